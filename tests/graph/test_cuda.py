"""On a GPU: the same graphs as on the CPU, counted syncs, streams, capture."""

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.utils import remove_self_loops

from pyg_dfgnn.graph import DeviceDataset, Graph
from pyg_dfgnn.graph.chunks import heavy_rows, row_order
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.reference.zoo import hub, random, zoo
from tests.graph.brute import check_graph, with_loops

pytestmark = pytest.mark.cuda


@pytest.fixture
def syncs_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_equals_the_cpu_bit_by_bit(case, dtype, self_loops):
    on_cpu = Graph.of(case.edge_index.to(dtype), case.num_src, case.num_dst, self_loops=self_loops)
    edge_index = case.edge_index.to("cuda", dtype)
    graph = Graph.of(edge_index, case.num_src, case.num_dst, self_loops=self_loops)
    check_graph(graph, on_cpu.edge_index.cuda(), case.num_src, case.num_dst)
    for ours, theirs in ((graph.csr, on_cpu.csr), (graph.csc, on_cpu.csc)):
        for max_edges in (1, 7, 64):
            a, b = heavy_rows(graph, ours, max_edges), heavy_rows(on_cpu, theirs, max_edges)
            assert (a is None) == (b is None)
            assert a is None or all(torch.equal(x.cpu(), y) for x, y in zip(tensors_of(a), tensors_of(b)))
        assert all(torch.equal(x.cpu(), y) for x, y in zip(ours.arrays, theirs.arrays))


def test_large_graph_equals_the_cpu():
    case = random(200_000, 150_000, 1_500_000)
    edge_index = case.edge_index.cuda()
    for self_loops in (False, True):
        on_cpu = Graph.of(case.edge_index, case.num_src, case.num_dst, self_loops=self_loops)
        graph = Graph.of(edge_index, case.num_src, case.num_dst, self_loops=self_loops)
        for ours, theirs in ((graph.csr, on_cpu.csr), (graph.csc, on_cpu.csc)):
            assert all(torch.equal(x.cpu(), y) for x, y in zip(ours.arrays, theirs.arrays))


def test_deterministic_mode():
    case = hub(5000)
    want = Graph.of(case.edge_index, case.num_src, self_loops=True)
    torch.use_deterministic_algorithms(True)
    try:
        graph = Graph.of(case.edge_index.cuda(), case.num_src, self_loops=True)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(graph.csc.arrays, want.csc.arrays))
        assert torch.equal(heavy_rows(graph, graph.csr, 256).row.cpu(), heavy_rows(want, want.csr, 256).row)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_a_build_syncs_once_and_a_hit_never(self_loops, host_syncs, syncs_are_errors):
    torch.cuda.set_sync_debug_mode("default")
    edge_index = remove_self_loops(hub(3000).edge_index)[0].cuda()
    torch.cuda.set_sync_debug_mode("error")
    graph = Graph.of(edge_index, 16, self_loops=self_loops)
    assert len(host_syncs) == 1
    assert graph.csc.num_rows == 16
    assert len(host_syncs) == 2
    assert heavy_rows(graph, graph.csr, 256).num_heavy == 1
    assert len(host_syncs) == 3
    for _ in range(3):
        assert Graph.of(edge_index, 16, self_loops=self_loops) is graph
        assert Graph.resolve(*graph.key) is graph and heavy_rows(graph, graph.csc, 10**6) is None
    assert len(host_syncs) == 3


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("form", ["coo", "csr", "edge_index"])
def test_other_forms(form):
    edge_index = random(40, 40, 200).edge_index.unique(dim=1).contiguous().cuda()
    if form == "edge_index":
        given = EdgeIndex(edge_index, sparse_size=(40, 40), sort_order="row")
        want = edge_index
    else:
        given = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(edge_index.size(1), device="cuda"), (40, 40))
        given = given.coalesce()
        want = given.indices().flip(0)
        given = given.to_sparse_csr() if form == "csr" else given
    check_graph(Graph.of(given, 40), want, 40, 40)


def test_batch():
    data = [Data(edge_index=c.edge_index, num_nodes=c.num_src) for c in zoo() if c.num_src == c.num_dst > 0]
    batch = Batch.from_data_list(data).to("cuda")
    graph = Graph.of(batch, self_loops=True)
    check_graph(graph, with_loops(batch.edge_index, batch.num_nodes, batch.num_nodes), *[batch.num_nodes] * 2)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_what_a_graph_keeps_is_not_made_in_a_capture():
    """Replays would make it anew, and whoever else reads it might be first."""
    graph = Graph.of(hub(3000).edge_index.cuda(), 16)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="call the layer once before"):
        row_order(graph, graph.csr)
    assert row_order(graph, graph.csr).numel() == 16


def test_another_stream_sees_a_finished_graph():
    side = torch.cuda.Stream()
    case = random(100_000, 100_000, 1_000_000)
    edge_index = case.edge_index.cuda()
    torch.cuda.synchronize()
    graph = Graph.of(edge_index, 100_000, self_loops=True)
    csc = graph.csc
    with torch.cuda.stream(side):
        assert Graph.of(edge_index, 100_000, self_loops=True) is graph
        total = csc.col.long().sum()
        assert side.cuda_stream in graph._streams
    # The current stream does not wait for the other one.
    side.synchronize()
    assert total.item() == graph.edge_index[1].sum().item()


def test_a_resident_batch_never_syncs(syncs_are_errors):
    torch.cuda.set_sync_debug_mode("default")
    cases = [random(size, size, 6 * size, seed=size) for size in range(20, 120, 5)]
    data = [Data(x=torch.randn(c.num_src, 3), edge_index=c.edge_index, y=torch.zeros(1)) for c in cases]
    ids = torch.tensor([3, 7, 1, 12])
    want, resident = Batch.from_data_list([data[i] for i in ids]), DeviceDataset(data, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    batch = resident.batch(ids)
    torch.cuda.set_sync_debug_mode("default")
    for name in ("x", "y", "edge_index", "batch", "ptr"):
        assert torch.equal(batch[name].cpu(), want[name]), name


def test_capture_pins_the_graph():
    edge_index = random(50, 50, 400).edge_index.cuda()
    graph = Graph.of(edge_index, 50, self_loops=True)
    x = torch.randn(50, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = x[Graph.of(edge_index, 50, self_loops=True).csr.col]
    assert graph.pinned
    captured.replay()
    assert torch.equal(out, x[graph.csr.col])
