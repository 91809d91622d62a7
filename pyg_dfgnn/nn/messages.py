"""Any `MessagePassing`, compiled: its forward is captured by TorchDynamo, and what is on edges becomes programs.

A layer is taken by a mark on the instance and a wrapper around `forward` of its class. What becomes of a captured graph
is said in :mod:`pyg_dfgnn.frontend`. A call that nothing can be captured of, or for which nothing would be won, is the
layer's own code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.dispatch.traversal import storage_reasons
from pyg_dfgnn.fallback import CPU, NO_DEVICE, SMALL, report_fallback
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.ends import PartitionedEdges
from pyg_dfgnn.graph.forms import INDEX_DTYPES
from pyg_dfgnn.ir.domains import E
from pyg_dfgnn.ir.index_space import IndexSpace
from pyg_dfgnn.ir.lowering import Lowered, lower
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.nn.captured_forward import (
    ERRORS_OF_USERS,
    WRAPPER,
    Forward,
    Forwards,
    before_call,
    clear,
    forward_of,
    of_any_size,
    run_on_part,
    torch_reasons,
)
from pyg_dfgnn.nn.conv_call import edges_in_flow
from pyg_dfgnn.nn.gate import hooks_of, lacks_kernels
from pyg_dfgnn.nn.registry import MARK, Description, copied, shown
from pyg_dfgnn.ops.graph import may_run_again
from pyg_dfgnn.ops.relational.backend import (
    INTERPRETER,
    KERNELS,
    Backend,
    backend,
    dtype_of,
    interpreted,
    is_small,
    match_of,
    running,
)
from pyg_dfgnn.ops.relational.program import ALL_PASSES
from pyg_dfgnn.ops.visits import new_visit, step
from pyg_dfgnn.settings import current, local_settings
from pyg_dfgnn.torch_private import current_graph_task_id, top_saved_tensors_hooks

__all__ = ["Mark", "clear", "describe", "interpreted", "lowered", "standing"]

_QUIET = 32
"""Calls that are not asked about between two that are, at most; as long as edges have been new for a few calls, a
quarter of these, so that one of a fixed list of batches is met again soon."""
UNCALLED = "its first call tells what of it becomes programs"
"""Said of a layer of which nothing is known before."""
_TENSORS = (Tensor, torch.nn.Parameter)


class Mark:
    """The mark of a compiled layer; unpickling it wraps the class again, in whatever process.

    Args:
        kind: Class of the layer.

    Attributes:
        few: Number of edges up to which torch's operators take less time than kernels, as far as it is known.
        seen: Number of graphs that its forward had after that call.
        is_left: Whether none of them had a program, so that the layer's own code runs.
        refused: Kinds of calls of which kernels run no program.
        on_part: Captured forward of the last call with a part of a graph; None without.
        quiet: Number of calls to come that nothing is asked about, as long as they are like the last one.
        place: Place of the edges among the arguments of such a call.
        count: Number of these arguments.
        most: Number of ids that edges of such a call have at most.
        on_gpu: Whether these edges are on a GPU.
        under: Settings of such a call.
        new: Number of calls, one after another, that were asked about and whose edges had not come before.
    """

    may_be_quiet = True
    """Whether calls need not be counted."""

    def __init__(self, kind: type) -> None:
        self.kind, self.few, self.seen, self.is_left = kind, -1, -1, False
        self.quiet, self.new = 0, 0
        self.place, self.count, self.most, self.on_gpu, self.under = 0, 0, 0, False, current()
        self.parts: list[dict[str, Any]] = []
        self.refused: set[Any] = set()
        self.forward: Forward | None = None
        self.on_part: Forward | None = None
        forward = kind.forward  # type: ignore[attr-defined]
        if getattr(forward, WRAPPER, None) is not kind:
            kind.forward = _wrapped(forward, kind)  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return Mark, (self.kind,)

    def call(self, layer: Any, own: Callable[..., Any], forwards: Forwards, args: Any, kwargs: Any) -> Any:
        """Return what a call of the forward returns."""
        if torch.compiler.is_compiling():
            return own(layer, *args, **kwargs)
        edges, batch, has_others, found = None, None, False, 0
        values = (*args, *kwargs.values()) if kwargs else args
        for value in values:
            if type(value) is Tensor:
                if value.dtype in INDEX_DTYPES and value.dim() == 2 and value.size(0) == 2:
                    edges, found = value if edges is None else edges, found + 1
            elif isinstance(value, PartitionedEdges):
                self.parts = _parts_of(layer)
                plain = [value.part.edge_index if each is value else each for each in values]
                given = layer, self.kind, own, forwards, args, kwargs, value, self.reasons(layer, plain)
                result, self.on_part = run_on_part(*given)
                return result
            elif isinstance(value, Graph):
                args = tuple(_plain(layer, value) for value in args)
                kwargs = {name: _plain(layer, value) for name, value in kwargs.items()}
                return self.call(layer, own, forwards, args, kwargs)
            elif value is not None:
                has_others = True
                batch = value if isinstance(value, Data) else batch
        # Layers of GraphGym and GraphGPS take a batch.
        inner = batch.edge_index if edges is None and batch is not None else None
        if type(inner) is Tensor and inner.dim() == 2:
            edges = inner
        under, may_be_few, is_left, most, quiet = current(), False, False, 0, 0
        if not under.compile_messages or step.is_refilled:
            return own(layer, *args, **kwargs)
        if edges is not None and edges.is_cuda:
            # As the function of this name does: each one that a call enters costs the host.
            may_be_few = under.leaves_few and edges.layout is torch.strided
            is_few = may_be_few and self.few >= 0 and edges.size(1) <= self.few
            visit = new_visit(layer, edges, under=under) if may_be_few and not is_few else 0
            is_left = is_few or visit > 0
            most, quiet = 2 * self.few, _QUIET
            if not is_few:
                self.new = self.new + 1 if visit == 1 else 0
                most, quiet = edges.numel(), min(self.new // 4, _QUIET)
                most = max(most, self.most) if quiet and self.on_gpu else most
        elif edges is not None and backend().devices is not None and lacks_kernels(edges):
            report_fallback(self.kind.__name__, CPU)
            is_left, most, quiet = True, sys.maxsize, _QUIET
        if is_left:
            if edges is not None and quiet and found == 1 and not kwargs and batch is None and self.may_be_quiet:
                self.place = next(place for place, value in enumerate(args) if value is edges)
                self.count, self.most, self.on_gpu, self.under = len(args), most, edges.is_cuda, under
                self.quiet = quiet
            # As `run_left` does.
            before, step.is_left = step.is_left, True
            try:
                return own(layer, *args, **kwargs)
            finally:
                step.is_left = before
        forward = self.forward
        if forward is None or not forward.is_current(self.kind):
            forward = self._forward_of(layer, own, forwards)
        if forward is None or self.is_left:
            if forward is not None and current().fallback == "error":
                forward.report()
            return own(layer, *args, **kwargs)
        if self.refused and current().fallback != "error" and _call_of(layer, values) in self.refused:
            return own(layer, *args, **kwargs)
        reasons = self.reasons(layer, values if batch is None else (*values, edges))
        if reasons:
            report_fallback(self.kind.__name__, reasons)
            return own(layer, *args, **kwargs)
        own_arguments = args, kwargs
        if has_others:
            views: dict[int, Tensor] = {}
            args, kwargs = of_any_size(args, views), of_any_size(kwargs, views)
        # The layers of a size have one forward, whose graphs each call of any of them may run.
        forward.compiler.turn = turn = forward.compiler.turn + 1
        undo, failure = before_call(layer, forward), None
        forward.compiler.layer, forward.compiler.edges = layer, edges
        try:
            result = forward.run(layer, *args, **kwargs)
        except ERRORS_OF_USERS:
            raise
        except Exception as error:
            failure = error
        finally:
            forward.compiler.layer = forward.compiler.edges = None
        if failure is not None:
            if undo is not None:
                undo()
            # An error of the layer's own code is raised here.
            result = own(layer, *own_arguments[0], **own_arguments[1])
            forward.failure = f"its captured forward fails ({type(failure).__name__}: {failure})"
            self.seen, self.is_left = len(forward.compiler.graphs), True
            forward.report()
            return result
        forward.calls += 1
        if self.seen != len(forward.compiler.graphs):
            forward.calls, self.seen, self.is_left = 0, len(forward.compiler.graphs), forward.is_left
            if self.is_left:
                forward.report()
        ran = forward.ran(turn)
        if edges is not None and may_be_few and ran and all([region.is_small for region in ran]):
            self.few = edges.size(1)
        elif ran and all([region.is_refused for region in ran]) and not may_run_again(layer.training):
            self.refused.add(_call_of(layer, values))
        return result

    def reasons(self, layer: Any, values: Iterable[Any]) -> list[str]:
        """Return what the state of the layer and of torch, and the values of a call have against captured code."""
        if reasons := torch_reasons():
            return reasons
        for part in self.parts:
            if reasons := state_reasons(part):
                return reasons
        device, other = _device_of(values)
        if other is not None:
            return [f"an argument is a {other}"]
        devices = backend().devices
        if devices is None:
            return []
        if device is None:
            device = next((tensor.device for tensor in (*layer.parameters(), *layer.buffers())), None)
        return [] if device is not None and device.type in devices else [NO_DEVICE]

    def _forward_of(self, layer: Any, own: Callable[..., Any], forwards: Forwards) -> Forward | None:
        """Return the captured forward that a layer of its sizes calls from now on; None while these are not known."""
        forward = forward_of(layer, self.kind, own, forwards)
        if forward is not None:
            self.parts = _parts_of(layer)
            self.forward, self.is_left, self.refused = forward, forward.failure is not None, set()
        return forward


def _parts_of(layer: Any) -> list[dict[str, Any]]:
    """Return the attributes of the layer, and of those in it, that propagate."""
    return [part.__dict__ for part in layer.modules() if "_decomposed_layers" in part.__dict__]


def _call_of(layer: Any, values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what decides, beside the sizes of a layer, whether kernels run its programs."""
    flat = [each for value in values for each in (value if isinstance(value, (tuple, list)) else (value,))]
    kinds = [(x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in flat]
    return layer.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), *kinds


