"""Autograd of every op, and what runs the calls of the registered operator (:mod:`pyg_dfgnn.operator`).

Nothing here knows an op: what runs comes with the call, or is found by the name of its program.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.eager import apply_of, differentiable, differentiated, tell_of_torch
from pyg_dfgnn.ops.host_codegen import count_of


class OpCall(NamedTuple):
    """One eager call of an op.

    Attributes:
        prepared: The :class:`~pyg_dfgnn.ops.core.PreparedOp`.
        graph: The edges.
        numbers: The numbers in the order of the statement.
        concat: Whether the heads of the output are side by side.
        shared: Whether target and value are one tensor.
        returns_kept: Whether what the forward pass leaves is returned too.
        exact: Whether the output is what the forward pass leaves in float32, and not rounded as the features are.
    """

    prepared: Any
    graph: Graph
    numbers: tuple[float, ...]
    concat: bool
    shared: bool
    returns_kept: bool
    exact: bool


def _again(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of :class:`Fused` by kernels that have derivatives, or by torch's operators."""
    prepared, graph, numbers, _, shared, _, _ = ctx.call
    (_, *needed), tensors = ctx.needs_input_grad, list(ctx.saved_tensors[: len(ctx.needs_input_grad) - 1])
    op, present = prepared.op, [tensor is not None for tensor in tensors]
    for place, value in enumerate(op.statement.inputs):
        if not present[place] and value.name in prepared.present:
            # Backward does not read it: gradients are the same for any numbers.
            shape = [prepared.channels if size == "C" else size for size in value.shape]
            tensors[place] = torch.zeros(
                count_of(graph, value.domain), *shape, dtype=prepared.problem.dtype, device=prepared.device
            )
            present[place] = True
    differentiable = op.gradient_names({"edge_grad", *({"shared"} if shared else ())}, present)
    needed = [
        is_needed and name in differentiable for is_needed, name in zip(needed, op.statement.input_names, strict=True)
    ]
    if grads[0] is not None:
        known = {}
        for value, tensor, is_needed in zip(op.statement.inputs, tensors, needed, strict=True):
            keeps = tensor is None or (is_needed and tensor.requires_grad)
            known[value.name] = tensor if keeps else tensor.detach().requires_grad_(is_needed)
        grad_inputs = op.again(ctx.call, known, *grads[: prepared.num_outputs])
        if grad_inputs is not None:
            return None, *map(grad_inputs.get, op.statement.input_names)
    tell_of_torch(op.statement.name)

    def outputs(inputs: list[Any]) -> list[Tensor]:
        results = op.in_torch(graph, wide(inputs), numbers, prepared.heads, shared)[0]
        results = (results,) if isinstance(results, Tensor) else results
        return [x if g is None else x.to(g.dtype).reshape(g.shape) for x, g in zip(results, grads, strict=False)]

    return None, *differentiated(outputs, tensors, needed, grads[: prepared.num_outputs])


def wide(tensors: Sequence[Any]) -> list[Any]:
    """Return floats of 16 bits as float32, and all else as it is."""
    return [t.float() if t is not None and t.is_floating_point() and t.dtype.itemsize == 2 else t for t in tensors]


class Fused(Function):
    """A fused op on a graph at hand: (call, inputs) to the outputs, and to what is kept if the call asks for it."""

    @staticmethod
    def forward(ctx: Any, call: OpCall, *tensors: Tensor | None) -> Any:
        prepared, graph, numbers, concat, shared, returns_kept, exact = call
        results = prepared.forward(TRAIN, concat, shared, graph)(graph, *tensors, *numbers)
        count = prepared.num_outputs
        outs, kept = results[:count], results[count:]
        if exact:
            *kept, out = kept
            outs = (out,)
        ctx.call = call
        # Not saved: autograd would then forbid to edit it in place, as one may with PyG's, and a copy costs every call.
        ctx.out = [(out.detach(), out._version) for out in outs] if prepared.keeps_output or exact else None
        if prepared.saves is not None:
            tensors = tuple(t if is_read else None for t, is_read in zip(tensors, prepared.saves, strict=True))
        ctx.save_for_backward(*tensors, *kept)
        # Of several outputs some may have no gradient, of which autograd makes zeros.
        ctx.set_materialize_grads(count > 1)
        if not returns_kept:
            return outs[0] if count == 1 else outs
        ctx.mark_non_differentiable(*kept)
        return results

    @staticmethod
    @differentiable(_again)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        prepared, graph, numbers, concat, shared, _, exact = ctx.call
        if grads[0] is None:
            ctx.out = None
            return (None,) * len(ctx.needs_input_grad)
        saved, count = ctx.saved_tensors, prepared.num_outputs
        outs: Any = (None,) * count
        if prepared.keeps_output or exact:
            outs = unedited(ctx)
            if outs is None:
                inputs = saved[: len(ctx.needs_input_grad) - 1]
                outs = prepared.forward(TRAIN if exact else INFER, concat, shared, graph)(graph, *inputs, *numbers)
        if exact:
            saved, outs, grads = (*saved, outs[-1]), (None,), (grads[0].to(prepared.problem.dtype),)
        backward = prepared.backward(shared, ctx.needs_input_grad[1 + prepared.edge_place], graph)
        return None, *backward(graph, *saved, *outs, *grads[:count], *numbers)


