"""One call of a compiled layer: as a program on kernels, or by PyG's function with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.fallback import NO_DEVICE, SMALL, report_fallback
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.made import Seen, graph_of
from pyg_dfgnn.ir import interpret
from pyg_dfgnn.ir.domains import E
from pyg_dfgnn.ir.program import SEED, Program
from pyg_dfgnn.ir.rows import Rows
from pyg_dfgnn.nn.gate import hooks_of, transform_reasons
from pyg_dfgnn.nn.messages.adjacency import adjacency_reasons, is_sparse_matrix, with_edges
from pyg_dfgnn.nn.messages.edits import may_wait_in
from pyg_dfgnn.nn.messages.lazy import EdgeValue, Pending, join, left_by, may_wait
from pyg_dfgnn.nn.messages.refusals import with_lines
from pyg_dfgnn.nn.messages.spec import Call, Spec, facts_of, signature_of, spec_of
from pyg_dfgnn.nn.messages.trace import NO_SHAPE, Trace, argument_of, keep, known_of, trace_of
from pyg_dfgnn.nn.owned import OfLayers
from pyg_dfgnn.ops.core import draw_seed
from pyg_dfgnn.ops.relational import rows_of
from pyg_dfgnn.ops.relational.backend import KERNELS, backend, is_small
from pyg_dfgnn.ops.visits import leave
from pyg_dfgnn.settings import current

_refused: dict[tuple[Any, ...], tuple[Program, tuple[str, ...]]] = {}
"""Number of a program, device, and which inputs need gradients -> the program, which so stays alive, and reasons."""
_MOST_REFUSED = 1024


_seen: OfLayers[Seen] = OfLayers(dict)
"""The edges that layers were called with."""


class Outcome(NamedTuple):
    """What became of a call.

    Attributes:
        trace: Its trace; None if there was no attempt at one.
        returned: What the program has returned, in a tuple; None if PyG's function is to run.
        is_settled: Whether further calls of the kind will end in PyG's function too.
    """

    trace: Trace | None = None
    returned: tuple[Any] | None = None
    is_settled: bool = False


watchers: list[Callable[[Any, str, Outcome, Sequence[str]], None]] = []
"""Called with the layer, the method, the outcome and the reasons of each call of a compiled layer."""


last: OfLayers[dict[str, tuple[tuple[str, ...], bool]]] = OfLayers(dict)
"""Of the last call of each method of a layer: the reasons why PyG's code ran, and whether its code has a program."""

_settled: OfLayers[set[tuple[Any, ...]]] = OfLayers(set)
"""The kinds of calls of a layer of which no program is made."""


def kind_of(layer: Any, method: str, kwargs: Mapping[str, Any], edges: Any) -> tuple[Any, ...]:
    """Return what calls have in common that end alike: PyG's function is right for all others too."""
    facts = [(name, type(value), getattr(value, "dtype", None)) for name, value in kwargs.items()]
    device = edges.device.type if isinstance(edges, Tensor) else None
    return method, device, layer.training, torch.is_grad_enabled(), *facts


def is_settled(layer: Any, method: str, kwargs: Mapping[str, Any], edges: Any) -> bool:
    """Return whether PyG's function takes a call without a further question."""
    kinds = _settled.peek(layer)
    if not kinds or watchers or current().fallback == "error" or current().edge_chunks:
        return False
    return kind_of(layer, method, kwargs, edges) in kinds and not any(map(_may_wait, kwargs.values()))


def is_pygs(layer: Any) -> bool:
    """Return whether PyG's functions took the last calls of a layer, and will take the next."""
    if not _settled.peek(layer) or watchers or current().edge_chunks:
        return False
    return all(reasons for reasons, _ in last.of(layer).values())


def state_reasons(layer: Any) -> list[str]:
    """Return what the state of a layer has against compiled messages whatever the call."""
    own, reasons = layer.__dict__, list[str]()
    if own["_explain"]:
        reasons.append("an explainer is attached")
    if any(hooks_of(own)):
        reasons.append("message passing hooks are registered")
    if own["_decomposed_layers"] != 1:
        reasons.append(f"decomposed_layers is {own['_decomposed_layers']}")
    return reasons


def late_reasons(layer: Any, method: str) -> list[str]:
    """Return what the layer's update asks for that is there for each edge only."""
    return [f"update reads '{name}' of each edge" for name in signature_of(layer, method).late]


