"""Inputs of one attention call and what it gives: shared by the tests of the operators on the CPU and on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.ops.attention.functional import op_by_role
from pyg_dfgnn.ops.core import draw_seed
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.reference.problems import draw_grad_out, draw_inputs
from pyg_dfgnn.reference.tolerances import assert_all_close, tolerance
from pyg_dfgnn.reference.zoo import EdgeList, random
from pyg_dfgnn.settings import local_settings
from pyg_dfgnn.statements.attention import inputs_of

SCORES = ("dot", "cosine", "add", "gatv2")
SCALARS = ("beta", "att", "alpha_src", "alpha_dst", "alpha_edge")
"""Inputs that stay float32 whatever the storage of the features."""

# Packed rows with duplicates and self-loops, some targets and sources without edges.
SPARSE = EdgeList("sparse", torch.tensor([[0, 2, 2, 5, 5, 1, 7, 7, 3, 2], [1, 1, 1, 4, 5, 5, 0, 7, 7, 7]]), 8, 8)
# Rows long enough for lanes to share them.
DENSE = random(24, 10, 200, seed=4, name="dense")


@dataclass
class Problem:
    """One score on one graph: named inputs, rounded to `dtype`, and a gradient of the output.

    Args:
        score: One of `SCORES`.
        case: The graph; one of the package is used as it is.
        heads: Heads H.
        channels: Channels C.
        dtype: Of the features.
        edge: Whether there are edge features.
        device: Of everything.
        dropout_p: Dropout of the weights.
        own_targets: Whether the targets of the cosine score have features of their own.
    """

    score: str
    case: EdgeList | Graph
    heads: int = 2
    channels: int = 4
    dtype: torch.dtype = torch.float32
    edge: bool = False
    device: str | torch.device = "cpu"
    dropout_p: float = 0.0
    own_targets: bool = True
    edge_index: Tensor = field(init=False)
    inputs: dict[str, Tensor] = field(init=False)
    grad_out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # A tensor of its own, so that each problem has its own graph and plan.
        self.edge_index = self.case.edge_index if isinstance(self.case, Graph) else self.case.edge_index.clone()
        self.edge_index = self.edge_index.to(self.device)
        edges = EdgeList(str(self.case), self.edge_index, self.case.num_src, self.case.num_dst)
        size = self.heads, self.channels
        drawn = draw_inputs(self.score, edges, *size, self.edge, self.own_targets)
        self.grad_out = draw_grad_out(self.score, edges, *size, drawn).to(self.dtype)
        stays = (*SCALARS,) if self.dtype != torch.float64 else ()
        self.inputs = {name: tensor if name in stays else tensor.to(self.dtype) for name, tensor in drawn.items()}

    @property
    def graph(self) -> Graph:
        if isinstance(self.case, Graph):
            return self.case
        return Graph.of(self.edge_index, self.case.num_src, self.case.num_dst)

    @property
    def edges(self) -> EdgeSet:
        return EdgeSet(self.edge_index, self.case.num_src, self.case.num_dst)

    @property
    def op(self) -> Callable[..., Any]:
        return getattr(ops, f"{self.score}_attention")

    @property
    def reference(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return getattr(reference, f"{self.score}_attention")

    def call(self, seed: int | None = None, **changes: Any) -> Any:
        """The op on the inputs, some of them changed; under a seed if one is given."""
        if seed is not None:
            torch.manual_seed(seed)
        return self.op(self.graph, **{**self.inputs, "dropout_p": self.dropout_p, **changes})

    def run(
        self, call: Callable[..., Any] | None = None, seed: int | None = None, **inputs: Tensor
    ) -> dict[str, Tensor]:
        """Output and the gradient of every input, by name, of `call(**inputs)` (the op by default), under a seed."""
        if seed is not None:
            torch.manual_seed(seed)
        inputs = {name: tensor.detach().requires_grad_() for name, tensor in {**self.inputs, **inputs}.items()}
        out = self.call(**inputs) if call is None else call(**inputs)
        grads = torch.autograd.grad(out, list(inputs.values()), self.grad_out.to(out.dtype))
        return {"out": out.detach(), **{f"grad {name}": grad for name, grad in zip(inputs, grads, strict=True)}}

    def run_with_weights(self, seed: int) -> dict[str, Tensor]:
        """What :meth:`run` gives, and the weights of another call under that seed, whose output has the same bits."""
        results = self.run(seed=seed)
        out, results["weights"] = self.call(seed, return_weights=True)
        assert torch.equal(out, results["out"])
        return results

    def kept(self, seed: int) -> Tensor | None:
        """The dropout factors [E, H] of calls under this seed, None without dropout."""
        torch.manual_seed(seed)
        return self.keep(draw_seed(self.device)) if self.dropout_p else None

    def keep(self, seed: Tensor) -> Tensor:
        """The dropout factors [E, H] that a call draws from this seed."""
        edges = torch.arange(self.edge_index.size(1), device=self.device)
        return dropout_factor(edges, self.heads, self.dropout_p, seed)

    def expected(self, keep: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        """What :meth:`run` gives in float64, by the reference with these options; `weights` too."""
        function = self.reference
        weights = []

        def call(**inputs: Tensor) -> Tensor:
            out, alpha = function(self.edge_index, self.case.num_dst, **inputs, keep=keep, **options)
            weights.append(alpha.detach())
            return out

        results = self.run(call, **{name: tensor.double() for name, tensor in self.inputs.items()})
        return {**results, "weights": weights[0]}

    def label(self) -> str:
        options = ["edge"] * self.edge + [f"p{self.dropout_p}"] * (self.dropout_p > 0)
        name = str(self.dtype).removeprefix("torch.")
        return "-".join([self.score, str(self.case), f"H{self.heads}", f"C{self.channels}", name, *options])


@dataclass
class EdgeRows(Problem):
    """The dot score with edge terms `edge_weight` times `edge_attr`, [H * C, D] times [E, D].

    Args:
        edge_channels: Channels D.
    """

    edge_channels: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = torch.randn(self.edge_index.size(1), self.edge_channels, device=self.device)
        weight = torch.randn(self.heads * self.channels, self.edge_channels, device=self.device)
        self.inputs["edge_attr"] = rows.to(self.dtype)
        self.inputs["edge_weight"] = (weight / self.edge_channels**0.5).to(self.dtype)

    @property
    def reference(self) -> Callable[..., tuple[Tensor, Tensor]]:
        def attention(*edges: Any, edge_attr: Tensor, edge_weight: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
            edge = (edge_attr @ edge_weight.T).unflatten(1, (self.heads, self.channels))
            return reference.dot_attention(*edges, edge=edge, **inputs)

        return attention


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor has the bits of the expected one of its name."""
    assert [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])] == []


