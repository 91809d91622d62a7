"""Cases of the benchmarks as data: an operation of one size, its inputs, and the implementations that compute it.

The other modules know a family below ``benchmarks/cases`` through the classes of this module alone.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.graphs import compressed
from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.oracle import Errors, Inputs, compare, float64_reference
from pyg_dfgnn.reference.tolerances import BACKWARD, tolerance
from pyg_dfgnn.reference.zoo import EdgeList
from pyg_dfgnn.settings import RULES, current, settings

Forward = Callable[[], Tensor]
Call = Callable[[Inputs], Tensor]

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Name -> storage type; ``tf32`` is float32 whose products may be rounded to TF32."""

INDEX_BYTES = 4


@dataclass(frozen=True)
class Case(ABC):
    """One operation of one size.

    Attributes:
        size: As a config and the result files write it, such as ``1x128``.
        form: Regular expression that a size matches, and its description.
        titles: Name of an operation -> its layer in tables and figures.
        family: Name of the family in the table of tolerances.
        dispatched: Family of kernels that the operation chooses from; None: its layer chooses.
        backward: Passes of its backward pass.

    Raises:
        ValueError: The size has another form.
    """

    op: str
    size: str

    form: ClassVar[tuple[str, str]]
    titles: ClassVar[Mapping[str, str]]
    family: ClassVar[str]
    dispatched: ClassVar[dispatch.Family | None] = None
    backward: ClassVar[tuple[str, ...]] = dispatch.BACKWARD

    def __post_init__(self) -> None:
        if not re.fullmatch(self.form[0], self.size):
            raise ValueError(f"'sizes' needs a list of {self.form[1]} (got {self.size!r})")

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of elements of the output per target."""

    @property
    def layer(self) -> str:
        return self.titles[self.op]

    @property
    def reads_inputs_again(self) -> bool:
        """Whether its only backward pass reads the inputs beside writing their gradients."""
        return False

    @property
    def target_rows_of(self) -> dict[str, str]:
        """Inputs of ``plain`` that are the targets' rows of another input where no such input is given."""
        return {}

    @abstractmethod
    def roles(self, graph: EdgeList) -> dict[str, str]:
        """Name -> role of every differentiable input: what its first axis is, "src", "dst", "edge" or "param"."""

    @abstractmethod
    def shapes(self, graph: EdgeList) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every differentiable input."""

    @abstractmethod
    def make_inputs(self, graph: EdgeList) -> Inputs:
        """Seeded float32 inputs on the graph's device."""

    def make_grad_out(self, graph: EdgeList, inputs: Inputs) -> Tensor:
        """A seeded float32 gradient of the output."""
        generator = torch.Generator(device=graph.device).manual_seed(1)
        return torch.randn(graph.num_dst, self.width, generator=generator, device=graph.device)

    def fused(self, graph: Graph, inputs: Inputs) -> Tensor:
        """The output of this package's operation."""
        raise NotImplementedError

    def plain(self, edge_index: Tensor, num_dst: int, inputs: Inputs, keep: Tensor | None = None) -> Tensor:
        """The output of the reference in plain torch, without dropout."""
        raise NotImplementedError

    def problem(self, dtype: str, device: torch.device) -> Any:
        """The problem of this case for dispatch, in the dtype of that name."""
        raise NotImplementedError

    def plan(self, dtype: str, graph: EdgeList) -> dict[str, str]:
        """Pass -> schedule that runs it; {} where no schedule is chosen."""
        if self.dispatched is None or self.unsupported_reasons(dtype, graph.device):
            return {}
        problem = self.problem(dtype, graph.device)
        choices = dispatch.explain(self.dispatched, problem, compressed(graph), True, backward=self.backward)
        return {choice.direction: choice.plan.schedule for choice in choices}

    def unsupported_reasons(self, dtype: str, device: torch.device) -> list[str]:
        """Why no kernel computes this case, [] where one does."""
        if self.dispatched is not None:
            return self.dispatched.unsupported(self.problem(dtype, device))
        return [] if device.type == "cuda" else ["the tensors are on a CPU"]

    def compulsory_bytes(self, graph: EdgeList, direction: str, itemsize: int) -> float:
        """Bytes of inputs, output, their gradients, and the index of each pass, each touched once by each pass.

        GT forward: ``4 N D b + 4 E + 4 N``; forward and backward three times that, for 12 node tensors and 3 passes.
        """
        inputs = sum(map(prod, self.shapes(graph).values()))
        passes = {"fwd": 1, "bwd": len(self.backward), "fwd+bwd": 1 + len(self.backward)}[direction]
        elements = passes * (inputs + graph.num_dst * self.width)
        if self.reads_inputs_again and direction != "fwd":
            elements += inputs
        return float(itemsize * elements + passes * INDEX_BYTES * (graph.num_edges + graph.num_dst))

    def bound(self, dtype: str) -> float:
        """The relative error that is allowed in the dtype of that name."""
        return tolerance(dtype, BACKWARD, self.family).relative

    def reference(self, graph: EdgeList, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
        """Output and every gradient in float64."""
        roles = self.roles(graph)
        rows = {name: of for name, of in self.target_rows_of.items() if name not in roles}
        return float64_reference(self.plain, roles, graph, inputs, grad_out, target_rows_of=rows)

    def errors(
        self, graph: EdgeList, actual: dict[str, Tensor], expected: dict[str, Tensor], grad_out: Tensor
    ) -> Errors:
        """The errors of a result against its float64 reference."""
        return compare(self.roles(graph), graph, actual, expected, grad_out)

    def unbounded_reasons(self, dtype: str, device: torch.device) -> list[str]:
        """Why no error bound holds for a dtype on a device, [] where one does: the bounds are those of the kernels."""
        reasons = self.unsupported_reasons(dtype, device)
        if reasons and DTYPES[dtype].itemsize == 2:
            return ["the reference rounds every step to 16 bits, no bound holds for it", *reasons]
        return []


@dataclass(frozen=True)
class HeadsCase(Case):
    """A case whose size is a number of heads and of channels of each."""

    form = r"[1-9]\d*x[1-9]\d*", "heads x channels, such as [1x128,8x16]"

    @property
    def heads(self) -> int:
        return int(self.size.split("x")[0])

    @property
    def channels(self) -> int:
        return int(self.size.split("x")[1])

    @property
    def width(self) -> int:
        return self.heads * self.channels


class Implementation:
    """One way to compute the cases of a family: its name in configs and files, and its title in tables and figures.

    Attributes:
        ops: Operations that it has; None: all of its family.
        error_bound: Relative error above which its time is no result, if wider than the bound of the dtype.
        is_ours: Whether it runs on kernels of this package, so that rows of other sources do not count.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    ops: ClassVar[Collection[str] | None] = None
    error_bound: ClassVar[float] = 2e-3
    is_ours: ClassVar[bool] = False

    def reasons(self, case: Case, graph: EdgeList) -> list[str]:
        """Why it is not run here, [] when it is."""
        return [] if self.ops is None or case.op in self.ops else [f"has no {case.layer}"]

    def call(self, case: Case, graph: EdgeList) -> Call:
        """The output as a function of inputs; work that is done once per graph is done here."""
        raise NotImplementedError

    def prepare(self, case: Case, graph: EdgeList, inputs: Inputs) -> Forward:
        """A forward call on ``inputs``."""
        return partial(self.call(case, graph), inputs)


class TorchCompiled(Implementation):
    """``torch.compile`` of the call of the class that stands beside it as a base, PyG's."""

    name = "compile"
    title = "torch.compile of PyG"

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend

    def prepare(self, case: Case, graph: EdgeList, inputs: Inputs) -> Forward:
        torch.compiler.reset()
        compiled = torch.compile(self.call(case, graph), backend=self.backend, dynamic=False)
        return lambda: compiled(inputs)


class Fused(Implementation):
    """This package's operation."""

    name = "fused"
    title = "ours"
    dtypes = tuple(DTYPES)
    error_bound = 0.0
    is_ours = True

    def call(self, case: Case, graph: EdgeList) -> Call:
        return partial(case.fused, compressed(graph))


@dataclass(frozen=True)
class Family:
    """All that the bench knows of a family: the class of its cases, and its implementations by name, ours first."""

    case: type[Case]
    implementations: Mapping[str, type[Implementation]]


def forward_backward(out: Tensor, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    """``out`` and the gradient of every input, under the names 'out' and 'grad_<input>'."""
    gradients = torch.autograd.grad(out, list(inputs.values()), grad_out)
    return {"out": out.detach(), **{f"grad_{name}": grad for name, grad in zip(inputs, gradients, strict=True)}}


@contextmanager
def in_force(schedule: str, dtype: str) -> Iterator[None]:
    """Ask for a schedule and for the precision of a dtype, for the whole process: backward has a thread of its own.

    A schedule that is asked for by name raises `UnsupportedError` where it cannot run.
    """
    before, precision = current(), torch.get_float32_matmul_precision()
    settings(schedule=schedule, fallback=before.fallback if schedule in RULES else "error")
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        settings(schedule=before.schedule, fallback=before.fallback)
        torch.set_float32_matmul_precision(precision)


def rounded_problem(case: Case, graph: EdgeList, dtype: str) -> tuple[Inputs, Tensor]:
    """Float32 inputs and output gradient that the dtype of that name holds exactly."""
    inputs = case.make_inputs(graph)
    grad_out = case.make_grad_out(graph, inputs).to(DTYPES[dtype]).float()
    return {name: tensor.to(DTYPES[dtype]).float() for name, tensor in inputs.items()}, grad_out
