"""What traced code reads: values of attributes, functions, and what these name; the facts that a trace rests on.

:class:`Reads` makes checks of it that cost a comparison each.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.ir.torch_front import Line, is_of_libraries, line_of_user
from pyg_dfgnn.nn.stand_ins import codes_in, own_names, stand_in_reasons

ORIGINAL = "_pyg_dfgnn_original"
"""Attribute of the class of a stand-in for a module: the module's own class."""
STATE = frozenset(torch.nn.Module().__dict__) - {"training"}
"""Attributes that every module has."""
TABLES = {"parameter": "_parameters", "buffer": "_buffers", "module": "_modules"}
SIMPLE: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, range, slice, types.EllipsisType)
SIMPLE += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum)
"""Classes of plain data."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
MISSING = object()


class Check(NamedTuple):
    """One fact that a trace rests on.

    Attributes:
        path: Names of submodules from the layer to the module whose table is read.
        table: "attribute", "parameter", "buffer", "module", "children", "names" or "hooks".
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
    if isinstance(value, SIMPLE) or type(value) is object:
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
        # Classes and modules of users that the code can reach, and all names that it may ask them for.
        self._holders: dict[int, Any] = {}
        self._names: set[str] = set()
        # Those that it asks for by `getattr` and `hasattr`, which may be lacking.
        self._asked: set[str] = set()
        # All texts of the code, and whether any of it asks by name, of values perhaps.
        self._strings: set[str] = set()
        self._asks_by_name = False

    def note(self, path: tuple[str, ...], table: str, key: str, value: Any) -> None:
        """Note a read of a table of a module."""
        place = path, table, key
        if place in self.checks:
            return
        name = ".".join((*path, key))
        if isinstance(value, (torch.nn.Module, Tensor)):
            kind = getattr(type(value), ORIGINAL, type(value))
            self.checks[place] = Check(path, table, key, kind)
            return
        try:
            self.checks[place] = Check(path, table, key, frozen(value))
        except TypeError as error:
            self.reasons.append(f"'self.{name}' is {error}")
        self._follow(value)

    def lacks(self, path: tuple[str, ...], kind: type, name: str) -> None:
        """Note that a module has nothing under a name, nor has its class."""
        for table in TABLES:
            self.checks.setdefault((path, table, name), Check(path, table, name, MISSING))
        self.hold(kind, name, MISSING)

    def settle(self) -> None:
        """Note what the code may have asked classes and modules for that it reaches by whatever way."""
        done: set[tuple[int, str]] = set()
        if self._asks_by_name:
            self.reasons += [f"code that asks by names has the name '{name}'" for name in own_names(self._strings)]
        while True:
            reached = {(id(h), name): h for h in self._holders.values() for name in self._names & vars(h).keys()}
            if not reached.keys() - done:
                for holder in self._holders.values():
                    for name in self._asked - vars(holder).keys():
                        self.hold(holder, name, getattr(holder, name, MISSING))
                return
            for (number, name), holder in reached.items():
                if (number, name) not in done:
                    done.add((number, name))
                    owner = _ClassNamespace.of(holder) if isinstance(holder, type) else holder
                    self._entry(owner, name, vars(holder)[name], self._names, f"'{holder.__name__}.{name}'")

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
            if now is value or not isinstance(value, SIMPLE) or equals(now, value):
                continue
            if isinstance(owner, _Namespace):
                owner.table[name] = value
                changed.append(f"the global '{name}' is changed")
            elif isinstance(owner, (type, types.ModuleType)):
                setattr(owner, name, value)
                changed.append(f"'{owner.__name__}.{name}' is changed")
            elif isinstance(owner, _ClassNamespace):
                setattr(owner.kind, name, value)
                changed.append(f"'{owner.kind.__name__}.{name}' is changed")
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
        if is_of_libraries(code.co_filename) or _is_standard(code.co_filename):
            return
        codes = list(codes_in(code))
        steps = [step for each in codes for step in dis.get_instructions(each)]
        names = {name for each in codes for name in each.co_names}
        loaded = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        strings = (text for each in codes for text in each.co_consts if isinstance(text, str))
        asked = set(filter(str.isidentifier, strings)) if loaded & {"getattr", "hasattr"} else set[str]()
        names |= asked
        self._asked |= asked
        self._names |= names
        for module in _imported_in(steps, function.__globals__.get("__package__")):
            self._follow(module)
        self.hold(function, "__code__", code)
        self.hold(function, "__defaults__", function.__defaults__)
        self.hold(function, "__kwdefaults__", function.__kwdefaults__)
        defaults = enumerate([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        for place, value in ((place, value) for place, value in defaults if not isinstance(value, SIMPLE)):
            self._named(_Held(value), "value", value, names, f"default {place} of {function.__qualname__}")
        is_method = kind is not None and not of_class
        self.reasons += stand_in_reasons(function, codes, is_method)
        self._strings.update(text for each in codes for text in each.co_consts if isinstance(text, str))
        self._asks_by_name |= bool(loaded & {"getattr", "hasattr"})
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
            for name in filter(is_plain_name, names & base.__dict__.keys()):
                self._entry(base, name, base.__dict__[name], names, f"'{base.__name__}.{name}'", kind)

    def _entry(self, owner: Any, name: str, entry: Any, names: set[str], what: str, kind: type | None = None) -> None:
        """Note what a class or a module has under a name."""
        inner = getattr(entry, "fget", None) or getattr(entry, "__func__", None)
        if inner is not None:
            if isinstance(entry, property):
                self.hold(owner, name, entry)
            is_static = isinstance(entry, staticmethod)
            self.function(inner, None if is_static else kind, of_class=isinstance(entry, classmethod))
        elif isinstance(entry, types.FunctionType):
            self.hold(owner, name, entry)
            self.function(entry, kind)
        elif not isinstance(entry, type) and (callable(entry) or hasattr(entry, "__get__")):
            self.hold(owner, name, entry)
        else:
            self._named(owner, name, entry, names, what)

    def _named(self, owner: Any, name: str, value: Any, names: set[str], what: str) -> None:
        if isinstance(value, (Tensor, torch.nn.Module)):
            self.hold(owner, name, value)
            if isinstance(value, torch.nn.Module):
                self._state(value, what)
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

    def _state(self, module: torch.nn.Module, what: str) -> None:
        """Note the state of a module that is no part of the layer."""
        for part in module.modules():
            self.function(type(part).forward, type(part))
            self.hold(part, "_modules", part._modules.copy())
            for name, value in part.__dict__.items():
                if name not in STATE:
                    self._named(part, name, value, set(), f"'{name}' of {what}")

    def _follow(self, value: Any) -> None:
        """Note the functions that plain data holds, and the classes and modules, for :meth:`settle`."""
        owner = getattr(value, "__self__", None) if isinstance(value, types.BuiltinFunctionType) else value
        if isinstance(value, _TENSOR_TYPE):
            self.reasons.append(f"{value.__name__} asks a tensor for its device")
        elif isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            self.reasons.append(f"{owner.__name__} is an autograd.Function, whose backward no trace has")
        elif isinstance(value, (types.ModuleType, type)):
            if not _is_library(value):
                self._holders[id(value)] = value
                if isinstance(value, type) and not issubclass(value, torch.nn.Module):
                    # What objects of the class do that no name tells: they are made, called, indexed.
                    for name, entry in vars(value).items():
                        # What is generated for a data class follows from its fields.
                        if not is_plain_name(name) and not _is_generated(entry):
                            self.function(entry, value)
        elif isinstance(value, functools.partial):
            self._follow(value.func)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                self._follow(entry)
        elif isinstance(value, dict):
            self._follow(list(value.values()))
        else:
            self.function(value)


def is_plain_name(name: str) -> bool:
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


class _ClassNamespace:
    """What a class itself has under a name, as it is there; one object per class."""

    _known: dict[int, _ClassNamespace] = {}

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        return vars(self.kind).get(name, MISSING)

    @classmethod
    def of(cls, kind: type) -> _ClassNamespace:
        return cls._known.setdefault(id(kind), cls(kind))


def _is_generated(entry: Any) -> bool:
    return isinstance(entry, types.FunctionType) and entry.__code__.co_filename == "<string>"


def _is_standard(filename: str) -> bool:
    """Whether a file is one of Python's own."""
    return filename.startswith(_PYTHON) and "-packages" not in filename


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
    return file is not None and (is_of_libraries(file) or _is_standard(file))


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


_PYTHON = sysconfig.get_paths()["stdlib"]
_STANDARD = frozenset({"math", "numpy", "functools", "itertools", "operator", "copy", "typing", "warnings"})


_TENSOR_TYPE = type(torch.FloatTensor)
_MODES = frozenset("is_grad_enabled is_inference_mode_enabled is_autocast_enabled is_compiling is_scripting".split())
"""What a trace would answer once for all calls."""
_UNSEEN = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__"})
"""Builtin functions by which code reads what its names do not tell."""
_RANDOM = "random uniform gauss normalvariate randint randrange choice choices sample shuffle getrandbits betavariate"
_ANSWERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "os": frozenset({"getenv", "getenvb", "environ", "environb", "getpid", "urandom"}),
        "sys": frozenset({"modules", "argv", "flags", "_getframe", "getsizeof", "getrefcount"}),
        "time": frozenset({"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "process_time"}),
        "random": frozenset(_RANDOM.split()),
        "operator": frozenset({"is_", "is_not"}),
        "_operator": frozenset({"is_", "is_not"}),
        "secrets": frozenset({"randbelow", "randbits", "choice", "token_bytes"}),
        "numpy": frozenset({"random"}),
    }
)
"""Module of the standard library, or numpy -> what it answers differently from call to call, or of stand-ins."""


def _imported_in(steps: Iterable[dis.Instruction], package: str | None) -> Iterator[types.ModuleType]:
    """The modules that code imports while it runs, which are loaded already."""
    for instruction in steps:
        if instruction.opname == "IMPORT_NAME":
            for name in (instruction.argval, f"{package}.{instruction.argval}" if instruction.argval else package):
                if name in sys.modules:
                    yield sys.modules[name]


HOOKED = object()
"""Stands for any table of hooks that is not empty."""


def equals(now: Any, value: Any) -> bool:
    if value is HOOKED:
        return bool(now)
    if isinstance(now, Tensor):
        return type(now) is value
    if type(now) is not type(value):
        # Tables of hooks are ordered dictionaries.
        return isinstance(now, dict) and isinstance(value, dict) and not now and not value
    if isinstance(now, dict):
        return bool(now == value) and [*now] == [*value]
    if isinstance(now, (list, tuple)):
        return bool(now == value) and [*map(type, now)] == [*map(type, value)]
    if isinstance(now, (set, frozenset, *SIMPLE[1:])):
        return bool(now == value)
    return False
