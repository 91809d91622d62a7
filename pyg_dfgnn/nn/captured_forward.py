"""The forward of a class as TorchDynamo captures it, and calls of it with the edges of a part of a graph."""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.errors import IdRangeError, StaleError, UnsupportedError
from pyg_dfgnn.fallback import NO_DEVICE, report_fallback
from pyg_dfgnn.frontend import Compiler, Region, captured
from pyg_dfgnn.graph.ends import PartitionedEdges, PartRefusedError
from pyg_dfgnn.ops.eager import intercepts_functions, is_eager
from pyg_dfgnn.ops.relational.backend import backend
from pyg_dfgnn.settings import current
from pyg_dfgnn.torch_private import (
    RecompileLimitError,
    StopRecomputationError,
    has_any_global_hook,
    is_tracing,
    tree_map,
)

WRAPPER = "_pyg_dfgnn_captures"
"""Attribute of our wrapper around the forward of a class: the class."""
ERRORS_OF_USERS = (IdRangeError, StaleError, UnsupportedError, torch.OutOfMemoryError, StopRecomputationError)
"""Errors of a captured forward that are the user's to see, or by which a checkpoint ends its second forward."""
ON_PART = "on a part of a graph its captured code runs on all processes together; pyg_dfgnn.report tells of its calls"
"""Said where one process asks what a call on a part would do."""
NO_GRAPH = "TorchDynamo captures no graph in which edges are gathered and reduced"
_TRIALS = 3
"""Calls of new graphs that are undone where they fail."""
_METHODS = ("propagate", "message", "aggregate", "update", "edge_updater", "edge_update", "message_and_aggregate")


class Forward:
    """The forward of a class, captured for layers of one size.

    Args:
        kind: The class.
        own: Its forward.
        on_parts: Whether it is called with edges of parts of graphs, for which it has to be one graph.

    Attributes:
        compiler: What has compiled its graphs.
        run: The captured function.
        deleted: Attributes that a call deletes of the layer.
        calls: Number of calls since its last graph was captured.
        failure: The reason why it is not run any more: an error that the layer's own code does not raise.
        methods: The methods of the class that PyG calls, which TorchDynamo takes for what never changes.
        in_chunks: Whether networks on edges are parts of programs, which run in chunks.
    """

    def __init__(self, kind: type, own: Callable[..., Any], on_parts: bool = False) -> None:
        self.compiler = Compiler(kind.__name__, on_parts)
        self.run = captured(own, self.compiler, whole=on_parts)
        self.methods, self.in_chunks = _methods(kind), current().edge_chunks
        self.deleted, self.calls = _deleted(kind), 0
        self.failure: str | None = None

    @property
    def is_left(self) -> bool:
        """Whether no graph of it has a program; of no edge or one a graph of its own is captured."""
        graphs = self.compiler.graphs
        return self.failure is not None or not any(x.regions or x.derived or x.is_of_one for x in graphs)

    def is_current(self, kind: type) -> bool:
        """Return whether neither the methods of a class nor the settings have changed since it was captured."""
        return self.in_chunks is current().edge_chunks and self.methods == _methods(kind)

    def ran(self, turn: int) -> list[Region]:
        """Return the regions that have run in a call."""
        return [region for graph in self.compiler.graphs for region in graph.regions if region.turn == turn]

    def reasons(self) -> list[str]:
        """Return why parts of the forward, or all of it, are PyTorch's."""
        if self.failure is not None:
            return [self.failure]
        graphs = self.compiler.graphs
        reasons = list(dict.fromkeys(reason for graph in graphs for reason in graph.reasons))
        every, inside = (sum(graph.counts[k] for graph in graphs) for k in (0, 1))
        if not reasons and self.is_left:
            breaks = self.compiler.breaks
            reasons.append(f"{NO_GRAPH}; it ends one at {breaks[0]}" if breaks else NO_GRAPH)
        elif not reasons and every > inside:
            reasons.append(f"{every - inside} of {every} gathers and reductions by edges stay PyTorch's")
        return reasons

    def report(self) -> None:
        """Say why the layer's own code runs."""
        report_fallback(self.compiler.name, self.reasons())


