"""How often layers were called with the same edges or groups: a few new ones are PyG's, where measuring costs more."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.graph.unmeasured import MEASURED_EDGES, VISITS
from pyg_dfgnn.nn.owned import OfLayers
from pyg_dfgnn.ops.graph import may_be_unmeasured, may_run_again

_MOST_TENSORS = 8
_visits: OfLayers[dict[tuple[Any, ...], list[Any]]] = OfLayers(dict)


class _Step(threading.local):
    """The step of this thread, and whether its batches are copied to the same tensors one after another."""

    is_refilled = False


_step = _Step()


@contextmanager
def refilled() -> Iterator[None]:
    """Say that what is called in the block comes again with other edges in the same tensors: all of them are new."""
    before, _step.is_refilled = _step.is_refilled, True
    try:
        yield
    finally:
        _step.is_refilled = before


def may_not_wait(edges: Any) -> bool:
    """Return whether what is not known of edges or groups is not to be found out: a capture, or what comes before it,
    of a step that is refilled.
    """
    if torch.compiler.is_compiling() or type(edges) is not Tensor:
        return False
    return _step.is_refilled or (edges.is_cuda and torch.cuda.is_current_stream_capturing())


def is_new(layer: torch.nn.Module, edges: Any, kind: str = "") -> bool:
    """Note a call of a layer, and return whether its edges are few and the layer has seen them twice at most.

    Args:
        layer: The layer.
        edges: An `edge_index` [2, E], an index [E] or offsets; what is no tensor on a GPU is not new.
        kind: Which of several calls of the layer with the same edges this is.
    """
    if torch.compiler.is_compiling() or type(edges) is not Tensor:
        return False
    if _step.is_refilled:
        return True
    if not edges.is_cuda:
        return False
    if edges.dim() == 0 or edges.size(-1) >= MEASURED_EDGES:
        return False
    if edges.layout is not torch.strided or not may_be_unmeasured():
        return False
    # PyG's convs reduce by a row of `edge_index`, which is a new view in every call.
    base = edges if edges._base is None else edges._base
    visits, key = _visits.of(layer), (kind, id(base), edges.storage_offset(), edges.size(-1))
    known = visits.get(key)
    if known is None or known[0]() is not base:
        if len(visits) >= _MOST_TENSORS:
            visits.clear()
        visits[key] = [weakref.ref(base), 1]
        return True
    if not may_run_again(layer.training):
        known[1] += 1
    return bool(known[1] <= VISITS)
