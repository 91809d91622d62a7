"""What the launches of a pass hold, whatever becomes of the graph that they were made on."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.core import BACKWARD, FORWARD, options
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import traversal as traversal_launches
from pyg_dfgnn.ops.attention import block_mma as block_mma_launches
from pyg_dfgnn.ops.attention import paper as paper_launches
from pyg_dfgnn.ops.attention.launchers import prepare
from pyg_dfgnn.reference.zoo import hub, sbm
from pyg_dfgnn.settings import Settings
from pyg_dfgnn.statements.op import DIRECTIONS
from tests.covering import over

PROBLEM = AttentionProblem("dot", 2, 8, torch.float32, torch.device("cpu"), False, False)


@pytest.fixture
def pointed_to(monkeypatch):
    """Weak references to the tensors that were turned into addresses, as those of CUDA tensors are."""
    found = []

    def addresses(arguments):
        found.extend(weakref.ref(a) for a in arguments if isinstance(a, Tensor))
        return tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)

    for launches in (traversal_launches, paper_launches, block_mma_launches):
        monkeypatch.setattr(launches, "addresses", addresses)
    return found


def planned(schedule, direction, graph):
    if schedule == "swept":
        return row_split.RowSplitPlan(row_split.swept_constants(PROBLEM, direction)[0], 64, 3)
    directions = FORWARD if direction == "forward" else BACKWARD
    (offers,) = (
        o
        for o, w in zip(options(FAMILY, PROBLEM, graph, directions, Settings(), [schedule]), directions, strict=True)
        if w == direction
    )
    return offers[schedule].plan


@over(schedule=("row_split", "swept", "smem", "block_mma", "smmf", "pmf"), direction=DIRECTIONS)
def test_what_has_an_address_stays(schedule, direction, pointed_to):
    """Two threads may make the same arrays of a graph at once, of which the graph keeps one."""
    case = hub(300) if schedule == "row_split" else sbm()
    edge_index = case.edge_index.unique(dim=1) if schedule == "block_mma" else case.edge_index.clone()
    graph = Graph.of(edge_index, case.num_src, case.num_dst)
    made = prepare(PROBLEM, direction, planned(schedule, direction, graph), graph, frozenset())
    assert pointed_to
    del graph, edge_index
    Graph.clear_cache()
    gc.collect()
    assert all(reference() is not None for reference in pointed_to) and made
