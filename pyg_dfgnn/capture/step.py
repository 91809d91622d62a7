"""One training step: launched kernel by kernel, or captured as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData

from pyg_dfgnn.capture.buckets import Bucket, Buckets, Capacity
from pyg_dfgnn.capture.recorder import Recorder, Recording
from pyg_dfgnn.capture.watch import Watch, data_watches, is_on_device, model_watches, optimizer_watches
from pyg_dfgnn.distributed import Group
from pyg_dfgnn.errors import UnsupportedError, check_device
from pyg_dfgnn.fallback import inform_once
from pyg_dfgnn.frontend.derived import edges_stay
from pyg_dfgnn.nn.registry import layer_rows
from pyg_dfgnn.settings import current, local_settings
from pyg_dfgnn.torch_private import tree_map_only

Loss = Callable[[Any, Any], Tensor]
ForwardFunction = Callable[[nn.Module, Any], Any]
PhaseMark = Callable[[str], None]
# Whose fused kernel GPUs have.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
ON_CPU = "capture_step: the model is on a CPU, where each step runs eagerly; CUDA graphs need a CUDA device"


def call_model(model: nn.Module, data: Any) -> Any:
    """Return `model(data.x, data.edge_index)`."""
    return model(data.x, data.edge_index)


def _no_mark(phase: str) -> None:
    """Ignore the end of a phase."""


class Step:
    """A training step that launches its kernels one by one.

    Args:
        model: Model whose parameters are on one device.
        loss: Called with the output of `forward` and the data; returns the mean loss, a tensor of one element.
        optimizer: Optimizer of the model's parameters.
        data: What :meth:`__call__` takes where it is called without data.
        forward: Called with the model and the data; None: `model(data.x, data.edge_index)`.
        group: Processes that share each batch; the loss is the mean over all of them.
        scaler: Scales the loss for float16; None: it is not scaled.
        mark: Called with "forward", "backward" and "optimizer" once the kernels of that phase are enqueued.

    Attributes:
        output: What `forward` returned in the last call, detached.

    Raises:
        ValueError: `model` has no parameters, or they are on several devices.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        data: Any = None,
        *,
        forward: ForwardFunction | None = None,
        group: Group | None = None,
        scaler: torch.amp.GradScaler | None = None,
        mark: PhaseMark | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer, self.data = model, loss, optimizer, data
        self.forward = forward or call_model
        self.group = group or Group()
        self.device = device_of(model)
        self.scaler = scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        self.mark = mark or _no_mark
        self.output: Any = None
        self.phase = ""

    def __call__(self, data: Any = None) -> Tensor:
        """Take one step and return the loss `[]` before it, detached; nothing waits for the device."""
        loss, self.output = self.train_step(self._data_of(data))
        return loss

    def evaluate(self, data: Any = None) -> Tensor:
        """Return the loss `[]` of data without a step; the caller decides whether the model is in evaluation mode."""
        loss, self.output = self.eval_step(self._data_of(data))
        return loss

    def train_step(self, data: Any) -> tuple[Tensor, Any]:
        """Take one step on data; return the loss before it, over all processes, and the output."""
        self.optimizer.zero_grad()
        loss, output = self.compute(data)
        mean = self.group.start_average(loss)
        self.mark("forward")
        self.phase = "the backward pass"
        # Backward on one device needs no second thread; handing over to one takes as long as many launches.
        with torch.autograd.set_multithreading_enabled(False):
            self.scaler.scale(loss).backward()
        self.mark("backward")
        self.phase = "the optimizer"
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Under autocast around the step, weights that were cast before it would be taken for those after it.
        torch.clear_autocast_cache()
        self.mark("optimizer")
        return mean(), tree_map_only(Tensor, Tensor.detach, output)

    @torch.no_grad()
    def eval_step(self, data: Any) -> tuple[Tensor, Any]:
        """Return the loss of data over all processes and the output, without gradients."""
        loss, output = self.compute(data)
        return self.group.average(loss), output

    def compute(self, data: Any) -> tuple[Tensor, Any]:
        """Return this process's part of the loss, and the output.

        Raises:
            TypeError: The loss is no tensor of one element.
        """
        self.phase = "the forward pass"
        output = self.forward(self.model, data)
        self.phase = "the loss"
        loss = self.loss(output, data)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"'loss' needs to return a tensor of one element (got {got})")
        return loss, output

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}, {type(self.optimizer).__name__}, {self.device})"

    def _data_of(self, data: Any) -> Any:
        data = self.data if data is None else data
        if data is None:
            raise TypeError("'data' needs a batch: this step was made for batches of different sizes (got None)")
        return data


