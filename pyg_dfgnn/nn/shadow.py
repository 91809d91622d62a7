"""A stand-in for a layer while its code is traced: it notes what is read and keeps what is written from the layer.

What was read decides when a trace holds: values of attributes, which submodules there are, functions and the globals
that these name. :class:`Reads` makes checks of it that cost a comparison each.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.ir.torch_front import Line, is_of_libraries, line_of_user
from pyg_dfgnn.nn.drop_ins import upstream_of

_NOTES, _ORIGINAL = "_pyg_dfgnn_notes", "_pyg_dfgnn_original"
_STATE = frozenset(torch.nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = {"parameter": "_parameters", "buffer": "_buffers", "module": "_modules"}
_SIMPLE: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, range, slice, types.EllipsisType)
_SIMPLE += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
MISSING = object()


class Check(NamedTuple):
    """One fact that a trace rests on.

    Attributes:
        path: Names of submodules from the layer to the module whose table is read.
        table: "attribute", "parameter", "buffer", "module", "children" or "hooks".
        key: Name in the table.
        value: What was there: frozen by :func:`frozen`, a class for a module; MISSING if nothing was.
    """

    path: tuple[str, ...]
    table: str
    key: str
    value: Any


def frozen(value: Any) -> Any:
    """Return a copy of plain data to compare with later.

    Raises:
        TypeError: The value is no plain data, so its changes could not be seen.
    """
    # An `object` tells an argument that was not given.
    if isinstance(value, _SIMPLE) or type(value) is object:
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(map(frozen, value)) if type(value) in (list, tuple) else _unknown(value)
    if isinstance(value, dict):
        return {key: frozen(entry) for key, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return type(value)(value)
    if isinstance(value, (*_FUNCTIONS, type, types.ModuleType)):
        return value
    if isinstance(value, functools.partial):
        frozen(value.func), frozen(value.args), frozen(value.keywords)
        return value
    return _unknown(value)


def _unknown(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__}, whose changes cannot be seen")


class Reads:
    """What code has read while it was traced.

    Args:
        own: File of the traced class.

    Attributes:
        checks: Facts about the layer and its submodules.
        fixed: Facts about classes, functions and globals: (object, attribute, value).
        reasons: Reads whose changes could not be seen.
        lines: Attribute that was set, with the path to its module -> the line that did.
    """

    def __init__(self, own: str | None = None) -> None:
        self.lines: dict[tuple[str, ...], Line] = {}
        self._own = own
        self.checks: dict[tuple[Any, ...], Check] = {}
        self.fixed: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.reasons: list[str] = []
        self._seen: set[int] = set()

    def note(self, path: tuple[str, ...], table: str, key: str, value: Any) -> None:
        """Note a read of a table of a module."""
        place = path, table, key
        if place in self.checks:
            return
        name = ".".join((*path, key))
        if isinstance(value, (torch.nn.Module, Tensor)):
            value = getattr(type(value), _ORIGINAL, type(value))
        try:
            self.checks[place] = Check(path, table, key, frozen(value) if value is not MISSING else value)
        except TypeError as error:
            self.reasons.append(f"'self.{name}' is {error}")
        self._follow(value)

    def wrote(self, path: tuple[str, ...], name: str, frame: types.FrameType) -> None:
        """Note that a frame sets an attribute of a module."""
        place = *path, name
        self.lines[place] = line_of_user(self._own, frame)

    def hold(self, owner: Any, name: str, value: Any) -> None:
        """Note what an object other than the layer has under a name."""
        self.fixed.setdefault((id(owner), name), (owner, name, value))

    def undo(self) -> list[str]:
        """Undo what the code has done to numbers of classes, modules and globals, and return reasons for each."""
        changed = []
        for owner, name, value in self.fixed.values():
            now = getattr(owner, name, MISSING)
            if now is value or not isinstance(value, _SIMPLE) or _equals(now, value):
                continue
            if isinstance(owner, _Namespace):
                owner.table[name] = value
                changed.append(f"the global '{name}' is changed")
            elif isinstance(owner, (type, types.ModuleType)):
                setattr(owner, name, value)
                changed.append(f"'{owner.__name__}.{name}' is changed")
        return changed

    def of_class(self, kind: type, name: str) -> None:
        """Note a method or another attribute of a class."""
        for base in kind.__mro__:
            if name in base.__dict__:
                self._entry(kind, name, base.__dict__[name], set(), f"'{kind.__name__}.{name}'", kind)
                return

    def function(self, function: Any, kind: type | None = None, *, of_class: bool = False) -> None:
        """Note a function's code and, of a user's, the globals, defaults, cells and helpers that it names.

        Args:
            function: The function; anything else is not followed.
            kind: Class of the layer whose method it is.
            of_class: Whether it is given the class in place of the layer.
        """
        if not isinstance(function, types.FunctionType) or id(function) in self._seen:
            return
        self._seen.add(id(function))
        self.function(getattr(function, "__wrapped__", None), kind)
        code = function.__code__
        if is_of_libraries(code.co_filename):
            return
        names, loaded = set(_names_in(code)), set(_loaded_in(code))
        self.hold(function, "__code__", code)
        self.hold(function, "__defaults__", function.__defaults__)
        self.hold(function, "__kwdefaults__", function.__kwdefaults__)
        defaults = enumerate([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        for place, value in ((place, value) for place, value in defaults if not isinstance(value, _SIMPLE)):
            self._named(_Held(value), "value", value, names, f"default {place} of {function.__qualname__}")
        builtin = loaded - function.__globals__.keys()
        for name in sorted((names & _MODES) | (builtin & _UNSEEN)):
            self.reasons.append(f"{function.__qualname__} asks for {name}")
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if name == "__class__":
                continue
            try:
                self._named(cell, "cell_contents", cell.cell_contents, names, f"'{name}' of {function.__qualname__}")
            except ValueError:
                self.reasons.append(f"'{name}' of {function.__qualname__} has no value yet")
        for name in loaded & function.__globals__.keys():
            owner = _Namespace.of(function.__globals__)
            self._named(owner, name, function.__globals__[name], names, f"the global '{name}'")
        of_class = of_class or bool(builtin & {"super", "type"}) or "__class__" in names
        for base in kind.__mro__ if kind is not None and of_class else ():
            for name in filter(_is_plain_name, names & base.__dict__.keys()):
                self._entry(base, name, base.__dict__[name], names, f"'{base.__name__}.{name}'", kind)

    def _entry(self, owner: Any, name: str, entry: Any, names: set[str], what: str, kind: type | None = None) -> None:
        """Note what a class or a module has under a name."""
        inner = getattr(entry, "fget", None) or getattr(entry, "__func__", None)
        if inner is not None:
            self.function(inner, kind, of_class=isinstance(entry, classmethod))
        elif isinstance(entry, types.FunctionType):
            self.hold(owner, name, entry)
            self.function(entry, kind)
        elif callable(entry) or hasattr(entry, "__get__"):
            self.hold(owner, name, entry)
        else:
            self._named(owner, name, entry, names, what)

    def _named(self, owner: Any, name: str, value: Any, names: set[str], what: str) -> None:
        if isinstance(value, (Tensor, torch.nn.Module)):
            self.hold(owner, name, value)
            return
        if unseen := _unseen_in(value, names):
            self.reasons.append(f"{what} is asked for {unseen}")
            return
        try:
            self.hold(owner, name, frozen(value))
        except TypeError as error:
            self.reasons.append(f"{what} is {error}")
            return
        self._follow(value)
        if isinstance(value, (types.ModuleType, type)) and not _is_library(value):
            for inner in names & vars(value).keys():
                self._entry(value, inner, vars(value)[inner], names, f"'{value.__name__}.{inner}'")

    def _follow(self, value: Any) -> None:
        """Note the functions that plain data holds."""
        if isinstance(value, functools.partial):
            self._follow(value.func)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                self._follow(entry)
        elif isinstance(value, dict):
            self._follow(list(value.values()))
        else:
            self.function(value)


def _is_plain_name(name: str) -> bool:
    return not (name.startswith("__") and name.endswith("__"))


class _Namespace:
    """The globals of a module by attribute; one object per dictionary, so that checks of it are found again."""

    _known: dict[int, _Namespace] = {}

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table

    def __getattr__(self, name: str) -> Any:
        return self.table.get(name, MISSING)

    @classmethod
    def of(cls, table: dict[str, Any]) -> _Namespace:
        return cls._known.setdefault(id(table), cls(table))


class _Held:
    """An object by attribute, to be compared with what it was."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_library(value: Any) -> bool:
    """Whether a module, or the module of a class, is no user's."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(value.__module__)
    name = getattr(module, "__name__", "builtins")
    if name in _STANDARD or name in sys.builtin_module_names:
        return True
    # A notebook, and a module that a program makes, have no file.
    file = getattr(module, "__file__", None)
    return file is not None and is_of_libraries(file)


def _unseen_in(value: Any, names: set[str]) -> str:
    """Return what code with these names may ask a module or a function of the standard library for, whose answer
    changes unseen; '' if nothing.
    """
    if isinstance(value, types.ModuleType):
        asked = names & _ANSWERS.get(value.__name__, frozenset[str]())
        return f"'{value.__name__}.{min(asked)}'" if asked else ""
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        name, owner = getattr(value, "__name__", ""), getattr(value, "__self__", None)
        module = str(getattr(value, "__module__", None) or type(owner).__module__)
        return f"'{module}.{name}'" if name in _ANSWERS.get(module, ()) else ""
    return ""


_STANDARD = frozenset({"math", "numpy", "functools", "itertools", "operator", "copy", "typing", "warnings"})


_MODES = frozenset("is_grad_enabled is_inference_mode_enabled is_autocast_enabled is_compiling is_scripting".split())
"""What a trace would answer once for all calls."""
_UNSEEN = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__"})
"""Builtin functions by which code reads what its names do not tell."""
_RANDOM = "random uniform gauss normalvariate randint randrange choice choices sample shuffle getrandbits betavariate"
_ANSWERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "os": frozenset({"getenv", "getenvb", "environ", "environb", "getpid", "urandom"}),
        "sys": frozenset({"modules", "argv", "flags", "_getframe"}),
        "time": frozenset({"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "process_time"}),
        "random": frozenset(_RANDOM.split()),
        "secrets": frozenset({"randbelow", "randbits", "choice", "token_bytes"}),
        "numpy": frozenset({"random"}),
    }
)
"""Module of the standard library, or numpy -> what it answers differently from call to call."""


def _loaded_in(code: types.CodeType) -> Iterator[str]:
    """The globals that code reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _loaded_in(constant)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@functools.cache
