"""Calls of layers while `settings(profile=True)` is in force: their ranges in profilers, and which code ran them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pyg_dfgnn.errors import check_type
from pyg_dfgnn.nn.gate import FusedConv
from pyg_dfgnn.nn.messages import Mark
from pyg_dfgnn.nn.on_cpu import Shortcut
from pyg_dfgnn.nn.owned import OfLayers
from pyg_dfgnn.nn.registry import layer_rows
from pyg_dfgnn.nn.scripted import Scripted
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.profiling import at_start, labelled, swap, thread


class Calls(NamedTuple):
    """Numbers of calls of a layer, or of all layers of a class.

    Attributes:
        name: Dotted name in the model; empty where layers of a class are counted together.
        kind: Class.
        fused: Calls of which fused kernels ran all that they can.
        partly: Calls of which fused kernels ran a part, and PyG's or the layer's own code the rest.
        pyg: Calls that PyG's or the layer's own code ran.
    """

    name: str
    kind: str
    fused: int = 0
    partly: int = 0
    pyg: int = 0


class Stats(tuple[Calls, ...]):
    """Counts of calls as rows; `str()` is a table."""

    def __str__(self) -> str:
        header = ("layer", "class", "fused", "partly fused", "PyG's")
        table = [header, *((row.name or "(all)", *map(str, row[1:])) for row in self)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


_lock = threading.Lock()
_of_kind: dict[str, list[int]] = {}
_of_layer = OfLayers[list[int]](lambda: [0, 0, 0])


class _CurrentLayer(threading.local):
    """The innermost layer that this thread calls.

    Attributes:
        layer: The layer.
        is_left: Whether its forward is PyG's.
    """

    layer: Any = None
    is_left = False


_thread = _CurrentLayer()


def stats(model: torch.nn.Module | None = None) -> Stats:
    """Return how many calls of layers were fused, partly fused, and PyG's.

    Counted are eager forward calls of drop-ins and of layers with compiled messages while `settings(profile=True)` is
    in force, in the whole process; counts start anew where profiling begins. Calls inside of functions compiled by
    `torch.compile` and replays of captured steps call no layer, and are not counted.

    Args:
        model: Count its layers one by one; None counts all layers of a class together.

    Returns:
        Rows with the fields `name`, `kind`, `fused`, `partly` and `pyg`; `str()` of all is a table.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> with pyg_dfgnn.local_settings(profile=True):
        ...     model(x, edge_index)
        >>> print(pyg_dfgnn.stats(model))
    """
    if model is None:
        with _lock:
            return Stats(Calls("", kind, *counts) for kind, counts in sorted(_of_kind.items()))
    check_type("model", model, torch.nn.Module, "a torch.nn.Module")
    counted = ((row, _of_layer.get(layer)) for layer, row in layer_rows(model))
    return Stats(Calls(row.name, row.kind, *counts) for row, counts in counted if counts is not None)


def _clear() -> None:
    with _lock:
        _of_kind.clear()
        _of_layer.clear()


def _counted(layer: Any, call: Callable[[], Any], reasons: Callable[[], Any]) -> Any:
    """Return what a call of a layer returns, named in profilers and counted.

    Args:
        layer: The layer.
        call: Calls it.
        reasons: Returns why parts of the call were the layer's own code.
    """
    if _thread.layer is layer:
        return call()
    outer, programs, kind = (_thread.layer, _thread.is_left), thread.programs, type(layer).__name__
    _thread.layer, _thread.is_left = layer, False
    try:
        with labelled(f"pyg_dfgnn {kind}"):
            result = call()
        is_partial = _thread.is_left or bool(reasons())
    finally:
        _thread.layer, _thread.is_left = outer
    place = 2 if thread.programs == programs else 1 if is_partial else 0
    with _lock:
        for counts in (_of_kind.setdefault(kind, [0, 0, 0]), _of_layer.of(layer)):
            counts[place] += 1
    return result


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a drop-in."""
    call = super(Scripted, self).__call__  # type: ignore[misc]
    if torch.compiler.is_compiling() or torch.jit.is_scripting():
        return call(*args, **kwargs)
    return _counted(self, lambda: call(*args, **kwargs), lambda: ())


_own_call, _own_fall_back, _own_project = Mark.call, FusedConv._fall_back, gemm.project


def _call_marked(self: Mark, layer: Any, own: Any, forwards: Any, args: Any, kwargs: Any) -> Any:
    """Call a layer with compiled messages."""
    turn = -1 if self.forward is None else self.forward.compiler.turn

    def reasons() -> Any:
        forward = self.forward
        if forward is None or forward.compiler.turn == turn:
            return ()
        return forward.reasons() or any(region.reasons for region in forward.ran(forward.compiler.turn))

    return _counted(layer, lambda: _own_call(self, layer, own, forwards, args, kwargs), reasons)


def _fall_back(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _thread.layer is self:
        _thread.is_left = True
    return _own_fall_back(self, *args, **kwargs)


def _project(*args: Any) -> Any:
    thread.programs += 1
    with labelled("pyg_dfgnn gemm forward"):
        return _own_project(*args)


at_start(_clear)
swap(Scripted, "__call__", _call)
swap(Mark, "call", _call_marked)
swap(Mark, "may_be_quiet", False)
swap(Shortcut, "is_open", False)
swap(FusedConv, "_fall_back", _fall_back)
swap(gemm, "project", _project)