apply_fused = apply_of(Fused)
INFER, STATS, TRAIN = 0, 1, 2
"""Modes of a forward pass by what it leaves: nothing, what a pass over edges reads, what backward reads."""


def unedited(ctx: Any) -> list[Tensor] | None:
    """Return the outputs of the forward pass; None if one was edited since or a backward pass has let them go."""
    # Let go as saved tensors are: the graph of autograd may live as long as a loss does.
    known, ctx.out = ctx.out, None
    if known is None or any(out._version != version for out, version in known):
        return None
    return [out for out, _ in known]


class EdgeValue(Function):
    """Autograd Function of a value per edge, from `run`; its gradient, rarely asked for, is that of the reference."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], reference: Callable[..., Tensor], *tensors: Any) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.reference = reference
        return run()

    @staticmethod
    @differentiable()
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[2:]
        gradients = differentiated(lambda inputs: [ctx.reference(wide(inputs))], ctx.saved_tensors, needed, [grad])
        return None, None, *gradients


# Tracing ------------------------------------------------------------------------------------------------------------


class ProgramName(NamedTuple):
    """A group of passes in a variant, as its name spells it.

    Attributes:
        op: Name of the statement.
        group: "forward", "backward" or "edge".
        heads: Number of heads.
        loops: Whether self-loops are replaced.
        transposed: Whether row 0 of the edges holds the targets.
        flags: Flags of the variant.
    """

    op: str
    group: str
    heads: int
    loops: bool
    transposed: bool
    flags: frozenset[str]

    @property
    def name(self) -> str:
        """The text that names it in the registered operator."""
        where = f"{self.heads}:{int(self.loops)}:{int(self.transposed)}"
        return f"{self.op}:{self.group}:{where}:{','.join(sorted(self.flags))}"

    @staticmethod
    def of(name: str) -> "ProgramName":
        """Read the text."""
        op, group, heads, loops, transposed, flags = name.split(":")
        return ProgramName(
            op, group, int(heads), loops == "1", transposed == "1", frozenset(filter(None, flags.split(",")))
        )

    @property
    def backward(self) -> "ProgramName":
        """The backward passes after this forward pass."""
        return self._replace(group="backward")


class Runner(Protocol):
    """Runner of the programs of one kind: those of a statement with its kernels, or those of the IR."""

    def run(
        self,
        name: str,
        anchors: Sequence[Tensor],
        sizes: Sequence[int],
        inputs: Sequence[Tensor | None],
        numbers: Sequence[float],
    ) -> list[Tensor]:
        """Run a program on tensors."""

    def empty_results(
        self, name: str, anchors: Sequence[Tensor], sizes: Sequence[Any], inputs: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return empty results of the shapes and dtypes that a program gives."""

    def num_outputs(self, name: str) -> int:
        """Return how many results of a forward program are outputs; the others are kept for backward."""

    def reads_outputs(self, name: str) -> bool:
        """Return whether the backward program reads the outputs."""

    def backward(self, name: str, present: Sequence[bool], needed: Sequence[bool]) -> tuple[str, Sequence[int]]:
        """Return the backward program, and the input that each of its results is the gradient of.

        Args:
            name: The forward program.
            present: Which inputs are there.
            needed: Which inputs need a gradient.
        """

    def reference(
        self,
        name: str,
        anchors: Sequence[Tensor],
        sizes: Sequence[int],
        inputs: Sequence[Tensor | None],
        numbers: Sequence[float],
    ) -> Sequence[Tensor]:
        """Return the outputs of a forward program by torch's operators."""


ops: dict[str, Runner] = {}
"""Runners of programs, by the start of a program's name."""
makers: list[Callable[[str], None]] = []
"""(start of a name) -> None, having put what runs such programs into :data:`ops` if it is of the maker's family."""


def runner_of(name: str) -> Runner:
    """Return what runs a program, which another process may have named.

    Raises:
        ValueError: No op has this name.
    """
    start = name.partition(":")[0]
    if start not in ops:
        for make in makers:
            make(start)
    if start not in ops:
        known = ", ".join(sorted(ops))
        need = "the name of an op; a score of one's own is known once pyg_dfgnn.statements.scores.register has taken it"
        raise ValueError(f"'program' needs {need} (got {start!r}, and of known names {known})")
    return ops[start]


# Marked constant: torch.compile runs these functions while it traces and leaves nothing of them in the graph. Code that
# it traced would be compiled anew whenever another op is registered.
@torch.compiler.assume_constant_result
def _outputs_of(name: str) -> tuple[int, bool]:
    """Return the number of outputs of a forward program, and whether its backward program reads them."""
    runner = runner_of(name)
    return runner.num_outputs(name), runner.reads_outputs(name)


