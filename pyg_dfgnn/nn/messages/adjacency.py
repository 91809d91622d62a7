"""Calls with a sparse adjacency of torch, as PyG's `propagate` reads it where no `message_and_aggregate` takes it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.utils import to_edge_index

from pyg_dfgnn.graph.forms import adjacency_anchor
from pyg_dfgnn.nn.messages.spec import STEPS, Call, original

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr)
_edges = WeakTensorKeyDictionary()
"""Adjacency -> versions of its indices and the edges that were read from it."""


def is_sparse_matrix(edges: Any) -> bool:
    """Return whether edges are a sparse matrix of torch in a layout that PyG's `propagate` reads."""
    return type(edges) is Tensor and edges.layout in _LAYOUTS


def adjacency_reasons(layer: Any, call: Call) -> list[str]:
    """Return why PyG's own code is to read a sparse adjacency."""
    if layer.fuse and call.method == "propagate":
        return ["edge_index is a sparse tensor that message_and_aggregate takes"]
    if layer.flow != "source_to_target":
        return ["edge_index is a sparse tensor, which flows from source to target"]
    if call.edges.layout is torch.sparse_coo and not call.edges.is_coalesced():
        return ["edge_index is a sparse tensor that is not coalesced"]
    asked = _asked(layer, call)
    return [f"{name} is not that of a tensor of edges" for name in ("edge_index", "adj_t") if name in asked]


def _asked(layer: Any, call: Call) -> set[str]:
    """Return the names of what the methods of a layer ask a call for."""
    return {name for step in (*STEPS[call.method], "update") for name in layer.inspector.get_param_names(step)}


def with_edges(layer: Any, call: Call) -> Call:
    """Return a call on the entries of its adjacency [N_dst, N_src], in the order in which PyG lists them, as edges."""
    adjacency = call.edges
    values = adjacency.values()
    # What these arguments are where they are None.
    given = {"edge_weight": values, "edge_attr": values if values.dim() > 1 else None, "edge_type": values}
    if "CollectArgs" in original(call.own).__globals__:
        # The code that PyG generates gives values to the first of these that the layer asks for.
        first = next((name for name in given if name in _asked(layer, call)), None)
        given = {name: value for name, value in given.items() if name == first}
    kwargs = {name: given[name] if value is None else value for name, value in call.kwargs.items() if name in given}
    size = adjacency.size(1), adjacency.size(0)
    return call._replace(edge_index=_edges_of(adjacency), kwargs={**call.kwargs, **kwargs}, size=size)


def _edges_of(adjacency: Tensor) -> Tensor:
    """Return the edges of an adjacency, row 0 sources, as one tensor while its indices are not edited."""
    versions: Hashable = adjacency_anchor(adjacency)[1]
    known = _edges.get(adjacency)
    if known is None or versions is None or known[0] != versions:
        # PyG's function marks COO in place, which autograd takes for an edit of what earlier calls have saved.
        is_csr = adjacency.layout is torch.sparse_csr
        known = versions, (to_edge_index(adjacency)[0] if is_csr else adjacency.indices().detach()).flip(0)
        if versions is not None:
            _edges[adjacency] = known
    edges: Tensor = known[1]
    return edges
