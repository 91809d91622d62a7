"""PyG's attention convs on the unfused sequence: SDDMM, row softmax, SpMM (cuSPARSE on a GPU), one head at a time.

A namespace for models, `convs: benchmarks.cases.unfused_nn`: parameters, initialisation and everything around attention
are PyG's. Edges are a tensor [2, E] between nodes of one kind, without features and attention dropout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn import Linear, conv
from torch_geometric.utils import add_self_loops, remove_self_loops

from benchmarks.cases.attention import unfused_attention
from benchmarks.cases.sparse import Sparse

_compressed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def compress(edge_index: Tensor, num_nodes: int, self_loops: bool = False) -> Sparse:
    """The CSR of edges [2, E] and of their transpose, kept for as long as `edge_index` lives unchanged.

    Self-loops may be replaced by one per node, as GATConv and AGNNConv do.
    """
    key = num_nodes, self_loops, edge_index._version
    kept = _compressed.setdefault(edge_index, {})
    if key not in kept:
        edges = edge_index
        if self_loops:
            edges, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=num_nodes)
        kept[key] = Sparse(edges, num_nodes, num_nodes)
    return kept[key]


class TransformerConv(conv.TransformerConv):
    """PyG's `TransformerConv` with unfused attention."""

    def propagate(self, edge_index: Tensor, size: Any = None, **tensors: Any) -> Tensor:
        query, key, value = (tensors[name] for name in ("query", "key", "value"))
        return unfused_attention(compress(edge_index, query.size(0)), "dot", (query, key, value))


class GATConv(conv.GATConv):
    """PyG's `GATConv` with unfused attention."""

    def __init__(self, *args: Any, add_self_loops: bool = True, **kwargs: Any) -> None:
        # PyG would make new edges in each forward; here the loops belong to the CSR, which is made once.
        super().__init__(*args, add_self_loops=False, **kwargs)
        self.self_loops = add_self_loops

    def edge_updater(self, edge_index: Tensor, size: Any = None, **tensors: Any) -> tuple[Tensor, Tensor]:
        return tensors["alpha"]

    def propagate(self, edge_index: Tensor, size: Any = None, **tensors: Any) -> Tensor:
        value, _ = tensors["x"]
        sparse = compress(edge_index, value.size(0), self.self_loops)
        return unfused_attention(sparse, "add", (value, *tensors["alpha"]), slope=self.negative_slope)


class AGNNConv(conv.AGNNConv):
    """PyG's `AGNNConv` with unfused attention."""

    def __init__(self, requires_grad: bool = True, add_self_loops: bool = True, **kwargs: Any) -> None:
        super().__init__(requires_grad, add_self_loops=False, **kwargs)
        self.self_loops = add_self_loops

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Cosine attention of `x [N, F]` over `edge_index [2, E]`; the sequence normalises `x` itself."""
        sparse = compress(edge_index, x.size(0), self.self_loops)
        return unfused_attention(sparse, "cosine", (x[:, None],), self.beta)[:, 0]


__all__ = ["AGNNConv", "GATConv", "Linear", "TransformerConv"]
