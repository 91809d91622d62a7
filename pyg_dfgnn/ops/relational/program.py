"""Programs run by their steps, with gradients; what is prepared is kept with the rows of a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.dispatch.traversal import storage_reasons
from pyg_dfgnn.errors import UnsupportedError, check_tensor, check_type
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import One, Program, Rows, interpret
from pyg_dfgnn.ir.interpreter import check_inputs, run_values
from pyg_dfgnn.ir.lanes import Refusal
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.steps import Lowered, Step
from pyg_dfgnn.ir.trace import Relational
from pyg_dfgnn.ops.eager import aligned, apply_of, is_eager, once_differentiable, unpack_saved
from pyg_dfgnn.ops.relational import products, traversal
from pyg_dfgnn.ops.relational.traversal import Run
from pyg_dfgnn.runtime.launcher import compiled_together
from pyg_dfgnn.settings import current

_logger = logging.getLogger("pyg_dfgnn")
_logged: set[str] = set()
ALL_PASSES = Passes()
_Todo = tuple[Run | Step, list[str]]
"""The launch of a step, or the step for torch, and the buffers that none reads after it."""


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
        outputs: Names of the outputs.
        non_differentiable: Places of the outputs that have no gradient in what is asked for.

    Raises:
        Refusal: Some value has no kernel.
    """

    def __init__(
        self,
        program: Program,
        rows: Rows,
        dtype: torch.dtype,
        wrt: tuple[str, ...],
        passes: Passes = ALL_PASSES,
        alone: bool = False,
    ) -> None:
        self.program, self.dtype, self.wrt = program, dtype, wrt
        self.outputs, self.gradients = [name for name, _ in program.outputs], ["d_" + name for name in wrt]
        differentiable = program.differentiable_inputs.values()
        self.non_differentiable = [i for i, names in enumerate(differentiable) if names.isdisjoint(wrt)]
        whole = passes.run(program, rows.sizes, wrt)
        if alone:
            self.outputs, self.gradients = self.gradients, []
            whole = selected(whole, self.outputs)
        self.lowered: Lowered = lower(whole, self.outputs)
        self._like = torch.empty(0, dtype=dtype, device=rows.device)
        values = {name: program.values[i] for name, i in program.inputs.items()}
        self._expected = {
            name: (
                torch.Size((*(() if value.domain is One else (rows.sizes[value.domain],)), *value.shape)),
                torch.int64 if value.is_seed else dtype,
            )
            for name, value in values.items()
        }
        self._static: dict[str, Tensor] = {}
        for step in self.lowered.static:
            self._static |= run_values(step.program, rows, {}, self._like.float())
        results = {name: self.lowered.outputs[name][0] for name in (*self.outputs, *self.gradients)}
        kept = {*self.lowered.saved, *(results[name] for name in self.outputs)}
        with compiled_together(rows.device):
            self._forward = self._prepared(self.lowered.forward, rows, kept)
            self._backward = self._prepared(self.lowered.backward, rows, {results[name] for name in self.gradients})

    def takes(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether inputs are as :func:`~pyg_dfgnn.ir.interpreter.check_inputs` wants them."""
        if inputs.keys() != self._expected.keys():
            return False
        device = self._like.device
        for name, (shape, dtype) in self._expected.items():
            tensor = inputs[name]
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
                return False
        return True

    def _prepared(self, steps: Sequence[Step], rows: Rows, kept: set[str]) -> list[_Todo]:
        """Return the launches of steps, having kept some buffers."""
        runs, later = list[_Todo](), kept | self._static.keys()
        exact = {buffer.name for buffer in self.lowered.buffers.values() if buffer.is_exact}
        compares = self.lowered.compares
        for step in reversed(steps):
            done = {*step.reads, *step.writes} - later
            later |= done
            run: Run | Step = step
            if step.kind in ("traversal", "map"):
                written = [self.lowered.buffers[name] for name in step.writes]
                if step.sums_outer:
                    # They are made of those of pieces.
                    written = [buffer for buffer in written if buffer.domain is not step.domain]
                shapes = {b.name: (rows.sizes[b.domain], *b.shape) for b in written}
                empty = {n: partial(_empty, self._like, shape, n in exact) for n, shape in shapes.items()}
                run = partial(_launch, traversal.prepare(step, exact, compares, rows, self.dtype), empty)
            elif step.kind in ("linear", "outer"):
                run = products.prepare(step, exact, rows, self.dtype)
            runs.append((run, sorted(done)))
        return runs[::-1]

    def _go(
        self,
        steps: Sequence[tuple[Run | Step, list[str]]],
        rows: Rows,
        buffers: dict[str, Tensor],
        names: Sequence[str],
    ) -> list[Tensor]:
        for run, done in steps:
            if isinstance(run, Step):
                exact = {name for name in run.writes if self.lowered.buffers[name].is_exact}
                operands = {name: buffers[name].to(self.dtype) for name in run.reads}
                written = run_values(run.program, rows, operands, self._like, exact)
                buffers |= {name: aligned(tensor) for name, tensor in written.items()}
            else:
                run(buffers)
            for name in done:
                del buffers[name]
        results = []
        for name in names:
            buffer, shape = self.lowered.outputs[name]
            tensor = buffers[buffer].to(self.dtype)
            lead = () if self.lowered.buffers[buffer].domain is One else tensor.shape[:1]
            # No view, which autograd would not let a user edit in place.
            results.append(torch.ops.aten._unsafe_view(tensor.contiguous(), (*lead, *shape)))
        return results

    def _read(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of inputs, as kernels read them: rows on every domain, aligned."""
        read = {name: tensor for name, tensor in inputs.items() if name in self.lowered.buffers}
        shared = {name for name in read if self.lowered.buffers[name].domain is One}
        return {n: aligned(t[None] if n in shared else t) for n, t in read.items()} | self._static

    def forward(self, rows: Rows, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs, and what the backward pass reads."""
        buffers = self._read(inputs)
        outputs = self._go(self._forward, rows, buffers, self.outputs)
        return outputs, [buffers[name] for name in self.lowered.saved]

    def backward(self, rows: Rows, saved: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the inputs `wrt`; `saved` is emptied, so that what was read can be let go."""
        buffers = self._read({"d_" + name: g for name, g in zip(self.outputs, gradients, strict=True)})
        buffers |= dict(zip(self.lowered.saved, saved, strict=True))
        saved.clear()
        return self._go(self._backward, rows, buffers, self.gradients)


def _empty(like: Tensor, shape: tuple[int, ...], is_exact: bool) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32 if is_exact else like.dtype)


def _launch(run: Run, empty: Mapping[str, Callable[[], Tensor]], buffers: dict[str, Tensor]) -> None:
    """Run a step that writes to new buffers."""
    buffers |= {name: make() for name, make in empty.items()}
    run(buffers)


class _Run(Function):
    """A prepared program: (prepared, rows, names of inputs, inputs) to the outputs."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, rows: Rows, names: tuple[str, ...], *tensors: Tensor) -> Any:
        outputs, saved = prepared.forward(rows, dict(zip(names, tensors)))
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(outputs[place] for place in prepared.non_differentiable))
        # With the graph of the rows, which has what the kernels read.
        ctx.call = prepared, rows, names
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        prepared, rows, names = ctx.call
        gradients = prepared.backward(rows, unpack_saved(ctx, grads), grads)
        by_name = dict(zip(prepared.wrt, gradients, strict=True))
        return None, None, None, *(by_name.get(name) for name in names)


_run = apply_of(_Run)


def rows_of(
    graph: Graph, *, source_type: Tensor | None = None, target_type: Tensor | None = None, num_types: int = 0
) -> Rows:
    """Return the rows of a graph, which keeps their lists for as long as the types stay as they are.

    Args:
        graph: As for :class:`~pyg_dfgnn.ir.Rows`.
        source_type: Type of each source, int64 or int32 [N_src], for programs with the domain Ts.
        target_type: Type of each target, int64 or int32 [N_dst], for programs with the domain Td.
        num_types: Number of node types.

    Raises:
        TypeError: The types are no integer tensors, or `num_types` is no integer.
        ValueError: The types have another shape or are out of range.
    """
    return Rows(graph, source_type=source_type, target_type=target_type, num_types=num_types, kept=True)


def selected(program: Program, outputs: Sequence[str]) -> Program:
    """Return the program with some of its outputs."""
    names = dict(program.outputs)
    return Program(program.name, program.values, tuple((name, names[name]) for name in outputs))


def _selected(
    program: Program | Relational, rows: Rows, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None
) -> Program:
    """Return the program of these shapes that gives some of its outputs; the same object for the same question."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if isinstance(program, Relational):
        shapes = tuple((n, tuple(inputs[n].shape[d is not One :])) for n, d in program.domains.items() if n in inputs)
    key = "traced", id(program), shapes, None if outputs is None else tuple(outputs)

    def build() -> tuple[Any, Program]:
        if isinstance(program, Relational) and not program.takes(inputs.keys()):
            raise ValueError(f"'inputs' needs {', '.join(program.domains)} (got {', '.join(inputs) or 'none'})")
        whole = program.program(**{n: shape for n, shape in shapes}) if isinstance(program, Relational) else program
        names = dict(whole.outputs)
        if outputs is not None:
            if unknown := [name for name in outputs if name not in names]:
                raise ValueError(f"'outputs' needs {', '.join(names)} (got {', '.join(unknown)})")
            whole = selected(whole, outputs)
        # With what the key is the number of, which so stays alive.
        return program, whole

    return rows.derived(key, build)[1]


def _prepared(
    program: Program, rows: Rows, dtype: torch.dtype, wrt: tuple[str, ...], passes: Passes, alone: bool = False
) -> Prepared | tuple[str, ...]:
    """Return what runs a program, or every reason why no kernels do; kept with the rows."""

    def build() -> Any:
        reasons = storage_reasons(dtype, rows.device)
        reasons += ["the edges of a static graph change"] if rows.graph.is_static else []
        if reasons:
            return tuple(reasons)
        try:
            return Prepared(program, rows, dtype, wrt, passes, alone)
        except Refusal as refusal:
            return (str(refusal),)

    return rows.derived(("prepared", id(program), dtype, wrt, passes, alone), build)


def prepared_for(
    program: Program | Relational,
    rows: Rows,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] | None = None,
    passes: Passes = ALL_PASSES,
) -> Prepared | tuple[str, ...]:
    """Return what would run a program on these inputs, or every reason why no kernels do."""
    return _found(program, rows, inputs, outputs, passes)[1]


