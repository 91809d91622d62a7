"""Large graphs: what goes span by span is what goes at once, and takes a bounded number of bytes per edge."""

import pytest
import torch

from pyg_dfgnn.dispatch import core
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph, adjacency, block_sparse
from pyg_dfgnn.graph.build import build
from pyg_dfgnn.graph.chunks import ascending, column_blocks, positions, row_index
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.graph.forms import read_tensor
from pyg_dfgnn.graph.node_ranges import diagonal_blocks
from pyg_dfgnn.reference.zoo import edges, hub, random, star, zoo
from tests.covering import over
from tests.graph.memory import PeakBytes, sorted_in_spans

MOST_BYTES = 24
"""Bytes per edge that may be held beside CSR and CSC at any time."""
BOTH = (False, True)
CASES = [
    *zoo(),
    # A row over several spans, and nothing else.
    star(200),
    star(200, inward=False),
    hub(300, num_nodes=7),
    random(1, 1, 40, name="one-node-many-loops"),
    edges("one-row", [(source % 5, 2) for source in range(90)], 5, 3),
    random(40, 3, 500, seed=3, name="bipartite-duplicates"),
]


def parts_of(case, by_source, self_loops):
    """Everything that is built span by span, of a fresh graph."""
    edge_index = case.edge_index
    if by_source:
        edge_index = edge_index[:, edge_index[0].argsort(stable=True)]
    built = build(read_tensor(edge_index, False), case.num_src, case.num_dst, self_loops=self_loops)
    graph = Graph(built, self_loops=self_loops)
    # Of the graph without loops too, by another path.
    twin = Graph.of(edge_index.clone(), case.num_src, case.num_dst)
    looped = twin.with_loops()
    parts = [graph.csr.arrays, graph.csc.arrays, graph.kept, graph.edge_index, looped.csr.arrays, looped.csc.arrays]
    for side in (graph.csr, graph.csc):
        parts += [row_index(graph, side), ascending(graph, side), column_blocks(graph, side, 3, 2)]
        parts.append(block_sparse.make_blocks(side, 32, None))
    diagonal = diagonal_blocks(graph)
    parts += [positions(graph, graph.csc, graph.csr), diagonal]
    loops = (edge_index[0] == edge_index[1]).sum()
    assert adjacency.count_loops(twin.csr.arrays) == loops and twin.has_loops is bool(loops)
    if diagonal is not None:
        parts.append(block_sparse.make_blocks(graph.csc, 32, diagonal))
    return list(tensors_of(parts))