def assert_like_rows(problem: "Problem", actual: dict[str, Tensor]) -> None:
    """Every result as `row_split` has it, up to the rounding of both; dropout as under the seed 3."""
    with local_settings(schedule="row_split"):
        expected = problem.run(seed=3)
    bound = 2 * tolerance(problem.dtype).relative
    largest = max(tensor.norm() for name, tensor in expected.items() if name != "out")
    for name, tensor in actual.items():
        scale = expected[name].norm() if name == "out" else largest
        difference = (tensor.double() - expected[name].double()).norm()
        assert difference <= bound * scale, f"{name}: {float(difference / scale):.1e}"


def check_opcheck(problem: "Problem") -> set[str]:
    """`torch.library.opcheck` of every operator of a call, forward, backward and weights; returns their programs."""
    with Recorder() as recorder:
        problem.run()
        problem.call(return_weights=True)
    assert {func.name() for func, *_ in recorder.calls} == {"pyg_dfgnn::run"}
    for (func, _), args in recorder.calls.items():
        opcheck(func, args)
    return {program for _, program in recorder.calls}


def check_gradient_through_the_weights(problem: "Problem") -> None:
    """A loss on output and weights together; asking for weights changes no bit of the output."""
    factor = torch.randn(problem.edge_index.size(1), problem.heads)

    def both(result: tuple[Tensor, Tensor]) -> Tensor:
        out, weights = result
        return torch.cat([out.flatten(), (weights * factor.to(weights.dtype)).flatten()])

    problem.grad_out = torch.cat([problem.grad_out.flatten(), torch.ones(factor.numel())])
    actual = problem.run(lambda **inputs: both(problem.call(seed=3, **inputs, return_weights=True)))
    assert torch.equal(problem.call(seed=3).flatten(), actual["out"][: -factor.numel()])
    keep = problem.kept(seed=3)
    inputs = {name: tensor.double() for name, tensor in problem.inputs.items()}
    nodes = problem.edge_index, problem.case.num_dst
    expected = problem.run(lambda **inputs: both(problem.reference(*nodes, **inputs, keep=keep)), **inputs)
    assert_all_close(pairs(actual, expected), torch.float32)


def check_each_gradient_alone(problem: "Problem") -> None:
    """Whatever subset of the inputs needs a gradient, it is the same."""
    everything = problem.run(seed=3)
    for name, tensor in problem.inputs.items():
        leaf = tensor.clone().requires_grad_()
        out = problem.call(seed=3, **{name: leaf})
        assert torch.equal(out, everything["out"])
        (grad,) = torch.autograd.grad(out, leaf, problem.grad_out)
        assert torch.equal(grad, everything[f"grad {name}"]), name


def pairs(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Tensors to compare, by name."""
    return {name: (tensor, expected[name]) for name, tensor in actual.items()}


def problem_of(score: str, case: EdgeList = SPARSE, full: bool = False, **options: Any) -> Problem:
    """A problem; `full` adds dropout and, where the score takes them, edge features."""
    if full:
        options = {"edge": score != "cosine", "dropout_p": 0.5, **options}
    return Problem(score, case, **options)


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of an operator of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "pyg_dfgnn":
            key = func, *(arg for arg in args if isinstance(arg, str))
            self.calls[key] = tree_map_only(Tensor, Tensor.detach, args)
        return func(*args, **(kwargs or {}))


def op_and_shape(problem, graph):
    """The op of an attention problem, and what its functions on a graph are compiled for."""
    op = op_by_role(problem.record)
    present = inputs_of(problem.record, problem.edge, problem.dropout)
    return op, op.shape(problem, graph, problem.heads, problem.channels, present)
