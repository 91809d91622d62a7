"""Batches pass through one framed graph: what was launched for the first, launched again, is right for each."""

import pytest
import torch
from torch_geometric.data import Batch, Data

from pyg_dfgnn.graph import BatchFacts, Graph, SortEdges, StaticGraph, block_sparse
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

pytestmark = needs_compiler

NODES, EDGES, GRAPHS = 80, 1200, 5
# The second has rows that are longer, the third fewer nodes and graphs, the last one row that all others point at.
SIZES = ([17, 1, 40], [20, 30], [9], [5, 5, 30, 1])


def batch_of(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for size in sizes:
        dense = torch.rand(size, size, generator=generator) < 0.3
        dense[:, 0] |= seed == 3
        data.append(SortEdges()(Data(edge_index=dense.nonzero().t().contiguous(), num_nodes=size)))
    batch = Batch.from_data_list(data)
    # Both sides hold what the convs key the graph by.
    return batch, Graph.of_batch(batch, facts=BatchFacts.of(batch))


@pytest.fixture
def static_of():
    kept = []

    def make(batch):
        edge_index = torch.full((2, EDGES), NODES - 1)
        kept.append(edge_index)
        static = StaticGraph(batch, edge_index, NODES, GRAPHS)
        static.max_degree = static.csr.max_degree = static.csc.max_degree = 64
        static.register()
        return static

    return make


def dot(graph, tensors):
    q, k, v = (t.detach().requires_grad_() for t in tensors)
    out = ops.dot_attention(graph, q, k, v)
    out.square().sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
@pytest.mark.parametrize("schedule", ["row_split", "block_mma"])
def test_same_launches_on_each_batch(static_of, schedule, self_loops):
    batches = [batch_of(sizes, seed) for seed, sizes in enumerate(SIZES)]
    static = static_of(batches[0][1])
    graph = Graph.resolve(static.key[0], NODES, NODES, self_loops, False)
    assert graph is (static.looped if self_loops else static) and graph.is_static
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(NODES, 2, 16, generator=generator) for _ in range(3)]
    recorded = []

    def record(spec, entry, grid, block, arguments, shared_bytes):
        # As a captured graph holds a launch: addresses, sizes, numbers. Tensors in between are the allocator's.
        mine = {t.data_ptr() for t in (*tensors_of(graph._derived), *tensors)}
        found = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        held = [a for a, given in zip(found, arguments) if not isinstance(given, torch.Tensor) or a in mine]
        recorded.append((spec, entry, grid, block, held, shared_bytes))
        with launcher.override(before):
            launcher.launch(launcher.kernel_of(spec, entry), grid, block, arguments, torch.device("cpu"), shared_bytes)

    seen = []
    with local_settings(schedule=schedule, fallback="error"), emulated_device() as launched:
        with launcher.override(record) as before:
            for batch, source in batches:
                assert static.takes(source)
                static.put(source)
                recorded.clear()
                results = dot(graph, tensors)
                seen.append([(entry, grid, held) for _, entry, grid, _, held, _ in recorded])
                plain = Graph.of(batch.edge_index, batch.num_nodes, self_loops=self_loops)
                wide = [t[: batch.num_nodes].double().requires_grad_() for t in tensors]
                want = reference.dot_attention(plain.edge_index, plain.num_dst, *wide)[0]
                want.square().sum().backward()
                for found, expected in zip(results, (want.detach(), *(t.grad for t in wide))):
                    torch.testing.assert_close(found[: batch.num_nodes].double(), expected, rtol=1e-4, atol=1e-4)
                    assert torch.equal(found[batch.num_nodes :], torch.zeros_like(found[batch.num_nodes :]))
    assert all(schedule in entry or schedule == "row_split" for entry in launched) and launched
    assert all(launches == seen[0] for launches in seen)


def test_what_does_not_fit(static_of):
    _, first = batch_of([17, 1, 40], 0)
    static = static_of(first)
    for sizes, why in (([70, 20], "nodes"), ([1] * 6, "graphs"), ([70], "a longer graph")):
        assert not static.takes(batch_of(sizes, 1)[1]), why
    hub = SortEdges()(Data(edge_index=torch.stack([torch.arange(60) % 50, torch.zeros(60).long()]), num_nodes=50))
    again = SortEdges()(Data(edge_index=torch.zeros(2, 2, dtype=torch.long), num_nodes=3))
    static.max_degree = 40
    for data, why in ((hub, "degree"), (again, "an edge twice")):
        batch = Batch.from_data_list([data])
        assert not static.takes(Graph.of_batch(batch, facts=BatchFacts.of(batch))), why
    small, crowded = static_of(batch_of([1], 0)[1]), batch_of([33, 33], 1)[1]
    assert small.takes(crowded)
    block_sparse.of(small, "targets", 32, False)
    assert not small.takes(crowded), "dense blocks"


def test_a_static_graph_needs_facts():
    edge_index = torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match="'batch' needs facts"):
        StaticGraph(Graph.of(edge_index, 2), edge_index, 4, 2)


def test_listed_columns_are_refused(static_of):
    with pytest.raises(ValueError, match="'compact' needs False"):
        block_sparse.of(static_of(batch_of([17, 1, 40], 0)[1]), "targets", 32, True)
