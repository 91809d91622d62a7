"""The cache never serves a stale graph, never keeps a tensor alive, and stays small."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops

from pyg_dfgnn.graph import EdgeSet, Graph, derived
from pyg_dfgnn.graph import graph as graph_module
from pyg_dfgnn.graph.cache import GraphCache
from pyg_dfgnn.graph.segment import graph_of_index
from pyg_dfgnn.reference.zoo import random
from tests.graph.brute import check_graph, with_loops


@pytest.fixture
def edge_index():
    return random(20, 20, 90).edge_index


def entries():
    return graph_module._cache.entries


def test_hit_is_the_same_graph_and_needs_no_host_sync(edge_index, host_syncs):
    Graph.of(edge_index, 20, self_loops=True)
    # The longest row is asked for once the loops that were there are gone.
    assert (edge_index[0] == edge_index[1]).any() and len(host_syncs) == 2
    edge_index = remove_self_loops(edge_index)[0]
    host_syncs.clear()
    graph = Graph.of(edge_index, 20, self_loops=True)
    assert len(host_syncs) == 1
    assert graph.csc.num_edges == graph.num_edges and len(host_syncs) == 2
    assert Graph.of(edge_index, 20, self_loops=True) is graph
    assert Graph.resolve(edge_index, 20, 20, True, False) is graph
    assert Graph.resolve(*graph.key) is graph
    assert Graph.resolve(*EdgeSet(edge_index, 20, 20, True, False).key) is graph
    assert graph.csc is graph.csc and len(host_syncs) == 2


def test_key_parts_are_told_apart(edge_index):
    graphs = {
        id(Graph.of(edge_index, num_src, num_dst, self_loops=loops, flow=flow))
        for num_src, num_dst in ((20, 20), (20, 21), (21, 20))
        for loops in (False, True)
        for flow in ("source_to_target", "target_to_source")
    }
    assert len(graphs) == 12


@pytest.mark.parametrize("number", [np.int64, np.int32, torch.tensor])
def test_sizes_of_any_integer_type_find_the_same_graph(number, edge_index):
    relations = edge_index[0] % 3
    graph = Graph.of(edge_index, number(20), number(21))
    assert graph is Graph.of(edge_index, 20, 21) and {type(graph.num_src), type(graph.num_dst)} == {int}
    typed = Graph.of(edge_index, number(20), edge_type=relations, num_relations=number(3))
    assert typed is Graph.of(edge_index, 20, edge_type=relations, num_relations=3) and type(typed.num_relations) is int
    for index in (relations, edge_index[0]):
        assert graph_of_index(index, number(20)) is graph_of_index(index, 20)
    assert Graph.of_index(relations, number(20)) is Graph.of_index(relations, 20)
    check_graph(Graph.of_pieces([edge_index], number(90), number(20), number(20)), edge_index, 20, 20)
    batch = Data(edge_index=edge_index.clone(), num_nodes=number(20))
    assert Graph.of(batch) is Graph.of(batch.edge_index, 20)


def test_equal_content_in_another_tensor_is_another_graph(edge_index):
    assert Graph.of(edge_index, 20) is not Graph.of(edge_index.clone(), 20)


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_in_place_edit_rebuilds(edge_index, self_loops):
    old = Graph.of(edge_index, 20, self_loops=self_loops)
    before = old.edge_index.clone()
    edge_index[0, 3] = (edge_index[0, 3] + 1) % 20
    want = with_loops(edge_index, 20, 20) if self_loops else edge_index
    check_graph(Graph.of(edge_index, 20, self_loops=self_loops), want, 20, 20)
    # The graph that someone still holds goes on saying what it said.
    check_graph(old, before, 20, 20)


def test_edit_through_a_view_rebuilds(edge_index):
    old = Graph.of(edge_index, 20)
    edge_index.view(-1)[:5].zero_()
    assert Graph.of(edge_index, 20) is not old
    check_graph(Graph.of(edge_index, 20), edge_index, 20, 20)


def test_edge_index_class_edit_rebuilds(edge_index):
    given = EdgeIndex(edge_index.clone(), sparse_size=(20, 20))
    old = Graph.of(given, 20)
    given.as_tensor()[0, 0] = (given.as_tensor()[0, 0] + 1) % 20
    assert Graph.of(given, 20) is not old
    check_graph(Graph.of(given, 20), given.as_tensor(), 20, 20)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_matrix_edit_rebuilds():
    adj_t = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.ones(2), (2, 2))
    assert Graph.of(adj_t, 2) is Graph.of(adj_t, 2)
    adj_t.col_indices()[0] = 0
    check_graph(Graph.of(adj_t, 2), torch.tensor([[0, 0], [0, 1]]), 2, 2)


def test_edges_own_their_memory():
    edge_index = random(20, 20, 90).edge_index.int()
    graph = Graph.of(edge_index, 20)
    given = EdgeIndex(edge_index[:, edge_index[1].argsort()].contiguous(), sparse_size=(20, 20), sort_order="col")
    used = {edge_index.untyped_storage().data_ptr(), given.as_tensor().untyped_storage().data_ptr()}
    for tensor in (*graph.csr.arrays, *Graph.of(given, 20).csr.arrays):
        assert tensor.untyped_storage().data_ptr() not in used


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_nothing_outlives_the_tensor(self_loops):
    gc.collect()
    gc.disable()
    try:
        edge_index = random(20, 20, 90).edge_index
        graph = Graph.of(edge_index, 20, self_loops=self_loops)
        assert graph.csc.num_edges and graph.edge_index.numel() and graph.key
        tensor, held = weakref.ref(edge_index), weakref.ref(graph)
        del graph
        assert held() is not None and len(entries()) > 0
        del edge_index
        # No cycle: both are gone without the garbage collector.
        assert tensor() is None and held() is None and len(entries()) == 0
    finally:
        gc.enable()


def test_graph_does_not_keep_the_tensor_but_outlives_it():
    edge_index = random(20, 20, 90).edge_index
    want = edge_index.clone()
    graph = Graph.of(edge_index, 20)
    tensor = weakref.ref(edge_index)
    del edge_index
    assert tensor() is None
    check_graph(graph, want, 20, 20)


def test_own_edge_index_is_not_trusted_after_an_edit():
    graph = Graph.of(random(20, 20, 90).edge_index.int(), 20)
    own = graph.edge_index
    assert Graph.resolve(own, 20, 20, False, False) is graph
    assert Graph.resolve(own, 21, 20, False, False) is not graph
    before = own.clone()
    own[0, 0] = (own[0, 0] + 1) % 20
    assert Graph.resolve(own, 20, 20, False, False) is not graph
    # The graph itself goes on saying what it said.
    assert torch.equal(graph.edge_index, before) and Graph.resolve(*graph.key) is graph


@pytest.mark.parametrize("dead_entries", ["removed", "left"])
def test_reused_addresses_give_fresh_graphs(dead_entries, monkeypatch):
    if dead_entries == "left":
        # The weak reference dies with its tensor, its callback may come later.
        monkeypatch.setattr(GraphCache, "_drop", lambda self, key, ref: None)
    seen = set()
    # Until an address has come back: without one the test would mean nothing.
    for seed in range(20_000):
        edge_index = random(20, 20, 90, seed=seed).edge_index
        seen.add(id(edge_index))
        graph = Graph.of(edge_index, 20, self_loops=seed % 2 == 0)
        want = with_loops(edge_index, 20, 20) if seed % 2 == 0 else edge_index
        assert torch.equal(graph.edge_index, want)
        del edge_index, graph
        if seed >= 300 and len(seen) <= seed:
            break
    assert len(seen) <= seed


@pytest.mark.parametrize("dead_entries", ["removed", "left"])
def test_reused_address_of_a_matrix(dead_entries, monkeypatch):
    if dead_entries == "left":
        monkeypatch.setattr(GraphCache, "_drop", lambda self, key, ref: None)
    seen = set()
    for seed in range(50):
        edge_index = random(20, 20, 90, seed=seed).edge_index
        adj_t = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(90), (20, 20))
        seen.add(id(adj_t))
        assert torch.equal(Graph.of(adj_t, 20).edge_index, edge_index)
        del adj_t
    assert len(seen) < 50


def test_tensor_kept_by_autograd_only():
    edge_index = random(20, 20, 90).edge_index
    graph = Graph.of(edge_index, 20)
    x = torch.randn(20, 3, requires_grad=True)
    out = x[edge_index[0]].sum() + x.index_select(0, edge_index.view(-1)).sum()
    want = edge_index.clone()
    del edge_index
    check_graph(graph, want, 20, 20)
    out.backward()
    assert torch.isfinite(x.grad).all()


def test_size_is_bounded(monkeypatch):
    monkeypatch.setattr(graph_module._cache, "max_graphs", 8)
    alive = [random(5, 5, 9, seed=seed).edge_index for seed in range(30)]
    first = Graph.of(alive[0], 5).pin()
    for edge_index in alive:
        check_graph(Graph.of(edge_index, 5), edge_index, 5, 5)
        assert len(entries()) <= 8
    assert Graph.of(alive[0], 5) is first
    assert Graph.of(alive[-1], 5) is Graph.of(alive[-1], 5)


class _Anchor:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.itself = self


def test_garbage_may_be_collected_while_the_oldest_graph_is_looked_for():
    size, graph = graph_module.MAX_CACHED_GRAPHS, SimpleNamespace(pinned=False)
    cache, threshold = GraphCache(size), gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        anchors = [_Anchor() for _ in range(size + 1)]
        for number, anchor in enumerate(anchors[:-1]):
            cache.put((number,), (anchor,), (0,), graph)
        # Tuples that were freed would be used again without a collection.
        tuples = [(number, number) for number in range(5000)]
        gc.collect(0)
        del anchors[:-1], anchor
        gc.set_threshold(50, 0, 0)
        gc.enable()
        cache.put((size,), (anchors[0],), (0,), graph)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    gc.collect()
    assert list(cache.entries) == [(size,)] and tuples


def test_clear_cache(edge_index):
    graph = Graph.of(edge_index, 20)
    Graph.clear_cache()
    assert Graph.of(edge_index, 20) is not graph


def test_inference_tensors_are_rebuilt_but_resolvable():
    with torch.inference_mode():
        edge_index = random(20, 20, 90).edge_index
        graph = Graph.of(edge_index, 20)
        check_graph(graph, edge_index, 20, 20)
        edge_index[0, 0] = (edge_index[0, 0] + 1) % 20
        check_graph(Graph.of(edge_index, 20), edge_index, 20, 20)
    assert not any(tensor.is_inference() for tensor in graph.csr.arrays)


def test_built_in_inference_mode_serves_training(edge_index):
    with torch.inference_mode():
        graph = Graph.of(edge_index, 20, self_loops=True)
    assert Graph.of(edge_index, 20, self_loops=True) is graph
    x = torch.randn(20, requires_grad=True)
    x[graph.csr.col.long()].mul(x[graph.edge_index[1]]).sum().backward()
    assert not graph.csc.rowptr.is_inference() and x.grad is not None


def test_threads():
    shared = [random(30, 30, 200, seed=seed).edge_index for seed in range(4)]
    start = Barrier(8)

    def work(number):
        start.wait()
        for step in range(60):
            edge_index = shared[(number + step) % 4]
            graph = Graph.of(edge_index, 30, self_loops=bool(step % 2))
            want = with_loops(edge_index, 30, 30) if step % 2 else edge_index
            assert torch.equal(graph.edge_index, want) and graph.csc.num_edges == want.size(1)
            own = random(9, 9, 20, seed=1000 * number + step).edge_index
            assert torch.equal(Graph.of(own, 9).csr.col[Graph.of(own, 9).csr.perm.argsort()].long(), own[0])
            if step % 20 == 19:
                Graph.clear_cache()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_arrays_that_come_meanwhile_are_not_taken_for_known(edge_index, monkeypatch):
    """One thread adds arrays while another tells the allocator that its stream reads those of before."""
    graph = Graph.of(edge_index, 20)

    def another_thread_adds_arrays(event):
        graph._streams = {1}

    stream = SimpleNamespace(wait_event=another_thread_adds_arrays)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(derived, "cuda_stream", lambda index: 2)
    graph._streams, graph._made = {1}, object()
    graph.on_this_stream()
    assert graph._streams == {1}


@pytest.mark.parametrize("handle", [0, 2], ids=["default", "other"])
def test_a_known_stream_is_asked_for_a_capture_unless_it_is_the_default_one(handle, edge_index, monkeypatch):
    graph = Graph.of(edge_index, 20)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(derived, "cuda_stream", lambda index: handle)
    graph._streams = {0, 2}
    assert graph.on_this_stream().pinned == (handle == 2)


class _GraphSizes(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, seed):
        return Graph.of(random(9, 9, 20, seed=seed).edge_index, 9, self_loops=True).num_edges


def test_in_dataloader_workers_forked_while_the_lock_is_held():
    with graph_module._cache._lock:
        loader = DataLoader(_GraphSizes(), num_workers=1, multiprocessing_context="fork", timeout=60)
        got = [int(size) for size in loader]
    assert got == [_GraphSizes()[seed] for seed in range(6)]
