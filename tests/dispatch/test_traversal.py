"""What all traversals share: whether a graph is local, and what then runs in place of sweeps."""

from dataclasses import replace

import pytest
import torch
from torch_geometric.data import Data

from pyg_dfgnn.dispatch import gpu, segment, traversal
from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.transforms import Reorder
from tests.dispatch.test_core import PROBLEM

NODES, DEGREE, GROUP, CACHE_ROWS = 2000, 320, 50, 800


def communities(order):
    """Edges between nodes of a community of 50, each 40 away from the next of its community, or in order."""
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(NODES).repeat_interleave(DEGREE)
    source = target // GROUP * GROUP + torch.randint(GROUP, (NODES * DEGREE,), generator=generator)
    edge_index = torch.stack([source, target])
    if order == "apart":
        return edge_index % GROUP * (NODES // GROUP) + edge_index // GROUP
    if order == "at random":
        return torch.randperm(NODES, generator=generator)[edge_index]
    # The order of the edges says nothing.
    return edge_index[:, torch.randperm(NODES * DEGREE, generator=generator)] if order == "mixed" else edge_index


@pytest.fixture
def small_cache(monkeypatch):
    """A cache for 800 rows of 512 bytes."""
    cache = replace(gpu.H200, cache_bytes=int(CACHE_ROWS * 512 / 0.8) + 1)
    monkeypatch.setitem(gpu.known, PROBLEM.device, cache)


def plans(edge_index):
    graph = Graph.of(edge_index, NODES)
    problem = segment.SegmentProblem("copy", ("sum",), 128, torch.float32, PROBLEM.device)
    attention = replace(PROBLEM, heads=1, channels=128, dtype=torch.float32)
    for direction in ("forward", "sources"):
        yield segment.FAMILY.candidates["row_split"].plan_pass(problem, direction, graph)
        yield row_split.plan_pass(attention, direction, graph)


@pytest.mark.parametrize("order", ["as they are", "mixed"])
def test_a_local_graph_is_not_swept(order, small_cache):
    for plan in plans(communities(order)):
        assert plan.blocks == 1 and plan.ascending and not plan.constants["ORDERED"]
        assert "columns ascending" in str(plan)


@pytest.mark.parametrize("order", ["apart", "at random"])
def test_other_graphs_are_swept_until_they_are_reordered(order, small_cache):
    edge_index = communities(order)
    for plan in plans(edge_index):
        assert plan.blocks > 1 and not plan.ascending
    data = Reorder("community")(Data(edge_index=edge_index, num_nodes=NODES))
    for plan in plans(data.edge_index):
        assert plan.blocks == 1 and plan.ascending


def test_graphs_that_fit_the_cache_are_not_measured(monkeypatch):
    monkeypatch.setattr(traversal, "gather_misses", None)
    for plan in plans(communities("at random")):
        assert plan.blocks == 1 and not plan.ascending


def test_the_measurement_is_kept_for_each_cache(monkeypatch):
    counts, measure = [], traversal.gather_misses

    def counted(col, *arguments, **options):
        counts.append(col.numel())
        return measure(col, *arguments, **options)

    monkeypatch.setattr(traversal, "gather_misses", counted)
    graph = Graph.of(communities("as they are"), NODES)
    assert all(traversal.is_local(graph, "forward", rows) for rows in (400, 400, 800))
    assert counts == [NODES * DEGREE // 4] * 2
