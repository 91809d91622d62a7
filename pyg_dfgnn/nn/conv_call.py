"""Every form of edges that a conv takes, turned into what the fused ops and PyG's own forward need."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import Adj, SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, is_torch_sparse_tensor, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr
from torch_geometric.utils.sparse import set_sparse_value

from pyg_dfgnn.errors import as_integer, check_shape
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.ends import Part, PartitionedEdges

FORMS = ("tensor", "EdgeIndex", "torch.sparse", "SparseTensor", "Graph")


class ConvCall(NamedTuple):
    """One forward call as the gate saw it.

    Attributes:
        reasons: Why PyG's own path takes it; empty when the fused one does.
        problem: The fields of the family's problem; empty where the inputs do not even allow the question.
        edge_index: The edges as the user passed them.
        form: One of `FORMS`, or the name of a type that no conv takes.
        edge_attr: `[num_input_edges, ...]` edge features, also those that a sparse adjacency holds as values.
        num_src: Number of nodes that send.
        num_dst: Number of nodes that receive.
        self_loops: Whether self-loops are replaced by one per node.
        weights: Whether the caller wants the attention weights.
        edge_type: Relation of each edge, `[num_input_edges]`; None where there are none, and where a `Graph` has them.
        part: The part of a partitioned graph that the edges are those of; None of a whole graph.
        by_torch: Whether operators of torch take the edges as they are, of which no list of pairs is made.
    """

    reasons: Sequence[str]
    problem: tuple[Any, ...]
    edge_index: Any
    form: str
    edge_attr: Tensor | None = None
    num_src: int = 0
    num_dst: int = 0
    self_loops: bool = False
    weights: bool = False
    edge_type: Tensor | None = None
    part: Part | None = None
    by_torch: bool = False

    def replace(self, **fields: Any) -> "ConvCall":
        """Return the call with other fields; torch 2.11 cannot go on with what `_replace` makes after a graph break."""
        return ConvCall(**{**self._asdict(), **fields})


def id_reasons(edge_index: Tensor) -> list[str]:
    """Return what is wrong with a tensor of ids as `edge_index`, which PyG's errors do not tell in every layer."""
    is_pair = edge_index.dim() == 2 and edge_index.size(0) == 2 and edge_index.dtype in (torch.int64, torch.int32)
    if is_pair or edge_index.layout is not torch.strided:
        return []
    passed = f"{edge_index.dtype}, {list(edge_index.shape)}"
    return [f"edge_index is no int64 or int32 tensor of shape [2, E] ({passed})"]


def form_of(edge_index: Any) -> str:
    """Return one of `FORMS`, or the name of a type that no conv takes."""
    if isinstance(edge_index, Tensor):
        if isinstance(edge_index, (EdgeIndex, PartitionedEdges)):
            return type(edge_index).__name__
        return "tensor" if edge_index.layout is torch.strided else "torch.sparse"
    if isinstance(edge_index, SparseTensor):
        return "SparseTensor"
    return "Graph" if isinstance(edge_index, Graph) else type(edge_index).__name__


def num_edges(edge_index: Any) -> int:
    """Return the number of edges of any form."""
    if isinstance(edge_index, Graph):
        return edge_index.num_edges
    if isinstance(edge_index, SparseTensor):
        return edge_index.nnz()
    return edge_index._nnz() if is_torch_sparse_tensor(edge_index) else edge_index.size(1)


def declared_sizes(edge_index: Any, form: str, flow: str) -> tuple[int | None, int | None]:
    """Return the numbers of nodes that row 0 and row 1 of an `edge_index` of this form point to."""
    if form == "EdgeIndex":
        return edge_index.num_rows, edge_index.num_cols
    if form != "Graph":
        return edge_index.size(1), edge_index.size(0)
    sizes = edge_index.num_src, edge_index.num_dst
    return sizes if flow == "source_to_target" else sizes[::-1]


def as_sizes(size: Sequence[Any]) -> list[int | None]:
    """Return the numbers of nodes that the user declares, None for an unknown one, as ints.

    Raises:
        TypeError: One is not an integer.
    """
    return [number if number is None else as_integer("size", number) for number in size]


def check_sizes(graph: Graph, flow: str, sizes: Sequence[int | None], size: Sequence[int | None] | None) -> None:
    """Check a graph against the numbers of nodes that features have and that the user declares.

    Args:
        graph: The user's graph.
        flow: The flow of the conv.
        sizes: Rows of the features of the nodes that row 0 and row 1 point to, None without features.
        size: What the user declares, likewise.

    Raises:
        ValueError: The numbers differ.
    """
    declared = declared_sizes(graph, "Graph", flow)
    if size is not None and tuple(size) != declared:
        raise ValueError(f"'size' needs {declared}, the numbers of nodes of the Graph (got {tuple(size)})")
    ends = ("sources", "targets") if flow == "source_to_target" else ("targets", "sources")
    for end, rows, count in zip(ends, sizes, declared, strict=True):
        if rows is not None and rows != count:
            raise ValueError(f"'edge_index' needs {rows} {end}, as many as x (got {graph})")


def edges_in_flow(graph: Graph, flow: str) -> Tensor:
    """Return the edges of a graph as PyG's convs of this flow read them: row 0 holds the sources or the targets."""
    if flow == "source_to_target":
        return graph.edge_index
    flipped = graph.derived(("edge_index", flow), lambda: graph.edge_index.flip(0))
    # A user who edits it gets others next time.
    return graph.edge_index.flip(0) if flipped._version else flipped


