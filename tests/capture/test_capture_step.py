"""`capture_step` on a CPU: equal to a loop by hand, what a replay cannot follow, what cannot be captured."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import nn
from torch_geometric.data import Batch, HeteroData
from torch_geometric.loader import DataLoader

import pyg_dfgnn
from pyg_dfgnn import fallback
from pyg_dfgnn.capture import Capacity, CapturedStep, Step, capture_step
from pyg_dfgnn.capture.watch import data_watches
from pyg_dfgnn.errors import StaleError, UnsupportedError
from pyg_dfgnn.graph import DeviceDataset, Graph
from pyg_dfgnn.models import GAT
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import local_settings
from tests.capture.test_step import HostRecorder, graph
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

STEPS = 20
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


@pytest.fixture(autouse=True)
def forget_said(monkeypatch):
    monkeypatch.setattr(fallback, "logged", set())


def whole(edge_dim=None):
    """A graph with a mask, and edge features on demand."""
    data = graph(40, 3)
    data.train_mask = torch.rand(40) < 0.6
    if edge_dim is not None:
        data.edge_attr = torch.randn(data.num_edges, edge_dim)
    return data


def masked_loss(out, data):
    losses = F.cross_entropy(out, data.y, reduction="none")
    return (losses * data.train_mask).sum() / data.train_mask.sum()


def by_hand(model, loss, optimizer, batches, forward):
    """A user's own loop: the losses and the last output."""
    losses = []
    for data in batches:
        optimizer.zero_grad()
        out = forward(model, data)
        value = loss(out, data)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses), out.detach()


def plain(model, data):
    return model(data.x, data.edge_index)


def twins(make, kind="adam"):
    """The model twice, each with an optimizer of its own."""
    torch.manual_seed(1)
    model = make()
    models = model, copy.deepcopy(model)
    return [(twin, OPTIMIZERS[kind](twin.parameters())) for twin in models]


def gat(dropout=0.0):
    return GAT(5, 3, pyg_dfgnn.nn, hidden_channels=4, heads=2, dropout=dropout)


def captured(data, model=None, loss=masked_loss, kind="adam", steps=CapturedStep.WARM_UPS + 1, **options):
    """A step that the host repeats, after its first replay."""
    model = gat() if model is None else model
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = capture_step(model, loss, optimizer, data, recorder=HostRecorder(optimizer), **options)
    for _ in range(steps):
        step()
    return step


def test_a_step_on_a_cpu_is_the_loop_by_hand(caplog):
    caplog.set_level("INFO", logger="pyg_dfgnn")
    data = whole()
    (left, optimizer), (right, other) = twins(lambda: gat(dropout=0.5))
    torch.manual_seed(5)
    want, out = by_hand(left, masked_loss, optimizer, [data] * STEPS, plain)
    step = pyg_dfgnn.capture_step(right, masked_loss, other, data)
    capture_step(right, masked_loss, other, data)
    torch.manual_seed(5)
    losses = torch.stack([step() for _ in range(STEPS)])
    assert type(step) is Step and torch.equal(losses, want) and torch.equal(step.output, out)
    assert not step.output.requires_grad and losses[-1] < losses[0]
    assert [message for message in caplog.messages if "capture_step" in message] == [
        "capture_step: the model is on a CPU, where each step runs eagerly; CUDA graphs need a CUDA device"
    ]


def test_silence(capsys, caplog):
    with local_settings(fallback="silent"):
        model = gat()
        capture_step(model, masked_loss, OPTIMIZERS["adam"](model.parameters()), whole())()
    assert not caplog.messages and not capsys.readouterr().err


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replays_read_features_and_rates_as_they_are(kind):
    """The host repeats what a GPU would replay; features, labels and the learning rate change before each step."""
    data = whole()
    other = data.clone()
    (left, optimizer), (right, second) = twins(lambda: gat(dropout=0.3), kind)
    step = capture_step(right, masked_loss, second, other, recorder=HostRecorder(second))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(either, 0.9) for either in (optimizer, second)]
    for number in range(STEPS):
        x, y = torch.randn(40, 5), torch.randint(3, (40,))
        for target in (data, other):
            target.x.copy_(x)
            target.y.copy_(y)
        torch.manual_seed(number)
        want, out = by_hand(left, masked_loss, optimizer, [data], plain)
        torch.manual_seed(number)
        torch.testing.assert_close(step(), want[0], **elementwise("float32/one_formula"))
        torch.testing.assert_close(step.output, out, **elementwise("float32/one_formula"))
        for schedule in schedules:
            schedule.step()
    assert step.recorder.replays == STEPS - CapturedStep.WARM_UPS
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, **elementwise("float32"))


