"""The statement of an op, written once as data: its tensors, numbers and passes.

From a statement :mod:`pyg_dfgnn.ops.core` derives the argument checks, the prepared launches, the autograd function,
the registered operator and the inputs of a timing. A statement names values by their role; `label` is the user's name
of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DIRECTIONS = ("forward", "targets", "sources")
"""The passes of an op: forward over the CSR, backward over targets (CSR rows), backward over sources (CSC rows)."""
DOMAINS = ("targets", "sources", "edges", "blocks", "whole")
"""Domains of the rows of a tensor; "blocks" are partial results of thread blocks, "whole" has no rows."""
FEATURES = "features"
"""The dtype that all feature tensors of a call share; other dtypes go by their own name."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that an op reads, writes or keeps.

    Attributes:
        name: Its role, such as "target".
        domain: One of ``DOMAINS``.
        shape: What follows the rows: letters (H heads, C channels per head, D channels of an edge, G groups of heads
            that thread blocks of their own take) and numbers.
        dtype: ``FEATURES``, "float32", "int16" or "int64".
        label: The user's name of an input; its role if empty.
        when: The flag of a variant that has this value; always, if empty. "stats": a pass over edges may follow;
            "saved": gradients may follow; "exact": likewise, and backward does not read the output itself; "shared":
            target and value are one tensor; any other is up to the family.
        needed: Whether an input may not be absent.
        like: The value whose shape and dtype it takes instead.
    """

    name: str
    domain: str
    shape: tuple[str | int, ...] = ()
    dtype: str = FEATURES
    label: str = ""
    when: str = ""
    like: str = ""
    needed: bool = False

    @property
    def user_name(self) -> str:
        """The name that errors show."""
        return self.label or self.name


@dataclass(frozen=True)
class Number:
    """One number that an op takes.

    Attributes:
        name: Its role.
        label: The user's name of it; empty where the user does not give it.
        low: Least value allowed.
        high: Greatest value allowed.
        example: The value in a timing.
    """

    name: str
    label: str = ""
    low: float | None = None
    high: float | None = None
    example: float = 1.0


@dataclass(frozen=True)
class Precomputed:
    """A kernel argument that is computed from an input before the first pass, unless that pass computes it itself.

    Attributes:
        value: The argument.
        source: The input that it is computed from.
        same_as: The precomputed argument that it equals where target and value are one tensor.
    """

    value: TensorSpec
    source: str
    same_as: str = ""


@dataclass(frozen=True)
class Gradient:
    """The gradient of an input.

    Attributes:
        input: The input.
        value: What the passes write.
        reduce: How the rows of `value` become the gradient: "" (they are it), "rows" (summed over the first
            dimension), "groups" (over the second) or "all" (summed to one number).
        when: The flag of a variant that computes it; always, if empty.
    """

    input: str
    value: TensorSpec
    reduce: str = ""
    when: str = ""


@dataclass(frozen=True)
class Pass:
    """One pass over the edges.

    Attributes:
        direction: Its name, by which dispatch plans it.
        rows: Domain of the rows that it traverses.
        cols: Domain of the rows that it gathers.
        arguments: Names of values and numbers, in the order of the kernels' ABI.
    """

    direction: str
    rows: str
    cols: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Statement:
    """An op as data.

    Attributes:
        name: Name of the program, such as "attention/dot".
        inputs: Tensors that the user gives, in the order of the kernels' ABI; a seed, which the op draws, is the last.
        numbers: Numbers that the user gives, likewise.
        output: What the op returns.
        extra_outputs: Further outputs; the gradient of each goes by its name after "grad_".
        saved: What the forward pass leaves for the passes after it, beside the output.
        forward: The forward passes.
        backward: The backward passes, in order.
        gradients: What the backward passes give.
        scratch: Values that pass from one backward pass to the next.
        edge_pass: The pass that writes one value per edge, if the op has one; `edge_value` is that value.
        edge_value: See there.
        precomputed: Arguments computed from inputs.
        exact_outputs: Names of the last saved values, that backward reads in place of rounded outputs, for each output.
        reference: The op in plain torch: `reference(edge_index, num_dst, inputs, numbers, keep)`, with inputs and
            numbers by role and the dropout factors [E, H] or None, returns the output, or a tuple of several, and
            the value per edge.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    numbers: tuple[Number, ...]
    output: TensorSpec
    saved: tuple[TensorSpec, ...]
    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]
    gradients: tuple[Gradient, ...]
    reference: Callable[..., Any]
    extra_outputs: tuple[TensorSpec, ...] = ()
    scratch: tuple[TensorSpec, ...] = ()
    edge_pass: Pass | None = None
    edge_value: TensorSpec | None = None
    precomputed: tuple[Precomputed, ...] = ()
    exact_outputs: tuple[str, ...] = ()

    @cached_property
    def values(self) -> Mapping[str, TensorSpec]:
        """All values by name."""
        every = (*self.inputs, *self.outputs, *self.saved, *self.scratch, *(each.value for each in self.precomputed))
        grads = (gradient.value for gradient in self.gradients)
        edge = () if self.edge_value is None else (self.edge_value,)
        return {value.name: value for value in (*every, *grads, *edge)}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs."""
        return self.output, *self.extra_outputs

    @cached_property
    def backward_directions(self) -> tuple[str, ...]:
        """Names of the backward passes, in order."""
        return tuple(stated.direction for stated in self.backward)

    @cached_property
    def reads_output(self) -> bool:
        """Whether a backward pass reads the output."""
        return any(self.output.name in stated.arguments for stated in self.backward)

    @cached_property
    def saved_inputs(self) -> frozenset[str]:
        """Names of the inputs that are kept for backward: those that it reads, or all to compute an output anew."""
        read = {name for stated in self.backward for name in stated.arguments}
        return frozenset(self.input_names if self.reads_output else read & {*self.input_names})

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(value.name for value in self.inputs)

    @cached_property
    def optional_flags(self) -> frozenset[str]:
        """Flags of values that a forward pass may leave or not."""
        return frozenset(value.when for value in self.saved) - {"", "stats", "saved", "exact"}

    def kept(self, flags: frozenset[str]) -> tuple[str, ...]:
        """Return the names of what a variant's forward pass returns beside the output.

        What "stats" leaves comes first: it is what the pass over edges reads.
        """
        if not flags & {"stats", "saved"}:
            return ()
        precomputed = tuple(each.value.name for each in self.precomputed if not (each.same_as and "shared" in flags))
        return precomputed + tuple(value.name for value in self.saved if not value.when or value.when in flags)
