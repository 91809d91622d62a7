"""Traces of a layer's code: how one is made, and when it holds."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.ir.domains import D, E, One, S
from pyg_dfgnn.ir.program import Program, Value
from pyg_dfgnn.ir.torch_front import FUNCTIONS, Guard, Line, Refusal, Sizes, Symbol, Tracer, fake_sizes, tidy
from pyg_dfgnn.nn.drop_ins import MARK
from pyg_dfgnn.nn.gate import HOOKS
from pyg_dfgnn.nn.messages.spec import Call, Spec, original
from pyg_dfgnn.nn.owned import OfLayers
from pyg_dfgnn.nn.reads import Check, Reads
from pyg_dfgnn.nn.shadow import Shadow, bind, getter, holds

NO_SHAPE = "has no shape before the first call"
"""How the reason ends why a layer with lazy parameters has no trace yet."""
MAX_TRACES = 16
"""Traces per layer and kind of call; a layer whose state changes at each call is PyG's then."""
_IGNORED = frozenset({"inspector", "_user_args", "_fused_user_args", "_edge_user_args", "fuse", MARK, *HOOKS})


class Source(NamedTuple):
    """Where an input of a program comes from: an argument, an entry of a pair, or a tensor of the layer.

    Attributes:
        name: Name of the argument; path of the tensor.
        entry: Positions inside lists and tuples of the argument.
        is_argument: Whether it is an argument.
        axis: Dimension of rows.
    """

    name: str
    entry: tuple[int, ...] = ()
    is_argument: bool = True
    axis: int = 0


class Trace(NamedTuple):
    """What became of a layer's code for one kind of call.

    Attributes:
        program: The program; None with reasons.
        reasons: Why there is none, with lines of the code.
        sources: Input of the program, but for a seed -> where it comes from.
        tree: Shape of what the code returns; its tensors are the outputs "0", "1", ...
        results: Output -> its dtype and the dimension of its rows.
        dtype: Floating dtype of all inputs.
        written: Attributes that the code sets: (path to the module, name, output).
        tensors: Paths, sizes, dtypes of the layer's tensors that are inputs.
        checks: Facts about the layer.
        fixed: Facts about classes, functions and globals.
        tied: Paths of which the second led to the same tensor as the first, which is an input.
        guards: Comparisons of numbers of rows that the code has made.
        types: The argument with types of edges that tables are looked up by, and their number; None if there is none.
        drafted: The program value by value as the code asked for them; None with reasons.
        lines: Value of the drafted program -> the line that asked for it.
    """

    program: Program | None
    reasons: tuple[str, ...]
    sources: dict[str, Source]
    tree: Any
    results: dict[str, tuple[torch.dtype, int]]
    dtype: torch.dtype
    written: tuple[tuple[tuple[str, ...], str, str], ...]
    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]
    checks: list[Check]
    fixed: list[tuple[Any, str, Any]]
    tied: tuple[tuple[str, str], ...] = ()
    guards: tuple[Guard, ...] = ()
    types: tuple[Source, int] | None = None
    drafted: Program | None = None
    lines: Mapping[int, Line] = MappingProxyType({})

    def __str__(self) -> str:
        return str(self.program)


class Bound(NamedTuple):
    """A trace on the tables of one layer."""

    trace: Trace
    lookups: list[Any]
    tensors: list[tuple[dict[str, Any], str, torch.Size, torch.dtype]]
    inputs: list[tuple[str, Source, dict[str, Any] | None, str]]
    tied: list[tuple[dict[str, Any], str, dict[str, Any], str]]

    def holds(self) -> bool:
        if not holds(self.lookups, self.trace.fixed):
            return False
        for table, name, shape, dtype in self.tensors:
            tensor = table.get(name)
            if tensor is None or tensor.dtype is not dtype or tensor.shape != shape:
                return False
        return all(table.get(name) is other.get(alias) for table, name, other, alias in self.tied)


def _bound(trace: Trace, layer: Any) -> Bound | None:
    lookups = bind(trace.checks, layer)
    if lookups is None:
        return None
    try:
        tensors = [(*getter(path, layer), shape, dtype) for path, shape, dtype in trace.tensors]
        inputs = [
            (name, source, *((None, "") if source.is_argument else getter(source.name, layer)))
            for name, source in trace.sources.items()
        ]
        tied = [(*getter(path, layer), *getter(alias, layer)) for path, alias in trace.tied]
    except KeyError:
        return None
    bound = Bound(trace, lookups, tensors, inputs, tied)
    return bound if bound.holds() else None


