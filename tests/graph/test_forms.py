"""Every form of edges against the obvious version; wrong ones give one clear error."""

from types import SimpleNamespace

import pytest
import torch
import torch_geometric.typing
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.utils import coalesce

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.chunks import row_index
from pyg_dfgnn.reference.zoo import random
from tests.graph.brute import check_graph, with_loops


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_tensor(case, dtype, self_loops):
    graph = Graph.of(case.edge_index.to(dtype), case.num_src, case.num_dst, self_loops=self_loops)
    want = with_loops(case.edge_index, case.num_src, case.num_dst) if self_loops else case.edge_index
    check_graph(graph, want, case.num_src, case.num_dst)


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_flow_target_to_source(case, self_loops):
    edge_index = case.edge_index.flip(0)
    graph = Graph.of(edge_index, case.num_src, case.num_dst, flow="target_to_source", self_loops=self_loops)
    want = with_loops(case.edge_index, case.num_src, case.num_dst) if self_loops else case.edge_index
    check_graph(graph, want, case.num_src, case.num_dst)


def test_non_contiguous(case):
    strided = case.edge_index.t().contiguous().t()
    check_graph(Graph.of(strided, case.num_src, case.num_dst), case.edge_index, case.num_src, case.num_dst)
    every_second = case.edge_index.repeat_interleave(2, dim=1)[:, ::2]
    check_graph(Graph.of(every_second, case.num_src, case.num_dst), case.edge_index, case.num_src, case.num_dst)


def test_expanded_edges():
    edge_index = torch.tensor([[1], [2]]).expand(2, 9)
    check_graph(Graph.of(edge_index, 3), edge_index, 3, 3)


def test_num_dst_defaults_to_num_src():
    assert Graph.of(torch.tensor([[0], [1]]), 4).num_dst == 4


@pytest.mark.parametrize("num_nodes", [2**15 - 2, 2**15 - 1, 2**15, 2**16 + 3])
def test_ids_around_the_narrow_sort_key(num_nodes):
    last = num_nodes - 1
    edge_index = torch.tensor([[last, 0, last, 5, last - 1], [0, last, last, last - 1, 7]])
    check_graph(Graph.of(edge_index, num_nodes), edge_index, num_nodes, num_nodes)


def test_order_inside_a_row_is_the_input_order(case):
    graph = Graph.of(case.edge_index, case.num_src, case.num_dst)
    csr, row = graph.csr, row_index(graph, graph.csr)
    same_row = row[1:] == row[:-1]
    assert (csr.perm.diff()[same_row] > 0).all()


def test_one_sort_per_side(sorts):
    case = random(30, 30, 200)
    graph = Graph.of(case.edge_index, 30)
    assert len(sorts) == 1
    assert graph.csc is graph.csc
    assert len(sorts) == 2
    assert Graph.of(case.edge_index, 30, self_loops=True).csc.num_rows == 30
    assert len(sorts) == 2


def test_sources_in_order_need_no_second_sort(sorts):
    edge_index = coalesce(random(30, 30, 200).edge_index)
    check_graph(Graph.of(edge_index, 30), edge_index, 30, 30)
    assert len(sorts) == 1


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("order", [None, "row", "col"])
def test_edge_index_class(case, order, dtype, self_loops):
    edge_index = case.edge_index
    if order is not None:
        edge_index = edge_index[:, edge_index[0 if order == "row" else 1].argsort(stable=True)]
    given = EdgeIndex(edge_index.to(dtype), sparse_size=(case.num_src, case.num_dst), sort_order=order)
    graph = Graph.of(given, case.num_src, case.num_dst, self_loops=self_loops)
    want = with_loops(edge_index, case.num_src, case.num_dst) if self_loops else edge_index
    check_graph(graph, want, case.num_src, case.num_dst)
    assert type(graph.edge_index) is type(graph.key[0]) is torch.Tensor
    assert Graph.of(given, case.num_src, case.num_dst, self_loops=self_loops) is graph


@pytest.mark.parametrize("flow, order", [("source_to_target", "col"), ("target_to_source", "row")])
def test_sorted_edge_index_needs_no_sort(flow, order, sorts):
    edge_index = random(20, 20, 90).edge_index
    edge_index = edge_index[:, edge_index[0 if order == "row" else 1].argsort(stable=True)]
    given = EdgeIndex(edge_index, sparse_size=(20, 20), sort_order=order)
    graph = Graph.of(given, 20, flow=flow)
    assert sorts == []
    check_graph(graph, edge_index if flow == "source_to_target" else edge_index.flip(0), 20, 20)


def test_false_order_is_refused():
    given = EdgeIndex(torch.tensor([[0, 1], [1, 0]]), sparse_size=(2, 2), sort_order="col")
    with pytest.raises(ValueError, match="needs the order it claims"):
        Graph.of(given, 2)


def transposed_matrix(edge_index, num_src, num_dst, layout):
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(edge_index.size(1)), (num_dst, num_src))
    return adj_t.to_sparse(layout=layout) if layout != torch.sparse_coo else adj_t.coalesce()


