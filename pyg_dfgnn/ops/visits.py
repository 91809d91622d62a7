"""Which edges and groups are PyG's: a few new ones, where measuring costs more, and sums of a few numbers."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.graph.unmeasured import VISITS
from pyg_dfgnn.ops.graph import may_run_again
from pyg_dfgnn.settings import Settings, current

_MOST_TENSORS = 64
MANY_EDGES = 1 << 20
"""Edges of which none are new: kernels take less time than PyG's code at once."""
COMPILED_VISITS = 16
"""Calls of a compiled program with the same edges after which they are known."""
_FEW_NUMBERS = 1 << 25
_NARROW, _WIDE = 128, 512
MEASURED_NUMBERS = 100_000_000
"""Numbers that PyG writes for all edges from which its kernels take longer than the host, and new edges are sorted."""
_COMPILED_NUMBERS = 1 << 23
"""Numbers in rows of edges below which what torch.compile makes of PyG's code takes less time than calls of ours."""
_visits: dict[tuple[int, int], list[Any]] = {}
"""Number of a tensor of edges and length of its rows -> the tensor, its first visitor, the calls and the layer of that
one, and the forward that was counted last."""
_NONE: tuple[Callable[[], Any], Any, Callable[[], Any], Any, int] = (lambda: _NONE, None, lambda: None, None, 0)
_last = _NONE
"""The last tensor that was new, its first visitor, the layer of that one, the settings then, and the calls."""


class _Step(threading.local):
    """The step of this thread.

    Attributes:
        is_refilled: Whether its batches are copied to the same tensors one after another.
        is_left: Whether PyG's code runs for a layer whose edges are few.
        is_captured: Whether the forward of a layer is being captured, whose operators are to be torch's.
    """

    is_refilled = False
    is_left = False
    is_captured = False


step = _Step()


@contextmanager
def _during(fact: str) -> Iterator[None]:
    """Let a fact of the step of this thread hold in the block."""
    before = getattr(step, fact)
    setattr(step, fact, True)
    try:
        yield
    finally:
        setattr(step, fact, before)


def refilled() -> AbstractContextManager[None]:
    """Say that what is called in the block comes again with other edges in the same tensors: all of them are new."""
    return _during("is_refilled")


def capturing() -> AbstractContextManager[None]:
    """Say that the forward of a layer is captured in the block: functions and aggregations in it are to be PyG's."""
    return _during("is_captured")


# Marked constant: torch.compile runs this function while it traces and leaves nothing of it in the graph.
@torch.compiler.assume_constant_result
def is_left() -> bool:
    """Return whether PyG's code runs for the layer that is being called, or captured."""
    return step.is_left or step.is_captured


def is_refilled() -> bool:
    """Return whether what is called now comes again with other edges in the same tensors."""
    return step.is_refilled


