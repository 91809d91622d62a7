"""`capture_step` on a GPU: equal to the loop by hand and to the trainer's step; what cannot be captured is named."""

import copy
import gc
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import nn
from torch_geometric.loader import DataLoader

import pyg_dfgnn.nn
from pyg_dfgnn.capture import Capacity, CapturedStep, capture_step
from pyg_dfgnn.capture.buckets import MaskedBatchNorm
from pyg_dfgnn.errors import IdRangeError, StaleError, UnsupportedError
from pyg_dfgnn.graph import DeviceDataset
from pyg_dfgnn.models import AGNN, GAT, GraphTransformer
from pyg_dfgnn.ops.masked_norm import RowMask
from pyg_dfgnn.reference.tolerances import elementwise, relative_error
from pyg_dfgnn.settings import local_settings
from pyg_dfgnn.training.step import make_step
from tests.capture import test_new_batches as new_batches
from tests.capture.test_capture_step import Pooled, by_hand, call, masked_loss, plain, rated, weighted_loss, whole
from tests.capture.test_new_batches import KERNELS, TYPED
from tests.capture.test_step import graph

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]
STEPS = 20
MODELS = {
    "gat": lambda p: GAT(5, 3, pyg_dfgnn.nn, hidden_channels=8, heads=2, dropout=p),
    "agnn": lambda p: AGNN(5, 3, pyg_dfgnn.nn, dropout=p),
    "gt": lambda p: GraphTransformer(
        5, 3, pyg_dfgnn.nn, hidden_channels=64, heads=4, layers=2, pe_size=0, dropout=p, norm="layer"
    ),
    "pyg": lambda p: torch_geometric.nn.GraphSAGE(5, 16, num_layers=2, out_channels=3, dropout=p),
}
OPTIMIZERS = {
    "adam": lambda p, **o: torch.optim.Adam(p, **o),
    "adam, fused": lambda p, **o: torch.optim.Adam(p, fused=True, **o),
    "adam, foreach": lambda p, **o: torch.optim.Adam(p, foreach=True, **o),
    "adamw, rate on the device": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr, device=CUDA), capturable=True),
    "sgd": lambda p, **o: torch.optim.SGD(p, momentum=0.9, **o),
    "rmsprop": lambda p, **o: torch.optim.RMSprop(p, **o),
    "adamax": lambda p, **o: torch.optim.Adamax(p, **o),
    "nadam": lambda p, **o: torch.optim.NAdam(p, **o),
    "radam": lambda p, **o: torch.optim.RAdam(p, **o),
    "adadelta": lambda p, **o: torch.optim.Adadelta(p, **o),
    "asgd": lambda p, **o: torch.optim.ASGD(p, **o),
}
NEAR = {"rtol": 1e-3, "atol": 1e-4}


def twins(make, count=2, kind="adam, fused", lr=0.003):
    torch.manual_seed(1)
    model = make().to(CUDA)
    models = [model, *(copy.deepcopy(model) for _ in range(count - 1))]
    return [(twin, OPTIMIZERS[kind](twin.parameters(), lr=lr)) for twin in models]


def labels_of_split(data):
    """The data as the trainer has them: labels outside of the split do not count."""
    data = copy.copy(data)
    data.y = data.y.masked_fill(~data.train_mask, -100)
    return data