_of_layer: weakref.WeakKeyDictionary[Any, dict[Any, list[Bound]]] = weakref.WeakKeyDictionary()
_of_class: weakref.WeakKeyDictionary[type, dict[Any, list[Trace]]] = weakref.WeakKeyDictionary()
_tracing = threading.RLock()
_of_facts: OfLayers[dict[tuple[Any, ...], tuple[Spec, Bound]]] = OfLayers(dict)
"""Facts of calls of a layer that became programs -> kind and trace of such calls."""
_MOST_FACTS = 64


def known_of(layer: Any, facts: tuple[Any, ...] | None) -> tuple[Spec, Bound] | None:
    """Return the kind and the trace of an earlier call with such facts, if the trace still holds."""
    calls = _of_facts.peek(layer)
    known = None if calls is None or facts is None else calls.get(facts)
    return known if known is not None and known[1].holds() else None


def keep(layer: Any, facts: tuple[Any, ...] | None, known: tuple[Spec, Bound]) -> None:
    """Keep the kind and the trace of calls with such facts."""
    if facts is not None:
        calls = _of_facts.of(layer)
        if len(calls) >= _MOST_FACTS:
            calls.clear()
        calls[facts] = known


def clear() -> None:
    """Forget all traces."""
    _of_facts.clear()
    _of_layer.clear()
    _of_class.clear()


def trace_of(layer: Any, call: Call, spec: Spec) -> Bound:
    """Return a trace of this kind of call whose facts hold; where there is none for any numbers of sources and targets,
    one for equal numbers, if the call has these.
    """
    bound = _guarded(_trace_of(layer, call, spec), layer, call, spec)
    if bound.trace.program is not None or spec.is_square or spec.sizes[0] != spec.sizes[1]:
        return bound
    square = spec._replace(key=(*spec.key, "square"), is_square=True)
    return _guarded(_trace_of(layer, call, square), layer, call, square)


def _guarded(bound: Bound, layer: Any, call: Call, spec: Spec) -> Bound:
    """Return a trace, refused where the code would decide by the numbers of rows of the call as it did not."""
    if bound.trace.guards:
        ends = spec.sizes if layer.flow == "source_to_target" else spec.sizes[::-1]
        sizes = Sizes(call.edge_index.size(1), *ends)
        for guard in bound.trace.guards:
            if guard.ask(sizes) != guard.answer:
                return _refused_for(f"{guard.line}: decides by the number of edges or nodes")
    return bound


def _refused_for(reason: str) -> Bound:
    return Bound(refused(reason), [], [], [], [])


def _trace_of(layer: Any, call: Call, spec: Spec) -> Bound:
    """Return a trace of this kind of call whose facts hold, from the cache or new."""
    known = _of_layer.get(layer)
    if known is None:
        known = _of_layer[layer] = {}
    bounds = known.get(spec.key)
    if bounds is None:
        kind = _without_numbers(spec.key)
        if sum(_without_numbers(key) == kind for key in list(known)) >= MAX_TRACES:
            return _refused_for(
                f"more than {MAX_TRACES} values of numbers were passed, which are to be tensors, or numbers of rows of "
                "tensors that have neither one for each edge nor for each target"
            )
        bounds = known[spec.key] = []
    for bound in bounds:
        if bound.holds():
            return bound
    with _tracing:
        shared = _of_class.setdefault(type(layer), {}).setdefault(spec.key, [])
        for trace in shared:
            new = _bound(trace, layer)
            if new is not None:
                bounds.append(new)
                return new
        if len(bounds) >= MAX_TRACES:
            return _refused_for(f"more than {MAX_TRACES} states of the layer were traced")
        trace = _trace(layer, call, spec)
        unset = [name for name, parameter in layer.named_parameters() if _has_no_shape(parameter)]
        if trace.program is None and unset:
            # Not kept: the shape is there in the next call.
            return _refused_for(f"'{unset[0]}' {NO_SHAPE}")
        new = _bound(trace, layer)
        if new is None:
            return _refused_for("the layer changes while its code is traced")
        shared.append(trace)
        bounds.append(new)
        return new


