"""Programs run by their steps, with gradients; what is prepared is kept with the rows of a graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.dispatch.traversal import storage_reasons
from pyg_dfgnn.errors import UnsupportedError, check_tensor, check_type
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import IndexSpace, One, Program, interpret
from pyg_dfgnn.ir.interpreter import check_inputs
from pyg_dfgnn.ir.kernel_steps import Lowered
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.program import SEED
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.ir.simplify import remove_dead
from pyg_dfgnn.ir.trace import Relational
from pyg_dfgnn.ops.eager import aligned, apply_of, differentiable, is_eager, tell_of_torch, unpack_saved
from pyg_dfgnn.ops.function import wide
from pyg_dfgnn.ops.relational.compile import Functions
from pyg_dfgnn.runtime.launcher import compiled_together
from pyg_dfgnn.settings import current

_logger = logging.getLogger("pyg_dfgnn")
_logged: set[str] = set()
ALL_PASSES = Passes()


class Prepared:
    """A program on a graph, ready to run on tensors of a dtype.

    The lists of the rows keep it, so it does not keep the rows.

    Args:
        program: The program.
        rows: The rows of its domains.
        dtype: Dtype of the inputs.
        wrt: Inputs whose gradients will be asked for.
        passes: The passes that make the steps.
        alone: Whether the gradients are the outputs, computed from the inputs and the gradients `d_...` of the
            program's outputs: nothing is left by a forward pass.

    Attributes:
        lowered: The steps.
        inputs: Names of the inputs.
        outputs: Names of the outputs.
        forward: (rows, inputs in their order) to the outputs and what the backward pass reads.
        backward: (rows, list of what it reads, which it empties so that each can be let go, gradients of the outputs)
            to the gradient of each input, None for one that is not asked for.
        non_differentiable: Places of the outputs that have no gradient in what is asked for.
        passes: See there.
        gradients: The program of the gradients in the order of `wrt`, which reads inputs and the gradients `d_...`.
        kept: Places of the inputs that are saved: those that `gradients` or the backward pass reads.
        saved: Of each tensor that the backward pass reads whether it is an input, and its place among those that are
            kept or among the others.

    Raises:
        Refusal: Some value has no kernel.
    """

    def __init__(
        self,
        program: Program,
        rows: IndexSpace,
        dtype: torch.dtype,
        wrt: tuple[str, ...],
        passes: Passes = ALL_PASSES,
        alone: bool = False,
    ) -> None:
        self.program, self.inputs, self.wrt, self.passes = program, list(program.inputs), wrt, passes
        self.outputs = [name for name, _ in program.outputs]
        gradients = ["d_" + name for name in self.outputs]
        wanted = ["d_" + name if name in wrt else None for name in self.inputs]
        differentiable = program.differentiable_inputs.values()
        self.non_differentiable = [i for i, names in enumerate(differentiable) if names.isdisjoint(wrt)]
        whole = passes.run(program, rows.sizes, wrt)
        if alone:
            self.inputs += gradients
            self.outputs, wanted = ["d_" + name for name in wrt], []
            whole = selected(whole, self.outputs)
        self.lowered: Lowered = lower(whole, self.outputs)
        self.gradients = _gradients_of(whole, wrt)
        read = self.gradients.inputs.keys() | {*self.lowered.saved}
        self.kept = [place for place, name in enumerate(program.inputs) if name in read]
        names = [self.inputs[place] for place in self.kept]
        others = [name for name in self.lowered.saved if name not in names]
        self.saved = [(name in names, (names if name in names else others).index(name)) for name in self.lowered.saved]
        functions = Functions(self.lowered, rows, dtype)
        with compiled_together(rows.device):
            self.forward = functions.forward(self.inputs, self.outputs)
            self.backward = functions.backward(gradients, wanted)

    def __call__(self, rows: IndexSpace, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, with gradients, of inputs that are as those that it was found for.

        Args:
            rows: The rows.
            inputs: As for :func:`apply`.
        """
        rows.graph.on_this_stream()
        rows.lists.on_this_stream()
        # To autograd no result depends on the others.
        tensors = [
            inputs[name].detach() if inputs[name].requires_grad and name not in self.wrt else inputs[name]
            for name in self.inputs
        ]
        results = _run(self, rows, *tensors) if self.wrt else self.forward(rows, *tensors)[0]
        return dict(zip(self.outputs, results))