def _methods(kind: type) -> list[Any]:
    return [getattr(kind, name, None) for name in _METHODS]


def before_call(layer: Any, forward: Forward) -> Callable[[], None] | None:
    """Prepare a layer for a call of its captured forward; return what undoes the call while its graphs are on trial.

    Where the call fails after a part of it has run, the layer's own code runs, and is not to find batch statistics and
    generators that have moved on.
    """
    for name in forward.deleted:
        # TorchDynamo replays the deletion of what a call makes and deletes without making it.
        if not hasattr(layer, name):
            layer.__dict__[name] = None
    if forward.calls >= _TRIALS:
        return None
    devices = {tensor.device for tensor in (*layer.parameters(), *layer.buffers()) if tensor.is_cuda}
    if devices and torch.cuda.is_current_stream_capturing():
        return None
    buffers = [(buffer, buffer.detach().clone()) for buffer in layer.buffers()]
    state = torch.get_rng_state()
    states = {device: torch.cuda.get_rng_state(device) for device in devices}

    def undo() -> None:
        with torch.no_grad():
            for buffer, then in buffers:
                buffer.copy_(then)
        torch.set_rng_state(state)
        for device, own in states.items():
            torch.cuda.set_rng_state(own, device)

    return undo


def _deleted(kind: type) -> tuple[str, ...]:
    """Return the attributes that functions of a layer's class delete of the layer."""
    names = dict[str, None]()
    for base in takewhile(lambda base: base not in (MessagePassing, torch.nn.Module), kind.__mro__):
        for function in vars(base).values():
            code: Any = getattr(function, "__code__", None)
            steps = list(dis.get_instructions(code)) if code is not None and code.co_varnames else []
            for before, step in zip(steps, steps[1:]):
                if step.opname == "DELETE_ATTR" and before.argval == code.co_varnames[0]:
                    names[step.argval] = None
    return tuple(names)


class Forwards(dict[Any, Forward]):
    """The captured forwards of a class by the sizes of its layers."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        _every.add(self)


_every: weakref.WeakSet[Forwards] = weakref.WeakSet()
_of_drop_ins: dict[type, Forwards] = {}


def clear() -> None:
    """Forget all captured forwards, and the graphs that their regions keep."""
    for forwards in _every:
        for forward in forwards.values():
            for region in (region for graph in forward.compiler.graphs for region in graph.regions):
                region.forget()
        forwards.clear()


def forward_of(
    layer: Any, kind: type, own: Callable[..., Any], forwards: Forwards, on_parts: bool = False
) -> Forward | None:
    """Return the captured forward for the sizes of a layer; None while these are not known."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    if any(torch.nn.parameter.is_lazy(tensor) for _, tensor in tensors):
        return None
    sizes = on_parts, current().edge_chunks, *((name, tensor.shape) for name, tensor in tensors)
    forward = forwards.get(sizes)
    if forward is None or not forward.is_current(kind):
        forward = forwards[sizes] = Forward(kind, own, on_parts)
    return forward


def torch_reasons() -> list[str]:
    """Return what the state of torch has against captured code, whatever the layer."""
    if not is_eager() or is_tracing() or intercepts_functions():
        return ["the call is traced, transformed or intercepted"]
    return ["hooks on all modules are registered"] if has_any_global_hook() else []


def of_any_size(value: Any, views: dict[int, Tensor]) -> Any:
    """Return arguments with a view in place of each parameter, whose sizes TorchDynamo takes for fixed."""
    kind = type(value)
    if kind is torch.nn.Parameter:
        if id(value) not in views:
            views[id(value)] = value.view_as(value)
        return views[id(value)]
    if kind is dict:
        return {name: of_any_size(part, views) for name, part in value.items()}
    return kind([of_any_size(part, views) for part in value]) if kind in (tuple, list) else value


