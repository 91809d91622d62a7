"""One call of a compiled layer: as a program on kernels, or by PyG's function with the reasons."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import interpret
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ir.rows import Rows
from pyg_dfgnn.nn.drop_ins import Description
from pyg_dfgnn.nn.fallback import NO_DEVICE, report_fallback
from pyg_dfgnn.nn.gate import HOOKS, transform_reasons
from pyg_dfgnn.nn.messages.spec import Call, Spec, signature_of, spec_of
from pyg_dfgnn.nn.messages.trace import Trace, argument_of, trace_of
from pyg_dfgnn.settings import settings

NO_KERNELS = "no kernels are generated from programs yet"


class Backend(NamedTuple):
    """What runs programs.

    Attributes:
        reasons: (program, device, dtype) -> why it cannot run one.
        apply: (program, rows, inputs) -> outputs.
    """

    reasons: Callable[[Program, torch.device, torch.dtype], Sequence[str]]
    apply: Callable[[Program, Rows, Mapping[str, Tensor]], Mapping[str, Tensor]]


def _kernel_reasons(program: Program, device: torch.device, dtype: torch.dtype) -> list[str]:
    return [NO_DEVICE] if device.type != "cuda" else [NO_KERNELS]


KERNELS = Backend(_kernel_reasons, interpret)
INTERPRETER = Backend(lambda program, device, dtype: (), interpret)
_backend = KERNELS


@contextmanager
def interpreted() -> Iterator[None]:
    """Run programs by the interpreter, on any device and slowly: what tests compare with PyG."""
    global _backend
    before, _backend = _backend, INTERPRETER
    try:
        yield
    finally:
        _backend = before


watchers: list[Callable[[Any, str, Trace | None, Sequence[str]], None]] = []
"""Called with the layer, the method, the trace and the reasons of each call of a compiled layer."""


def describe(layer: Any, device: torch.device | None, *args: Any, **kwargs: Any) -> Description:
    """Return what a copy of a layer would do with a call: the programs that it runs, or what was refused and where."""
    calls: list[tuple[Trace | None, Sequence[str]]] = []
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        # A description of a whole model has come here through hooks of its own.
        for key in [key for key, hook in module._forward_pre_hooks.items() if hasattr(hook, "of_description")]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]

    def watch(other: Any, method: str, trace: Trace | None, reasons: Sequence[str]) -> None:
        if other is layer:
            calls.append((trace, tuple(reasons)))

    watchers.append(watch)
    try:
        with torch.no_grad(), torch.random.fork_rng(), settings(fallback="silent"):
            layer(*args, **kwargs)
    finally:
        watchers.remove(watch)
    reasons = [reason for _, against in calls for reason in against if device is None or reason != NO_DEVICE]
    programs = [trace for trace, _ in calls if trace is not None and trace.program is not None]
    if device is not None:
        reasons += [r for t in programs for r in _backend.reasons(t.program, device, t.dtype)]  # type: ignore[arg-type]
    if not calls:
        reasons.append("this forward does not pass messages")
    plan = "\n".join(dict.fromkeys(map(str, programs))) or None
    return Description(str(layer), tuple(dict.fromkeys(reasons)), None, plan)


def rows_of_graph(graph: Graph) -> Rows:
    """Return the rows of a graph, made once."""
    rows = _rows.get(graph)
    if rows is None:
        rows = _rows[graph] = Rows(graph)
    return rows


_rows: weakref.WeakKeyDictionary[Graph, Rows] = weakref.WeakKeyDictionary()


def _layer_reasons(layer: Any, call: Call) -> list[str]:
    """Return what the state of the layer and of torch have against compiled messages."""
    own = layer.__dict__
    reasons = transform_reasons()
    if own["_explain"]:
        reasons.append("an explainer is attached")
    if any(own[name] for name in HOOKS):
        reasons.append("message passing hooks are registered")
    if own["_decomposed_layers"] != 1:
        reasons.append(f"decomposed_layers is {own['_decomposed_layers']}")
    if torch.nn.modules.module._has_any_global_hook():
        reasons.append("hooks on all modules are registered")
    edge_index = call.edge_index
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        reasons.append(f"edge_index is a {type(edge_index).__name__}")
    elif edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in (torch.int64, torch.int32):
        reasons.append("edge_index is no int64 or int32 tensor of shape [2, E]")
    elif torch.is_autocast_enabled(edge_index.device.type):
        reasons.append("autocast is enabled")
    return reasons


def _update_reasons(layer: Any, call: Call) -> list[str]:
    late = signature_of(layer, call.method).late if call.method == "propagate" else ()
    return [f"update reads '{name}' of each edge" for name in late if name[-2:] in ("_i", "_j") and name != "size_i"]


def call_layer(layer: Any, call: Call) -> Any:
    """Run a call of a compiled layer: as a program, or by PyG's function with the reasons reported."""
    reasons = [*_layer_reasons(layer, call), *_update_reasons(layer, call)]
    trace, outputs = None, None
    if not reasons and call.edge_index.size(1) > 0:
        trace, outputs = _attempt(layer, call, reasons)
    for watcher in watchers:
        watcher(layer, call.method, trace, reasons)
    if outputs is None:
        if reasons:
            report_fallback(type(layer).__name__, reasons)
        kwargs = call.kwargs if call.size is None else {**call.kwargs, "size": call.size}
        return call.own(layer, call.edge_index, **kwargs)
    return outputs[0]