# Batches of a kind have the same program.
@lru_cache(256)
def _gradients_of(whole: Program, wrt: tuple[str, ...]) -> Program:
    """Return the part of a differentiated program that gives the gradients in `wrt`."""
    outputs = dict(whole.outputs)
    # Names that no program has whose gradients are these.
    renamed = tuple((f"{whole.name}.{name}", outputs["d_" + name]) for name in wrt)
    return remove_dead(Program(whole.name, whole.values, renamed))


def gradients(
    program: Program | Relational, graph: Graph, inputs: Mapping[str, Tensor], grads: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return the gradient of each input that needs one by generated kernels, as its derivatives are.

    Args:
        program: As for :func:`apply`.
        graph: The graph.
        inputs: As for :func:`apply`.
        grads: The gradient of each output.

    Returns:
        Name -> gradient; None where no kernels run the program.
    """
    if graph.is_static or not graph.is_measured:
        return None
    rows, wrt = index_space_of(graph), tuple(name for name, tensor in inputs.items() if tensor.requires_grad)
    if not wrt:
        return {}
    key = "gradients", id(program), wrt, *((name, tensor.shape) for name, tensor in inputs.items())

    def find() -> tuple[Any, Program]:
        whole = program_for(program, {name: tensor for name, tensor in inputs.items() if name != SEED}, None)
        return program, _gradients_of(ALL_PASSES.run(whole, rows.sizes, wrt), wrt)

    own = rows.derived(key, find)[1]
    every = {**inputs, **{"d_" + name: grad for name, grad in grads.items()}}
    own_inputs = {name: every[name] for name in own.inputs}
    run = _known_call(own, rows, own_inputs, None, ALL_PASSES).prepared
    return None if isinstance(run, tuple) else dict(zip(wrt, run(rows, own_inputs).values()))


def again(prepared: Prepared, rows: IndexSpace, saved: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the gradient of each input by a program of its own, so that it can be differentiated.

    Args:
        prepared: What has run.
        rows: The rows.
        saved: The inputs that are kept, in their order.
        grads: The gradients of the outputs.
    """
    program, kept = prepared.gradients, [prepared.inputs[place] for place in prepared.kept]
    every = dict(zip(kept, saved)) | {"d_" + n: grad for n, grad in zip(prepared.outputs, grads)}
    inputs = {name: every[name] for name in program.inputs}
    run = _known_call(program, rows, inputs, None, prepared.passes).prepared
    if isinstance(run, tuple):
        tell_of_torch(f"the program {prepared.program.name!r} ({'; '.join(run)})")
        results = interpret(program, rows, dict(zip(inputs, wide(list(inputs.values())))))
    else:
        results = run(rows, inputs)
    like, by_name = grads[0], dict(zip(prepared.wrt, results.values()))
    return tuple(by_name[n].to(like.dtype) if n in by_name else None for n in prepared.inputs)


def _again(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    prepared, rows = ctx.call
    return None, None, *again(prepared, rows, ctx.saved_tensors, grads)


class _ProgramFunction(Function):
    """A prepared program: (prepared, rows, inputs) to the outputs."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, rows: IndexSpace, *tensors: Tensor) -> Any:
        outputs, saved = prepared.forward(rows, *tensors)
        others = [tensor for (is_kept, _), tensor in zip(prepared.saved, saved) if not is_kept]
        # Inputs as they are, of which the gradients are functions.
        ctx.save_for_backward(*[tensors[place] for place in prepared.kept], *others)
        if prepared.non_differentiable:
            ctx.mark_non_differentiable(*(outputs[place] for place in prepared.non_differentiable))
        # With the graph of the rows, which has what the kernels read.
        ctx.call = prepared, rows
        return outputs

    @staticmethod
    @differentiable(_again)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        prepared, rows = ctx.call
        saved, first = unpack_saved(ctx, grads), len(prepared.kept)
        saved = [aligned(saved[k]) if is_kept else saved[first + k] for is_kept, k in prepared.saved]
        return None, None, *prepared.backward(rows, saved, *grads)


_run = apply_of(_ProgramFunction)


def index_space_of(
    graph: Graph, *, source_type: Tensor | None = None, target_type: Tensor | None = None, num_types: int = 0
) -> IndexSpace:
    """Return the rows of a graph, which keeps their lists for as long as the types stay as they are.

    Args:
        graph: As for :class:`~pyg_dfgnn.ir.IndexSpace`.
        source_type: Type of each source, int64 or int32 [N_src], for programs with the domain Ts.
        target_type: Type of each target, int64 or int32 [N_dst], for programs with the domain Td.
        num_types: Number of node types.

    Raises:
        TypeError: The types are no integer tensors, or `num_types` is no integer.
        ValueError: The types have another shape or are out of range.
    """
    return IndexSpace(graph, source_type=source_type, target_type=target_type, num_types=num_types, kept=True)


def selected(program: Program, outputs: Sequence[str]) -> Program:
    """Return the program with some of its outputs."""
    names = dict(program.outputs)
    return Program(program.name, program.values, tuple((name, names[name]) for name in outputs))


def program_for(program: Program | Relational, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None) -> Program:
    """Return the program of these shapes that gives some of its outputs."""
    if isinstance(program, Relational):
        if not program.takes(inputs.keys()):
            raise ValueError(f"'inputs' needs {', '.join(program.domains)} (got {', '.join(inputs) or 'none'})")
        domains = program.domains
        program = program.program(**{n: tuple(x.shape[domains[n] is not One :]) for n, x in inputs.items()})
    if outputs is None:
        return program
    names = dict(program.outputs)
    if unknown := [name for name in outputs if name not in names]:
        raise ValueError(f"'outputs' needs {', '.join(names)} (got {', '.join(unknown)})")
    return selected(program, outputs)


def _prepare(
    program: Program, rows: IndexSpace, dtype: torch.dtype, wrt: tuple[str, ...], passes: Passes, alone: bool = False
) -> Prepared | tuple[str, ...]:
    """Return what runs a program, or every reason why no kernels do."""
    reasons = storage_reasons(dtype, rows.device)
    reasons += ["the edges of the graph change"] if rows.graph.is_static else []
    if reasons:
        return tuple(reasons)
    try:
        return Prepared(program, rows, dtype, wrt, passes, alone)
    except LoweringError as refusal:
        return (str(refusal),)


class _KnownCall:
    """Program found for calls with inputs of the same facts, which have been checked.

    Attributes:
        source: The program of the call, whose number is a key and which so stays alive.
        program: The program of these shapes that gives the outputs that are wanted.
        prepared: What runs it, or every reason why no kernels do.
    """

    def __init__(self, source: Any, program: Program, prepared: Prepared | tuple[str, ...]) -> None:
        self.source, self.program, self.prepared = source, program, prepared


def _known_call(
    program: Program | Relational,
    rows: IndexSpace,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] | None,
    passes: Passes,
) -> _KnownCall:
    """Return what runs a call, kept with the rows by all that the answer depends on."""
    if type(rows) is not IndexSpace:
        check_type("rows", rows, IndexSpace, "the IndexSpace of a graph, from index_space_of(graph)")
    if outputs is not None and type(outputs) is not tuple:
        check_type("outputs", outputs, (tuple, list), "a list of names")
        outputs = tuple(outputs)
    has_grad = torch.is_grad_enabled()
    facts: list[Any] = [id(program), outputs, None if passes is ALL_PASSES else passes]
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            check_tensor(name, tensor)
        facts += name, tensor.shape, tensor.dtype, tensor.device, has_grad and tensor.requires_grad
    if not is_eager():
        check_type("program", program, (Program, Relational), "a Program or a function under @relational")
        return _KnownCall(program, program_for(program, inputs, outputs), ("operators are traced or transformed",))
    key = tuple(facts)
    known: _KnownCall | None = rows.lists.get(key)
    return (
        rows.derived(key, lambda: _prepare_call(program, rows, inputs, outputs, passes, has_grad))
        if known is None
        else known
    )


def _prepare_call(
    program: Program | Relational,
    rows: IndexSpace,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] | None,
    passes: Passes,
    has_grad: bool,
) -> _KnownCall:
    check_type("program", program, (Program, Relational), "a Program or a function under @relational")
    whole = program_for(program, inputs, outputs)
    wrt: tuple[str, ...] = ()
    if has_grad:
        names = frozenset[str]().union(*whole.differentiable_inputs.values())
        wrt = tuple(n for n, t in inputs.items() if t.requires_grad and n in names)
    dtype = next((t.dtype for t in inputs.values() if t.is_floating_point()), torch.float32)
    prepared = _prepare(whole, rows, dtype, wrt, passes)
    if not isinstance(prepared, tuple):
        # A seed is drawn when it is known that kernels run.
        seed = {SEED: torch.zeros(1, dtype=torch.int64, device=rows.device)} if SEED in whole.inputs else {}
        check_inputs(whole, rows, {**seed, **inputs})
    return _KnownCall(program, whole, prepared)


def prepared_for(
    program: Program | Relational,
    rows: IndexSpace,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] | None = None,
    passes: Passes = ALL_PASSES,
) -> Prepared | tuple[str, ...]:
    """Return what would run a program on these inputs, whose seed may be missing, or all reasons why no kernels do.

    Raises:
        TypeError: As for :func:`apply`.
        ValueError: As for :func:`apply`.
    """
    return _known_call(program, rows, inputs, outputs, passes).prepared


def apply(
    program: Program | Relational,
    rows: IndexSpace,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] | None = None,
    passes: Passes = ALL_PASSES,
) -> dict[str, Tensor]:
    """Run a program with gradients: by generated kernels, or where these cannot by the interpreter.

    Args:
        program: The program, or the function that is traced for the shapes of the inputs. What was prepared for it is
            found by the object: keep it.
        rows: The rows of the graph, from :func:`index_space_of`.
        inputs: Name -> tensor [rows, *shape] of one dtype; [*shape] on the domain of one row.
        outputs: Names of the outputs that are wanted; all by default.
        passes: The passes that make the kernels' steps; all by default.

    Returns:
        Name -> tensor of each output, shaped as inputs are.

    Raises:
        TypeError: An input is no tensor, inputs have several dtypes, or `outputs` is no list.
        ValueError: An output is unknown; an input is missing, unknown, or has another shape or device; or the graph
            lacks a domain.
        UnsupportedError: No kernels run the program, with `settings(fallback="error")`.
    """
    call = _known_call(program, rows, inputs, outputs, passes)
    prepared = call.prepared
    if isinstance(prepared, tuple):
        _report(call.program.name, prepared, rows.device)
        return interpret(call.program, rows, inputs)
    if len(inputs) < len(prepared.inputs):
        # The seed is missing.
        check_inputs(call.program, rows, inputs)
    return prepared(rows, inputs)


def run(program: Program, rows: IndexSpace, inputs: Mapping[str, Tensor], wrt: tuple[str, ...] | None) -> list[Tensor]:
    """Return the outputs of a program, or some of its gradients, without recording any: what traced calls run.

    Args:
        program: The program; what was prepared for it is found by the object.
        rows: The rows of the graph.
        inputs: As for :func:`apply`; for gradients also that of each output, under its name after "d_".
        wrt: Inputs whose gradients are wanted, which are computed from `inputs` alone; None for the outputs.
    """
    dtype = next((tensor.dtype for tensor in inputs.values()), torch.float32)
    alone = wrt is not None
    key = "program", id(program), dtype, wrt
    # With the program, whose number the key has.
    _, prepared = rows.derived(key, lambda: (program, _prepare(program, rows, dtype, wrt or (), ALL_PASSES, alone)))
    if wrt is None:
        check_inputs(program, rows, inputs)
    if isinstance(prepared, Prepared):
        rows.graph.on_this_stream()
        return list(prepared.forward(rows, *(inputs[name] for name in prepared.inputs))[0])
    _report(program.name, prepared, rows.device)
    if wrt is not None:
        program = selected(ALL_PASSES.run(program, rows.sizes, wrt), ["d_" + name for name in wrt])
        # Of the inputs it may not read all.
        inputs = {name: inputs[name] for name in program.inputs}
    return list(interpret(program, rows, inputs).values())


def _report(name: str, reasons: tuple[str, ...], device: torch.device) -> None:
    """Tell the user, as `settings(fallback=...)` asks, that the interpreter runs a program."""
    fallback = current().fallback
    if device.type == "cpu" and not torch.cuda.is_available():
        return
    if fallback == "error":
        raise UnsupportedError(reasons, f"the program {name!r}")
    message = f"the program {name!r} runs without fused kernels: {'; '.join(reasons)}"
    if fallback == "log" and message not in _logged:
        _logged.add(message)
        _logger.warning("%s", message)