def layer_reasons(layer: Any, call: Call) -> list[str]:
    """Return what the state of the layer and of torch have against compiled messages."""
    reasons = [*transform_reasons(), *state_reasons(layer)]
    if torch.nn.modules.module._has_any_global_hook():
        reasons.append("hooks on all modules are registered")
    edges, edge_index = call.edges, call.edge_index
    if is_sparse_matrix(edges):
        return [*reasons, *adjacency_reasons(layer, call)]
    if isinstance(edges, EdgeIndex) and layer.fuse and layer.SUPPORTS_FUSED_EDGE_INDEX:
        reasons.append("edge_index is an EdgeIndex that message_and_aggregate takes")
    elif type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        reasons.append(f"edge_index is a {type(edge_index).__name__}")
    elif edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in (torch.int64, torch.int32):
        reasons.append("edge_index is no int64 or int32 tensor of shape [2, E]")
    return reasons


def call_layer(layer: Any, call: Call) -> Any:
    """Run a call of a compiled layer: as a program, or by PyG's function with the reasons reported."""
    call = _read(layer, call)
    reasons, given = layer_reasons(layer, call), call
    if not reasons and is_sparse_matrix(call.edges):
        call = with_edges(layer, call)
    outcome, own = Outcome(), None
    if reasons or call.edge_index.size(1) == 0:
        reasons += late_reasons(layer, call.method)
    else:
        outcome = _attempt(layer, call, reasons)
        if reasons and reasons[-1].endswith(NO_SHAPE):
            # PyG's function gives lazy parameters their shapes; its result is that of layers that are no programs.
            own = (_run_own(layer, given),)
            reasons.clear()
            outcome = _attempt(layer, call, reasons)
    for watcher in watchers:
        watcher(layer, call.method, outcome, reasons)
    last.of(layer)[call.method] = tuple(reasons), outcome.trace is None or outcome.trace.program is not None
    if outcome.returned is not None:
        return outcome.returned[0]
    if outcome.is_settled:
        _settled.of(layer).add(kind_of(layer, call.method, call.kwargs, given.edges))
    if reasons:
        report_fallback(type(layer).__name__, reasons)
    return _run_own(layer, given) if own is None else own[0]


def _run_own(layer: Any, call: Call) -> Any:
    """Call PyG's function."""
    kwargs = call.kwargs
    if any(map(_may_wait, kwargs.values())):
        kwargs = tree_map_only(EdgeValue, EdgeValue.value, kwargs)
    return call.own(layer, call.edges, **kwargs, **call.declared)


def _may_wait(value: Any) -> bool:
    return type(value) is EdgeValue or (type(value) in (tuple, list) and any(map(_may_wait, value)))


def _read(layer: Any, call: Call) -> Call:
    """Return a call in which values of edges that no program can be joined to are plain tensors."""
    if not any(map(_may_wait, call.kwargs.values())):
        return call
    lifted = {name for name, _ in signature_of(layer, call.method).lifted}
    kwargs = dict(call.kwargs)
    for name, value in kwargs.items():
        stays = type(value) is EdgeValue and value.pending is not None and name not in lifted
        if not stays and _may_wait(value):
            kwargs[name] = tree_map_only(EdgeValue, EdgeValue.value, value)
    return call._replace(kwargs=kwargs)


