"""Compiled messages while torch.compile traces: the program of a layer through the one registered operator.

Two things happen in the graph that torch.compile makes. PyG's own function is traced as it would be without us: what it
reads of the layer, of its classes and of Python are the facts that the program rests on, and torch.compile guards them.
Then the operator takes the text of the program, the edges and the inputs, and its results are returned. Nothing reads
those of PyG's function, so the compiler removes what computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.dispatch.traversal import storage_reasons
from pyg_dfgnn.fallback import NO_DEVICE, report_fallback
from pyg_dfgnn.ir.domains import D, E, One, R, S, U, V
from pyg_dfgnn.ir.lanes import Refusal
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.program import SEED, Program
from pyg_dfgnn.nn.gate import export_reasons, transform_reasons
from pyg_dfgnn.nn.messages.call import layer_reasons
from pyg_dfgnn.nn.messages.spec import Call, signature_of, spec_of
from pyg_dfgnn.nn.messages.trace import trace_of
from pyg_dfgnn.ops.function import run_traced
from pyg_dfgnn.ops.relational.backend import KERNELS, backend, stored_reasons
from pyg_dfgnn.ops.relational.program import selected
from pyg_dfgnn.ops.relational.traced import Name
from pyg_dfgnn.settings import current, quiet

_ROWS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061)
"""Numbers of rows that the layer's code is traced with, of which no size of an argument may be one."""
_EDGES_PER_NODE = 16
"""What the lowering is asked for; the operator asks again with the numbers of its graph."""


def call_traced(layer: Any, own: Callable[..., Any], method: str, args: Any, kwargs: Any) -> Any:
    """Run a call of a compiled layer that torch.compile traces: through the operator, or by PyG's function.

    Args:
        layer: The layer.
        own: PyG's function.
        method: `propagate` or `edge_updater`.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    edges = args[0] if args else kwargs["edge_index"]
    # Values of edges join no program here: what makes them is the compiler's to fuse.
    is_plain = isinstance(edges, Tensor) and not isinstance(edges, EdgeIndex) and edges.layout is torch.strided
    if method != "propagate" or len(args) > 1 or not is_plain or edges.dim() != 2 or not current().compile_messages:
        return own(layer, *args, **kwargs)
    lifted, is_forward, node_dim = layer._pyg_dfgnn_wanted()
    declared = kwargs.get("size")
    data = {name: value for name, value in kwargs.items() if name not in ("edge_index", "size")}
    sizes = _sizes(data, lifted, node_dim, declared)
    if sizes is None or _is_one(edges.size(1), 0):
        return own(layer, *args, **kwargs)
    first, second = sizes
    counts, names = (edges.size(1), second if is_forward else first), [name for name, _ in lifted]
    described = tuple(
        [(name, _described(value, node_dim if name in names else None, counts)) for name, value in data.items()]
    )
    is_declared = None if declared is None else tuple([size is not None for size in declared])
    is_there = all([tensor.device == edges.device for tensor in _tensors(data)])
    is_one = _is_one(first, second)
    plan = layer._pyg_dfgnn_plan(described, is_declared, is_one, edges.dtype, edges.device, is_there)
    reasons, name, sources, types, dtype, results, is_single, late = plan
    if reasons:
        report_fallback(type(layer).__name__, reasons)
    if not name:
        return own(layer, *args, **kwargs)
    with quiet():
        own(layer, *args, **kwargs)
    tensors = [_input(layer, data, source) for source in sources]
    inputs = [tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in tensors]
    rows = [first, second] if is_forward else [second, first]
    anchors = [edges] if types is None else [edges, _input(layer, data, types[0])]
    outputs = run_traced(name, anchors, rows if types is None else [*rows, types[1]], (), inputs)
    returned: Any = tuple(
        [(x if axis == 0 else x.movedim(0, axis).contiguous()).to(kind) for x, (kind, axis) in zip(outputs, results)]
    )
    returned = returned[0] if is_single else returned
    return returned if late is None else layer.update(returned, **{each: data[each] for each in late})


# Marked constant: torch.compile runs this function while it traces and leaves nothing of it in the graph.
@torch.compiler.assume_constant_result
def _pyg_dfgnn_wanted(layer: Any) -> tuple[tuple[tuple[str, int], ...], bool, int]:
    """Return the arguments with features of nodes and the rows that read them, the direction, the nodes' dimension."""
    return signature_of(layer, "propagate").lifted, layer.flow == "source_to_target", layer.node_dim


