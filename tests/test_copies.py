"""What a user's module may hold is copied, pickled and saved with it, or one error says why not."""

import copy
import io
import pickle

import pytest
import torch
from torch_geometric.data import Data

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.capture import Capacity, CapturedStep, capture_step
from pyg_dfgnn.graph import DeviceDataset, EdgeSet, Graph
from pyg_dfgnn.ir import D, IndexSpace, R, S, relational, sum_to
from pyg_dfgnn.ops import edge_attention
from pyg_dfgnn.ops.function import runner_of
from pyg_dfgnn.ops.relational import RowSet, apply, index_space_of
from pyg_dfgnn.settings import current, local_settings
from pyg_dfgnn.statements import score as statements
from pyg_dfgnn.statements.score import Score
from pyg_dfgnn.statements.scores import ADD, DOT, SCORES, register
from pyg_dfgnn.statements.segment import MESSAGES, statement_of
from pyg_dfgnn.transforms import Reorder
from tests.capture.test_step import HostRecorder
from tests.graph.test_copy import WAYS
from tests.nn.convs import EDGES, FEATURES, NUM_NODES
from tests.processes import run_script

X = torch.randn(NUM_NODES, FEATURES)
KIND, TYPE = torch.arange(EDGES.size(1)) % 3, torch.arange(NUM_NODES) % 2


@pytest.fixture(autouse=True)
def registered():
    """Forget the score after each test."""
    yield
    statements._scores.pop("half_dot", None)


def half_dot(o):
    return 0.5 * (o.target * o.key).sum(dim=-1)


OWN = Score("half_dot", "struct Score {};", half_dot, target=True, key=True, gradients=("value", "target", "key"))


@relational
def added(x: S):
    return sum_to(D, x)


def typed():
    return Graph.of(EDGES, NUM_NODES, edge_type=KIND, num_relations=3)


def a_model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"conv": ours.GATConv(FEATURES, 4), "linear": torch.nn.Linear(4, 2)})


def described(layer, *args):
    return pyg_dfgnn.describe_plan(layer, X, EDGES, *args, device="cuda")


HELD = {
    "score": lambda: ADD,
    "score of a user": lambda: OWN,
    "message": lambda: MESSAGES["copy"],
    "statement": lambda: statement_of(MESSAGES["copy"], ("sum", "max")),
    "statements": lambda: [runner_of(name).statement for name in ("attention/add", "segment/copy/sum")],
    "op of a score": lambda: runner_of("attention/add"),
    "op of an aggregation": lambda: runner_of("segment/weight/mean"),
    "graph": lambda: Graph.of(EDGES, NUM_NODES, self_loops=True),
    "graph with relations": typed,
    "EdgeSet": lambda: EdgeSet(EDGES, NUM_NODES, NUM_NODES),
    "settings": lambda: current(),
    "settings to be entered": lambda: local_settings(fallback="silent"),
    "program": lambda: added.program(x=(3,)),
    "relational function": lambda: added,
    "rows": lambda: index_space_of(typed()),
    "rows with types": lambda: IndexSpace(typed(), source_type=TYPE, target_type=TYPE, num_types=2),
    "RowSet": lambda: RowSet("edges", (EDGES,), (NUM_NODES, NUM_NODES)),
    "report": lambda: pyg_dfgnn.report(a_model()),
    "description of a conv": lambda: described(ours.GATConv(FEATURES, 4)),
    "description of a sum": lambda: described(ours.SAGEConv(FEATURES, 4, aggr="max")),
    "description of a program": lambda: described(ours.RGCNConv(FEATURES, 4, 3), KIND),
    "capacity": lambda: Capacity(3, (1.0, 2.0), (3.0, 4.0)),
    "Reorder": Reorder,
    "DeviceDataset": lambda: DeviceDataset([Data(x=X, edge_index=EDGES)]),
    "layers": a_model,
}


