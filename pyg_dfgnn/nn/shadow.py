"""A stand-in for a layer while its code is traced: it notes what is read and keeps what is written from the layer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.ir.torch_front import Refusal, is_of_libraries
from pyg_dfgnn.nn.drop_ins import upstream_of
from pyg_dfgnn.nn.gate import MODULE_HOOKS
from pyg_dfgnn.nn.reads import (
    HOOKED,
    MISSING,
    ORIGINAL,
    SIMPLE,
    STATE,
    TABLES,
    Check,
    Reads,
    equals,
    is_plain_name,
)

_NOTES = "_pyg_dfgnn_notes"


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

    body: dict[str, Any] = {"__hash__": _identify, "__eq__": _equals} if kind.__hash__ is object.__hash__ else {}
    body |= {
        "__class__": property(lambda self: original),
        "__getattribute__": read,
        "__setattr__": write,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        ORIGINAL: original,
    }
    return type(kind.__name__, (kind,), body)


def _identify(self: Any, frame: Any = None) -> int:
    """Return the hash of a stand-in; code of a user looks up the layer by it, which the stand-in is not."""
    notes = object.__getattribute__(self, "__dict__").get(_NOTES)
    if notes is not None and not is_of_libraries((frame or sys._getframe(1)).f_code.co_filename):
        notes[0].reasons.append("a module is looked up by what object it is")
    return id(self)


def _equals(self: Any, other: Any) -> bool:
    _identify(self, sys._getframe(1))
    return self is other


def _note(own: dict[str, Any], notes: Any, kind: type, name: str) -> None:
    reads, path, ignored, before = notes
    if name in own:
        if name == "_modules":
            # What iterates over children reads each of them, and that there are no others.
            for child, module in own["_modules"].items():
                _note_module(reads, path, child, module)
            reads.checks.setdefault((path, "children"), Check(path, "children", "", tuple(own["_modules"])))
        elif name in ("_parameters", "_buffers"):
            reads.checks.setdefault((path, name), Check(path, "names", name, tuple(own[name])))
        elif name not in STATE and name not in ignored and own[name] is before.get(name, MISSING):
            # What the code itself has set is no fact about the layer.
            reads.note(path, "attribute", name, own[name])
        return
    for table, key in TABLES.items():
        if name in own[key]:
            if table == "module":
                _note_module(reads, path, name, own[key][name])
            else:
                reads.note(path, table, name, own[key][name])
            return
    if name == "__dict__":
        if not is_of_libraries(sys._getframe(2).f_code.co_filename):
            reads.reasons.append("'self.__dict__' is read as a whole")
        return
    if not is_plain_name(name):
        return
    reads.checks.setdefault((path, "attribute", name), Check(path, "attribute", name, MISSING))
    if hasattr(kind, name):
        reads.of_class(kind, name)
    else:
        reads.lacks(path, kind, name)


def _note_module(reads: Reads, path: tuple[str, ...], name: str, module: Any) -> None:
    """Note that a submodule is read.

    Raises:
        Refusal: TorchScript runs it, which takes no stand-ins.
    """
    reads.note(path, "module", name, module)
    if isinstance(module, torch.jit.ScriptModule):
        reads.reasons.append(f"'self.{'.'.join((*path, name))}' is a module of TorchScript, which no trace reads")
        raise Refusal(reads.reasons[-1])


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
        self._layer = layer
        self.module = self._copy(layer, (), reads, ignored)

    def _copy(
        self, module: torch.nn.Module | None, path: tuple[str, ...], reads: Reads, ignored: frozenset[str]
    ) -> Any:
        if module is None or isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) in self._made:
            return self._made[id(module)]
        shadow: Any = object.__new__(_recording(type(module)))  # type: ignore[arg-type]
        own = object.__getattribute__(shadow, "__dict__")
        self._made[id(module)] = shadow
        own.update({key: _copied(value) for key, value in module.__dict__.items()})
        own["_modules"] = {
            name: self._copy(child, (*path, name), reads, ignored) for name, child in module._modules.items()
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

    def tied(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield the name of a tensor and each other path that leads to it."""
        known = {id(tensor): name for name, tensor in self.tensors().values() if name in names}
        for path, module in self._layer.named_modules(remove_duplicate=False):
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            for table in () if is_scripted else (module._parameters, module._buffers, module.__dict__):
                for key, value in table.items():
                    alias = f"{path}.{key}" if path else key
                    if isinstance(value, Tensor) and known.get(id(value), alias) != alias:
                        yield known[id(value)], alias

    def hooked(self, reads: Reads) -> list[str]:
        """Note whether submodules that the code has used have hooks, and return a reason for each that has."""
        used = {(*check.path, check.key) for check in reads.checks.values() if check.table == "module"}
        hooked = []
        for path, module, _ in self._pairs:
            for hooks in MODULE_HOOKS if path in used else ():
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
                elif not (isinstance(new, SIMPLE) and type(new) is type(old) and new == old):
                    for name in _changed_in(new, original) if key in TABLES.values() else [key]:
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
        if check.value is MISSING and check.table in TABLES:
            lookups.append((module.__dict__[TABLES[check.table]], check.key, MISSING))
        elif check.table == "children":
            if tuple(module._modules) != check.value:
                return None
            lookups += [(module._modules, name, module._modules[name]) for name in check.value]
            lookups.append((module.__dict__, "_modules", module._modules))
            lookups.append((_Names(module._modules), "", check.value))
        elif check.table == "names":
            lookups.append((_Names(module.__dict__[check.key]), "", check.value))
        elif check.table == "module":
            child = module._modules.get(check.key)
            if (type(None) if child is None else type(child)) is not (check.value or type(None)):
                return None
            lookups.append((module._modules, check.key, child))
        elif check.table == "hooks":
            lookups.append((module.__dict__, check.key, HOOKED if check.value else {}))
        elif check.table == "attribute":
            lookups.append((module.__dict__, check.key, check.value))
        else:
            # A tensor is compared by its class, or None: which it is decides too, whatever reads its numbers.
            lookups.append((module.__dict__[TABLES[check.table]], check.key, check.value))
    return list({(id(table), key): (table, key, value) for table, key, value in lookups}.values())


def holds(lookups: list[Lookup], fixed: list[tuple[Any, str, Any]]) -> bool:
    """Whether all facts are as they were."""
    for table, key, value in lookups:
        now = table.get(key, MISSING)
        if now is not value and not equals(now, value):
            return False
    for owner, key, value in fixed:
        now = getattr(owner, key, MISSING)
        if now is not value and not equals(now, value):
            return False
    return True


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
