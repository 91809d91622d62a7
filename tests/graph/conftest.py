"""Graph tests start and end with an empty cache; host syncs of the room can be counted."""

import sys

import pytest
import torch

from pyg_dfgnn.graph import Graph, adjacency


@pytest.fixture(autouse=True)
def empty_cache():
    Graph.clear_cache()
    yield
    Graph.clear_cache()


@pytest.fixture
def host_syncs(monkeypatch):
    """A list that grows by one entry whenever the graph room brings numbers to the host; no debug mode refuses it."""
    syncs = []

    def counted(original):
        def count(*values):
            syncs.append(values)
            if not torch.cuda.is_available():
                return original(*values)
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            try:
                return original(*values)
            finally:
                torch.cuda.set_sync_debug_mode(mode)

        return count

    pull = counted(adjacency.pull)
    for name, module in list(sys.modules.items()):
        if name.startswith("pyg_dfgnn.graph.") and hasattr(module, "pull"):
            monkeypatch.setattr(module, "pull", pull)
    monkeypatch.setattr(torch.Tensor, "cpu", counted(torch.Tensor.cpu))
    return syncs


@pytest.fixture
def sorts(monkeypatch):
    """A list that grows by one entry whenever the graph room sorts rows."""
    counts = []
    original = adjacency.sort_rows

    def counted(rows, num_rows):
        counts.append(rows.numel())
        return original(rows, num_rows)

    for name, module in list(sys.modules.items()):
        if name.startswith("pyg_dfgnn.graph.") and hasattr(module, "sort_rows"):
            monkeypatch.setattr(module, "sort_rows", counted)
    return counts