@torch.compiler.assume_constant_result
def _pyg_dfgnn_plan(
    layer: Any,
    described: tuple[tuple[str, Any], ...],
    is_declared: tuple[bool, ...] | None,
    is_one: bool,
    index: torch.dtype,
    device: torch.device,
    is_there: bool,
) -> tuple[Any, ...]:
    """Return what the operator is called with.

    Args:
        layer: The layer.
        described: Arguments as :func:`_described` gives them.
        is_declared: Which numbers of nodes are declared.
        is_one: Whether both numbers of nodes are one.
        index: Dtype of the edges.
        device: Device of the edges.
        is_there: Whether all arguments are on it.

    Returns:
        Reasons why PyG's function runs; the name of the program, empty if PyG's function runs; its inputs, each by
        the fields of its `Source`; where types of edges come from and their number, or None; the dtype of the inputs;
        dtype and dimension of the rows of each result; whether there is one that is no tuple; the arguments of the
        layer's own update, or None.
    """
    nothing = "", (), None, None, (), True, None
    if backend().devices is not None and device.type not in (backend().devices or ()):
        return (NO_DEVICE,), *nothing
    # Under a transform no example can be made.
    if against := [*transform_reasons(), *export_reasons()]:
        return tuple(against), *nothing
    call = _example(layer, described, is_declared, is_one, index, device)
    reasons = layer_reasons(layer, call)
    if not is_there:
        reasons.append("the arguments are on several devices")
    updates = "update" in layer.__dict__ or type(layer).update is not MessagePassing.update
    late = None if not updates else tuple(layer.inspector.get_param_names("update"))
    given = [name for name, _ in described]
    reasons += [f"update reads '{name}', while compiling" for name in late or () if name not in given]
    spec = None if reasons else spec_of(layer, call, reasons)
    if spec is None:
        return tuple(reasons), *nothing
    trace = trace_of(layer, call, spec).trace
    if trace.program is None:
        return trace.reasons, *nothing
    # The example has other numbers of rows than the call.
    reasons += [f"{guard.line}: decides by the number of edges or nodes, while compiling" for guard in trace.guards]
    if SEED in trace.program.inputs:
        reasons.append("messages draw random numbers, while compiling")
    count = trace.tree.num_leaves
    is_single = trace.tree.is_leaf()
    if not is_single and tree_unflatten(list(range(count)), trace.tree) != tuple(range(count)):
        reasons.append("what is returned is neither a tensor nor a tuple of tensors, while compiling")
    program = selected(trace.program, [str(k) for k in range(count)])
    if not reasons and backend() is KERNELS:
        tensors = {name: _input(layer, call.kwargs, source) for name, source in trace.sources.items()}
        wrt = tuple(name for name in program.inputs if tensors[name].requires_grad) if torch.is_grad_enabled() else ()
        num_types = 0 if trace.types is None else trace.types[1]
        reasons += [*storage_reasons(trace.dtype, device), *_refusals(program, wrt, max(spec.sizes), num_types)]
    if reasons:
        return tuple(reasons), *nothing
    name = Name("edges" if trace.types is None else "relations", layer.flow != "source_to_target", program).text
    sources = tuple(tuple(trace.sources[each]) for each in program.inputs)
    types = None if trace.types is None else (tuple(trace.types[0]), trace.types[1])
    results = tuple(trace.results[str(k)] for k in range(count))
    return (), name, sources, types, trace.dtype, results, is_single, late


METHODS = (_pyg_dfgnn_wanted, _pyg_dfgnn_plan)
"""Methods, by their own names, of classes of compiled layers. Of a function that is marked constant, torch 2.11 takes a
module as `self` and not as an argument.
"""


def _example(
    layer: Any,
    described: Sequence[tuple[str, Any]],
    is_declared: tuple[bool, ...] | None,
    is_one: bool,
    index: torch.dtype,
    device: torch.device,
) -> Call:
    """Return a call with arguments of the same kind, without data."""
    taken = {size for _, part in described for size in _numbers(part)}
    edges, first, second = [size for size in _ROWS if size not in taken][:3]
    rows = first, first if is_one else second
    signature = dict(signature_of(layer, "propagate").lifted)
    targets = rows[1 if layer.flow == "source_to_target" else 0]

    def make(part: Any, row: int | None) -> Any:
        kind, *rest = part
        if kind in ("tuple", "list"):
            parts = [make(p, None if row is None else k) for k, p in enumerate(rest)]
            return tuple(parts) if kind == "tuple" else parts
        if kind != "tensor":
            return rest[0] if kind == "value" else object()
        of, axis, shape, dtype, needs_grad = rest
        size = {"N": rows[row or 0], "E": edges, "D": targets, "1": None}[of]
        shape = shape if size is None else (*shape[:axis], size, *shape[axis:])
        return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(needs_grad)

    kwargs = {name: make(part, signature.get(name)) for name, part in described}
    edge_index = torch.empty(2, edges, dtype=index, device=device)
    size = None if is_declared is None else [n if is_known else None for n, is_known in zip(rows, is_declared)]
    declared = {} if size is None else {"size": size}
    return Call("propagate", type(layer).propagate, edge_index, declared, kwargs, edge_index, size)