def run_on_part(
    layer: Any,
    kind: type,
    own: Callable[..., Any],
    forwards: Forwards,
    args: Any,
    kwargs: Any,
    edges: PartitionedEdges,
    reasons: Sequence[str],
) -> tuple[Any, Forward | None]:
    """Return what a call with the edges of a part of a graph returns, for which programs run too.

    Processes fetch features of each other, so that the state of a layer and of torch has to be alike on all of them.

    Args:
        layer: The layer.
        kind: Its class.
        own: The forward.
        forwards: Captured forwards of the class.
        args: Arguments of the call.
        kwargs: Further ones.
        edges: The edges among them.
        reasons: What is against captured code.

    Returns:
        What the call returns, and the captured forward, also one that has failed; None where there is none.
    """
    part: Any = edges.part
    plain, devices, against = part.edge_index, backend().devices, [*reasons]
    if not edges.is_whole:
        against.append("the edges are not those of the part")
    if not current().compile_messages:
        against.append("settings(compile_messages=False)")
    if devices is not None and plain.device.type not in devices:
        against.append(NO_DEVICE)
    if not against and not part.compiles_alike:
        against.append("a process has fewer than two nodes or edges")
    forward = None if against else forward_of(layer, kind, own, forwards, True)
    if forward is None or forward.failure is not None:
        report_fallback(
            kind.__name__, against or (forward.reasons() if forward is not None else ["a size is not known"])
        )
        return own(layer, *args, **kwargs), forward
    compiler, known = forward.compiler, len(forward.compiler.graphs)
    compiler.turn = turn = compiler.turn + 1
    compiler.layer, compiler.of_thread.edges = layer, edges
    given = _swapped((of_any_size(args, {}), of_any_size(kwargs, {})), edges, plain)
    undo = before_call(layer, forward)
    failure: Exception | None = None
    try:
        result = forward.run(layer, *given[0], **given[1])
    except Exception as error:
        if isinstance(error, ERRORS_OF_USERS) and not isinstance(error, PartRefusedError):
            raise
        failure = error
    finally:
        compiler.layer = compiler.of_thread.edges = None
    forward.calls = forward.calls + 1 if len(compiler.graphs) == known else 0
    if failure is not None:
        if undo is not None:
            undo()
        # An error of the layer's own code is raised here.
        result = own(layer, *args, **kwargs)
    if isinstance(failure, RecompileLimitError):
        # Those that are there run on.
        report_fallback(kind.__name__, ["layers of its size have more captured forwards than TorchDynamo keeps"])
        return result, forward
    if failure is not None:
        line = f"{type(failure).__name__}: {failure}".splitlines()[0]
        forward.failure = f"its captured forward fails on a part ({line})"
    elif len(compiler.graphs) > known and _kept_by(layer, plain, edges):
        forward.failure = "it keeps its edges, which are those of a part"
    ran = forward.ran(turn)
    left = [region for region in ran if region.reasons]
    if forward.is_left:
        forward.report()
    elif left and (len(left) == len(ran) or current().fallback != "error"):
        # What runs in part is no error.
        report_fallback(kind.__name__, list(dict.fromkeys(reason for region in left for reason in region.reasons)))
    return (_swapped(result, plain, edges) if failure is None else result), forward


def run_pygs_on_part(
    layer: Any, forward: Any, args: Any, kwargs: Any, edges: PartitionedEdges, reasons: Sequence[str]
) -> Any:
    """Return what PyG's forward of a drop-in returns, as :func:`run_on_part` does.

    Args:
        layer: The drop-in.
        forward: PyG's forward, bound to it.
        args: As for :func:`run_on_part`.
        kwargs: As there.
        edges: As there.
        reasons: As there.
    """
    kind, own = type(layer), forward.__func__
    own = own.__wrapped__ if hasattr(own, WRAPPER) else own
    forwards = _of_drop_ins.setdefault(kind, Forwards())
    return run_on_part(layer, kind, own, forwards, args, kwargs, edges, reasons)[0]


def _kept_by(layer: Any, plain: Tensor, edges: PartitionedEdges) -> bool:
    """Return whether a layer has kept plain edges as an attribute, where those of the part are put."""
    found = False
    for module in layer.modules():
        for name, value in vars(module).items():
            if value is plain:
                vars(module)[name], found = edges, True
    return found


def _swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return arguments, or results, with a tensor in the place of another one."""
    return tree_map(lambda each: new if each is old else each, value)