def graphs(make=graph, count=24):
    return [make(10 + 7 * i % 30, i) for i in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_whole_graph(name):
    """The loop by hand, `capture_step` and the trainer's captured step lose alike."""
    data = whole().to(CUDA)
    (by, first), (ours, second), (trainers, third) = twins(lambda: MODELS[name](0.0), 3)
    step = capture_step(ours, masked_loss, second, data)
    split = labels_of_split(data)
    trained = make_step(trainers, third, split, captured=True)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) for optimizer in (first, second, third)]
    losses = []
    for _ in range(STEPS):
        want, out = by_hand(by, masked_loss, first, [data], plain)
        losses.append(torch.stack([want[0], step(), trained(split)]))
        torch.testing.assert_close(step.output, out, **NEAR)
        for schedule in schedules:
            schedule.step()
    want, found, of_trainer = torch.stack(losses, dim=1)
    torch.testing.assert_close(found, want, **NEAR)
    torch.testing.assert_close(of_trainer, want, **NEAR)
    assert want[-1] < want[0] and f"{STEPS - CapturedStep.WARM_UPS} replays" in repr(step)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind):
    data = whole().to(CUDA)
    (by, first), (ours, second) = twins(lambda: MODELS["gat"](0.0), kind=kind, lr=0.01)
    step = capture_step(ours, masked_loss, second, data)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in (first, second)]
    for _ in range(STEPS):
        want, _ = by_hand(by, masked_loss, first, [data], plain)
        torch.testing.assert_close(step(), want[0], **NEAR)
        for schedule in schedules:
            schedule.step()
    for (name, a), b in zip(ours.named_parameters(), by.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_refilled_features():
    data = whole().to(CUDA)
    other = data.clone()
    (by, first), (ours, second) = twins(lambda: MODELS["gt"](0.0))
    step = capture_step(ours, masked_loss, second, other)
    for _ in range(STEPS):
        x, y, mask = torch.randn(40, 5), torch.randint(3, (40,)), torch.rand(40) < 0.5
        for target in (data, other):
            for name, value in (("x", x), ("y", y), ("train_mask", mask)):
                target[name].copy_(value)
        want, _ = by_hand(by, masked_loss, first, [data], plain)
        torch.testing.assert_close(step(), want[0], **NEAR)


class OwnNorm(torch_geometric.nn.SSGConv):
    """A layer of a user's own that norms its weighted edges, with self-loops that it adds, in its forward."""


class Weighted(torch.nn.Module):
    """Weights of the edges from features of the nodes, which change, and a layer that norms them."""

    def __init__(self):
        super().__init__()
        self.conv = OwnNorm(5, 3, alpha=0.1, K=2)

    def forward(self, x, edge_index):
        with torch.no_grad():
            weight = x[edge_index[0], 0].abs() + 0.1
        return self.conv(x, edge_index, weight)


MAKE_EDGES = {
    "EGConv": lambda: torch_geometric.nn.EGConv(5, 3, ["sum", "max"], num_heads=3, num_bases=2),
    "EGConv, normed": lambda: torch_geometric.nn.EGConv(5, 3, ["symnorm"], num_heads=3, num_bases=2),
    "FeaStConv": lambda: torch_geometric.nn.FeaStConv(5, 3, heads=2),
    "MixHopConv": lambda: torch_geometric.nn.MixHopConv(5, 1),
    "weights": Weighted,
}


@pytest.mark.parametrize("name", MAKE_EDGES)
def test_layers_that_make_their_edges(name):
    """Compiled layers whose forward adds self-loops and norms edges; a replay reads the features as they are."""
    data = whole().to(CUDA)
    data.edge_index[:, 1] = data.edge_index[0, 1]
    other = data.clone()
    (by, first), (ours, second) = twins(MAKE_EDGES[name])
    pyg_dfgnn.accelerate(ours)
    step = capture_step(ours, masked_loss, second, other)
    with pyg_dfgnn.local_settings(fallback="error"):
        for _ in range(STEPS):
            x = torch.randn(40, 5)
            data.x.copy_(x)
            other.x.copy_(x)
            want, _ = by_hand(by, masked_loss, first, [data], plain)
            torch.testing.assert_close(step(), want[0], **NEAR)
        assert "captured" in str(step)
        other.edge_index[0, 0] = 1
        with pytest.raises(StaleError, match="edges that were captured"):
            step()


@pytest.mark.parametrize("moved", [False, True], ids=["", "moved before"])
@pytest.mark.parametrize("name", [*KERNELS, *TYPED])
def test_batches_of_a_loader(name, moved):
    loader = DataLoader(new_batches.members(24), batch_size=6, shuffle=True)
    batches = [batch for _ in range(5) for batch in loader]
    (by, first), (ours, second) = twins(lambda: new_batches.Model({**KERNELS, **TYPED}[name]))
    want = new_batches.by_hand(by, first, [batch.clone().to(CUDA) for batch in batches])
    pyg_dfgnn.accelerate(ours)
    step = capture_step(ours, new_batches.loss, second, loader, forward=call)
    with local_settings(fallback="error"):
        losses = torch.stack([step(batch.to(CUDA) if moved else batch) for batch in batches])
    torch.testing.assert_close(losses, want, **elementwise("float32/many_steps"))
    assert "replays" in repr(step)


@pytest.mark.parametrize("pool", ["add", "max"])
def test_pools_of_batches(pool, monkeypatch):
    loader = DataLoader(new_batches.members(24), batch_size=6, shuffle=True)
    batches = [batch for _ in range(5) for batch in loader]
    (by, first), (ours, second) = twins(lambda: new_batches.Model(KERNELS["gin"], pool))
    want = new_batches.by_hand(by, first, [batch.clone().to(CUDA) for batch in batches])
    name = f"global_{pool}_pool"
    monkeypatch.setattr(torch_geometric.nn, name, getattr(pyg_dfgnn.nn, name))
    step = capture_step(pyg_dfgnn.accelerate(ours), new_batches.loss, second, loader, forward=call)
    losses = torch.stack([step(batch) for batch in batches])
    torch.testing.assert_close(losses, want, **elementwise("float32/many_steps"))


@pytest.mark.parametrize("name", new_batches.PYGS)
def test_layers_of_batches_that_pygs_code_takes(name):
    loader = DataLoader(new_batches.members(24), batch_size=6, shuffle=True)
    batches = [batch for _ in range(5) for batch in loader]
    (by, first), (ours, second) = twins(lambda: new_batches.Model(new_batches.PYGS[name]))
    want = new_batches.by_hand(by, first, [batch.clone().to(CUDA) for batch in batches])
    step = capture_step(pyg_dfgnn.accelerate(ours), new_batches.loss, second, loader, forward=call)
    losses = torch.stack([step(batch) for batch in batches])
    torch.testing.assert_close(losses, want, **elementwise("float32/many_steps"))
    assert "replays" in repr(step)


def test_an_id_out_of_range_is_told_by_the_next_step():
    """The last id lies in the room for padding."""
    loader = DataLoader(new_batches.members(24), batch_size=6)
    ((model, optimizer),) = twins(lambda: new_batches.Model(KERNELS["gin"]), 1)
    step = capture_step(pyg_dfgnn.accelerate(model), new_batches.loss, optimizer, loader, forward=call)
    for _ in range(2):
        for batch in loader:
            step(batch)
    bad = next(iter(loader))
    for end, number in ((0, bad.num_nodes), (1, -1), (1, bad.num_nodes)):
        bad.edge_index[end, 4] = number
        assert step(bad).isfinite()
        torch.cuda.synchronize()
        with pytest.raises(IdRangeError, match=f"{('source', 'target')[end]} id {number} of {bad.num_nodes} nodes"):
            step(next(iter(loader)))
        bad = next(iter(loader))
    assert step(bad).isfinite()


def test_a_step_on_new_batches_does_not_wait():
    """Replays copy, launch and read what the GPU has told before, no more."""
    batches = [batch.to(CUDA) for batch in DataLoader(new_batches.members(24), batch_size=6)]
    ((model, optimizer),) = twins(lambda: new_batches.Model(KERNELS["gat"]), 1)
    step = capture_step(
        pyg_dfgnn.accelerate(model), new_batches.loss, optimizer, Capacity.of(new_batches.members(24), 6), forward=call
    )
    for batch in batches * 2:
        step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_groups_that_are_not_known_while_a_stream_is_captured():
    """Nothing waits for them: PyG's code takes the reduction, and a later call without a capture the kernels."""
    x, index = torch.randn(50, 8, device=CUDA), torch.randint(7, (50,), device=CUDA)
    sums = pyg_dfgnn.nn.aggr.SumAggregation()
    for _ in range(4):
        sums(x, index, dim_size=7)
    index.add_(1).remainder_(7)
    stream, recorded = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=stream):
        out = sums(x, index, dim_size=7)
    recorded.replay()
    torch.testing.assert_close(out, sums(x, index, dim_size=7), **NEAR)