def _numbers(part: Any) -> list[int]:
    if isinstance(part, tuple):
        return [number for each in part for number in _numbers(each)]
    return [part] if isinstance(part, int) else []


def _refusals(program: Program, wrt: tuple[str, ...], nodes: int, num_types: int) -> list[str]:
    """Return why kernels would not take a program or that of its gradients."""
    rows = {One: 1, S: nodes, D: nodes, E: _EDGES_PER_NODE * nodes}
    rows |= {R: num_types, U: rows[E], V: rows[E]} if num_types else {}
    names = [name for name, _ in program.outputs]
    try:
        steps = [lower(Passes().run(program, rows), names)]
        if wrt:
            gradients = ["d_" + name for name in wrt]
            steps.append(lower(selected(Passes().run(program, rows, wrt), gradients), gradients))
    except Refusal as refusal:
        return [str(refusal)]
    return [reason for each in steps for reason in stored_reasons(each.edge_rows)]


def _input(layer: Any, data: Mapping[str, Any], source: tuple[str, tuple[int, ...], bool, int]) -> Tensor:
    """Return what a `Source` names: of the arguments or of the layer."""
    name, entry, is_argument, axis = source
    tensor = data[name] if is_argument else _tensor_of(layer, name)
    for place in entry:
        tensor = tensor[place]
    return tensor if axis == 0 else tensor.movedim(axis, 0)


def _tensor_of(layer: Any, path: str) -> Tensor:
    """Return a parameter or a buffer of a layer."""
    value = layer
    for part in path.split("."):
        value = getattr(value, part)
    tensor: Tensor = value
    return tensor


def _is_one(first: Any, second: Any) -> bool:
    """Whether two numbers of rows are known to be one."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(first == second))


def _sizes(data: Mapping[str, Any], lifted: Any, node_dim: int, declared: Any) -> tuple[Any, Any] | None:
    """Return the numbers of nodes that row 0 and row 1 of the edges point to; None if they do not agree."""
    sizes = [None, None] if declared is None else list(declared)
    for name, row in lifted:
        value = data.get(name)
        parts = [(row, value)] if isinstance(value, Tensor) else []
        if isinstance(value, (tuple, list)):
            parts = [(1 - row, value[1 - row]), (row, value[row])]
        for place, part in parts:
            size = part.size(node_dim) if isinstance(part, Tensor) else None
            if sizes[place] is None:
                sizes[place] = size
            elif size is not None and not _is_one(sizes[place], size):
                return None
    first, second = (n if n is not None else m for n, m in (sizes, sizes[::-1]))
    return None if first is None or second is None else (first, second)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in an argument."""
    if isinstance(value, Tensor):
        return [value]
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _described(value: Any, node_dim: int | None, counts: tuple[Any, Any]) -> Any:
    """Return an argument as plain data: a tensor by what its rows are, their dimension, its other sizes and its dtype.

    Args:
        value: The argument.
        node_dim: Dimension of the nodes, if it has features of these.
        counts: Numbers of edges and of targets.
    """
    if isinstance(value, Tensor):
        rows, axis = "1", 0
        if node_dim is not None:
            rows, axis = "N", node_dim % value.dim()
        elif value.dim() > 0:
            rows = "E" if _is_one(value.size(0), counts[0]) else "D" if _is_one(value.size(0), counts[1]) else "1"
        # The length of a range is a constant to torch.compile, as a width has to be.
        shape = tuple([len(range(n)) for dim, n in enumerate(value.shape) if rows == "1" or dim != axis])
        return "tensor", rows, axis, shape, value.dtype, value.requires_grad
    if isinstance(value, (tuple, list)):
        parts = [_described(part, node_dim, counts) for part in value]
        return ("tuple" if isinstance(value, tuple) else "list", *parts)
    if isinstance(value, int) and not isinstance(value, bool):
        return "value", len(range(value)) if value >= 0 else -len(range(-value))
    if value is None or isinstance(value, (bool, float, str, torch.dtype)):
        return "value", value
    return ("unknown",)