class Holder(torch.nn.Module):
    """A module of a user with something in an attribute."""

    def __init__(self, held):
        super().__init__()
        self.held, self.linear = held, torch.nn.Linear(2, 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HELD)
def test_what_a_module_holds(name, way):
    held = HELD[name]()
    for value in (WAYS[way](held), WAYS[way](Holder(held)).held):
        assert type(value) is type(held)
        if name not in ("settings to be entered",):
            assert str(value) == str(held) or " at 0x" in str(held)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("held", [ADD, DOT, runner_of("attention/dot"), runner_of("segment/copy/max"), added])
def test_what_is_found_by_its_name_stays_the_same_object(held, way):
    assert WAYS[way](Holder(held)).held is held


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_score_runs(way):
    register(OWN)
    graph, x = Graph.of(EDGES, NUM_NODES), torch.randn(NUM_NODES, 2, 4, dtype=torch.float64)
    want = edge_attention(graph, OWN, target=x, key=x, value=x)
    torch.testing.assert_close(edge_attention(graph, WAYS[way](OWN), target=x, key=x, value=x), want)
    assert SCORES["half_dot"] is OWN
    changed = Score("half_dot", "struct Score {};", half_dot, target=True, key=True)
    with pytest.raises(ValueError, match=r"'score' needs a name that no other score has.*\(got 'half_dot'\)"):
        edge_attention(graph, changed, target=x, key=x, value=x)


def test_a_pickled_score_in_another_process(tmp_path):
    """The module that states the score is imported before it is read, or by reading it."""
    (tmp_path / "held.pt").write_bytes(pickle.dumps((OWN, ADD, runner_of("segment/copy/min"), added)))
    code = f"""
import pickle, torch
score, add, op, added = pickle.loads(open({str(tmp_path / "held.pt")!r}, "rb").read())
from pyg_dfgnn.statements.scores import ADD
from tests.test_copies import EDGES, NUM_NODES, OWN, Graph, edge_attention
import tests.test_copies
x = torch.randn(NUM_NODES, 1, 4)
for each in (score, OWN):
    edge_attention(Graph.of(EDGES, NUM_NODES), each, target=x, key=x, value=x)
assert add is ADD and op.statement.name == "segment/copy/min" and added is tests.test_copies.added
"""
    run_script(code, tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_copied_rows_run(way):
    rows = IndexSpace(typed(), source_type=TYPE, target_type=TYPE, num_types=2)
    want = apply(added, rows, {"x": X})["out"]
    copied = WAYS[way](rows)
    assert copied.sizes == rows.sizes and copied.sizes[R] == 3
    torch.testing.assert_close(apply(added, copied, {"x": X})["out"], want)


def test_a_function_that_no_name_leads_to():
    @relational
    def inside(x: S):
        return sum_to(D, x)

    assert copy.deepcopy(Holder(inside)).held is inside
    with pytest.raises((AttributeError, pickle.PicklingError), match="inside"):
        pickle.dumps(Holder(inside))


def loss(out, data):
    return out.square().mean()


@pytest.mark.parametrize("way", WAYS)
def test_steps(way):
    torch.manual_seed(0)
    model, data = ours.SAGEConv(FEATURES, 4), Data(x=X, edge_index=EDGES)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with local_settings(fallback="silent"):
        step = capture_step(model, loss, optimizer, data)
        captured = capture_step(model, loss, optimizer, data, recorder=HostRecorder(optimizer))
        assert type(captured) is CapturedStep
        copied = WAYS[way](step)
        torch.testing.assert_close(copied.evaluate(), step.evaluate())
        with pytest.raises(TypeError, match="'step' needs to be made anew by capture_step.*got a CapturedStep"):
            WAYS[way](captured)


def test_a_state_dict_beside_a_score():
    file = io.BytesIO()
    torch.save(Holder(ADD).state_dict(), file)
    file.seek(0)
    assert set(torch.load(file)) == {"linear.weight", "linear.bias"}