class Pooled(nn.Module):
    """A value per graph, from nodes and edges."""

    def __init__(self, convs=torch_geometric.nn, heads=1, conv="TransformerConv"):
        super().__init__()
        if conv == "TransformerConv":
            self.conv = convs.TransformerConv(5, 8, heads=heads, edge_dim=2)
        else:
            self.conv = convs.GINEConv(nn.Linear(5, 8 * heads), edge_dim=2)
        self.lin = nn.Linear(8 * heads, 1)

    def forward(self, data):
        out = self.conv(data.x, data.edge_index, data.edge_attr).relu()
        return self.lin(torch_geometric.nn.global_add_pool(out, data.batch, data.num_graphs)).squeeze(-1)


def rated(size, seed):
    """A graph with a real label, a weight and edge features."""
    data = graph(size, seed, label=0)
    data.y, data.weight = torch.randn(1), torch.ones(1)
    data.edge_attr = torch.randn(data.num_edges, 2)
    return data


def call(model, data):
    return model(data)


def weighted_loss(out, data):
    return ((out - data.y).square() * data.weight).sum() / data.weight.sum()


@pytest.mark.parametrize("on", ["cpu", "recorder"])
def test_batches_of_a_loader(on):
    """Real labels, a weight that is 0 on padding, edge features and a value per graph."""
    loader = DataLoader([rated(6 + 3 * i % 11, i) for i in range(10)], batch_size=4)
    (left, optimizer), (right, other) = twins(Pooled)
    batches = list(loader) * 4
    want, _ = by_hand(left, weighted_loss, optimizer, batches, call)
    recorder = HostRecorder(other) if on == "recorder" else None
    step = capture_step(right, weighted_loss, other, loader, forward=call, recorder=recorder)
    losses = torch.stack([step(batch) for batch in batches])
    torch.testing.assert_close(losses, want, **elementwise("float32"))
    assert step.output.shape == batches[-1].y.shape
    assert (type(step) is Step) == (on == "cpu") and (recorder is None or recorder.replays == len(batches) - 3)
    torch.testing.assert_close(step.evaluate(batches[0]), weighted_loss(call(right, batches[0]), batches[0]))


@needs_compiler
@pytest.mark.parametrize("name", ["global_add_pool", "global_mean_pool", "global_max_pool"])
def test_pools_of_batches_on_the_kernels(name, monkeypatch):
    """Each batch refills the groups of its bucket; a graph built anew would wait for the GPU."""
    loader = DataLoader([rated(6 + 3 * i % 11, i) for i in range(10)], batch_size=4)
    batches = list(loader) * 3

    def pooled(model, data):
        return getattr(pyg_dfgnn.nn, name)(model(data.x), data.batch, data.num_graphs).squeeze(-1)

    (left, optimizer), (right, other) = twins(lambda: nn.Linear(5, 1))
    want, _ = by_hand(left, weighted_loss, optimizer, batches, pooled)
    monkeypatch.setattr("pyg_dfgnn.graph.graph.build_index", None)
    with local_settings(fallback="error"), emulated_device() as launched:
        options = {"forward": pooled, "recorder": HostRecorder(other)}
        step = capture_step(right, weighted_loss, other, loader, **options)
        losses = torch.stack([step(batch) for batch in batches])
    torch.testing.assert_close(losses, want, **elementwise("float32"))
    assert step.recorder.replays and "segment_backward_sources" in launched


@needs_compiler
@pytest.mark.parametrize("conv", ["TransformerConv", "GINEConv"])
def test_edge_features_of_batches_on_the_kernels(conv):
    resident = DeviceDataset([rated(6 + i, i) for i in range(6)])
    batches = [resident.batch(ids) for ids in torch.tensor([[0, 5], [1, 4], [2, 3], [4, 0], [5, 1]])]
    (left, optimizer), (right, other) = twins(lambda: Pooled(pyg_dfgnn.nn, heads=2, conv=conv))
    want, _ = by_hand(left, weighted_loss, optimizer, batches, call)
    with local_settings(fallback="error"), emulated_device() as launched:
        options = {"forward": call, "recorder": HostRecorder(other)}
        step = capture_step(right, weighted_loss, other, Capacity.of(resident, 2), **options)
        losses = torch.stack([step(batch) for batch in batches])
    torch.testing.assert_close(losses, want, **elementwise("float32/steps"))
    assert step.recorder.replays == 2 and launched


