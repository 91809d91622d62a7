"""Captured steps take the steps of single launches; here what a GPU would replay is run again by the host."""

import copy
import threading

import pytest
import torch
import torch_geometric.nn
from torch import nn
from torch_geometric.data import Batch, Data

from pyg_dfgnn.capture import Buckets, Capacity, CapturedStep, Recorder
from pyg_dfgnn.capture.buckets import IGNORED, MaskedBatchNorm
from pyg_dfgnn.capture.recorder import _waiting_refused
from pyg_dfgnn.graph import DeviceDataset
from pyg_dfgnn.models import GraphTransformer
from pyg_dfgnn.ops.masked_norm import RowMask
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import local_settings
from pyg_dfgnn.training.step import make_step
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device


class HostRecorder:
    """Keeps work to run it again, with the learning rates that were in the optimizer while it was recorded."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.runs = self.recordings = self.replays = 0

    def run(self, work):
        self.runs += 1
        return work()

    def record(self, work):
        self.recordings += 1
        rates = [group["lr"] for group in self.optimizer.param_groups]
        assert self.runs
        self.rates = rates
        recorder = self

        class Recording:
            def replay(self):
                recorder.replays += 1
                numbers = [group["lr"] for group in recorder.optimizer.param_groups]
                for group, rate in zip(recorder.optimizer.param_groups, rates):
                    group["lr"] = rate
                results = work()
                for group, number in zip(recorder.optimizer.param_groups, numbers):
                    group["lr"] = number
                return results

        return Recording()


def graph(size, seed, label=None):
    generator = torch.Generator().manual_seed(seed)
    edge_index = (torch.rand(size, size, generator=generator) < 0.3).nonzero().t().contiguous()
    y = torch.randint(3, (size,), generator=generator) if label is None else torch.tensor([label])
    return Data(x=torch.randn(size, 5, generator=generator), edge_index=edge_index, y=y)


def batches(graph_level=False):
    sizes = ([9, 14, 11], [12, 8, 10], [10, 10, 9], [6, 9], [30, 40, 20])
    return [
        Batch.from_data_list([graph(n, 10 * i + j, j % 3 if graph_level else None) for j, n in enumerate(part)])
        for i, part in enumerate(sizes)
    ]


def capacity(given):
    return Capacity.of([graph for batch in given for graph in batch.to_data_list()], 3)


def pair(make, data, **options):
    """The same model with an eager step of the trainer and with a captured one."""
    torch.manual_seed(1)
    model = make()
    steps = []
    for captured in (False, True):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.Adam(twin.parameters(), lr=0.01, fused=True)
        recorder = HostRecorder(optimizer) if captured else None
        steps.append(make_step(twin, optimizer, data, captured=captured, recorder=recorder, **options))
    return steps


def transformer(dropout=0.0, norm="batch"):
    options = {"hidden_channels": 16, "heads": 2, "layers": 2, "dropout": dropout, "norm": norm}
    return GraphTransformer(5, 3, torch_geometric.nn, **options, pe_size=0)


def train(step, given, scheduler, epochs=4):
    schedule = scheduler(step.optimizer)
    losses = []
    torch.manual_seed(7)
    for _ in range(epochs):
        for batch in given:
            losses.append(step(batch))
            assert step.output.size(0) == batch.y.numel()
        schedule.step()
    return torch.stack(losses)


def assert_same_parameters(left, right, **tolerance):
    for (name, a), (_, b) in zip(left.model.state_dict().items(), right.model.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=name, **tolerance)


def assert_same_evaluation(left, right, batch, **tolerance):
    torch.testing.assert_close(left.evaluate(batch), right.evaluate(batch), **tolerance)
    torch.testing.assert_close(left.output, right.output, **tolerance)


SCHEDULES = {
    "constant": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replays_equal_single_launches(schedule):
    (whole,) = batches()[:1]
    eager, captured = pair(lambda: transformer(dropout=0.3, norm="layer"), whole)
    want, found = (train(step, [whole], SCHEDULES[schedule], epochs=12) for step in (eager, captured))
    torch.testing.assert_close(found, want, **elementwise("float32/one_formula"))
    assert_same_parameters(eager, captured, **elementwise("float32"))
    recorder = captured.recorder
    assert (recorder.runs, recorder.recordings, recorder.replays) == (CapturedStep.WARM_UPS, 1, 9)
    # As numbers they would be those of the capture for ever.
    assert all(isinstance(rate, torch.Tensor) for rate in recorder.rates)
    assert all(isinstance(group["lr"], float) for group in captured.optimizer.param_groups)


def test_evaluation_is_captured_too():
    (whole,) = batches()[:1]
    eager, captured = pair(transformer, whole)
    for step in (eager, captured):
        step.model.eval()
    for _ in range(CapturedStep.WARM_UPS + 3):
        assert_same_evaluation(eager, captured, whole)
    assert captured.recorder.recordings == 1 and captured.recorder.replays == 3


@pytest.mark.parametrize("graph_level", [False, True], ids=["nodes", "graphs"])
@pytest.mark.parametrize("loss_weights", [False, True], ids=["plain", "weighted"])
def test_padded_batches_equal_the_batches(graph_level, loss_weights):
    given = batches(graph_level)
    eager, captured = pair(transformer, capacity(given[:4]), graph_level=graph_level, loss_weights=loss_weights)
    want, found = (train(step, given, SCHEDULES["cosine"]) for step in (eager, captured))
    # Adam makes whole steps of gradients that are rounding errors, such as those of biases before a batch norm.
    torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-4)
    # Four batches share a bucket, the large one has its own.
    assert captured.recorder.recordings == 2 and captured.recorder.replays > 8
    norms = [module for module in captured.model.modules() if isinstance(module, MaskedBatchNorm)]
    assert norms and all(module.mask is None for module in norms)
    captured.model.load_state_dict(eager.model.state_dict())
    for step in (eager, captured):
        step.model.eval()
    for batch in given:
        assert_same_evaluation(captured, eager, batch)


def test_one_padded_step_is_exact():
    (batch,) = batches()[:1]
    model = transformer().double()
    padded = copy.deepcopy(model)
    batch.x, batch.pe = batch.x.double(), torch.randn(batch.num_nodes, 2)
    buckets = Buckets(padded, capacity([batch]))
    with buckets.active(buckets.place(batch)) as wide:
        assert wide.num_nodes > batch.num_nodes and wide.edge_index.size(1) > batch.num_edges
        assert torch.equal(wide.pe[: batch.num_nodes], batch.pe) and not wide.pe[batch.num_nodes :].any()
        out = padded(wide.x, wide.edge_index)
        loss = torch.nn.functional.cross_entropy(out, wide.y, ignore_index=IGNORED)
        loss.backward()
    want = model(batch.x, batch.edge_index)
    torch.nn.functional.cross_entropy(want, batch.y).backward()
    torch.testing.assert_close(out[: batch.num_nodes], want)
    for (name, a), (_, b) in zip(padded.named_parameters(), model.named_parameters()):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), (_, b) in zip(padded.named_buffers(), model.named_buffers()):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("momentum", [0.1, None], ids=["moving", "cumulative"])
def test_norm_leaves_out_padding(affine, momentum):
    norm = MaskedBatchNorm(3, affine=affine, momentum=momentum).double()
    plain = nn.BatchNorm1d(3, affine=affine, momentum=momentum).double()
    for module in (norm, plain):
        for position, parameter in enumerate(module.parameters()):
            nn.init.constant_(parameter, 0.7 + position)
    norm.mask = RowMask(12, torch.zeros(1, dtype=torch.int64))
    for count in (9, 4):
        norm.mask.count.fill_(count)
        x, down = 5 + torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
        x[count:] = down[count:] = torch.nan
        x.requires_grad_()
        head = x.detach()[:count].requires_grad_()
        out, want = norm(x), plain(head)
        out.backward(down)
        want.backward(down[:count])
        torch.testing.assert_close(out[:count], want)
        torch.testing.assert_close(x.grad[:count], head.grad)
        assert out.isfinite().all() and not x.grad[count:].any()
        for (name, a), (_, b) in zip(norm.named_parameters(), plain.named_parameters()):
            torch.testing.assert_close(a.grad, b.grad, msg=name)
        for (name, a), (_, b) in zip(norm.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    assert torch.equal(norm(x.bfloat16().detach()).isfinite(), torch.ones_like(x, dtype=torch.bool))


def test_second_derivatives_of_a_norm():
    norm, results = MaskedBatchNorm(3).double(), []
    nn.init.constant_(norm.weight, 0.7)
    x = torch.randn(6, 3, dtype=torch.float64)
    x[4:] = torch.nan
    for rows, mask in ((6, RowMask(6, torch.tensor([4]))), (4, None)):
        norm.mask, leaf = mask, x[:rows].clone().requires_grad_()
        leaves, out = [leaf, *norm.parameters()], norm(leaf)[:4]
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        grads += torch.autograd.grad(sum(grad[:4].sin().sum() for grad in grads), leaves)
        results.append([grad[:4] for grad in grads])
    torch.testing.assert_close(*results)


def test_a_batch_has_the_same_sizes_in_every_run():
    """Dropout draws for all of it, so a run that goes on elsewhere in an epoch has to find the same."""
    given = batches()
    wide = capacity(given)
    drawn = []
    for order in (given, given[::-1], given[2:] + given[:2]):
        buckets = Buckets(transformer(), wide)
        placed = [buckets.place(batch) for batch in order]
        drawn.append({id(batch): (bucket.num_nodes, bucket.num_edges) for batch, bucket in zip(order, placed)})
    assert drawn[0] == drawn[1] == drawn[2]


def test_capacity():
    (small,), large = [graph(8, 0)], graph(400, 1)
    wide = Capacity.of([graph(n, n) for n in (10, 20, 30)], 4)
    assert wide.nodes == (pytest.approx(80), pytest.approx(2 * (200 / 3) ** 0.5))
    # 80 + 3 * 16.3 + 80 / 64 nodes, in units of 64, and twice as much beyond the mean.
    assert [wide.sizes(level)[0] for level in range(3)] == [192, 192, 320]
    assert wide.level(small) == 0 and 0 < wide.level(large) < 9
    nodes, edges = wide.sizes(wide.level(large))
    assert large.num_nodes < nodes and large.num_edges <= edges
    with pytest.raises(ValueError, match=r"'num_graphs' needs a value in \[1, 4\] \(got 5\)"):
        Buckets(transformer(), wide).place(Batch.from_data_list([small] * 5))
    with pytest.raises(ValueError, match=r"'batch_size' needs a value >= 1 \(got 0\)"):
        Capacity.of([small], 0)


def test_a_capture_leaves_the_waiting_of_other_threads_alone(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    if threading.active_count() == 1:
        with _waiting_refused():
            assert modes[-1] == "error"
        assert modes[-1] == "default"
    ended, modes[:] = threading.Event(), ["default"]
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with _waiting_refused():
            assert modes == ["default"]
    finally:
        ended.set()
        other.join()


def test_a_resumed_optimizer_counts_on():
    (whole,) = batches()[:1]
    eager, captured = pair(transformer, whole)
    eager(whole)
    captured.model.load_state_dict(eager.model.state_dict())
    captured.optimizer.load_state_dict(copy.deepcopy(eager.optimizer.state_dict()))
    losses = [(eager(whole), captured(whole)) for _ in range(6)]
    for a, b in losses:
        torch.testing.assert_close(a, b)
    assert all(state["step"] == 7 for state in captured.optimizer.state.values())


def test_marks():
    (whole,) = batches()[:1]
    seen = []
    model = transformer()
    make_step(model, adam(model), whole, mark=seen.append)()
    assert seen == ["forward", "backward", "optimizer"]


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), **options)


def test_what_cannot_be_captured():
    model = transformer()
    with pytest.raises(ValueError, match=r"'device' needs a CUDA device .* \(got cpu\)"):
        Recorder(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"'device' needs a CUDA device .* \(got cpu\)"):
        make_step(model, adam(model), captured=True)
    with pytest.raises(ValueError, match=r"'precision' needs fp32 or bf16 with cuda_graph"):
        make_step(model, adam(model), captured=True, precision="fp16")
    with pytest.raises(ValueError, match=r"'precision' needs one of"):
        make_step(model, adam(model), precision="fp8")


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4), torch_geometric.nn.GraphNorm(4)], ids=lambda m: type(m).__name__)
def test_norms_that_padding_would_change(layer):
    with pytest.raises(ValueError, match=rf"'model' needs BatchNorm1d or LayerNorm .* \(got {type(layer).__name__}\)"):
        Buckets(nn.Sequential(nn.BatchNorm1d(4), layer), capacity(batches()))


@needs_compiler
def test_padded_batches_on_the_kernels():
    import pyg_dfgnn.nn

    def make():
        return GraphTransformer(5, 3, pyg_dfgnn.nn, hidden_channels=16, heads=1, layers=1, pe_size=0)

    resident = DeviceDataset([graph(6 + i, i) for i in range(6)])
    given = [resident.batch(ids) for ids in torch.tensor([[0, 5], [1, 4], [2, 3], [4, 0], [5, 1]])]
    wide = Capacity.of([graph(6 + i, i) for i in range(6)], 2)
    with local_settings(fallback="error"), emulated_device() as launched:
        eager, captured = pair(make, wide)
        want, found = (train(step, given, SCHEDULES["cosine"], epochs=1) for step in (eager, captured))
    torch.testing.assert_close(found, want, **elementwise("float32/steps"))
    assert captured.recorder.replays == 2 and {"graph_count", "attention_forward"} <= set(launched)
