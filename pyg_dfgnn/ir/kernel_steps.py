"""The lowered form of a program: steps, the buffers between them, and their dump."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from pyg_dfgnn.ir.domains import FEW, D, Domain, E, R, S, determines
from pyg_dfgnn.ir.program import Program, Shape


@dataclass(frozen=True)
class Buffer:
    """Rows of a domain that steps hand to each other.

    Attributes:
        name: An input's own name, or "%" and a number.
        domain: What the rows are.
        shape: Sizes of a row.
        is_exact: Whether it is float32 whatever the dtype of the features.
    """

    name: str
    domain: Domain
    shape: Shape
    is_exact: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.domain}{list(self.shape)}{' float32' if self.is_exact else ''}"


@dataclass(frozen=True)
class KernelStep:
    """One step.

    Attributes:
        kind: See the head of `ir/lowering.py`.
        domain: Domain of what is written.
        over: Domain of the rows that are read one by one.
        reads: Names of buffers.
        writes: Names of buffers.
        program: What it computes: inputs are what it reads, outputs what it writes.
    """

    kind: str
    domain: Domain
    over: Domain
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    program: Program

    def numbers_read(self, name: str) -> int:
        """Return how many numbers of a row of a buffer the step reads: all, or those of some parts."""
        values, i = self.program.values, self.program.inputs[name]
        readers = [value for value in values if i in value.args]
        if self.kind == "dense" or not readers or any(value.op != "slice" for value in readers):
            return prod(values[i].shape)
        return min(prod(values[i].shape), sum(prod(value.shape) for value in readers))

    @property
    def is_by_relation(self) -> bool:
        """Whether the step is a product with the weights of relations, or gives their gradient."""
        return self.kind in ("linear", "outer") and any(value.domain is R for value in self.program.values)

    def __str__(self) -> str:
        where = f"{self.over}->{self.domain}" if self.over is not self.domain else f"{self.domain}"
        return f"{self.kind} {where}\n" + "\n".join(str(self.program).splitlines()[1:])


@dataclass(frozen=True)
class Lowered:
    """A program as steps.

    Attributes:
        name: Name of the program.
        static: Steps that depend on the graph alone: they run once.
        forward: Steps that give the outputs.
        backward: Steps that give the gradients.
        buffers: By name.
        outputs: Name of an output or gradient -> its buffer and the sizes of its rows.
    """

    name: str
    static: tuple[KernelStep, ...]
    forward: tuple[KernelStep, ...]
    backward: tuple[KernelStep, ...]
    buffers: Mapping[str, Buffer] = field(hash=False)
    outputs: Mapping[str, tuple[str, Shape]] = field(hash=False)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Buffers that the forward pass leaves for the backward pass, inputs among them."""
        fixed, written = {name for s in self.static for name in s.writes}, {n for s in self.backward for n in s.writes}
        reads = dict.fromkeys(name for step in self.backward for name in step.reads)
        # An input of the user's may be called as gradients are.
        gradients = {f"d_{name}" for name in self.outputs}
        return tuple(n for n in reads if n not in written | fixed | gradients)

    def traffic_elements(self, sizes: Mapping[Domain, int]) -> int:
        """Return how many numbers all steps read and write; a row is read as often as it is gathered.

        Args:
            sizes: Rows of each domain of the graph.
        """
        total = 0
        for step in (*self.forward, *self.backward):
            for buffer in (self.buffers[name] for name in step.reads):
                rows = step.domain if determines(step.domain, buffer.domain) else step.over
                is_whole = buffer.domain in FEW or step.kind == "dense"
                total += sizes[buffer.domain if is_whole else rows] * step.numbers_read(buffer.name)
            for buffer in (self.buffers[name] for name in step.writes):
                total += sizes[buffer.domain] * prod(buffer.shape)
        return total

    @cached_property
    def edge_rows(self) -> tuple[Buffer, ...]:
        """Buffers of every edge that are stored although nobody asked for them, but for a few numbers beside rows of
        features, or beside what is asked for of each edge.

        Rows multiplied with the weights of relations are not among them: without kernels each row has a weight.
        """
        steps = *self.forward, *self.backward
        kept = {name for step in steps if step.is_by_relation for name in (*step.reads, *step.writes)}
        kept |= {name for name, _ in self.outputs.values()}
        written = {name for step in steps for name in step.writes} - kept
        rows = [b.shape for b in self.buffers.values() if b.domain in (S, D)]
        results = [self.buffers[buffer] for name, (buffer, _) in self.outputs.items() if not name.startswith("d_")]
        asked = [2 * prod(buffer.shape) for buffer in results if buffer.domain is E]
        nodes = max([1, *map(prod, rows), *asked])
        edges = [self.buffers[name] for name in sorted(written) if self.buffers[name].domain is E]
        return tuple(buffer for buffer in edges if 2 * prod(buffer.shape) > nodes)

    @cached_property
    def compares(self) -> bool:
        """Whether numbers are compared that several steps may compute, as of a maximum: all have to round alike."""
        return any(v.op == "eq" for step in (*self.forward, *self.backward) for v in step.program.values)

    def __str__(self) -> str:
        lines = [f"program {self.name}"]
        for what, steps in (("static", self.static), ("forward", self.forward), ("backward", self.backward)):
            lines += [f"{what}:", *("  " + line for step in steps for line in str(step).splitlines())] if steps else []
        lines += ["saved: " + ", ".join(str(self.buffers[name]) for name in self.saved)] if self.backward else []
        return "\n".join(lines)