def _found(
    program: Program | Relational,
    rows: Rows,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] | None,
    passes: Passes,
) -> tuple[Program, Prepared | tuple[str, ...]]:
    check_type("program", program, (Program, Relational), "a Program or a function under @relational")
    check_type("rows", rows, Rows, "the Rows of a graph, from rows_of(graph)")
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            check_tensor(name, tensor)
    if outputs is not None:
        check_type("outputs", outputs, (tuple, list), "a list of names")
    whole = _selected(program, rows, inputs, outputs)
    wrt: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        names = frozenset[str]().union(*whole.differentiable_inputs.values())
        wrt = tuple(n for n, t in inputs.items() if t.requires_grad and n in names)
    dtype = next((t.dtype for t in inputs.values() if t.is_floating_point()), torch.float32)
    if not is_eager():
        return whole, ("operators are traced or transformed",)
    return whole, _prepared(whole, rows, dtype, wrt, passes)


def apply(
    program: Program | Relational,
    rows: Rows,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] | None = None,
    passes: Passes = ALL_PASSES,
) -> dict[str, Tensor]:
    """Run a program with gradients: by generated kernels, or where these cannot by the interpreter.

    Args:
        program: The program, or the function that is traced for the shapes of the inputs. What was prepared for it is
            found by the object: keep it.
        rows: The rows of the graph, from :func:`rows_of`.
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
    whole, prepared = _found(program, rows, inputs, outputs, passes)
    if not isinstance(prepared, Prepared):
        _report(whole.name, prepared, rows.device)
        return interpret(whole, rows, inputs)
    if not prepared.takes(inputs):
        check_inputs(whole, rows, inputs)
    rows.graph.on_this_stream()
    if prepared.wrt:
        # To autograd no result depends on the others.
        tensors = [t if n in prepared.wrt or not t.requires_grad else t.detach() for n, t in inputs.items()]
        results = _run(prepared, rows, tuple(inputs), *tensors)
    else:
        results = prepared.forward(rows, {name: tensor.detach() for name, tensor in inputs.items()})[0]
    return dict(zip(prepared.outputs, results, strict=True))


def run(program: Program, rows: Rows, inputs: Mapping[str, Tensor], wrt: tuple[str, ...] | None) -> list[Tensor]:
    """Return the outputs of a program, or some of its gradients, without recording any: what traced calls run.

    Args:
        program: The program; what was prepared for it is found by the object.
        rows: The rows of the graph.
        inputs: As for :func:`apply`; for gradients also that of each output, under its name after "d_".
        wrt: Inputs whose gradients are wanted, which are computed from `inputs` alone; None for the outputs.
    """
    dtype = next((tensor.dtype for tensor in inputs.values()), torch.float32)
    prepared = _prepared(program, rows, dtype, wrt or (), ALL_PASSES, alone=wrt is not None)
    if wrt is None:
        check_inputs(program, rows, inputs)
    if isinstance(prepared, Prepared):
        rows.graph.on_this_stream()
        return prepared.forward(rows, inputs)[0]
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