def trace_with(layer: Any, program: Program) -> Trace | None:
    """Return a trace of the layer's class that has become a program."""
    traces = (trace for shared in _of_class.get(type(layer), {}).values() for trace in shared)
    return next((trace for trace in traces if trace.program is program), None)


def refused(*reasons: str) -> Trace:
    return Trace(None, reasons, {}, None, {}, torch.float32, (), (), [], [])


def argument_of(kwargs: dict[str, Any], source: Source) -> Tensor:
    tensor = kwargs[source.name]
    for entry in source.entry:
        tensor = tensor[entry]
    return tensor if source.axis == 0 else tensor.movedim(source.axis, 0)


def _trace(layer: Any, call: Call, spec: Spec) -> Trace:
    """Trace the layer's code with small and with large numbers of rows; both must agree."""
    taken = {n for key in spec.key for n in _numbers(key)} | {n for p in layer.parameters() for n in _shape(p)}
    small, values, _ = _once(layer, call, spec, taken, large=False)
    large, others, lines = _once(layer, call, spec, taken, large=True)
    if large.program is None:
        return large
    if small.program == large.program and values == others:
        return large._replace(program=tidy(large.program), drafted=large.program, lines=lines)
    different = next((i for i, (value, other) in enumerate(zip_longest(values, others)) if value != other), -1)
    reason = f"{lines.get(different, 'the call')}: what is computed depends on the number of edges or nodes"
    return large._replace(program=None, reasons=(reason, *small.reasons))


def _without_numbers(key: Any) -> Any:
    """Return the key of a kind of call but for the values of numbers that are arguments, and for numbers of rows."""
    if not isinstance(key, tuple):
        return key
    if key[:1] == ("1",):
        return "1", len(key[1]), *key[1][1:], *key[2:]
    return key[0] if key and key[0] in (int, float) else tuple(map(_without_numbers, key))


def _has_no_shape(parameter: Any) -> bool:
    return isinstance(parameter, torch.nn.UninitializedParameter)


def _shape(parameter: Any) -> Sequence[int]:
    return () if _has_no_shape(parameter) else parameter.shape


def _numbers(key: Any) -> Iterator[int]:
    if isinstance(key, int):
        yield int(key)
    elif isinstance(key, tuple):
        for part in key:
            yield from _numbers(part)


def _once(
    layer: Any, call: Call, spec: Spec, taken: set[int], *, large: bool
) -> tuple[Trace, list[Value], dict[int, Line]]:
    """Return a trace that is to be tidied, its values and the lines that asked for them."""
    own_file = inspect.getsourcefile(type(layer))
    reads = Reads(own_file)
    shadow = Shadow(layer, reads, _IGNORED)
    fakes = fake_sizes(taken, spec.is_square, large=large)
    tracer = Tracer(FUNCTIONS, shadow.tensors(), fakes, call.edge_index.device, spec.autocast, own_file)
    is_forward = layer.flow == "source_to_target"
    arguments, sources = _arguments(tracer, call, spec, row_j=0 if is_forward else 1)
    by_row = (fakes.sources, fakes.targets) if is_forward else (fakes.targets, fakes.sources)
    given = (None, None) if call.size is None else call.size
    size = [None if n is None else tracer.count(by_row[row]) for row, n in enumerate(given)]
    outputs: dict[str, int] = {}
    results: dict[str, tuple[torch.dtype, int]] = {}
    tree: Any = None
    written: list[tuple[tuple[str, ...], str, str]] = []

    def add(name: str, leaf: Any) -> None:
        if tracer.reasons:
            return
        if not isinstance(leaf, Symbol) or leaf.number is None or not leaf.dtype.is_floating_point:
            raise tracer.stop(f"{'the result' if name.isdigit() else repr(name)} is no floating tensor of the program")
        outputs[name] = tracer.emit("gather", tracer.full(leaf), attrs=(leaf.rows or One,))
        results[name] = leaf.dtype, leaf.lead

    try:
        edge_index = tracer.edge_index(layer.flow)
        with tracer, torch.enable_grad():
            returned = _run_own(layer, shadow.module, call, edge_index, size, arguments)
        tracer.reasons += shadow.hooked(reads)
        attributes, changes = shadow.written(reads)
        tracer.reasons += changes
        leaves, tree = tree_flatten(returned)
        for k, leaf in enumerate(leaves):
            add(str(k), leaf)
        for (path, name), value in attributes.items():
            written.append((path, name, f"self.{'.'.join((*path, name))}"))
            add(written[-1][2], value)
    except Refusal as refusal:
        tracer.reasons += [reason for reason in refusal.reasons if reason not in tracer.reasons]
    except Exception as error:
        tracer.refuse(f"{type(error).__name__}: {error}")
    reads.settle()
    reasons = [*tracer.reasons, *reads.undo(), *reads.reasons]
    checks, fixed = list(reads.checks.values()), list(reads.fixed.values())
    values, lines = tracer.builder.values, tracer.lines
    paths = dict(shadow.tensors().values())
    read = tuple((n, paths[n].shape, paths[n].dtype) for n in tracer.inputs if n in paths and n not in sources)
    if not reasons:
        program = tracer.builder.build(type(layer).__name__, outputs)
        named = {name: sources.get(name, Source(name, is_argument=False)) for name in program.features}
        tensors = [argument_of(call.kwargs, s) if s.is_argument else paths[s.name] for s in named.values()]
        dtype = functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
        # Kernels compute in float32 whatever the dtype, as autocast wants it.
        widest = tracer.widest if tracer.widest is not None and spec.autocast is None else dtype
        if torch.promote_types(widest, dtype) is dtype:
            types = None if tracer.types is None else (sources[tracer.types[0]], tracer.types[1])
            trace = Trace(program, (), named, tree, results, dtype, tuple(written), read, checks, fixed)
            tied = tuple(shadow.tied([name for name, *_ in read]))
            return trace._replace(tied=tied, guards=tuple(tracer.guards), types=types), values, lines
        reasons.append(f"{tracer.widest} is computed with, of inputs of {dtype}")
    return refused(*dict.fromkeys(reasons))._replace(tensors=read, checks=checks, fixed=fixed), values, lines


