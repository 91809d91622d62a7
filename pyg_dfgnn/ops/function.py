"""Autograd of every op, and the one registered operator that tracers see.

Nothing here knows an op: what runs comes with the call, or is found by the name of its program.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.eager import apply_of, once_differentiable
from pyg_dfgnn.statements.op import Statement


class Call(NamedTuple):
    """One eager call of an op.

    Attributes:
        prepared: The :class:`~pyg_dfgnn.ops.core.PreparedOp`.
        graph: The edges.
        numbers: The numbers in the order of the statement.
        concat: Whether the heads of the output are side by side.
        shared: Whether target and value are one tensor.
        returns_kept: Whether what the forward pass leaves is returned too.
    """

    prepared: Any
    graph: Graph
    numbers: tuple[float, ...]
    concat: bool
    shared: bool
    returns_kept: bool


class Fused(Function):
    """A fused op on a graph at hand: (call, inputs) to the outputs, and to what is kept if the call asks for it."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> Any:
        prepared, graph, numbers, concat, shared, returns_kept = call
        results = prepared.forward(TRAIN, concat, shared, graph)(*tensors, *numbers)
        count = prepared.num_outputs
        outs, kept = results[:count], results[count:]
        ctx.call = call
        # Not saved: autograd would then forbid to edit it in place, as one may with PyG's, and a copy costs every call.
        ctx.out = [(out.detach(), out._version) for out in outs] if prepared.keeps_output else None
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
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        prepared, graph, numbers, concat, shared, _ = ctx.call
        if grads[0] is None:
            ctx.out = None
            return (None,) * len(ctx.needs_input_grad)
        saved, count = ctx.saved_tensors, prepared.num_outputs
        outs: Any = (None,) * count
        if prepared.keeps_output:
            outs = unedited(ctx)
            if outs is None:
                inputs = saved[: len(ctx.needs_input_grad) - 1]
                outs = prepared.forward(INFER, concat, shared, graph)(*inputs, *numbers)
        backward = prepared.backward(shared, ctx.needs_input_grad[1 + prepared.edge_place], graph)
        return None, *backward(*saved, *outs, *grads[:count], *numbers)


apply_fused = apply_of(Fused)
INFER, STATS, TRAIN = 0, 1, 2
"""What a forward pass leaves: nothing, what a pass over edges reads, what backward reads."""


def unedited(ctx: Any) -> list[Tensor] | None:
    """Return the outputs of the forward pass; None if one was edited since or a backward pass has let them go."""
    # Let go as saved tensors are: the graph of autograd may live as long as a loss does.
    known, ctx.out = ctx.out, None
    if known is None or any(out._version != version for out, version in known):
        return None
    return [out for out, _ in known]


class EdgeValue(Function):
    """What `run` gives per edge; a gradient of it, rarely asked for, takes the reference's composite path."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], reference: Callable[..., Tensor], *tensors: Any) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.reference = reference
        return run()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            leaves: list[Any] = [
                None if tensor is None else tensor.detach().requires_grad_(need)
                for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            wide: list[Any] = [
                leaf.float() if leaf is not None and leaf.is_floating_point() else leaf for leaf in leaves
            ]
            edge_value = ctx.reference(wide)
        wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(edge_value, wanted, grad, allow_unused=True))
        return None, None, *(next(grads) if need else None for need in needed)


# Tracing ------------------------------------------------------------------------------------------------------------


class Program(NamedTuple):
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
    def of(name: str) -> "Program":
        """Read the text."""
        op, group, heads, loops, transposed, flags = name.split(":")
        return Program(
            op, group, int(heads), loops == "1", transposed == "1", frozenset(filter(None, flags.split(",")))
        )

    @property
    def backward(self) -> "Program":
        """The backward passes after this forward pass."""
        return self._replace(group="backward")


_known_program = cache(Program.of)
ops: dict[str, Any] = {}
"""What runs a program, by the start of its name: :class:`~pyg_dfgnn.ops.core.Op` by the name of its statement."""


class Traced(Function):
    """An op through the registered operator, for tracing: (program, edges, sizes, numbers, inputs) to the outputs and
    what is kept.
    """

    @staticmethod
    def forward(ctx: Any, program: str, edge_index: Tensor, num_src: int, num_dst: int, count: int, *rest: Any) -> Any:
        numbers, tensors = list(rest[:count]), list(rest[count:])
        results = torch.ops.pyg_dfgnn.run(program, [edge_index], [num_src, num_dst], tensors, numbers)
        statement: Statement = ops[Program.of(program).op].statement
        num_outputs = len(statement.outputs)
        outs, kept = results[:num_outputs], results[num_outputs:]
        exact = statement.exact_outputs[:1] and statement.exact_outputs[0] in statement.kept(Program.of(program).flags)
        ctx.save_for_backward(edge_index, *(t for t in tensors if t is not None), *kept, *(() if exact else outs))
        ctx.layout = program, num_src, num_dst, count, numbers, [t is not None for t in tensors], exact, num_outputs
        ctx.mark_non_differentiable(*kept)
        return *outs, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_out: Tensor) -> tuple[Any, ...]:
        program, num_src, num_dst, count, numbers, present, exact, num_outputs = ctx.layout
        edge_index, *saved = ctx.saved_tensors
        waiting = iter(saved)
        tensors = [next(waiting) if is_there else None for is_there in present]
        kept_and_out = [*waiting, *((None,) * num_outputs if exact else ())]
        backward = Program.of(program).backward
        place = ops[backward.op].edge_place
        if present[place] and ctx.needs_input_grad[5 + count + place]:
            backward = backward._replace(flags=backward.flags | {"edge_grad"})
        inputs = [*tensors, *kept_and_out, *grads_out[:num_outputs]]
        grads = torch.ops.pyg_dfgnn.run(backward.name, [edge_index], [num_src, num_dst], inputs, numbers)
        names, order = ops[backward.op].gradient_names(backward.flags, present), ops[backward.op].statement.input_names
        by_name = dict(zip(names, grads, strict=True))
        return *(None,) * (5 + count), *(by_name.get(name) for name in order)


_library = torch.library.Library("pyg_dfgnn", "DEF")
# Inductor's CUDA graphs copy edge_index into a buffer of theirs: a replay would launch on the recorded graph.
_library.define(
    "run(str program, Tensor[] anchors, SymInt[] sizes, Tensor?[] inputs, float[] numbers) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)


def _run(
    name: str,
    anchors: Sequence[Tensor],
    sizes: Sequence[int],
    inputs: Sequence[Tensor | None],
    numbers: Sequence[float],
) -> list[Tensor]:
    """Run a program on tensors."""
    program = _known_program(name)
    results: list[Tensor] = ops[program.op].run(program, anchors, sizes, inputs, numbers)
    return results


def _run_fake(
    name: str,
    anchors: Sequence[Tensor],
    sizes: Sequence[Any],
    inputs: Sequence[Tensor | None],
    numbers: Sequence[float],
) -> list[Tensor]:
    """Return empty results of the shapes and dtypes that the program gives."""
    program = Program.of(name)
    results: list[Tensor] = ops[program.op].empty_results(program, anchors, sizes, inputs)
    return results


_library.impl("run", _run, "CompositeExplicitAutograd")
torch.library.register_fake("pyg_dfgnn::run", _run_fake, lib=_library)


def run_program(
    program: Program,
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