MATRICES = [random(20, 20, 90), random(13, 5, 40), random(5, 13, 40), random(4, 4, 0), random(1, 1, 3)]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("case", MATRICES, ids=str)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_torch_sparse_layouts(case, layout):
    edge_index = coalesce(case.edge_index)
    adj_t = transposed_matrix(edge_index, case.num_src, case.num_dst, layout)
    graph = Graph.of(adj_t, case.num_src, case.num_dst)
    by_column = layout == torch.sparse_csc
    # PyG lists the entries in storage order: by target for COO and CSR, by source for CSC.
    want = edge_index if by_column else coalesce(edge_index.flip(0)).flip(0)
    check_graph(graph, want, case.num_src, case.num_dst)
    assert Graph.of(adj_t, case.num_src, case.num_dst) is graph


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("case", MATRICES, ids=str)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_torch_sparse_self_loops_as_pyg(case, layout):
    edge_index = coalesce(case.edge_index)
    adj_t = transposed_matrix(edge_index, case.num_src, case.num_dst, layout)
    want = coalesce(with_loops(edge_index, case.num_src, case.num_dst).flip(0)).flip(0)
    graph = Graph.of(adj_t, case.num_src, case.num_dst, self_loops=True)
    assert graph.self_loops and graph.kept is None
    check_graph(graph, want, case.num_src, case.num_dst)


def test_uncoalesced_matrix_keeps_duplicates_and_order():
    edge_index = torch.tensor([[2, 0, 0, 1], [1, 2, 2, 0]])
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(4), (3, 3))
    check_graph(Graph.of(adj_t, 3), edge_index, 3, 3)
    # PyG marks what it reads as coalesced, whether it is or not.
    adj_t._coalesced_(True)
    Graph.clear_cache()
    check_graph(Graph.of(adj_t, 3), edge_index, 3, 3)


def test_matrix_refuses_reverse_flow_and_wrong_size():
    adj_t = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 3))
    with pytest.raises(ValueError, match=r"'flow' needs 'source_to_target' .* \(got 'target_to_source'\)"):
        Graph.of(adj_t, 3, 2, flow="target_to_source")
    with pytest.raises(ValueError, match=r"'edge_index' needs shape \[num_dst=3, num_src=2\].*got \[2, 3\]"):
        Graph.of(adj_t, 2, 3)


class FakeStorage:
    pass


class FakeSparseTensor:
    """The part of torch_sparse.SparseTensor that is read, rows in order."""

    def __init__(self, row, col, sizes):
        order = (row * max(sizes[1], 1) + col).argsort(stable=True)
        self._row, self._col, self._sizes = row[order], col[order], sizes
        self._rowptr = torch.cat([row.new_zeros(1), self._row.bincount(minlength=sizes[0]).cumsum(0)])
        self.storage = FakeStorage()

    def size(self, dim):
        return self._sizes[dim]

    def coo(self):
        return self._row, self._col, None

    def csr(self):
        return self._rowptr, self._col, None


def fake_set_diag(adj):
    row, col, _ = adj.coo()
    edge_index = with_loops(torch.stack([row, col]), *adj._sizes)
    return FakeSparseTensor(*edge_index, adj._sizes)


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_sparse_tensor_branch(case, self_loops, monkeypatch):
    monkeypatch.setattr(torch_geometric.typing, "SparseTensor", FakeSparseTensor)
    monkeypatch.setattr(torch_geometric.typing, "torch_sparse", SimpleNamespace(set_diag=fake_set_diag), raising=False)
    adj_t = FakeSparseTensor(case.edge_index[1], case.edge_index[0], (case.num_dst, case.num_src))
    graph = Graph.of(adj_t, case.num_src, case.num_dst, self_loops=self_loops)
    read = fake_set_diag(adj_t) if self_loops else adj_t
    check_graph(graph, torch.stack([read._col, read._row]), case.num_src, case.num_dst)
    assert Graph.of(adj_t, case.num_src, case.num_dst, self_loops=self_loops) is graph
    if case.edge_index.numel():
        adj_t._col.add_(0)
        assert Graph.of(adj_t, case.num_src, case.num_dst, self_loops=self_loops) is not graph


@pytest.mark.sparse
@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_sparse_tensor(case, self_loops):
    torch_sparse = pytest.importorskip("torch_sparse")
    source, target = case.edge_index
    adj_t = torch_sparse.SparseTensor(row=target, col=source, sparse_sizes=(case.num_dst, case.num_src))
    graph = Graph.of(adj_t, case.num_src, case.num_dst, self_loops=self_loops)
    row, col, _ = (torch_sparse.set_diag(adj_t) if self_loops else adj_t).coo()
    check_graph(graph, torch.stack([col, row]), case.num_src, case.num_dst)
    assert Graph.of(adj_t, case.num_src, case.num_dst, self_loops=self_loops) is graph
    changed = adj_t.set_value(torch.ones(adj_t.nnz()), layout="coo")
    check_graph(Graph.of(changed, case.num_src, case.num_dst), torch.stack(adj_t.coo()[1::-1]), *graph.key[1:3])