@over([("by_source", "self_loops", "spans")], case=CASES, by_source=BOTH, self_loops=BOTH, spans=(1, 2, 16))
def test_spans_give_what_one_sort_gives(case, by_source, self_loops, spans, monkeypatch):
    want = parts_of(case, by_source, self_loops)
    with sorted_in_spans(monkeypatch, spans):
        assert all(torch.equal(a, b) for a, b in zip(parts_of(case, by_source, self_loops), want, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_columns_ascend_stably(case):
    """As one sort by row, column and position."""
    graph = Graph.of(case.edge_index.clone(), case.num_src, case.num_dst)
    for side, rows, cols in ((graph.csr, 1, 0), (graph.csc, 0, 1)):
        keys = case.edge_index[rows] * max(case.num_src, case.num_dst) + case.edge_index[cols]
        perm = keys.argsort(stable=True)
        assert torch.equal(ascending(graph, side)[1].long(), perm)
        assert torch.equal(ascending(graph, side)[0].long(), case.edge_index[cols, perm])


def test_an_index_in_spans(monkeypatch):
    index = random(30, 30, 400).edge_index[0]
    want = Graph.of_index(index.clone(), 30)
    with sorted_in_spans(monkeypatch):
        assert all(map(torch.equal, Graph.of_index(index, 30).csr.arrays, want.csr.arrays))


def test_a_wrong_id_is_told_before_anything_is_counted(monkeypatch):
    with (
        sorted_in_spans(monkeypatch),
        pytest.raises(ValueError, match=r"target ids in \[0, num_dst=3\) \(got 0 to 3\)"),
    ):
        Graph.of(torch.tensor([[0, 1, 2], [0, 3, 1]]), 3)


def test_the_counter_of_bytes():
    """What is held counts, also through views; what is freed, or theirs, does not; a sort has memory of its own."""
    theirs = torch.zeros(1000, dtype=torch.int32)
    with PeakBytes(theirs) as held:
        kept = (theirs + 1)[:10]
        for _ in range(3):
            theirs + 2
    assert held.peak == 8000 and kept.numel() == 10
    with PeakBytes(theirs) as held:
        theirs.sort(stable=True)
    assert held.peak == 1000 * (4 + 8 + 8 + 4 + 8)


# Pieces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_pieces_give_what_the_tensor_gives(case, self_loops, dtype, flow):
    edge_index = case.edge_index if flow == "source_to_target" else case.edge_index.flip(0)
    want = Graph.of(edge_index, case.num_src, case.num_dst, flow=flow, self_loops=self_loops)
    # An empty piece too.
    pieces = [edge_index[:, :0].to(dtype), *edge_index.to(dtype).split(7, dim=1)]
    sizes = case.num_edges, case.num_src, case.num_dst
    graph = Graph.of_pieces(iter(pieces), *sizes, flow=flow, self_loops=self_loops)
    assert (graph.num_edges, graph.self_loops) == (want.num_edges, self_loops)
    parts = ((g.csr.arrays, g.csc.arrays, g.kept) for g in (graph, want))
    assert all(map(torch.equal, *map(tensors_of, parts)))
    assert not any(key == "edge_index" for key in graph.derived_bytes())
    # Only on request.
    assert torch.equal(graph.edge_index, want.edge_index)


def test_no_pieces():
    graph = Graph.of_pieces([], 0, 3, 2, device="cpu")
    assert graph.csr.rowptr.tolist() == [0, 0, 0] and graph.csc.rowptr.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("pieces", "num_edges", "error", "message"),
    [
        ([torch.zeros(2, 3, dtype=torch.long)], 4, ValueError, r"'pieces' needs num_edges=4 edges in all \(got 3\)"),
        ([torch.zeros(2, 3, dtype=torch.long)], 2, ValueError, r"num_edges=2 edges in all \(got more than 2\)"),
        ([torch.zeros(3, 2, dtype=torch.long)], 2, ValueError, r"'pieces' needs shape \[2, E\] \(got \[3, 2\]\)"),
        ([torch.zeros(2, 2)], 2, TypeError, "'pieces' needs"),
        # What int32 would cut to a node that there is.
        (
            [torch.tensor([[0, 1 << 32], [0, 1]])],
            2,
            ValueError,
            r"source ids in \[0, num_src=5\) \(got 0 to 4294967296\)",
        ),
        ([torch.tensor([[0, 1], [-1, 1]])], 2, ValueError, r"target ids in \[0, num_dst=5\) \(got -1 to 1\)"),
        ([], 1 << 31, ValueError, "'pieces' needs at most 2147479551 edges, self-loops included"),
    ],
)
def test_wrong_pieces(pieces, num_edges, error, message):
    with pytest.raises(error, match=message):
        Graph.of_pieces(pieces, num_edges, 5)


def test_loops_of_a_graph_whose_edges_are_gone():
    case = random(30, 20, 200)
    graph = Graph.of_pieces(case.edge_index.split(50, dim=1), 200, 30, 20)
    plain = Graph.of(case.edge_index, 30, 20)
    want = Graph.of(case.edge_index, 30, 20, self_loops=True)
    looped = graph.looped_twin()
    assert looped is graph.looped_twin() and "edge_index" not in graph.derived_bytes()
    assert all(map(torch.equal, looped.csr.arrays + looped.csc.arrays, want.csr.arrays + want.csc.arrays))
    assert graph.derived_bytes()["looped"] >= 4 * (2 * looped.num_edges + 21)
    # With the edges at hand both are the one that their key names.
    assert plain.looped_twin() is want
    Graph.clear_cache()
    assert plain.looped_twin() is want, "the looped graph is made anew for each call"


# Bytes ----------------------------------------------------------------------------------------------------------------

NODES, EDGES = 20_000, 400_000


def near(width):
    """Edges between nodes that are near each other, none twice: blocks of which an eighth is filled."""
    target = torch.randint(NODES, (EDGES,))
    source = (target + torch.randint(-width, width + 1, (EDGES,))).clamp(0, NODES - 1)
    edge_index = torch.stack([source, target]).unique(dim=1)
    return edge_index[:, torch.randperm(edge_index.size(1))]


@pytest.fixture(scope="module", params=["random", "near", "hub"])
def edge_index(request):
    torch.manual_seed(0)
    if request.param == "near":
        return near(100)
    if request.param == "random":
        return random(NODES, NODES, EDGES).edge_index
    return torch.cat([random(NODES, NODES, EDGES // 2).edge_index, hub(EDGES // 2, NODES).edge_index], dim=1)


@over(in_pieces=BOTH, self_loops=BOTH, spans=(4, 16))
def test_bytes_of_building(edge_index, in_pieces, self_loops, spans, monkeypatch):
    num_edges = edge_index.size(1)
    with sorted_in_spans(monkeypatch, spans):
        with PeakBytes(edge_index) as building:
            if in_pieces:
                pieces = (piece.clone() for piece in edge_index.split(num_edges // 20, dim=1))
                graph = Graph.of_pieces(pieces, num_edges, NODES, self_loops=self_loops)
            else:
                graph = Graph.of(edge_index, NODES, self_loops=self_loops)
        with PeakBytes(graph.csr.arrays) as transposing:
            csc = graph.csc
    csr, csc = (sum(array.nbytes for array in side.arrays) for side in (graph.csr, csc))
    assert building.peak - csr <= MOST_BYTES * num_edges
    assert transposing.peak - csc <= MOST_BYTES * num_edges
    # What is checked is there: the sort of one span at least.
    assert building.peak - csr > num_edges


@over(score=("dot", "add", "cosine"), heads_and_dtype=((8, torch.bfloat16), (1, torch.float32)))
def test_bytes_of_choosing(edge_index, score, heads_and_dtype, monkeypatch):
    """Choosing for all three passes holds little and leaves next to nothing, whatever is taken."""
    heads, dtype = heads_and_dtype
    problem = AttentionProblem(score, heads, 128 // heads, dtype, torch.device("cuda", 0), False, False)
    graph = Graph.of(edge_index, NODES)
    num_edges, sides = graph.num_edges, graph.csr.arrays + graph.csc.arrays
    monkeypatch.setattr(block_sparse, "SAMPLED_EDGES", 1)
    with sorted_in_spans(monkeypatch), PeakBytes(sides) as choosing:
        choices = core.explain(FAMILY, problem, graph, trained=True)
    assert len(choices) == 3
    assert choosing.peak <= MOST_BYTES * num_edges
    left = {key: nbytes for key, nbytes in graph.derived_bytes().items() if key[0] != "adjacency"}
    # Offsets of diagonal blocks, which may be as many as nodes.
    assert sum(left.values()) <= 4 * (NODES + 1)


@over(domain=("targets", "sources"), spans=(4, 16))
def test_bytes_of_what_is_taken(edge_index, domain, spans, monkeypatch):
    """Sweeps over blocks of columns, dense blocks and positions, with what of them is kept."""
    graph = Graph.of(edge_index, NODES)
    side = graph.csc if domain == "sources" else graph.csr
    sides = graph.csr.arrays + graph.csc.arrays
    with sorted_in_spans(monkeypatch, spans):
        for build_one in (
            lambda: column_blocks(graph, side, 4, 256, ordered=True),
            lambda: block_sparse.make_blocks(side, 64, None) if block_sparse.fill(graph, 64, True) > 0.02 else None,
            lambda: positions(graph, graph.csc, graph.csr),
        ):
            with PeakBytes(sides, graph._derived) as building:
                build_one()
            assert building.peak <= MOST_BYTES * graph.num_edges