def adjacency_features(edge_index: Any) -> Tensor | None:
    """Return the values of a sparse adjacency that PyG takes as edge features: those with channels."""
    if isinstance(edge_index, Tensor) and edge_index.layout is torch.strided:
        return None
    if isinstance(edge_index, SparseTensor):
        values = edge_index.coo()[2]
    elif is_torch_sparse_tensor(edge_index):
        values = edge_index._values() if edge_index.layout == torch.sparse_coo else edge_index.values()
    else:
        return None
    return values if values is not None and values.dim() > 1 else None


def with_weights(out: Tensor, adjacency: Adj, alpha: Tensor) -> tuple[Any, ...]:
    """Return the output and the attention weights as PyG's GATConv and GATv2Conv do for this kind of adjacency."""
    if isinstance(adjacency, SparseTensor):
        return out, adjacency.set_value(alpha, layout="coo")
    if is_torch_sparse_tensor(adjacency):
        return out, (set_sparse_value(adjacency, alpha), alpha)
    return out, (adjacency, alpha)


def resolve(
    call: ConvCall,
    flow: str,
    fill_value: float | Tensor | str | None,
    edge_dim: int | None,
    new: Graph | None = None,
) -> tuple[Graph | EdgeSet, Tensor | None, Adj]:
    """Return the edges of a call without reasons in the order of the fused ops.

    Args:
        call: The call.
        flow: The flow of the conv.
        fill_value: How the features of self-loops are made, as PyG's convs define it.
        edge_dim: The width of the edge features, None or -1 for any.
        new: The graph of a tensor whose edges are not to be measured yet.

    Returns:
        The graph; the edge features in the order of its `edge_index`; the adjacency that PyG returns with the weights.

    Raises:
        ValueError: The edge features have another shape.
    """
    _, _, edge_index, form, edge_attr, num_src, num_dst, self_loops, weights, *_ = call
    num_loops = min(num_src, num_dst)
    if edge_attr is not None:
        edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        width: int | str = "edge_dim" if edge_dim is None or edge_dim < 0 else edge_dim
        check_shape("edge_attr", edge_attr, (num_edges(edge_index), width), f"[E, edge_dim={width}]")

    is_matrix = form not in ("tensor", "Graph")
    if self_loops and is_matrix and (weights or (edge_attr is not None and form != "EdgeIndex")):
        # PyG returns an adjacency of the same kind with the loops in it, in an order of its own.
        if form == "SparseTensor":
            edge_index = torch_sparse.set_diag(edge_index)
        else:
            values = edge_attr if form == "EdgeIndex" else None
            edge_index, values = remove_self_loops(edge_index, values)
            # Values that are no edge features make room for the weights: nothing is reduced into the loops.
            fill = 1.0 if edge_attr is None else fill_value
            edge_index, values = add_self_loops(edge_index, values, fill_value=fill, num_nodes=num_loops)
            if edge_attr is not None:
                edge_attr = values if form == "EdgeIndex" else adjacency_features(edge_index)
        self_loops = False

    transposed = flow != "source_to_target"
    if torch.compiler.is_compiling():
        if call.by_torch and edge_attr is not None:
            edge_attr = _with_loop_features(edge_index, edge_attr, (num_src, num_dst), fill_value)
        return EdgeSet(edge_index, num_src, num_dst, self_loops, transposed, call.by_torch), edge_attr, edge_index
    if form == "Graph":
        graph, plain = edge_index, None
        if self_loops and edge_attr is not None:
            plain = edges_in_flow(graph, flow)
        if self_loops and not graph.self_loops:
            graph = graph.looped_twin()
        elif self_loops and edge_attr is not None:
            graph = Graph.resolve(graph.edge_index, num_src, num_dst, True, False)
        edge_index = edges_in_flow(graph, flow) if weights else edge_index
    elif form == "tensor":
        plain = edge_index
        graph = Graph.resolve(edge_index, num_src, num_dst, self_loops, transposed) if new is None else new
    else:
        # PyG's convs take any value that is true.
        graph = Graph.of(edge_index, num_src, num_dst, flow=flow, self_loops=bool(self_loops))
        plain = edge_index.as_tensor() if form == "EdgeIndex" else None
    if self_loops and edge_attr is not None and graph.is_bare:
        edge_attr = _with_loop_features(plain, edge_attr, (num_src, num_dst), fill_value)
    elif self_loops and edge_attr is not None:
        assert graph.kept is not None and plain is not None
        edge_attr = edge_attr.index_select(0, graph.kept)
        # A reduction sums at row 1, which may have more nodes than there are loops.
        kept = plain.index_select(1, graph.kept).long()
        loop_attr = compute_loop_attr(kept, edge_attr, max(num_src, num_dst), False, fill_value)
        edge_attr = torch.cat([edge_attr, loop_attr[:num_loops]])
    if self_loops and weights:
        edge_index = graph.edge_index.flip(0) if transposed else graph.edge_index.clone()
    return graph, edge_attr, edge_index


def _with_loop_features(edge_index: Any, edge_attr: Tensor, sizes: tuple[int, int], fill_value: Any) -> Tensor:
    """Return edge features with those that PyG's convs give to self-loops appended; own self-loops keep theirs.

    They, and edges whose ids nobody has checked yet, are reduced into a row of their own.
    """
    num_nodes, (row, col) = max(sizes), edge_index
    col = torch.where((row == col) | (col < 0), num_nodes, col).clamp_(max=num_nodes)
    # Of the ends only the second is read.
    ends: Any = row, col.long()
    loop_attr = compute_loop_attr(ends, edge_attr, num_nodes + 1, False, fill_value)
    return torch.cat([edge_attr, loop_attr[: min(sizes)]])