class CapturedStep(Step):
    """A training step that is captured as a CUDA graph and replayed, so that one launch runs all its kernels.

    The first steps on data launch their kernels one by one; they count as steps and settle plans, compiled kernels and
    the state of the optimizer. Later steps replay with the random numbers and learning rates that single launches
    would use; dropout on a padded batch draws for its padded size. A capture belongs to the tensors of its data and
    reads what they hold at each replay. Therefore the same data come again, or batches are copied to a bucket.

    Args:
        model: Model on a CUDA device.
        loss: Function of the model's output and the data, as in :func:`capture_step`.
        optimizer: Optimizer that can be captured.
        data: The data of each step, or the :class:`Capacity` of batches that are copied to :class:`Buckets`;
            evaluation then launches kernels one by one.
        mark: As in :class:`Step`, called during the capture but not in a replay.
        recorder: Recorder of the captures; None: a new one on the model's device.
        **options: `forward` and `group` as in :class:`Step`.

    Raises:
        ValueError: The model is not on a CUDA device, or model or optimizer cannot be captured.
    """

    WARM_UPS = 3
    SHARED_WARM_UPS = 12
    """Warm-ups with several processes: DistributedDataParallel times its first ten steps, which cannot be captured."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        data: Any,
        *,
        mark: PhaseMark | None = None,
        recorder: Recorder | None = None,
        **options: Any,
    ) -> None:
        padded = isinstance(data, Capacity)
        super().__init__(model, loss, optimizer, None if padded else data, **options)
        check_optimizer(optimizer)
        if recorder is None and self.group.size > 1:
            raise ValueError("'recorder' needs the Recorder whose stream distributed.wrap was given (got None)")
        self.recorder = recorder or Recorder(self.device)
        self.buckets = Buckets(model, data) if padded else None
        self.capture_mark = mark or _no_mark
        # The data of an evaluation are not kept alive; their capture goes with them.
        self._captures: dict[tuple[str, int], _DataCapture] = {}
        self._rates: list[Tensor] = []
        self._unchecked: tuple[Bucket, Any] | None = None

    def __call__(self, data: Any = None) -> Tensor:
        """Take one step as :meth:`Step.__call__` does; the next step on this data overwrites `output`.

        Raises:
            StaleError: Model, optimizer or data are not as they were captured.
            UnsupportedError: The step cannot be captured.
            ValueError: The data are not those of the step; the loss counts the padding of a batch.
        """
        data = self._data_of(data)
        self._set_rates()
        if self.buckets is None:
            if data is not self.data:
                raise ValueError("'data' needs the object that capture_step was given (got another one)")
            loss, self.output = self._run("step", data, partial(self.train_step, data))
            return loss.clone()
        buckets, batch = self.buckets, self.buckets.move(data)
        bucket = buckets.place(batch)
        self._unchecked = None if bucket.is_checked else (bucket, batch)

        def step() -> tuple[Tensor, Any]:
            with buckets.active(bucket) as wide:
                bucket.refill()
                return self.train_step(wide)

        loss, output = self._run("step", bucket.batch, step)
        self.output = bucket.rows(output, batch)
        return loss.clone()

    def evaluate(self, data: Any = None) -> Tensor:
        """Return the loss of data; the next evaluation of this data overwrites `output`."""
        if self.buckets is not None:
            self._unchecked = None
            return super().evaluate(self.buckets.move(self._data_of(data)))
        data = self._data_of(data)
        loss, self.output = self._run("evaluate", data, partial(self.eval_step, data))
        return loss.clone()

    def compute(self, data: Any) -> tuple[Tensor, Any]:
        """Return loss and output as :meth:`Step.compute`; the first step on a bucket checks the loss without padding.

        The loss must leave out the padding of batches.

        Raises:
            ValueError: It does not.
        """
        loss, output = super().compute(data)
        if self._unchecked is not None:
            bucket, batch = self._unchecked
            with torch.no_grad():
                want = self.loss(bucket.rows(output, batch), batch)
            if not torch.isclose(loss, want, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise ValueError(
                    "'loss' needs to leave out the padding of batches, where integer labels y are -100 and all other "
                    f"attributes 0 (got {loss.item():.6g} with padding, {want.item():.6g} without)"
                )
            bucket.is_checked, self._unchecked = True, None
        return loss, output

    def __repr__(self) -> str:
        lines = [f"  {kind} on {capture.shown(self._warm_ups)}" for (kind, _), capture in self._captures.items()]
        return "\n".join([super().__repr__(), *lines])

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError(
            "'step' needs to be made anew by capture_step: a captured step is bound to the memory of its model "
            f"(got a {type(self).__name__} to be copied or pickled)"
        )

    @property
    def _warm_ups(self) -> int:
        return self.WARM_UPS if self.group.size == 1 else self.SHARED_WARM_UPS

    def _run(self, kind: str, data: Any, work: Callable[[], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        key = kind, id(data)
        capture = self._captures.get(key)
        if capture is None:
            capture = self._captures[key] = _DataCapture(ref(data, partial(_forget, ref(self), key)))
        capture.runs += 1
        if capture.recording is None:
            # A recording is of kernels, however seldom the edges have come before it.
            with local_settings(check_ids="now"):
                if capture.runs <= self._warm_ups:
                    return self.recorder.run(work)
                # The edges of a bucket are edited for each batch.
                with edges_stay(self.buckets is None) as read:
                    capture.recording = self._record(work)
            capture.watches = model_watches(self.model)
            capture.watches += data_watches(data, read) if self.buckets is None else []
            capture.watches += optimizer_watches(self.optimizer) if kind == "step" else []
        else:
            for watch in capture.watches:
                watch.check()
        return capture.recording.replay()

    def _record(self, work: Callable[[], tuple[Tensor, Any]]) -> Recording:
        try:
            with self._capturing():
                return self.recorder.record(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            where = _layer_of(self.model, error)
            raise UnsupportedError([f"{where}{self.phase}: {error}"], what="the captured step") from error

    def _set_rates(self) -> None:
        """Copy the learning rates of the groups to the tensors that a replay reads."""
        groups = self.optimizer.param_groups
        if not self._rates:
            for group in groups:
                if "capturable" in group:
                    group["capturable"] = True
                # One launch, where torch's own choice has two for each parameter.
                if _is_open(self.optimizer, group):
                    group["fused"] = True
            # A resumed run may have counted its steps on the host.
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.device != self.device:
                        state[name] = value.to(self.device, torch.float32)
            self._rates = [torch.zeros((), device=self.device) for _ in groups]
            self._known: list[float | None] = [None] * len(groups)
        for position, (group, rate) in enumerate(zip(groups, self._rates)):
            if not is_on_device(group["lr"]) and group["lr"] != self._known[position]:
                number = self._known[position] = float(group["lr"])
                rate.fill_(number)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """A block in which learning rates are tensors, so that replays follow schedulers, and phases are marked."""
        groups = self.optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates):
            group["lr"] = group["lr"] if is_on_device(group["lr"]) else rate
        self.mark = self.capture_mark
        try:
            yield
        finally:
            self.mark = _no_mark
            for group, number in zip(groups, numbers):
                group["lr"] = number


def capture_step(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer,
    data: Any,
    *,
    forward: ForwardFunction | None = None,
    group: Group | None = None,
    recorder: Recorder | None = None,
    mark: PhaseMark | None = None,
) -> Step:
    """Make a training step that a GPU runs with one launch.

    A step is `optimizer.zero_grad()`, `out = forward(model, data)`, `loss(out, data).backward()`, `optimizer.step()`.
    The first three run as written, then the step is captured as a CUDA graph and replayed. On a CPU each step runs as
    written, and a line says so once. See `docs/capture.md`.

    Args:
        model: Model whose parameters are on one device.
        loss: Called with the output and the data; returns a tensor of one element and waits for no number of the GPU.
        optimizer: With the option `capturable`, as Adam, AdamW and RMSprop have, or with a fused kernel, as SGD has.
            The fused kernel is taken where neither `fused` nor `foreach` is given.
        data: Either a `Data` or `HeteroData` on the model's device, which each step takes: its edges stay as they are,
            other tensors may be refilled in place. Or a `DataLoader` of small graphs, or the :class:`Capacity` of
            batches that are made otherwise: each step takes a batch, which is padded.
        forward: Called with the model and the data; None: `model(data.x, data.edge_index)`. `torch.autocast` belongs
            in it.
        group: Processes that share each batch; None: this one alone.
        recorder: For several processes: what records the step, whose stream `distributed.wrap` was given.
        mark: Called with "forward", "backward" and "optimizer" as each phase is enqueued, also in the capture.

    Returns:
        The step. `step()`, for batches `step(batch)`, returns the loss `[]` before the step, detached; `step.output` is
        what `forward` returned, which the next step overwrites. `step.evaluate(data)` returns the loss without a step.
        `print(step)` shows what was captured.

    Raises:
        TypeError: An argument is of another kind.
        UnsupportedError: The model is on a CPU where there is a GPU, under `settings(fallback="error")`.
        ValueError: The data are on another device, or model or optimizer cannot be captured.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"'model' needs a torch.nn.Module (got {type(model).__name__})")
    device = device_of(model)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"'optimizer' needs a torch.optim.Optimizer (got {type(optimizer).__name__})")
    check_optimizer(optimizer)
    for name, function in {"loss": loss, "forward": forward or call_model}.items():
        if not callable(function):
            raise TypeError(f"'{name}' needs a function (got {type(function).__name__})")
    if isinstance(data, BaseData):
        for store in data.stores:
            for name, value in store.items():
                if isinstance(value, Tensor):
                    check_device(f"data.{name}", value, device)
        if forward is None and not ("x" in data and "edge_index" in data):
            need = "a function of model and data where these have no 'x' and 'edge_index'"
            raise TypeError(f"'forward' needs {need} (got None)")
    elif not isinstance(data, Capacity):
        data = _capacity_of(data)
    known = {id(parameter) for parameter in model.parameters()}
    if known.isdisjoint(id(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("'optimizer' needs parameters of the model (got none of them)")
    if device.type == "cpu" and recorder is None:
        if current().fallback == "error" and torch.cuda.is_available():
            raise UnsupportedError(["the model is on a CPU"], what="the captured step")
        if current().fallback != "silent":
            inform_once(ON_CPU)
        data = data if isinstance(data, BaseData) else None
        return Step(model, loss, optimizer, data, forward=forward, group=group, mark=mark)
    return CapturedStep(model, loss, optimizer, data, forward=forward, group=group, recorder=recorder, mark=mark)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters of a model.

    Raises:
        ValueError: There are none, or they are on several devices.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"'model' needs parameters on one device (got {', '.join(map(str, devices)) or 'none'})")
    return devices.pop()


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that torch can capture an optimizer with its learning rates in tensors.

    Raises:
        ValueError: It cannot.
    """
    groups = optimizer.param_groups
    if not all("capturable" in group or group.get("fused") or _is_open(optimizer, group) for group in groups):
        need = "the option 'capturable', as Adam has, or a fused kernel, as SGD has, to be captured"
        raise ValueError(f"'optimizer' needs {need} (got {type(optimizer).__name__})")


def _is_open(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether torch's fused kernel can take a group of parameters, and the user has asked for no other form."""
    is_chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
    if type(optimizer) not in _FUSED or is_chosen:
        return False
    return all(parameter.is_floating_point() for parameter in group["params"])


def _capacity_of(loader: Any) -> Capacity:
    graphs, batch_size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
    if graphs is None or batch_size is None or not len(graphs) or not isinstance(graphs[0], Data):
        kind = f"{type(loader).__name__} of {type(graphs).__name__}" if graphs is not None else type(loader).__name__
        need = "a Data, a DataLoader of Data with a batch_size, or a pyg_dfgnn.capture.Capacity"
        raise TypeError(f"'data' needs {need} (got {kind})")
    return Capacity.of(graphs, min(batch_size, len(graphs)))


def _layer_of(model: nn.Module, error: BaseException) -> str:
    """Name the innermost layer of a model that an error went through, and what is known against its kernels."""
    names = {id(module): name for name, module in model.named_modules() if name}
    path: list[str] = []
    cause: BaseException | None = error
    # Where the end of a capture fails, the error before tells why.
    while cause is not None and not path:
        owners = [frame.f_locals.get("self") for frame, _ in walk_tb(cause.__traceback__)]
        path, cause = [names[id(owner)] for owner in owners if id(owner) in names], cause.__context__
    if not path:
        return ""
    why = "".join(f" ({row.why})" for _, row in layer_rows(model) if row.name in path and row.why)
    return f"'{path[-1]}', a {type(model.get_submodule(path[-1])).__name__}{why}, in "


def _forget(step: ref[CapturedStep], key: tuple[str, int], _: ref[Any]) -> None:
    """Drop a capture whose data have died; a step that refers to itself would keep its memory for long."""
    owner = step()
    if owner is not None:
        owner._captures.pop(key, None)


class _DataCapture:
    """Runs, recording and watches of the work on one data object."""

    def __init__(self, data: ref[Any]) -> None:
        self.data = data
        self.runs = 0
        self.recording: Recording | None = None
        self.watches: list[Watch] = []

    def shown(self, warm_ups: int) -> str:
        if self.recording is None:
            return f"{self.data()}: {self.runs} eager runs, captured after {warm_ups}"
        return f"{self.data()}: captured after {warm_ups} eager runs, {self.runs - warm_ups} replays"