def _wrapped(own: Callable[..., Any], kind: type) -> Callable[..., Any]:
    forwards = Forwards()

    # What the function reads is in its closure, see below.
    name, is_tracing, settings, here, Tensor = MARK, torch.compiler.is_dynamo_compiling, current, step, torch.Tensor
    task, has_grad, hooks = current_graph_task_id, torch.is_grad_enabled, top_saved_tensors_hooks

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark = self.__dict__.get(name)
        if mark is None or mark.kind is not kind or is_tracing():
            return own(self, *args, **kwargs)
        # What `Mark.call` does with few edges, or on a CPU, by few operations: a step has none of ours in its caches.
        if mark.quiet > 0 and len(args) == mark.count and not kwargs:
            edges = args[mark.place]
            is_left = type(edges) is Tensor and edges.is_cuda is mark.on_gpu and edges.numel() <= mark.most
            is_alike = is_left and not here.is_refilled and mark.under is settings()
            # What is computed again for gradients is asked about, see `may_run_again`.
            if is_alike and task() < 0 and (has_grad() or not self.training) and hooks(True) is None:
                mark.quiet -= 1
                before, here.is_left = here.is_left, True
                try:
                    return own(self, *args, **kwargs)
                finally:
                    here.is_left = before
        return mark.call(self, own, forwards, args, kwargs)

    # TorchScript reads the globals of the forward, so that none is ours. Code of its own: torch.compile counts by code
    # how often it has compiled something anew, and then gives up.
    code = wrapper.__code__.replace()
    function = FunctionType(code, own.__globals__, own.__name__, None, wrapper.__closure__)
    functools.update_wrapper(function, own)
    setattr(function, WRAPPER, kind)
    return function