def test_a_loss_that_counts_padding_is_refused():
    loader = DataLoader([rated(6 + i, i) for i in range(8)], batch_size=4)
    model = Pooled()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    before = copy.deepcopy(model.state_dict())
    step = capture_step(
        model, lambda out, data: F.mse_loss(out, data.y), optimizer, loader, forward=call, recorder=HostRecorder(None)
    )
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"'loss' needs to leave out the padding of batches.*\(got .* with padding"
        ):
            step(next(iter(loader)))
    assert step.evaluate(next(iter(loader))).isfinite()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_capacity_of_graphs_on_the_device():
    graphs = [graph(5 + i, i) for i in range(7)]
    assert Capacity.of(DeviceDataset(graphs), 3) == Capacity.of(graphs, 3)


def replace(module, name):
    setattr(module, name, nn.Parameter(getattr(module, name).detach().clone()))


def replace_layer(layers):
    layers[0] = copy.deepcopy(layers[0])


def reload(step):
    step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))


def swap(**tensors):
    return lambda step: step.data.update({name: change(step.data[name]) for name, change in tensors.items()})


TENSOR, EDGES = "needs the tensor that was captured", "needs the edges that were captured"
CHANGES = {
    "edited edges": (lambda s: s.data.edge_index[0].zero_(), f"'data.edge_index' {EDGES}"),
    "edited edge features": (lambda s: s.data.edge_attr.mul_(2), rf"'data.edge_attr' {EDGES}.*\(it was edited"),
    "other edges": (swap(edge_index=torch.clone), f"'data.edge_index' {TENSOR}"),
    "other features": (swap(x=torch.clone), f"'data.x' {TENSOR}"),
    "more nodes": (swap(x=lambda x: x.new_zeros(41, 5)), f"'data.x' {TENSOR}"),
    "fewer nodes": (lambda s: s.data.x.resize_(39, 5), f"'data.x' {TENSOR}"),
    "removed": (lambda s: s.data.__delattr__("train_mask"), f"'data.train_mask' {TENSOR}"),
    "evaluation": (lambda s: s.model.eval(), r"'model.training' needs its mode .*\(got False, captured with True\)"),
    "a layer": (lambda s: s.model.convs[0].eval(), "'model.convs.0.training' needs its mode at the capture"),
    "replaced": (lambda s: replace(s.model.convs[1], "att_src"), f"'model.convs.1.att_src' {TENSOR}"),
    "moved": (lambda s: s.model.double(), f"'model.convs.0.att_src' {TENSOR}"),
    "frozen": (lambda s: s.model.convs[1].bias.requires_grad_(False), "'model.convs.1.bias' .* its requires_grad"),
    "new layer": (lambda s: replace_layer(s.model.convs), "'model.convs.0' needs the layer that was captured"),
    "new state": (reload, "'optimizer.state' needs the object that was captured"),
    "betas": (lambda s: s.optimizer.param_groups[0].update(betas=(0.8, 0.9)), r"'optimizer.*\[0\].betas' .*got \(0.8"),
    "parameters": (
        lambda s: s.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        "'optimizer.* needs the object that was captured",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_replay_cannot_follow(change):
    edit, message = CHANGES[change]
    step = captured(whole(edge_dim=2))
    edit(step)
    with pytest.raises(StaleError, match=message):
        step()
    # A new step takes what is there now, where the model still takes it.
    if change in ("edited edges", "evaluation", "replaced", "betas"):
        captured(step.data, step.model)


def test_autocast_around_a_step():
    step = captured(whole())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(StaleError, match="'torch.autocast' needs its state"):
        step()
    step()


def test_what_a_replay_follows():
    step = captured(whole())
    step.model.load_state_dict({name: torch.zeros_like(value) for name, value in step.model.state_dict().items()})
    step.data.y.fill_(1)
    step.data.train_mask.fill_(True)
    step.optimizer.param_groups[0]["lr"] = 0.0
    torch.testing.assert_close(step(), torch.tensor(3.0).log())
    torch.testing.assert_close(step(), torch.tensor(3.0).log())


def test_evaluation_of_other_data_is_captured_and_forgotten():
    step, other = captured(whole()), whole()
    step.model.eval()
    for _ in range(CapturedStep.WARM_UPS + 2):
        loss = step.evaluate(other)
    torch.testing.assert_close(loss, masked_loss(plain(step.model, other), other))
    step.model.train()
    with pytest.raises(StaleError, match="'model.training'"):
        step.evaluate(other)
    # The host, unlike a recording, keeps the data that it repeats; of others only the first evaluations are known.
    fresh = whole()
    step.evaluate(fresh)
    assert len(step._captures) == 3
    del fresh
    gc.collect()
    assert len(step._captures) == 2


def test_graphs_live_as_long_as_their_capture():
    data = whole()
    kept = weakref.ref(Graph.of(data.edge_index, 40))
    step = captured(data)
    Graph.clear_cache()
    gc.collect()
    assert kept() is not None and step() is not None
    del step
    gc.collect()
    assert kept() is None


@needs_compiler
def test_edges_that_layers_have_made_others_of_are_not_to_be_edited():
    data, edge_index = whole(), torch.tensor([[0, 1], [1, 0]])
    watches = data_watches(data, [edge_index])
    for watch in watches:
        watch.check()
    edge_index[0, 0] = 1
    with pytest.raises(StaleError, match="'edges of a layer' needs the edges that were captured"):
        for watch in watches:
            watch.check()


def test_groups_of_a_reduction_are_not_to_be_edited():
    data = whole()
    data.group, data.y = torch.arange(40) % 4, torch.randint(3, (4,))
    model = nn.Linear(5, 3)
    pooled = pyg_dfgnn.nn.global_add_pool
    with emulated_device() as launched:
        step = captured(
            data,
            model,
            loss=lambda out, data: F.cross_entropy(out, data.y),
            forward=lambda model, data: pooled(model(data.x), data.group, 4),
        )
        data.x.zero_()
        step()
        data.group.zero_()
        with pytest.raises(StaleError, match="'data.group' needs the edges that were captured, with groups"):
            step()
    assert launched


def test_hetero_data():
    data = HeteroData()
    data["a"].x, data["b"].x, data["a"].y = torch.randn(6, 4), torch.randn(5, 3), torch.randint(2, (6,))
    data["b", "to", "a"].edge_index = torch.stack([torch.randint(5, (12,)), torch.randint(6, (12,))])
    conv = pyg_dfgnn.nn.GATConv((3, 4), 2, add_self_loops=False)
    model = torch_geometric.nn.HeteroConv({("b", "to", "a"): conv})
    step = captured(
        data,
        model,
        loss=lambda out, data: F.cross_entropy(out, data["a"].y),
        forward=lambda model, data: model(data.x_dict, data.edge_index_dict)["a"],
    )
    assert step() < step.evaluate() + 1
    data["b", "to", "a"].edge_index.zero_()
    with pytest.raises(StaleError, match=r"'data\[\('b', 'to', 'a'\)\].edge_index' needs the edges"):
        step()


def test_what_waits_is_named():
    """A layer waits for the device once `capturing` is set, as CUDA would tell in a capture."""
    data, model, capturing = whole(), Plain(), []
    forward = model.conv.forward

    def wait(x, edge_index):
        if capturing:
            raise RuntimeError("called a synchronizing CUDA operation")
        return forward(x, edge_index)

    class Refusing(HostRecorder):
        def record(self, work):
            capturing.append(True)
            return work()

    model.conv.forward = wait
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = capture_step(model, masked_loss, optimizer, data, recorder=Refusing(optimizer))
    for _ in range(CapturedStep.WARM_UPS):
        step()
    message = r"captured step cannot run here: 'conv', a GCNConv \(.*\), in the forward pass: called a synchronizing"
    with pytest.raises(UnsupportedError, match=message):
        step()
    assert isinstance(optimizer.param_groups[0]["lr"], float)


def test_what_is_shown():
    step = captured(whole())
    assert repr(step) == (
        "CapturedStep(GAT, Adam, cpu)\n  step on Data(x=[40, 5], edge_index=[2, 513], y=[40], train_mask=[40]): "
        "captured after 3 eager runs, 1 replays"
    ).replace("513", str(step.data.num_edges))
    graphs = [graph(5 + i, i) for i in range(6)]
    model = Plain()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    loss = torch.nn.CrossEntropyLoss()
    options = {"recorder": HostRecorder(optimizer)}
    step = capture_step(model, lambda out, data: loss(out, data.y), optimizer, Capacity.of(graphs, 2), **options)
    step(Batch.from_data_list(graphs[:2]))
    assert "y=[64]" in repr(step) and "1 eager runs, captured after 3" in repr(step)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch_geometric.nn.GCNConv(5, 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def step_of(model=None, loss=masked_loss, optimizer=torch.optim.Adam, data=None, **options):
    model = Plain() if model is None else model
    data = whole() if data is None else data
    return capture_step(model, loss, optimizer(model.parameters()), data, **options)


def scattered():
    model = Plain()
    model.conv.bias = nn.Parameter(torch.zeros(3, device="meta"))
    return model


class NoModule:
    parameters = list


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": torch.optim.LBFGS}, ValueError, r"'optimizer' needs the option 'capturable'.*\(got LBFGS\)"),
        ({"optimizer": partial(torch.optim.SGD, foreach=True)}, ValueError, r"'optimizer' needs .*\(got SGD\)"),
        ({"model": nn.Identity(), "optimizer": lambda _: None}, ValueError, r"'model' needs .* device \(got none\)"),
        ({"model": scattered()}, ValueError, r"'model' needs parameters on one device \(got .*meta"),
        (
            {"model": NoModule(), "optimizer": lambda _: None},
            TypeError,
            r"'model' needs a torch.nn.Module \(got NoModule",
        ),
        ({"optimizer": lambda _: "adam"}, TypeError, r"'optimizer' needs a torch.optim.Optimizer \(got str\)"),
        ({"loss": 0.5}, TypeError, r"'loss' needs a function \(got float\)"),
        ({"forward": "model"}, TypeError, r"'forward' needs a function \(got str\)"),
        ({"data": whole().to("meta")}, ValueError, r"'data.x' needs device cpu \(got meta\)"),
        ({"data": (1, 2)}, TypeError, r"'data' needs a Data, a DataLoader .* \(got tuple\)"),
        ({"data": torch.utils.data.DataLoader(range(4))}, TypeError, r"'data' needs .* \(got DataLoader of range\)"),
    ],
)
def test_what_cannot_be_captured(options, error, message):
    with pytest.raises(error, match=message):
        step_of(**options)


@pytest.mark.parametrize("loss", [lambda out, data: out, lambda out, data: 0.5], ids=["rows", "float"])
def test_a_loss_is_one_element(loss):
    with pytest.raises(TypeError, match=r"'loss' needs to return a tensor of one element \(got (\[40, 3\]|float)\)"):
        step_of(loss=loss)()


def test_which_data_a_step_takes():
    with pytest.raises(ValueError, match="'data' needs the object that capture_step was given"):
        captured(whole())(whole())
    loader = DataLoader([graph(5 + i, i) for i in range(4)], batch_size=2)
    model = Plain()
    optimizer = OPTIMIZERS["adam"](model.parameters())

    def loss(out, data):
        return F.cross_entropy(out, data.y)

    for recorder in (None, HostRecorder(optimizer)):
        step = capture_step(model, loss, optimizer, loader, recorder=recorder)
        with pytest.raises(TypeError, match=r"'data' needs a batch: .* \(got None\)"):
            step()
    with pytest.raises(TypeError, match=r"'data' needs a Batch of graphs \(got Data\)"):
        step(graph(5, 0))
    good = Batch.from_data_list([graph(5, 0), graph(6, 1)])
    step(good)
    wrong = {
        "x": (good.x[:, :1], ValueError, r"'data.x' needs shape \[11, 5\], as in the first batch \(got \[11, 1\]\)"),
        "y": (good.y.float(), TypeError, r"'data.y' needs dtype torch.int64 \(got torch.float32\)"),
    }
    for name, (value, error, message) in wrong.items():
        batch = copy.copy(good)
        batch[name] = value
        with pytest.raises(error, match=message):
            step(batch)
    del batch[name]
    with pytest.raises(TypeError, match=r"'data.y' needs a torch.Tensor \(got None\)"):
        step(batch)
    torch.testing.assert_close(step(good), loss(step.output, good))
    odd = copy.copy(good)
    odd.table = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"'data.table' needs one row per node, edge or graph, .* \(got \[3, 2\]\)"):
        capture_step(model, loss, optimizer, loader, recorder=HostRecorder(optimizer))(odd)