def node_loss(out, data):
    return F.cross_entropy(out, data.y)


@pytest.mark.parametrize("source", ["loader", "device data set"])
@pytest.mark.parametrize("name", ["gat", "agnn", "gt"])
def test_batches(name, source):
    data = graphs()
    parts = torch.randperm(24, generator=torch.Generator().manual_seed(3)).split(6)
    resident = DeviceDataset(data, CUDA)
    (by, first), (ours, second) = twins(lambda: MODELS[name](0.0))
    batches = [resident.batch(part) for part in parts] * 5
    if source == "loader":
        loader = DataLoader(data, batch_size=6)
        step = capture_step(ours, node_loss, second, loader)
        batches = [batch.to(CUDA) for batch in loader] * 5
        fed = [batch for _ in range(5) for batch in loader]
    else:
        step, fed = capture_step(ours, node_loss, second, Capacity.of(resident, 6)), batches
    want, out = by_hand(by, node_loss, first, batches, plain)
    with local_settings(fallback="error"):
        losses = torch.stack([step(batch) for batch in fed])
    torch.testing.assert_close(losses, want, **elementwise("float32/many_steps"))
    assert step.output.shape == out.shape
    assert any(capture.recording is not None for capture in step._captures.values())


def test_batches_with_edge_features_and_a_value_per_graph():
    resident = DeviceDataset(graphs(rated), CUDA)
    batches = [resident.batch(part) for part in torch.arange(24).split(6)] * 5
    (by, first), (ours, second) = twins(lambda: Pooled(pyg_dfgnn.nn, heads=2))
    want, _ = by_hand(by, weighted_loss, first, batches, call)
    step = capture_step(ours, weighted_loss, second, Capacity.of(resident, 6), forward=call)
    with local_settings(fallback="error"):
        losses = torch.stack([step(batch) for batch in batches])
    torch.testing.assert_close(losses, want, **elementwise("float32/many_steps"))