def _plain(layer: Any, value: Any) -> Any:
    """Return an argument of a forward: in place of a `Graph` its edges, by which programs find it again."""
    return edges_in_flow(value, layer.flow) if isinstance(value, Graph) else value


def _device_of(values: Iterable[Any]) -> tuple[torch.device | None, str | None]:
    """Return the device of the first tensor among values, and the kind of one that no graph is captured with."""
    device = None
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            if value.layout is not torch.strided:
                return None, "sparse tensor"
            device = value.device if device is None else device
        elif kind in (tuple, list, dict):
            inner, other = _device_of(value.values() if kind is dict else value)
            if other is not None:
                return None, other
            device = inner if device is None else device
        elif isinstance(value, Tensor) or kind.__name__ == "SparseTensor":
            return None, kind.__name__
    return device, None


def state_reasons(part: Mapping[str, Any]) -> list[str]:
    """Return what the attributes of a `MessagePassing` have against its captured forward, whatever the call."""
    reasons = []
    if part["_explain"]:
        reasons.append("an explainer is attached")
    if any(hooks_of(part)):
        reasons.append("message passing hooks are registered")
    if part["_decomposed_layers"] != 1:
        reasons.append(f"decomposed_layers is {part['_decomposed_layers']}")
    return reasons


def standing(layer: Any) -> tuple[bool, list[str]]:
    """Return whether programs may run for a layer, and why its calls, or parts of them, are PyG's own.

    This is what is known by its state and its device, and by what its calls have captured.
    """
    tensor = next((t for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()), torch.empty(0))
    reasons = [*state_reasons(vars(layer)), *storage_reasons(tensor.dtype, tensor.device)]
    mark = layer.__dict__[MARK]
    forward = mark.on_part if mark.seen < 0 else mark.forward
    if forward is None:
        return True, reasons or [UNCALLED]
    told = [reason for graph in forward.compiler.graphs for region in graph.regions for reason in region.reasons]
    told = [reason for reason in told if reason != NO_DEVICE]
    is_left = forward.is_left if forward is mark.on_part else mark.is_left
    return not is_left, list(dict.fromkeys([*forward.reasons(), *told, *reasons]))