def _attempt(layer: Any, call: Call, reasons: list[str]) -> tuple[Trace | None, tuple[Any] | None]:
    """Run a call as a program; with reasons, added to the list, there is no result."""
    spec = spec_of(layer, call, reasons)
    if spec is None:
        return None, None
    bound = trace_of(layer, call, spec)
    trace = bound.trace
    if trace.program is None:
        reasons += trace.reasons
        return trace, None
    device = call.edge_index.device
    reasons += _backend.reasons(trace.program, device, trace.dtype)
    inputs: dict[str, Tensor] = {}
    for name, source, table, key in bound.inputs:
        tensor = argument_of(call.kwargs, source) if table is None else table[key]
        if tensor.device != device:
            reasons.append(f"'{source.name}' is on {tensor.device} and edge_index on {device}")
        inputs[name] = tensor if tensor.dtype is trace.dtype else tensor.to(trace.dtype)
    if reasons:
        return trace, None
    is_forward = layer.flow == "source_to_target"
    num_src, num_dst = spec.sizes if is_forward else spec.sizes[::-1]
    graph = Graph.resolve(call.edge_index, num_src, num_dst, False, not is_forward)
    results = dict(_backend.apply(trace.program, rows_of_graph(graph), inputs))
    for name, (dtype, axis) in trace.results.items():
        result = results[name] if axis == 0 else results[name].movedim(0, axis)
        results[name] = result.to(dtype).contiguous()
    for path, name, output in trace.written:
        module = layer
        for part in path:
            module = module._modules[part]
        module.__dict__[name] = results[output]
    returned = tree_unflatten([results[str(k)] for k in range(trace.tree.num_leaves)], trace.tree)
    if call.method == "propagate" and type(layer).update is not MessagePassing.update:
        returned = layer.update(returned, **_update_arguments(layer, call, spec))
    return trace, (returned,)


def _update_arguments(layer: Any, call: Call, spec: Spec) -> dict[str, Any]:
    i, j = (1, 0) if layer.flow == "source_to_target" else (0, 1)
    given = {
        **call.kwargs,
        **{"edge_index": call.edge_index, "edge_index_i": call.edge_index[i], "edge_index_j": call.edge_index[j]},
        **{"index": call.edge_index[i], "ptr": None, "adj_t": None, "size": list(spec.sizes)},
        **{"size_i": spec.sizes[i], "size_j": spec.sizes[j], "dim_size": spec.sizes[i]},
    }
    data: dict[str, Any] = layer.inspector.collect_param_data("update", given)
    return data