def test_kept_lists_the_edges_that_stay(case):
    graph = Graph.of(case.edge_index, case.num_src, case.num_dst, self_loops=True)
    stays = case.edge_index[0] != case.edge_index[1]
    assert torch.equal(graph.kept, stays.nonzero().view(-1))
    assert Graph.of(case.edge_index, case.num_src, case.num_dst).kept is None


def test_loops_from_a_cached_base_equal_loops_from_scratch(case):
    scratch = Graph.of(case.edge_index.clone(), case.num_src, case.num_dst, self_loops=True)
    base = Graph.of(case.edge_index, case.num_src, case.num_dst)
    derived = Graph.of(case.edge_index, case.num_src, case.num_dst, self_loops=True)
    assert derived is not base
    check_graph(derived, scratch.edge_index, case.num_src, case.num_dst)
    assert all(torch.equal(a, b) for a, b in zip(derived.csr.arrays, scratch.csr.arrays))


# Wrong edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
@pytest.mark.parametrize(
    "edges, message",
    [
        ([[0, 5], [0, 0]], r"needs source ids in \[0, num_src=5\) \(got 0 to 5\)"),
        ([[-1, 4], [0, 0]], r"needs source ids in \[0, num_src=5\) \(got -1 to 4\)"),
        ([[0, 4], [2, 3]], r"needs target ids in \[0, num_dst=3\) \(got 2 to 3\)"),
        ([[0, 4], [-7, 2]], r"needs target ids in \[0, num_dst=3\) \(got -7 to 2\)"),
        ([[0, 4], [0, 2**16]], r"needs target ids in \[0, num_dst=3\) \(got 0 to 65536\)"),
        ([[0, 2**32], [0, 0]], r"needs source ids in \[0, num_src=5\) \(got 0 to 4294967296\)"),
    ],
)
def test_id_out_of_range(edges, message, self_loops):
    # PyG's own code raises an IndexError, other wrong arguments a ValueError.
    for kind in (IndexError, ValueError):
        with pytest.raises(kind, match=f"'edge_index' {message}: only those are valid indices"):
            Graph.of(torch.tensor(edges), 5, 3, self_loops=self_loops)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (4, 2), (2, 2, 2), ()])
def test_shape(shape):
    with pytest.raises(ValueError, match=r"'edge_index' needs shape \[2, E\]"):
        Graph.of(torch.zeros(shape, dtype=torch.int64), 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool], ids=str)
def test_dtype(dtype):
    with pytest.raises(TypeError, match="'edge_index' needs dtype torch.int64 or torch.int32"):
        Graph.of(torch.zeros(2, 3, dtype=dtype), 5)


def test_not_a_tensor():
    with pytest.raises(TypeError, match="'edge_index' needs a torch.Tensor"):
        Graph.of([[0], [1]], 2)


@pytest.mark.parametrize("sizes, name", [((-1, 2), "num_src"), ((2, -1), "num_dst"), ((2**31, 2), "num_src")])
def test_sizes(sizes, name):
    with pytest.raises(ValueError, match=f"'{name}' needs a value in"):
        Graph.of(torch.zeros(2, 0, dtype=torch.int64), *sizes)


@pytest.mark.parametrize(
    "make",
    [
        lambda edge_index, **options: Graph.of(edge_index, 2, **options),
        lambda edge_index, **options: Graph.of_pieces([edge_index], 2, 2, **options),
        lambda edge_index, **options: Graph.of(Data(edge_index=edge_index, num_nodes=2), **options),
    ],
    ids=["edges", "pieces", "batch"],
)
def test_self_loops_are_true_or_false(make):
    with pytest.raises(TypeError, match=r"'self_loops' needs True or False \(got str 'no'\)"):
        make(torch.tensor([[0, 1], [1, 0]]), self_loops="no")


def test_flow():
    with pytest.raises(ValueError, match="'flow' needs one of"):
        Graph.of(torch.zeros(2, 0, dtype=torch.int64), 2, flow="upstream")


def test_more_edges_than_int32_counts():
    edge_index = torch.zeros(1, 1, dtype=torch.int64).expand(2, 2**31)
    with pytest.raises(ValueError, match="at most 2147479551 edges"):
        Graph.of(edge_index, 1)


def test_loops_count_as_edges():
    edge_index = torch.zeros(1, 1, dtype=torch.int64).expand(2, 2**31 - 4097)
    with pytest.raises(ValueError, match="self-loops included"):
        Graph.of(edge_index, 1, self_loops=True)


def test_failed_build_leaves_nothing_behind():
    edge_index = torch.tensor([[0, 9], [0, 0]])
    for _ in range(2):
        with pytest.raises(ValueError, match="source ids"):
            Graph.of(edge_index, 5)