def describe(layer: Any, device: torch.device | None, *args: Any, **kwargs: Any) -> Description:
    """Return what a copy of a layer would do with a call: the steps of its programs, or what was refused and where."""
    runs: dict[tuple[int, tuple[str, ...]], tuple[Program, IndexSpace, torch.dtype]] = {}
    has_grad = torch.is_grad_enabled()
    layer = copied(layer)
    for module in layer.modules():
        # A description of a whole model has come here through hooks of its own.
        for key in [key for key, hook in module._forward_pre_hooks.items() if hasattr(hook, "of_description")]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]

    def find(program: Program, rows: IndexSpace, inputs: Mapping[str, Tensor], names: Sequence[str]) -> Any:
        runs[id(program), tuple(names)] = program, rows, dtype_of(inputs)
        backend = KERNELS if rows.device.type in fused_device_types else INTERPRETER
        return backend.find(program, rows, inputs, names)

    with (
        torch.compiler.set_stance("default"),
        torch.set_grad_enabled(has_grad),
        torch.random.fork_rng(),
        local_settings(fallback="silent", check_ids="now", compile_messages=True),
        running(Backend(find, None)),
    ):
        mark, values = layer.__dict__[MARK], (*args, *kwargs.values())
        # Graphs of this call alone, and not of all that layers of its class and size were called with.
        mark._forward_of(layer, type(layer).forward.__wrapped__, Forwards())
        values = tuple(_plain(layer, value) for value in values)
        layer(*args, **kwargs)
        against = mark.reasons(layer, values)
    forward = mark.forward
    reasons = [*against] if forward is None else [*forward.reasons(), *against]
    regions = [] if forward is None else [region for graph in forward.compiler.graphs for region in graph.regions]
    lines = {id(region.program): region.line for region in regions}
    plans, is_partial = [], False
    for (number, names), (program, rows, dtype) in runs.items():
        plan, against = _plan(program, rows, dtype, names, rows.device if device is None else device, has_grad)
        reasons += [reason if reason == NO_DEVICE else f"{lines[number]}: {reason}" for reason in against]
        plans.append(plan)
        is_partial |= not against
    small = [rows.device.type == "cuda" and is_small(program, rows.sizes[E]) for program, rows, _ in runs.values()]
    if small and all(small) and current().leaves_few:
        reasons.append(SMALL)
        is_partial = False
    shown_plans = "\n".join(dict.fromkeys(plans)) or None
    is_partial &= bool(reasons)
    return Description(shown(layer), tuple(dict.fromkeys(reasons)), None, shown_plans, is_partial=is_partial)


def _plan(
    program: Program, rows: IndexSpace, dtype: torch.dtype, names: Sequence[str], device: torch.device, has_grad: bool
) -> tuple[str, Sequence[str]]:
    """Return the steps that a device would run for some outputs of a program, and what is in their way."""
    if device.type not in fused_device_types:
        return str(program), (NO_DEVICE,)
    reasons = storage_reasons(dtype, device)
    family = match_of(program, dtype, device, names)
    if family is not None:
        return f"{program}\nwhich is {family.name}: hand-written kernels run it", reasons
    steps, against = lowered(program, rows.sizes, program.features if has_grad else (), names)
    return str(program if steps is None else steps), [*reasons, *against]


def lowered(
    program: Program, sizes: Mapping[Any, int], wrt: Sequence[str], outputs: Sequence[str]
) -> tuple[Lowered | None, list[str]]:
    """Return the steps for some outputs of a program and their gradients, or None, and what is against them."""
    every = dict(program.outputs)
    program = Program(program.name, program.values, tuple((name, every[name]) for name in outputs))
    try:
        steps = lower(ALL_PASSES.run(program, sizes, tuple(wrt)), list(outputs))
    except LoweringError as refusal:
        return None, [str(refusal)]
    return steps, []