def run_left(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function of PyG's makes of few edges; aggregations in it ask no further."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    before, step.is_left = step.is_left, True
    try:
        return function(*args, **kwargs)
    finally:
        step.is_left = before


def may_not_wait(edges: Any) -> bool:
    """Return whether what is not known of edges or groups is not to be found out: in a capture, or in what comes before
    it of a step that is refilled.
    """
    if step.is_refilled:
        return True
    if type(edges) is not Tensor or torch.compiler.is_compiling():
        return False
    return edges.is_cuda and torch.cuda.is_current_stream_capturing()


def is_new(layer: torch.nn.Module, edges: Any, kind: str = "", turn: int | None = None) -> bool:
    """Note a call of a layer, and return whether its edges are few and their first layer has seen them twice at most.

    Args:
        layer: The layer.
        edges: An `edge_index` [2, E], an index [E] or offsets; what is no tensor on a GPU is not new.
        kind: Which of several calls of the layer with the same edges this is.
        turn: Number of the forward that the call is a part of: the calls of one count once. None: each counts.
    """
    if type(edges) is not Tensor or torch.compiler.is_compiling():
        return False
    return new_visit(layer, edges, kind, turn) > 0


def is_new_outside_captures(layer: torch.nn.Module, edges: Any) -> bool:
    """Return what :func:`is_new` does, of edges whose layer may wait for the device; False where it may not.

    Args:
        layer: The layer.
        edges: As there.
    """
    if type(edges) is not Tensor or step.is_refilled or torch.compiler.is_compiling() or not may_be_few(edges):
        return False
    if edges.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return new_visit(layer, edges, under=current()) > 0


def new_visit(
    layer: torch.nn.Module,
    edges: Tensor,
    kind: str = "",
    turn: int | None = None,
    under: Settings | None = None,
    most: int = VISITS,
    many: int = MANY_EDGES,
) -> int:
    """Note a call of a layer where torch.compile does not trace, and return which of the first layer it is with edges
    that are new, as :func:`is_new` says; 0 where they are not.

    Args:
        layer: The layer; `edges`, `kind` and `turn` are as there.
        edges: The tensor.
        kind: Which call of the layer this is.
        turn: Number of the forward.
        under: The settings in force, where they and the tensor are known to let PyG's code take few edges.
        most: Visits after which the edges are known.
        many: Edges of which none are new.
    """
    global _last
    if step.is_refilled:
        return 1
    visitor, settings = (id(layer), kind), current() if under is None else under
    tensor, first, owner, then, visit = _last
    # The layers of a model ask about one tensor in turn.
    if tensor() is edges and first != visitor and then is settings and owner() is not None:
        return visit
    if edges.dim() == 0 or (under is None and not may_be_few(edges)):
        return 0
    count = edges.size(-1)
    if count >= many:
        return 0
    # PyG's convs reduce by a row of `edge_index`, which is a new view in every call.
    base = edges._base
    base = edges if base is None else base
    key = id(base), count
    known = _visits.get(key)
    if known is None or known[0]() is not base:
        if len(_visits) >= _MOST_TENSORS:
            _make_room()
        reference, owner = weakref.ref(edges), weakref.ref(layer)
        _visits[key] = [reference if base is edges else weakref.ref(base), visitor, 1, owner, turn]
        _last = reference, visitor, owner, settings, 1
        return 1
    if known[3]() is None:
        # The first layer will not come again, and this one stands in for it.
        known[1], known[3] = visitor, weakref.ref(layer)
    # In a capture edges stay what they were before it, since nothing can be made of them there.
    is_counted = not edges.is_cuda or not torch.cuda.is_current_stream_capturing()
    if is_counted and known[1] == visitor and (turn is None or turn != known[4]) and not may_run_again(layer.training):
        known[2], known[4] = known[2] + 1, turn
    if known[2] > most:
        if first == known[1]:
            _last = _NONE
        return 0
    _last = weakref.ref(edges), known[1], known[3], settings, known[2]
    return known[2]  # type: ignore[no-any-return]


_few: tuple[Callable[[], Any], Any, Any] = (lambda: _few, None, None)
"""The last tensor of which a sum was found to be of few numbers, the settings then, and what was summed how."""


def know_few(edges: Tensor, kind: Any) -> None:
    """Note that sums of a kind over edges are of few numbers."""
    global _few
    _few = weakref.ref(edges), current(), kind


def is_known_few(edges: Tensor, kind: Any) -> bool:
    """Return whether sums of a kind over edges are those that were last found to be of few numbers."""
    tensor, under, known = _few
    return tensor() is edges and under is current() and known == kind


def is_last(layer: torch.nn.Module, edges: Tensor) -> bool:
    """Return whether edges are the last ones that were new, and another layer is the first to have come with them."""
    tensor, first, owner, under, _ = _last
    return tensor() is edges and under is current() and first[0] != id(layer) and owner() is not None


def _make_room() -> None:
    """Forget tensors that are gone; all, where none is."""
    for key in [key for key, known in list(_visits.items()) if known[0]() is None]:
        _visits.pop(key, None)
    if len(_visits) >= _MOST_TENSORS:
        _visits.clear()


def is_few(rows: int, width: int) -> bool:
    """Return whether two launches of PyG's, which sum rows of so many numbers, take less time than the host for ours.

    PyG's take as long for narrow rows as for those of 128 numbers. Ours have launches for each piece of a wide row.
    """
    return rows * min(max(width, _NARROW), _WIDE) < _FEW_NUMBERS


def may_be_left(edges: Any) -> bool:
    """Return whether edges, an index or offsets are a tensor on a GPU, of which PyG's code may take a few."""
    return type(edges) is Tensor and may_be_few(edges) and edges.dim() > 0 and not torch.compiler.is_compiling()


def is_compiled_few(edges: Any, width: int) -> bool:
    """Return whether torch.compile is tracing a call whose rows of edges of so many numbers are few."""
    if not torch.compiler.is_compiling() or not may_be_few(edges):
        return False
    return edges.size(-1) * width < _COMPILED_NUMBERS  # type: ignore[no-any-return]


# Marked constant, and so called while torch.compile traces, which takes torch's function for True before torch 2.13.
@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Return whether torch.export traces."""
    return torch.compiler.is_exporting()


def may_be_few(edges: Tensor) -> bool:
    """Return whether a tensor is on a GPU, and the settings let PyG's code take few edges.

    An exported program is for any number of edges.
    """
    is_few = edges.is_cuda and current().leaves_few and edges.layout is torch.strided
    return is_few and not is_exporting()