@torch.compiler.assume_constant_result
def _backward_of(name: str, present: tuple[bool, ...], needed: tuple[bool, ...]) -> tuple[str, tuple[int, ...]]:
    """Return what :meth:`Runner.backward` does."""
    program, places = runner_of(name).backward(name, present, needed)
    return program, tuple(places)


def _of_runner(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Return the gradients of :class:`Traced` by torch's operators."""
    name, num_anchors, sizes, numbers, present, _, num_outputs = ctx.layout
    anchors, waiting = list(ctx.saved_tensors[:num_anchors]), iter(ctx.saved_tensors[num_anchors:])
    tensors = [next(waiting) if is_there else None for is_there in present]
    before, runner = 4 + num_anchors + len(sizes) + len(numbers), runner_of(name)
    _, places = _backward_of(name, tuple(present), tuple(ctx.needs_input_grad[before:]))
    needed = [is_needed and place in places for place, is_needed in enumerate(ctx.needs_input_grad[before:])]
    tell_of_torch(name)

    def outputs(inputs: list[Any]) -> list[Tensor]:
        results = runner.reference(name, anchors, sizes, inputs, numbers)
        return [x.to(g.dtype).reshape(g.shape) for x, g in zip(results, grads, strict=False)]

    return *(None,) * before, *differentiated(outputs, tensors, needed, grads[:num_outputs])


class Traced(Function):
    """A program through the registered operator, for tracing: (its name, the numbers of anchors, sizes and numbers,
    all of these, inputs) to the outputs and what is kept.
    """

    @staticmethod
    def forward(ctx: Any, name: str, num_anchors: int, num_sizes: int, num_numbers: int, *rest: Any) -> Any:
        first, second = num_anchors + num_sizes, num_anchors + num_sizes + num_numbers
        anchors, sizes, numbers = list(rest[:num_anchors]), list(rest[num_anchors:first]), list(rest[first:second])
        tensors = list(rest[second:])
        results = torch.ops.pyg_dfgnn.run(name, anchors, sizes, tensors, numbers)
        num_outputs, reads_outputs = _outputs_of(name)
        outs, kept = results[:num_outputs], results[num_outputs:]
        present = [t is not None for t in tensors]
        ctx.save_for_backward(*anchors, *(t for t in tensors if t is not None), *kept, *(outs if reads_outputs else ()))
        ctx.layout = name, num_anchors, sizes, numbers, present, reads_outputs, num_outputs
        ctx.mark_non_differentiable(*kept)
        return *outs, *kept

    @staticmethod
    @differentiable(_of_runner)
    def backward(ctx: Any, *grads_out: Tensor) -> tuple[Any, ...]:
        name, num_anchors, sizes, numbers, present, reads_outputs, num_outputs = ctx.layout
        anchors, saved = list(ctx.saved_tensors[:num_anchors]), ctx.saved_tensors[num_anchors:]
        waiting = iter(saved)
        tensors = [next(waiting) if is_there else None for is_there in present]
        kept_and_out = [*waiting, *(() if reads_outputs else (None,) * num_outputs)]
        before = 4 + num_anchors + len(sizes) + len(numbers)
        program, places = _backward_of(name, tuple(present), tuple(ctx.needs_input_grad[before:]))
        inputs = [*tensors, *kept_and_out, *grads_out[:num_outputs]]
        grads = torch.ops.pyg_dfgnn.run(program, anchors, sizes, inputs, numbers)
        by_place = dict(zip(places, grads, strict=True))
        return *(None,) * before, *(by_place.get(place) for place in range(len(present)))


def run_program(
    program: ProgramName,
    anchor: Tensor,
    num_src: int,
    num_dst: int,
    inputs: Sequence[Tensor | None],
    numbers: Sequence[float],
) -> list[Tensor]:
    """Run a program through the registered operator, without gradients."""
    detached = [None if tensor is None else tensor.detach() for tensor in inputs]
    with torch.no_grad():
        results: list[Tensor] = torch.ops.pyg_dfgnn.run(
            program.name, [anchor], [num_src, num_dst], detached, list(numbers)
        )
    return results


def run_traced(
    name: str,
    anchors: Sequence[Tensor],
    sizes: Sequence[Any],
    numbers: Sequence[float],
    inputs: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Run a program through the registered operator, with gradients: return its outputs and what it keeps."""
    tensors = [*anchors, *inputs]
    if torch.compiler.is_compiling():
        tensors = _without_repeats(tensors)
    anchors, inputs = tensors[: len(anchors)], tensors[len(anchors) :]  # type: ignore[assignment]
    results: tuple[Tensor, ...] = Traced.apply(
        name, len(anchors), len(sizes), len(numbers), *anchors, *sizes, *numbers, *inputs
    )  # type: ignore[no-untyped-call]
    return results


def _without_repeats(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return a view for each repetition of a tensor: torch.compile refuses a Function that takes one tensor twice."""
    distinct: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is not None and any(tensor is other for other in distinct):
            tensor = tensor.view_as(tensor)
        distinct.append(tensor)
    return distinct