def _recording(original: type) -> type:
    """Return the subclass of a module's class that notes reads; of a drop-in it is a subclass of PyG's class."""
    kind = upstream_of(original)

    def read(self: Any, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        notes = own.get(_NOTES)
        if notes is not None and name not in ("__class__", _NOTES):
            _note(own, notes, kind, name)
        return kind.__getattribute__(self, name)  # type: ignore[call-arg]

    def write(self: Any, name: str, value: Any) -> None:
        notes = object.__getattribute__(self, "__dict__").get(_NOTES)
        if notes is not None:
            notes[0].wrote(notes[1], name, sys._getframe(1))
        kind.__setattr__(self, name, value)  # type: ignore[call-arg]

    body = {
        "__getattribute__": read,
        "__setattr__": write,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _ORIGINAL: original,
    }
    return type(kind.__name__, (kind,), body)


def _note(own: dict[str, Any], notes: Any, kind: type, name: str) -> None:
    reads, path, ignored, before = notes
    if name in own:
        if name == "_modules":
            # What iterates over children reads each of them, and that there are no others.
            for child, module in own["_modules"].items():
                reads.note(path, "module", child, module)
            reads.checks.setdefault((path, "children"), Check(path, "children", "", tuple(own["_modules"])))
        elif name not in _STATE and name not in ignored and own[name] is before.get(name, MISSING):
            # What the code itself has set is no fact about the layer.
            reads.note(path, "attribute", name, own[name])
        return
    for table, key in _TABLES.items():
        if name in own[key]:
            reads.note(path, table, name, own[key][name])
            return
    if name == "__dict__":
        if not is_of_libraries(sys._getframe(2).f_code.co_filename):
            reads.reasons.append("'self.__dict__' is read as a whole")
        return
    if not _is_plain_name(name):
        return
    reads.checks.setdefault((path, "attribute", name), Check(path, "attribute", name, MISSING))
    if hasattr(kind, name):
        reads.of_class(kind, name)


class Shadow:
    """A stand-in for a layer.

    Args:
        layer: The layer.
        reads: Where reads are noted.
        ignored: Attributes of the layer that are no concern of the traced code.

    Attributes:
        module: What the code is to get as `self`.
    """

    def __init__(self, layer: torch.nn.Module, reads: Reads, ignored: frozenset[str]) -> None:
        self._pairs: list[tuple[tuple[str, ...], Any, dict[str, Any]]] = []
        self._made: dict[int, Any] = {}
        self.module = self._copy(layer, (), reads, ignored)

    def _copy(self, module: torch.nn.Module, path: tuple[str, ...], reads: Reads, ignored: frozenset[str]) -> Any:
        if id(module) in self._made:
            return self._made[id(module)]
        shadow: Any = object.__new__(_recording(type(module)))  # type: ignore[arg-type]
        own = object.__getattribute__(shadow, "__dict__")
        self._made[id(module)] = shadow
        own.update({key: _copied(value) for key, value in module.__dict__.items()})
        own["_modules"] = {
            name: None if child is None else self._copy(child, (*path, name), reads, ignored)
            for name, child in module._modules.items()
        }
        before = dict(own)
        self._pairs.append((path, module, before))
        own[_NOTES] = reads, path, ignored, before
        return shadow

    def tensors(self) -> dict[int, tuple[str, Tensor]]:
        """Return the tensors that the code may read: id -> (path to it, tensor)."""
        tensors: dict[int, tuple[str, Tensor]] = {}
        for path, module, _ in self._pairs:
            for table in (module._parameters, module._buffers, module.__dict__):
                for name, value in table.items():
                    if isinstance(value, Tensor):
                        tensors.setdefault(id(value), (".".join((*path, name)), value))
        return tensors

    def hooked(self, reads: Reads) -> list[str]:
        """Note whether submodules that the code has used have hooks, and return a reason for each that has."""
        used = {(*check.path, check.key) for check in reads.checks.values() if check.table == "module"}
        hooked = []
        for path, module, _ in self._pairs:
            for hooks in _HOOKS if path in used else ():
                has_some = bool(vars(module)[hooks])
                reads.checks[path, hooks] = Check(path, "hooks", hooks, has_some)
                hooked += [f"hooks are registered on {'.'.join(path)}"] if has_some else []
        return hooked

    def written(self, reads: Reads) -> tuple[dict[tuple[tuple[str, ...], str], Any], list[str]]:
        """Return the tensors that the code has left in attributes, and reasons for what else it has changed."""
        tensors: dict[tuple[tuple[str, ...], str], Any] = {}
        reasons = []
        for path, module, before in self._pairs:
            own = object.__getattribute__(self._made[id(module)], "__dict__")
            for key in (own.keys() | before.keys()) - {_NOTES}:
                old, new = before.get(key, MISSING), own.get(key, MISSING)
                original = module.__dict__.get(key)
                if new is old and not _is_changed(new, original):
                    continue
                if isinstance(new, Tensor) and key not in module._buffers:
                    tensors[path, key] = new
                elif not (isinstance(new, _SIMPLE) and type(new) is type(old) and new == old):
                    for name in _changed_in(new, original) if key in _TABLES.values() else [key]:
                        line = reads.lines.get((*path, name))
                        where = "" if line is None else f"{line}: "
                        reasons.append(f"{where}'self.{'.'.join((*path, name))}' is changed")
        return tensors, reasons


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (dict, list, set) or isinstance(value, dict) else value


def _is_changed(copy: Any, original: Any) -> bool:
    """Whether a container is no longer what it was copied from."""
    if isinstance(copy, dict) and isinstance(original, dict):
        return [*map(id, copy.values())] != [*map(id, original.values())] and not _are_modules(copy)
    if isinstance(copy, (list, set)) and isinstance(original, (list, set)):
        return [*map(id, copy)] != [*map(id, original)]
    return False


def _changed_in(table: dict[str, Any], original: dict[str, Any]) -> list[str]:
    """Return the names under which two tables of a module have other entries."""
    return [name for name in table | original if table.get(name) is not original.get(name)]


def _are_modules(table: dict[Any, Any]) -> bool:
    return any(isinstance(value, torch.nn.Module) for value in table.values())


class _Names:
    """The names in a table, to be looked up as one fact."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table

    def get(self, _: str, __: Any) -> tuple[str, ...]:
        return tuple(self.table)


Lookup = tuple[dict[str, Any] | _Names, str, Any]


def bind(checks: list[Check], layer: torch.nn.Module) -> list[Lookup] | None:
    """Return the checks of a trace on the tables of one layer, None if the layer lacks a submodule."""
    lookups: list[Lookup] = []
    for check in checks:
        module: Any = layer
        for name in check.path:
            parent, module = module, module._modules.get(name)
            if module is None:
                return None
            lookups.append((parent._modules, name, module))
        if check.table == "children":
            if tuple(module._modules) != check.value:
                return None
            lookups += [(module._modules, name, module._modules[name]) for name in check.value]
            lookups.append((module.__dict__, "_modules", module._modules))
            lookups.append((_Names(module._modules), "", check.value))
        elif check.table == "module":
            child = module._modules.get(check.key)
            if (type(None) if child is None else type(child)) is not (check.value or type(None)):
                return None
            lookups.append((module._modules, check.key, child))
        elif check.table == "hooks":
            lookups.append((module.__dict__, check.key, _HOOKED if check.value else {}))
        elif check.table == "attribute":
            lookups.append((module.__dict__, check.key, check.value))
        else:
            value = module.__dict__[_TABLES[check.table]].get(check.key)
            if (value is None) != (check.value is None):
                return None
    return list({(id(table), key): (table, key, value) for table, key, value in lookups}.values())


def holds(lookups: list[Lookup], fixed: list[tuple[Any, str, Any]]) -> bool:
    """Whether all facts are as they were."""
    for table, key, value in lookups:
        now = table.get(key, MISSING)
        if now is not value and not _equals(now, value):
            return False
    for owner, key, value in fixed:
        now = getattr(owner, key, MISSING)
        if now is not value and not _equals(now, value):
            return False
    return True


_HOOKED = object()
"""Stands for any table of hooks that is not empty."""


def _equals(now: Any, value: Any) -> bool:
    if value is _HOOKED:
        return bool(now)
    if isinstance(now, Tensor):
        return type(now) is value
    if type(now) is not type(value):
        # Tables of hooks are ordered dictionaries.
        return isinstance(now, dict) and isinstance(value, dict) and not now and not value
    if isinstance(now, (list, tuple, dict, set, frozenset, *_SIMPLE[1:])):
        return bool(now == value)
    return False


def getter(path: str, layer: torch.nn.Module) -> tuple[dict[str, Any], str]:
    """Return the table and the key of a tensor of a layer."""
    *parents, name = path.split(".")
    module: Any = layer
    for parent in parents:
        module = module._modules[parent]
    for table in (module._parameters, module._buffers, module.__dict__):
        if name in table:
            return table, name
    raise KeyError(path)