def _attempt(layer: Any, call: Call, reasons: list[str]) -> Outcome:
    """Run a call as a program; with reasons, added to the list, it returns nothing."""
    facts = facts_of(layer, call)
    known = known_of(layer, facts)
    if known is None:
        reasons += late_reasons(layer, call.method)
        spec = None if reasons else spec_of(layer, call, reasons)
        if spec is None:
            return Outcome()
        bound = trace_of(layer, call, spec)
        if bound.trace.program is None:
            reasons += bound.trace.reasons
            return Outcome(bound.trace, is_settled=True)
        known = spec, bound
        keep(layer, facts, known)
    spec, bound = known
    trace = bound.trace
    assert trace.program is not None
    if is_small(trace.program, call.edge_index.size(1)) and leave(layer, call.edge_index, call.method):
        reasons.append(SMALL)
        return Outcome(trace)
    device = call.edge_index.device
    devices = backend().devices
    has_kernels = devices is None or device.type in devices
    if not has_kernels:
        reasons.append(NO_DEVICE)
    inputs: dict[str, Tensor] = {}
    for name, source, table, key in bound.inputs:
        tensor = argument_of(call.kwargs, source) if table is None else table[key]
        if tensor.device != device:
            reasons.append(f"'{source.name}' is on {tensor.device} and edge_index on {device}")
        inputs[name] = tensor if tensor.dtype is trace.dtype else tensor.to(trace.dtype)
    if trace.types is not None and (types := argument_of(call.kwargs, trace.types[0])).device != device:
        reasons.append(f"'{trace.types[0].name}' is on {types.device} and edge_index on {device}")
    if reasons:
        return Outcome(trace, is_settled=not has_kernels)
    run = _Runnable(layer, call, spec, trace, inputs)
    waiting = run.waiting()
    now = [name for name, _ in trace.program.outputs if name not in waiting]
    results = run.results(now, reasons) if now else {}
    if reasons:
        return Outcome(trace, is_settled=run.is_refused)
    for name in waiting:
        results[name] = run.left(name)
    for path, name, output in trace.written:
        module = layer
        for part in path:
            module = module._modules[part]
        module.__dict__[name] = results[output]
    count = trace.tree.num_leaves
    leaves = [results[str(k)] for k in range(count)]
    returned = leaves[0] if count == 1 and trace.tree.is_leaf() else tree_unflatten(leaves, trace.tree)
    updates = "update" in layer.__dict__ or type(layer).update is not MessagePassing.update
    if call.method == "propagate" and updates:
        returned = layer.update(returned, **_update_arguments(layer, call, spec))
    return Outcome(trace, (returned,))