@pytest.mark.parametrize("name", MODELS)
def test_dropout_differs_between_replays(name):
    """With a learning rate of 0 nothing else does; the same seed draws the same masks again."""
    data = whole().to(CUDA)
    ((model, optimizer),) = twins(lambda: MODELS[name](0.5), 1, lr=0.0)
    step = capture_step(model, masked_loss, optimizer, data)
    for _ in range(CapturedStep.WARM_UPS + 1):
        step()
    rounds = []
    for _ in range(2):
        torch.manual_seed(11)
        rounds.append(torch.stack([step() for _ in range(5)]))
    assert rounds[0].unique().numel() == 5
    torch.testing.assert_close(*rounds)


def test_autocast_in_the_forward():
    def forward(model, data):
        with torch.autocast("cuda", torch.bfloat16):
            return model(data.x, data.edge_index)

    def loss(out, data):
        return masked_loss(out.float(), data)

    data = whole().to(CUDA)
    (by, first), (ours, second) = twins(lambda: MODELS["gt"](0.0))
    step = capture_step(ours, loss, second, data, forward=forward)
    want, out = by_hand(by, loss, first, [data] * STEPS, forward)
    losses = torch.stack([step() for _ in range(STEPS)])
    assert step.output.dtype == out.dtype
    torch.testing.assert_close(losses, want, **elementwise("16 bits"))


def test_autocast_around_the_steps():
    """Weights that were cast for one step are not taken for those of the next."""
    data = whole().to(CUDA)
    (by, first), (ours, second) = twins(lambda: MODELS["gt"](0.0))
    loss = torch.autocast("cuda", enabled=False)(lambda out, data: masked_loss(out.float(), data))
    want = []
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            want.append(by_hand(by, loss, first, [data], plain)[0][0])
    step = capture_step(ours, loss, second, data)
    with torch.autocast("cuda", torch.bfloat16):
        losses = torch.stack([step() for _ in range(STEPS)])
    torch.testing.assert_close(losses, torch.stack(want), **elementwise("16 bits"))
    with pytest.raises(StaleError, match="'torch.autocast' needs its state"):
        step()


class Waiting(nn.Module):
    """A layer that waits for the device, as many of PyG's own do."""

    def __init__(self, wait):
        super().__init__()
        self.conv, self.wait = torch_geometric.nn.GCNConv(5, 3), wait

    def forward(self, x, edge_index):
        self.wait(x)
        return self.conv(x, edge_index)


