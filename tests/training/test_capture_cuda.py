"""On a GPU: captured steps equal single ones, batches are whole where they are used, nothing waits for the device."""

import copy

import pytest
import torch
from torch_geometric.data import Batch

import pyg_dfgnn.nn
from pyg_dfgnn.capture import Capacity, CapturedStep
from pyg_dfgnn.distributed import Group
from pyg_dfgnn.graph import DeviceDataset, Graph
from pyg_dfgnn.models import AGNN, GAT, GraphTransformer
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import local_settings
from pyg_dfgnn.training.loaders import Batches, DeviceLoader, graph_batches
from pyg_dfgnn.training.step import make_step
from tests.capture.test_step import SCHEDULES, assert_same_evaluation, graph, train

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
MODELS = {
    "gt": lambda p: GraphTransformer(
        5, 3, pyg_dfgnn.nn, hidden_channels=64, heads=4, layers=2, pe_size=0, dropout=p, attention_dropout=p
    ),
    "gat": lambda p: GAT(5, 3, pyg_dfgnn.nn, dropout=p),
    "agnn": lambda p: AGNN(5, 3, pyg_dfgnn.nn, dropout=p),
}


@pytest.fixture(autouse=True)
def fused_only():
    with local_settings(fallback="error"):
        yield


def pair(name, dropout, data):
    torch.manual_seed(1)
    model = MODELS[name](dropout).to(CUDA)
    steps = []
    for captured in (False, True):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.Adam(twin.parameters(), lr=0.003, fused=True)
        steps.append(make_step(twin, optimizer, data, captured=captured))
    return steps


def graphs(count=40):
    return [graph(10 + 7 * i % 30, i) for i in range(count)]


@pytest.mark.parametrize(
    ("name", "dropout", "schedule"),
    [("gt", 0.0, "cosine"), ("gt", 0.5, "cosine"), ("gat", 0.5, "constant"), ("agnn", 0.0, "cosine")],
)
def test_whole_graph(name, dropout, schedule):
    whole = Batch.from_data_list(graphs()).to(CUDA)
    eager, captured = pair(name, dropout, whole)
    want, found = (train(step, [whole], SCHEDULES[schedule], epochs=20) for step in (eager, captured))
    torch.testing.assert_close(found, want, **elementwise("float32/steps"))
    for step in (eager, captured):
        step.model.eval()
    for _ in range(CapturedStep.WARM_UPS + 2):
        captured.evaluate(whole)
    captured.model.load_state_dict(eager.model.state_dict())
    assert_same_evaluation(eager, captured, whole, **elementwise("float32/gradients"))


@pytest.mark.parametrize(
    ("name", "schedule"), [("gt", "auto"), ("gt", "row_split"), ("gt", "block_mma"), ("gat", "auto"), ("agnn", "auto")]
)
def test_padded_batches(name, schedule):
    resident = DeviceDataset(graphs(), CUDA)
    parts = torch.randperm(40, generator=torch.Generator().manual_seed(3)).split(8)
    given = [resident.batch(part) for part in parts]
    with local_settings(schedule=schedule, fallback="log"):
        eager, captured = pair(name, 0.0, Capacity.of(graphs(), 8))
        want, found = (train(step, given, SCHEDULES["cosine"], epochs=4) for step in (eager, captured))
    torch.testing.assert_close(found, want, **elementwise("float32/many_steps"))
    assert any(capture.recording is not None for capture in captured._captures.values())
    assert len(captured.buckets.buckets) < len(given)


def test_dropout_on_padded_batches():
    """What is drawn depends on the shapes, so single launches run on the padded batches too."""
    resident = DeviceDataset(graphs(), CUDA)
    given = [resident.batch(part) for part in torch.arange(40).split(8)] * 4
    losses = []
    for warm_ups in (CapturedStep.WARM_UPS, 10**6):
        _, step = pair("gt", 0.5, Capacity.of(graphs(), 8))
        step.WARM_UPS = warm_ups
        losses.append(train(step, given, SCHEDULES["constant"], epochs=1))
    torch.testing.assert_close(losses[0], losses[1], **elementwise("float32/many_steps"))
    assert losses[0].std() > 0


def test_a_captured_step_does_not_wait():
    whole = Batch.from_data_list(graphs()).to(CUDA)
    _, step = pair("gt", 0.5, whole)
    for _ in range(CapturedStep.WARM_UPS + 1):
        step(whole)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(whole)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_prefetched_batches_are_whole():
    data = graphs(60)
    sums = []
    for prefetch in (False, True):
        source = DeviceLoader(data, 6, CUDA, torch.Generator().manual_seed(0))
        seen = []
        for _ in range(5):
            for batch in Batches(source, lambda b: b, CUDA, prefetch=prefetch):
                # The device is busy with this batch while the next is made.
                torch.cuda._sleep(2_000_000)
                csr = Graph.of(batch.edge_index, batch.num_nodes).csr
                seen.append((csr.col.long() * csr.perm).sum() + (batch.x.sum() * 1e4).long())
        sums.append(torch.stack(seen))
    assert torch.equal(*sums)


def test_loaders_give_the_same_graphs():
    from pyg_dfgnn.datasets import Task

    data = [graph(10 + 7 * i % 30, i) for i in range(12)]
    task = Task("t", {"val": data}, 5, 3)
    order = torch.Generator()
    options = {"batch_size": 5}
    for resident in (False, True):
        found = graph_batches(task, CUDA, options, order, Group(), resident=resident, prefetch=True)["val"]
        for batch, part in zip(found, torch.arange(12).split(5), strict=True):
            want = Batch.from_data_list([data[i] for i in part]).to(CUDA)
            for name in ("x", "y", "edge_index", "batch", "ptr"):
                assert torch.equal(batch[name], want[name]), name


@pytest.mark.parametrize("model", ["gt_small", "gat"])
def test_run_with_captured_steps(run, model):
    from tests.training.test_run import history

    same = [f"model={model}", "device=cuda", "backend.settings.fallback=error", "scheduler=cosine"]
    same += ["model.pe_size=0"] if model == "gt_small" else ["model.dropout=0"]
    same += ["trainer.resident=true"]
    (_, eager), (_, captured) = run("eager", *same, "backend=auto"), run("captured", *same, "backend=auto_graph")
    for row, want in zip(history(captured), history(eager), strict=True):
        for key in ("train_loss", "val_loss"):
            assert float(row[key]) == pytest.approx(float(want[key]), rel=1e-2), key
