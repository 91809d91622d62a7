"""What a graph keeps: values by key and their bytes, adjacencies over domains; graphs of an index or of offsets."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from pyg_dfgnn.graph import Adjacency, Graph, block_sparse
from pyg_dfgnn.graph import graph as graph_module
from pyg_dfgnn.graph.chunks import Chunks, column_blocks, heavy_rows, row_order
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.reference.zoo import random
from tests.graph.brute import check_graph, check_side


@pytest.fixture
def edge_index():
    return random(20, 20, 90).edge_index


@pytest.fixture
def graph(edge_index):
    return Graph.of(edge_index, 20)


# Values ---------------------------------------------------------------------------------------------------------------


def test_a_value_is_built_once_per_key(graph):
    builds = []
    for key in ("a", ("a", 1), ("a", 2), "a", ("a", 1)):
        assert graph.derived(key, lambda: builds.append(1) or len(builds)) in (1, 2, 3)
    assert len(builds) == 3
    assert graph.derived("nothing", lambda: builds.append(1)) is None
    assert graph.derived("nothing", lambda: builds.append(1)) is None and len(builds) == 4


def test_a_failed_build_leaves_nothing(graph):
    with pytest.raises(ZeroDivisionError):
        graph.derived("a", lambda: 1 // 0)
    assert graph.derived("a", lambda: 7) == 7


def test_threads_that_build_at_once_get_one_value(graph):
    both_build = Barrier(2)

    def build():
        both_build.wait()
        return torch.zeros(3)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: graph.derived("a", build), range(2))
    assert first is second is graph.derived("a", build)


def test_values_depend_on_their_anchors(graph):
    """Values of edges evict what was derived from them, and nothing else; the graph keeps none of them alive."""
    weight, builds = torch.ones(90), []

    def total(of):
        return graph.derived("total", lambda: builds.append(1) or float(of.sum()), anchors=[of])

    csc = graph.csc
    assert total(weight) == total(weight) == 90.0 and len(builds) == 1
    weight[0] = 2.0
    assert total(weight) == 91.0 and len(builds) == 2
    other = torch.zeros(90)
    assert total(other) == 0.0 and total(weight) == 91.0 and len(builds) == 4
    with torch.inference_mode():
        untracked = torch.ones(90)
    assert total(untracked) == total(untracked) == 90.0 and len(builds) == 6
    assert graph.csc is csc
    alive = weakref.ref(weight)
    assert total(weight) == 91.0
    del weight
    assert alive() is None


def test_bytes_of_what_is_derived(graph):
    empty = {"input": 0, "csr": 4 * (21 + 90 + 90)}
    assert dict(zip(empty, graph.derived_bytes().values(), strict=True)) == empty
    order = row_order(graph, graph.csr)
    assert graph.derived_bytes()["row_order", "targets", "sources"] == order.numel() * 4
    blocks = column_blocks(graph, graph.csr, 3, 1)
    sizes = graph.derived_bytes()
    shared = sizes["ascending", "targets", "sources"]
    assert shared == 2 * 4 * 90
    # Arrays that two values share count once.
    own = sizes["column_blocks", "targets", "sources", 3, 1, False]
    assert (
        own >= 4 * blocks.rowptr.numel()
        and sum(sizes.values()) == sum(empty.values()) + order.numel() * 4 + shared + own
    )
    assert graph.derived("a number", lambda: 7) == 7 and graph.derived_bytes()["a number"] == 0


def test_tensors_are_found_wherever_they_lie(graph):
    """What another stream reads is recorded: it must not matter how a schedule wraps its arrays."""
    chunks = heavy_rows(graph, graph.csr, 2)
    dense = block_sparse.of(graph, "targets", 32, True)
    loose = graph.derived("loose", lambda: {"a": [torch.zeros(2)], "b": (None, 1, "x")})
    known = {id(tensor) for tensor in tensors_of(graph._derived)}
    assert isinstance(chunks, Chunks) and {id(chunks.row), id(chunks.heavy_ptr), id(dense.bits)} <= known
    assert {id(loose["a"][0]), id(graph.csr.rowptr)} <= known
    assert graph.on_this_stream() is graph


# Domains --------------------------------------------------------------------------------------------------------------


def test_csr_and_csc_are_adjacencies(graph, edge_index):
    assert graph.adjacency("targets", "sources") is graph.csr and graph.adjacency("sources", "targets") is graph.csc
    assert (graph.csc.rows, graph.csc.cols, graph.csc.num_cols) == ("sources", "targets", 20)


def test_a_pair_of_domains_without_a_builder(graph):
    with pytest.raises(ValueError, match=r"'rows' and 'cols' need a pair .* \(got \('relations', 'targets'\)\)"):
        graph.adjacency("relations", "targets")
    with pytest.raises(ValueError, match=r"'rows' needs one of 'targets', 'sources', .* \(got 'nodes'\)"):
        graph.adjacency("nodes", "targets")
    with pytest.raises(ValueError, match=r"'cols' needs one of .* \(got 'edge'\)"):
        graph_module.builds("targets", "edge")


def test_a_registered_builder(edge_index, monkeypatch):
    monkeypatch.setattr(graph_module, "_builders", dict(graph_module._builders))
    edge_type = torch.arange(90) % 4

    @graph_module.builds("relations", "targets")
    def by_relation(graph):
        order = graph.relation.argsort(stable=True)
        rowptr = torch.cat([torch.zeros(1).int(), graph.relation.bincount().cumsum(0).int()])
        target = graph.edge_index[1, order].int()
        degree = int(rowptr.diff().max())
        return Adjacency(rowptr, target, order.int(), graph.num_dst, degree, "relations", "targets")

    graph = Graph.of(edge_index, 20, edge_type=edge_type, num_relations=4)
    side = graph.adjacency("relations", "targets")
    assert graph.adjacency("relations", "targets") is side
    check_side(graph, side, edge_type, edge_index[1], 4)
    assert heavy_rows(graph, side, 5).num_heavy == 4


# Relations ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_relations_share_the_edges(edge_index, dtype, sorts):
    edge_type = (torch.arange(90) % 7).to(dtype)
    plain = Graph.of(edge_index, 20)
    graph = Graph.of(edge_index, 20, edge_type=edge_type, num_relations=7)
    check_graph(graph, edge_index, 20, 20)
    assert graph.csr is plain.csr and graph.csc is plain.csc and len(sorts) == 2
    assert graph.num_relations == 7 and torch.equal(graph.relation.to(dtype), edge_type)
    assert graph.relation.dtype == torch.int32
    assert Graph.of(edge_index, 20, edge_type=edge_type, num_relations=7) is graph
    assert Graph.of(edge_index, 20, edge_type=edge_type, num_relations=8) is not graph
    assert Graph.of(edge_index, 20) is plain


@pytest.mark.parametrize("edited", ["edge_index", "edge_type"])
def test_an_edit_of_any_anchor_evicts(edge_index, edited):
    edge_type = torch.arange(90) % 7
    plain = Graph.of(edge_index, 20)
    graph = Graph.of(edge_index, 20, edge_type=edge_type, num_relations=7)
    before = graph.relation.clone()
    if edited == "edge_type":
        edge_type[3] = 6
    else:
        edge_index[0, 3] = (edge_index[0, 3] + 1) % 20
    fresh = Graph.of(edge_index, 20, edge_type=edge_type, num_relations=7)
    assert fresh is not graph and torch.equal(fresh.relation.long(), edge_type)
    assert torch.equal(graph.relation, before)
    # What was derived from the edges alone stays as long as they do.
    assert (Graph.of(edge_index, 20) is plain) == (edited == "edge_type")


@pytest.mark.parametrize("dies", [0, 1], ids=["edge_index", "edge_type"])
def test_the_death_of_any_anchor_evicts(dies):
    anchors = [random(20, 20, 90).edge_index, torch.zeros(90).long()]
    graph = weakref.ref(Graph.of(anchors[0], 20, edge_type=anchors[1], num_relations=1))
    assert graph() is not None
    del anchors[dies]
    assert graph() is None


@pytest.mark.parametrize(
    ("edge_type", "options", "error", "message"),
    [
        (torch.zeros(3).long(), {}, ValueError, r"'edge_type' needs shape \[E=2\] \(got \[3\]\)"),
        (torch.zeros(2), {}, TypeError, "'edge_type' needs dtype torch.int64 or torch.int32"),
        ([0, 1], {}, TypeError, "'edge_type' needs a torch.Tensor"),
        (torch.tensor([0, 2]), {}, ValueError, r"'edge_type' needs values in \[0, num_relations=2\) \(got 0 to 2\)"),
        (torch.tensor([-1, 0]), {}, ValueError, r"\(got -1 to 0\)"),
        (torch.zeros(2).long(), {"self_loops": True}, ValueError, "'self_loops' needs False with 'edge_type'"),
        (torch.zeros(2).long(), {"num_relations": -1}, ValueError, "'num_relations' needs a value in"),
        (torch.zeros(2).long(), {"num_relations": 2.5}, TypeError, "'num_relations' needs an integer"),
    ],
)
def test_wrong_relations(edge_type, options, error, message):
    with pytest.raises(error, match=message):
        Graph.of(torch.tensor([[0, 1], [1, 0]]), 2, edge_type=edge_type, **{"num_relations": 2, **options})


# Reductions -----------------------------------------------------------------------------------------------------------

INDEXES = {
    "sorted": torch.tensor([0, 0, 1, 3, 3, 3]),
    "unsorted": torch.tensor([3, 0, 3, 1, 0, 3]),
    "one-group": torch.zeros(7).long(),
    "empty": torch.zeros(0).long(),
    "strided": torch.tensor([[2, 9], [0, 9], [2, 9]])[:, 0],
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("name", INDEXES)
def test_a_graph_of_an_index(name, dtype, host_syncs, sorts):
    index = INDEXES[name].to(dtype)
    is_sorted = name not in ("unsorted", "strided")
    graph = Graph.of_index(index, 5)
    assert len(host_syncs) == (1 if is_sorted else 2) and len(sorts) == (0 if is_sorted else 1)
    assert Graph.of_index(index, 5) is graph and Graph.of_index(index, 6) is not graph
    check_graph(graph, torch.stack([torch.arange(index.numel()), index.long()]), index.numel(), 5)
    assert len(sorts) == (0 if is_sorted else 2)
    # Rows are groups, columns the positions in the input.
    assert graph.csr.col is graph.csr.perm


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("ptr", [[0], [0, 0], [0, 3], [0, 2, 2, 6, 6, 7]], ids=str)
def test_a_graph_of_offsets(ptr, dtype, host_syncs, sorts):
    given = torch.tensor(ptr, dtype=dtype)
    graph = Graph.of_ptr(given)
    assert len(host_syncs) == 1
    group = torch.repeat_interleave(torch.arange(len(ptr) - 1), given.diff().long())
    check_graph(graph, torch.stack([torch.arange(ptr[-1]), group]), ptr[-1], len(ptr) - 1)
    assert Graph.of_ptr(given) is graph and sorts == []
    given.add_(0)
    assert Graph.of_ptr(given) is not graph


def test_an_edited_or_dead_index_is_forgotten():
    index = INDEXES["unsorted"].clone()
    graph = Graph.of_index(index, 5)
    index[0] = 4
    fresh = Graph.of_index(index, 5)
    assert fresh is not graph and torch.equal(fresh.edge_index[1], index)
    alive = weakref.ref(fresh)
    del index, fresh
    assert alive() is None
    # A graph that outlives its index is still found by a key.
    assert Graph.resolve(*graph.key) is graph and torch.equal(graph.edge_index[1], INDEXES["unsorted"])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Graph.of_index(torch.tensor([0, 5]), 5), ValueError, r"'index' needs values in \[0, num_groups=5\)"),
        (lambda: Graph.of_index(torch.tensor([3, -2]), 5), ValueError, r"\(got -2 to 3\)"),
        (lambda: Graph.of_index(torch.zeros(2), 5), TypeError, "'index' needs dtype torch.int64 or torch.int32"),
        (
            lambda: Graph.of_index(torch.zeros(2, 1).long(), 5),
            ValueError,
            r"'index' needs shape \[E\] \(got \[2, 1\]\)",
        ),
        (lambda: Graph.of_index([0, 1], 5), TypeError, "'index' needs a torch.Tensor"),
        (lambda: Graph.of_index(torch.zeros(2).long(), -1), ValueError, "'num_groups' needs a value in"),
        (lambda: Graph.of_index(torch.zeros(2).long(), 1.5), TypeError, "'num_groups' needs an integer"),
        (lambda: Graph.of(torch.zeros(2, 2).long(), 1.5), TypeError, r"'num_src' needs an integer \(got float 1.5\)"),
        (lambda: Graph.of_ptr(torch.tensor([0, 3, 1])), ValueError, r"'ptr' needs .* \(got one that descends by 2\)"),
        (lambda: Graph.of_ptr(torch.tensor([1, 3])), ValueError, r"'ptr' needs .* \(got one that begins at 1\)"),
        (
            lambda: Graph.of_ptr(torch.zeros(0).long()),
            ValueError,
            r"'ptr' needs shape \[num_groups \+ 1\] \(got \[0\]\)",
        ),
        (lambda: Graph.of_ptr(torch.zeros(2)), TypeError, "'ptr' needs dtype torch.int64 or torch.int32"),
        (lambda: Graph.of_ptr(torch.tensor([0, 2**31])), ValueError, "'ptr' needs at most"),
    ],
)
def test_wrong_index_or_offsets(make, error, message):
    with pytest.raises(error, match=message):
        make()