WAITS = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: (x[:, 0] > 0).nonzero(),
    "mask": lambda x: x[x[:, 0] > 0],
    "to the host": lambda x: x.cpu(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_layer_that_waits_is_named(wait):
    data = whole().to(CUDA)
    model = nn.Module()
    model.inner = Waiting(WAITS[wait]).to(CUDA)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    step = capture_step(model, masked_loss, optimizer, data, forward=lambda model, data: plain(model.inner, data))
    for _ in range(CapturedStep.WARM_UPS):
        step()
    stream = torch.cuda.current_stream()
    with pytest.raises(
        UnsupportedError, match="captured step cannot run here: 'inner', a Waiting, in the forward pass"
    ):
        step()
    # The process goes on: on its stream, eagerly and with other captures.
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
    by_hand(model.inner, masked_loss, optimizer, [data], plain)
    ((other, second),) = twins(lambda: MODELS["gat"](0.0), 1)
    step = capture_step(other, masked_loss, second, data)
    losses = torch.stack([step() for _ in range(STEPS)])
    assert losses.isfinite().all() and "17 replays" in repr(step)


class Copying(Thread):
    """Another thread that copies and waits, on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.ends, self.error, self.rounds = Event(), None, 0

    def run(self):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                numbers = torch.arange(1000, device=CUDA)
                while not self.ends.is_set():
                    assert numbers.cpu()[-1] == numbers.sum().item() - 498501
                    torch.ones(9).to(CUDA, non_blocking=True)
                    torch.cuda.current_stream().synchronize()
                    self.rounds += 1
        except Exception as error:
            self.error = error


@pytest.mark.parametrize("name", ["gat", "gt"])
def test_other_threads_copy_and_wait_meanwhile(name):
    data = whole().to(CUDA)
    (by, first), (ours, second) = twins(lambda: MODELS[name](0.0))
    want, _ = by_hand(by, masked_loss, first, [data] * STEPS, plain)
    other = Copying()
    other.start()
    try:
        for _ in range(3):
            # Each step captures anew.
            step = capture_step(ours, masked_loss, second, data)
            state = copy.deepcopy((ours.state_dict(), second.state_dict()))
            losses = torch.stack([step() for _ in range(STEPS)])
            ours.load_state_dict(state[0])
            second.load_state_dict(state[1])
            torch.testing.assert_close(losses, want, **NEAR)
    finally:
        other.ends.set()
        other.join()
    assert other.error is None and other.rounds


@pytest.mark.parametrize("was_called", [False, True], ids=["", "a layer was called with it"])
def test_batches_that_came_to_the_device_before(was_called):
    members = graphs(rated)
    loader = DataLoader(members, batch_size=8)
    (left, first), (right, second) = twins(lambda: Pooled(pyg_dfgnn.nn, heads=2))
    step = capture_step(right, weighted_loss, second, loader, forward=call)
    for _ in range(4):
        for batch, again in zip(loader, loader, strict=True):
            batch, again = batch.to(CUDA), again.to(CUDA)
            if was_called:
                call(right, again)
            want, _ = by_hand(left, weighted_loss, first, [batch], call)
            torch.testing.assert_close(step(again), want[0], **NEAR)
    assert "replays" in repr(step)


def test_a_capture_that_cuda_ends_is_told_as_well():
    """PyTorch does not see this one coming; the process goes on, which another one tries."""
    code = """
import pyg_dfgnn, torch
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.capture import capture_step
from tests.capture.test_capture_cuda import Waiting, masked_loss, plain, whole
model = torch.nn.Sequential(Waiting(lambda x: torch.cuda.synchronize())).cuda()
optimizer = torch.optim.Adam(model.parameters(), fused=True)
forward = lambda model, data: plain(model[0], data)
step = capture_step(model, masked_loss, optimizer, whole().cuda(), forward=forward)
try:
    for _ in range(4):
        torch.cuda.manual_seed(0)
        step()
except UnsupportedError as error:
    print(error)
assert torch.rand(9, device="cuda").isfinite().all()
model[0].wait = lambda x: torch.dropout(x, 0.5, True)
pyg_dfgnn.accelerate(model)
step = capture_step(model, masked_loss, optimizer, whole().cuda(), forward=forward)
assert all(step().isfinite() for _ in range(9))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    message = "the captured step cannot run here: '0', a Waiting, in the forward pass"
    assert result.returncode == 0 and message in result.stdout, (result.stdout, result.stderr)


@pytest.mark.parametrize("where", ["loss", "optimizer"])
def test_what_waits_elsewhere_is_named(where):
    data = whole().to(CUDA)
    ((model, optimizer),) = twins(lambda: MODELS["gat"](0.0), 1)

    def loss(out, data):
        # A mask as an index waits for the number of rows.
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])

    if where == "optimizer":

        def wait(*_):
            next(model.parameters()).grad.sum().item()

        optimizer.register_step_pre_hook(wait)
    step = capture_step(model, loss if where == "loss" else masked_loss, optimizer, data)
    with pytest.raises(UnsupportedError, match=f"captured step cannot run here: the {where}: "):
        for _ in range(STEPS):
            step()