def _arguments(tracer: Tracer, call: Call, spec: Spec, row_j: int) -> tuple[dict[str, Any], dict[str, Source]]:
    """Return the arguments of a call as symbols, and where the inputs that they may become come from."""
    sources: dict[str, Source] = {}

    def make(name: str, value: Any, role: Any, entry: tuple[int, ...]) -> Any:
        if role is None:
            return value
        if isinstance(role, list):
            return type(value)(make(name, v, r, (*entry, k)) for k, (v, r) in enumerate(zip(value, role)))
        label = name + "".join(f"_{k}" for k in entry)
        if isinstance(role, int):
            rows = spec.lifted[name] if not entry else {entry[0]} if row_j == 0 else {0, 1}
            domain = None if len(rows) == 2 else S if rows == {row_j} else D
            base = label if domain is None else name
            for suffix in ("_i", "_j"):
                if domain is None or suffix == ("_j" if domain is S else "_i"):
                    sources[base + suffix] = Source(name, entry, axis=role)
            symbol = tracer.node_input(base, value, domain, role)
        else:
            sources[label] = Source(name, entry)
            if role == "1":
                symbol = tracer.global_input(label, value)
            else:
                symbol = tracer.row_input(label, value, E if role == "E" else D)
        symbol._is_param = type(value) is torch.nn.Parameter
        return symbol

    return {n: make(n, v, spec.roles.get(n), ()) for n, v in call.kwargs.items()}, sources


def _run_own(layer: Any, module: Any, call: Call, edge_index: Tensor, size: list[int | None], kwargs: Any) -> Any:
    """Do what PyG's `propagate` or `edge_updater` does with a plain `edge_index` and no hooks, up to `update`."""
    own, generated = layer.__dict__, original(call.own).__globals__
    if "CollectArgs" in generated:
        collect = generated["collect" if call.method == "propagate" else "edge_collect"]
        collected = collect(module, edge_index, size=size, **kwargs)._asdict()
    else:
        wanted = own["_user_args"] if call.method == "propagate" else own["_edge_user_args"]
        collected = MessagePassing._collect(module, wanted, edge_index, size, kwargs)
    data = own["inspector"].collect_param_data
    if call.method == "edge_updater":
        return module.edge_update(**data("edge_update", collected))
    messages = module.message(**data("message", collected))
    return module.aggregate(messages, **data("aggregate", collected))
