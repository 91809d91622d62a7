"""What tests of parity with PyG share: a small graph in every form of edges, and the comparison of two convs."""

import pytest
import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

from pyg_dfgnn import Graph

# Duplicates (0 -> 1), self-loops (2 -> 2), a target without edges (4), a source without edges (3).
EDGES = torch.tensor([[0, 0, 1, 2, 2, 4, 0, 1], [1, 1, 0, 2, 3, 1, 3, 3]])
NUM_NODES = 5
# Three sources, five targets.
BIPARTITE = torch.tensor([[0, 0, 1, 2, 2, 1, 0, 1], [1, 1, 0, 2, 3, 1, 3, 3]])


def simple(edges, num_src=NUM_NODES, num_dst=NUM_NODES):
    """Without duplicates, which a sparse layout would merge, and in the order of the targets."""
    key = torch.unique(edges[1] * num_src + edges[0])
    return torch.stack([key % num_src, key // num_src])


def adjacency(edges, layout, num_src=NUM_NODES, num_dst=NUM_NODES, values=None):
    """The transposed adjacency that PyG's convs take, with edges already in the order of the targets."""
    values = torch.ones(edges.size(1)) if values is None else values
    adj = torch.sparse_coo_tensor(edges.flip(0), values, (num_dst, num_src, *values.shape[1:]), is_coalesced=True)
    if layout == "coo":
        return adj
    rowptr = torch.zeros(num_dst + 1, dtype=torch.long)
    rowptr[1:] = edges[1].bincount(minlength=num_dst).cumsum(0)
    return torch.sparse_csr_tensor(rowptr, edges[0], values, (num_dst, num_src, *values.shape[1:]))


FORMS = {
    "tensor": lambda: EDGES,
    "int32": lambda: EDGES.int(),
    "strided": lambda: torch.stack([EDGES[0], EDGES[0], EDGES[1]], 1)[:, ::2].t(),
    "empty": lambda: torch.empty(2, 0, dtype=torch.long),
    "edge_index": lambda: EdgeIndex(EDGES, sparse_size=(NUM_NODES, NUM_NODES)),
    "edge_index_no_size": lambda: EdgeIndex(EDGES),
    "edge_index_int32": lambda: EdgeIndex(EDGES.int(), sparse_size=(NUM_NODES, NUM_NODES)),
    "edge_index_by_row": lambda: EdgeIndex(EDGES, sparse_size=(NUM_NODES, NUM_NODES)).sort_by("row")[0],
    "edge_index_by_col": lambda: EdgeIndex(EDGES, sparse_size=(NUM_NODES, NUM_NODES)).sort_by("col")[0],
    "coo": lambda: adjacency(simple(EDGES), "coo"),
    "csr": lambda: adjacency(simple(EDGES), "csr"),
    "sparse_tensor": lambda: sparse_tensor(simple(EDGES)),
    "graph": lambda: Graph.of(EDGES, NUM_NODES),
    "graph_with_loops": lambda: Graph.of(EDGES, NUM_NODES, self_loops=True),
    "graph_transposed": lambda: Graph.of(EDGES.flip(0), NUM_NODES, flow="target_to_source"),
    "graph_of_pieces": lambda: Graph.of_pieces(EDGES.split(3, dim=1), EDGES.size(1), NUM_NODES),
    "graph_of_adjacency": lambda: Graph.of(adjacency(simple(EDGES), "csr"), NUM_NODES),
}


def sparse_tensor(edges, num_src=NUM_NODES, num_dst=NUM_NODES, value=None):
    if not torch_geometric.typing.WITH_TORCH_SPARSE:
        pytest.skip("torch_sparse is not installed")
    return SparseTensor(row=edges[1], col=edges[0], value=value, sparse_sizes=(num_dst, num_src))


def leaves(value):
    """Copies of the inputs that collect gradients of their own."""
    if isinstance(value, tuple):
        return tuple(leaves(v) for v in value)
    return value.detach().clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def as_pyg_takes(edge_index, flow="source_to_target"):
    """A graph as tensor; int32 as int64, since `scatter` in torch 2.13 reads it wrongly on the CPU."""
    if isinstance(edge_index, Graph):
        edge_index = edge_index.edge_index if flow == "source_to_target" else edge_index.edge_index.flip(0)
    return edge_index.long() if getattr(edge_index, "dtype", None) == torch.int32 else edge_index


def flat(value):
    return [t for v in value for t in flat(v)] if isinstance(value, tuple) else [value]


def assert_same(actual, expected, name):
    assert type(actual) is type(expected), name
    if isinstance(expected, Tensor):
        assert actual.layout == expected.layout, name
    if isinstance(expected, SparseTensor):
        actual, expected = actual.to_dense(), expected.to_dense()
    if isinstance(expected, EdgeIndex):
        actual, expected = actual.as_tensor(), expected.as_tensor()
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if actual.dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(actual, expected, **tolerance, msg=lambda text: f"{name}: {text}")


def assert_parity(convs, x, edge_index, *args, before=(), **kwargs):
    """Same output and same gradients of every input and parameter, through the fused branch.

    `before` are the arguments between x and the edges.
    """
    ours_conv, pyg_conv = convs
    results = []
    for conv in convs:
        inputs, between, rest = leaves(x), leaves(before), leaves(args)
        if conv is ours_conv:
            assert conv._call(inputs, *between, edge_index, *rest, **kwargs).reasons == []
        else:
            edge_index = as_pyg_takes(edge_index, conv.flow)
        out = conv(inputs, *between, edge_index, *rest, **kwargs)
        generator = torch.Generator().manual_seed(1)
        (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum().backward()
        grads = {
            f"grad of input {i}": t.grad for i, t in enumerate(flat((inputs, between, rest))) if isinstance(t, Tensor)
        }
        grads.update({f"grad of {n}": p.grad for n, p in conv.named_parameters()})
        conv.zero_grad(set_to_none=True)
        results.append((out.detach(), grads))
    (out, grads), (expected, expected_grads) = results
    assert_same(out, expected, "out")
    assert grads.keys() == expected_grads.keys()
    for key, grad in expected_grads.items():
        # PyG leaves None where an empty graph cuts the graph of gradients; zero is the same gradient.
        actual = grads[key]
        if grad is None or actual is None:
            assert all(g is None or not g.any() for g in (grad, actual)), key
        else:
            assert_same(actual, grad, key)