def test_clipping_in_a_hook():
    """What happens between backward and step is a hook of the optimizer."""
    data = whole().to(CUDA)
    (by, first), (ours, second) = twins(lambda: MODELS["gat"](0.0), lr=0.05)

    def clip(optimizer, *_):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    for optimizer in (first, second):
        optimizer.register_step_pre_hook(clip)
    step = capture_step(ours, masked_loss, second, data)
    want, _ = by_hand(by, masked_loss, first, [data] * STEPS, plain)
    torch.testing.assert_close(torch.stack([step() for _ in range(STEPS)]), want, **NEAR)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.data.edge_index[0].zero_(), "'data.edge_index' needs the edges that were captured"),
        (lambda s: s.model.eval(), "'model.training' needs its mode"),
        (lambda s: s.model.cpu(), "'model.convs.0.att_src' needs the tensor"),
    ],
    ids=["edges", "mode", "moved"],
)
def test_what_a_replay_cannot_follow(edit, message):
    ((model, optimizer),) = twins(lambda: MODELS["gat"](0.0), 1)
    step = capture_step(model, masked_loss, optimizer, whole().to(CUDA))
    for _ in range(CapturedStep.WARM_UPS + 1):
        step()
    edit(step)
    with pytest.raises(StaleError, match=message):
        step()


def test_a_replay_does_not_wait():
    ((model, optimizer),) = twins(lambda: MODELS["gt"](0.5), 1)
    step = capture_step(model, masked_loss, optimizer, whole().to(CUDA))
    for _ in range(CapturedStep.WARM_UPS + 1):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_evaluation_does_not_keep_its_data():
    ((model, optimizer),) = twins(lambda: MODELS["gat"](0.0), 1)
    step, other = capture_step(model, masked_loss, optimizer, whole().to(CUDA)), whole().to(CUDA)
    model.eval()
    for _ in range(CapturedStep.WARM_UPS + 2):
        loss = step.evaluate(other)
    torch.testing.assert_close(loss, masked_loss(plain(model, other), other), **NEAR)
    assert len(step._captures) == 1
    del other
    gc.collect()
    assert not step._captures


def test_data_on_the_host():
    ((model, optimizer),) = twins(lambda: MODELS["gat"](0.0), 1)
    with pytest.raises(ValueError, match=r"'data.x' needs device cuda:0 \(got cpu\)"):
        capture_step(model, masked_loss, optimizer, whole())
    with (
        local_settings(fallback="error"),
        pytest.raises(UnsupportedError, match="captured step cannot run here: the model is"),
    ):
        capture_step(model.cpu(), masked_loss, optimizer, whole())


@pytest.mark.parametrize("shift", [0.0, 100.0], ids=["centred", "shifted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, count, channels", [(64, 1, 3), (192, 150, 64), (70_016, 69_000, 128)])
def test_norm_leaves_out_padding(rows, count, channels, dtype, shift):
    """Against torch's norm of the rows of the batch in float64; padding is poisoned."""
    norm, plain = MaskedBatchNorm(channels).cuda(), nn.BatchNorm1d(channels).cuda().double()
    norm.mask = RowMask(rows, torch.tensor([count], device="cuda"))
    norm.mask.count.fill_(count)
    x, down = (torch.randn(rows, channels, device="cuda") for _ in range(2))
    x, down = (x + shift).to(dtype), down.to(dtype)
    x[count:] = down[count:] = torch.nan
    head = x[:count].double().requires_grad_()
    out = norm(x.requires_grad_())
    out.backward(down)
    assert out.dtype is x.grad.dtype is dtype and out.isfinite().all() and not x.grad[count:].any()
    if count == 1:
        return
    want = plain(head)
    want.backward(down[:count].double())
    pairs = [(out[:count], want), (x.grad[:count], head.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(norm.parameters(), plain.parameters(), strict=True)]
    pairs += [(norm.running_mean, plain.running_mean), (norm.running_var, plain.running_var)]
    bound = 1e-2 if dtype is torch.bfloat16 else 1e-5 * (1 + shift)
    for actual, expected in pairs:
        assert relative_error(actual, expected) <= bound