class _Runnable:
    """A trace with the inputs of a call."""

    def __init__(self, layer: Any, call: Call, spec: Spec, trace: Trace, inputs: dict[str, Tensor]) -> None:
        self.layer, self.call, self.spec, self.trace, self.inputs = layer, call, spec, trace, inputs
        self.is_forward = layer.flow == "source_to_target"
        self.device = call.edge_index.device
        self.graph: Graph | None = None
        self.is_refused = False

    @property
    def program(self) -> Program:
        assert self.trace.program is not None
        return self.trace.program

    def waiting(self) -> list[str]:
        """Return the outputs that need not be computed before something reads them: attributes, and new values of
        edges, with a row per edge, of a layer whose forward runs.
        """
        written = self.call.method == "edge_updater" or self.trace.written
        # A program with types of edges is not joined to others.
        if not may_wait(self.layer) or not written or self.trace.types is not None or not may_wait_in(self.layer):
            return []
        # Edits of tensors of inference mode leave no trace.
        if any(tensor.is_inference() for tensor in (self.call.edge_index, *self.inputs.values())):
            return []
        names = [output for _, _, output in self.trace.written]
        names += [str(k) for k in range(self.trace.tree.num_leaves)] if self.call.method == "edge_updater" else []
        domains = {name: self.program.values[i].domain for name, i in self.program.outputs}
        return [n for n in names if domains[n] is E and self.trace.results[n] == (self.trace.dtype, 0)]

    def draw(self) -> None:
        """Draw the seed of the program's dropout, once for all of its outputs."""
        if SEED in self.program.inputs and SEED not in self.inputs:
            self.inputs[SEED] = draw_seed(self.device)

    def left(self, name: str) -> EdgeValue:
        """Return an output that is computed later."""
        self.draw()

        def compute() -> Tensor:
            reasons: list[str] = []
            results = self.results([name], reasons)
            if not reasons:
                return results[name]
            report_fallback(type(self.layer).__name__, reasons)
            if not name.isdigit():
                rows = self.rows()
                if rows is None:
                    raise UnsupportedError(reasons, what=f"'{name}' of {type(self.layer).__name__}")
                return interpret(self.program, rows, self.inputs)[name]
            value: Tensor = tree_flatten(_run_own(self.layer, self.call))[0][int(name)]
            return value

        sizes, dtype = self.spec.sizes, self.trace.dtype
        pending = Pending(self.program, name, self.inputs, self.call.edge_index, sizes, dtype, compute)
        return left_by(self.layer, EdgeValue.of(pending, self.program.values[dict(self.program.outputs)[name]].shape))

    def results(self, names: Sequence[str], reasons: list[str]) -> dict[str, Tensor]:
        """Return some outputs, or add to the reasons why no kernels give them."""
        program, inputs = self.program, self.inputs
        outputs: Mapping[str, Tensor] | None = None
        waiting = {name: tensor for name, tensor in inputs.items() if isinstance(tensor, EdgeValue)}
        if waiting:
            if any(value.pending and self._joins(program, name, value) for name, value in waiting.items()):
                outputs = self._apply(*join(program, inputs, self._joins), names, [])
            if outputs is None:
                inputs |= {name: value.value() for name, value in waiting.items()}
        outputs = self._apply(program, inputs, names, reasons) if outputs is None else outputs
        if outputs is None:
            return {}
        results = {}
        for name in names:
            dtype, axis = self.trace.results[name]
            result = outputs[name]
            if axis != 0 or result.dtype is not dtype:
                result = result.movedim(0, axis).to(dtype)
            results[name] = result.contiguous()
        return results

    def _joins(self, program: Program, name: str, value: EdgeValue) -> bool:
        """Whether the program of a value of edges can become part of one that has it as an input."""
        pending = value.pending
        if pending is None or not value.is_current() or program.values[program.inputs[name]].domain is not E:
            return False
        call = self.call.edge_index, self.spec.sizes, self.trace.dtype
        return pending.edges is call[0] and (pending.sizes, pending.dtype) == call[1:]

    def _apply(
        self, program: Program, inputs: dict[str, Tensor], names: Sequence[str], reasons: list[str]
    ) -> Mapping[str, Tensor] | None:
        """Return outputs of a program, None with the reasons why no kernels give them."""
        # What runs in chunks depends on how many edges there are.
        knows = bool(_refused) and backend() is KERNELS and not current().edge_chunks
        if knows and (kind := self._kind(program, inputs, names)) in _refused:
            reasons += _refused[kind][1]
            self.is_refused = True
            return None
        rows = self.rows()
        if rows is None:
            reasons.append(
                "edge_index is another tensor than before, whose edges the host may not wait for in a capture"
            )
            return None
        run = backend().find(program, rows, inputs, names)
        if not callable(run):
            kind = self._kind(program, inputs, names)
            wrt = [name for name, needed in zip(inputs, kind[-1]) if needed]
            against = with_lines(self.layer, program, rows.sizes, wrt, names, run)
            # The next call needs no graph to be told.
            if len(_refused) < _MOST_REFUSED:
                _refused[kind] = program, tuple(against)
            reasons += against
            self.is_refused = True
            return None
        # Not before: what PyG's code draws where kernels refuse is what it draws without us.
        self.draw()
        if SEED in program.inputs:
            inputs = {**inputs, SEED: self.inputs[SEED]}
        if self.spec.autocast is None:
            return run(rows, inputs)
        # The program has one dtype; what autocast makes of the results is part of the trace.
        with torch.autocast(self.device.type, enabled=False):
            return run(rows, inputs)

    def _kind(self, program: Program, inputs: Mapping[str, Tensor], names: Sequence[str]) -> tuple[Any, ...]:
        """Return what calls have in common that are refused alike, last which inputs need gradients."""
        has_grad = torch.is_grad_enabled()
        needs = tuple([has_grad and tensor.requires_grad for tensor in inputs.values()])
        return id(program), self.device.type, tuple(names), needs

    def rows(self) -> Rows | None:
        """Return the rows of the call's edges; None if only a look at them could tell which these are."""
        call = self.call
        num_src, num_dst = self.spec.sizes if self.is_forward else self.spec.sizes[::-1]
        types = None
        if self.trace.types is not None:
            source, number = self.trace.types
            types = argument_of(call.kwargs, source), number
        if not isinstance(call.edges, EdgeIndex) or types is not None:
            graph = graph_of(_seen.of(self.layer), call.edge_index, num_src, num_dst, not self.is_forward, types)
        else:
            graph = Graph.of(call.edges, num_src, num_dst, flow=self.layer.flow)
        # Nothing else keeps the graph of tensors of inference mode.
        self.graph = graph
        return None if graph is None else rows_of(graph)


def _update_arguments(layer: Any, call: Call, spec: Spec) -> dict[str, Any]:
    i, j = (1, 0) if layer.flow == "source_to_target" else (0, 1)
    given = {
        **call.kwargs,
        **{"edge_index": call.edges, "edge_index_i": call.edge_index[i], "edge_index_j": call.edge_index[j]},
        **{"index": call.edge_index[i], "ptr": None, "adj_t": None, "size": list(spec.sizes)},
        **{"size_i": spec.sizes[i], "size_j": spec.sizes[j], "dim_size": spec.sizes[i]},
    }
    data: dict[str, Any] = layer.inspector.collect_param_data("update", given)
    return data
