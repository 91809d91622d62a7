"""Layers of PyG, ours in their place, and the comparison of both under a condition, with float64 as the measure."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import Any

import torch
import torch_geometric.nn.conv as pyg
from torch import Tensor

import pyg_dfgnn
from pyg_dfgnn import fallback
from pyg_dfgnn.nn import DROP_INS
from pyg_dfgnn.nn.conv.aggregation import AggregationConv
from pyg_dfgnn.nn.conv.attention import AttentionConv
from pyg_dfgnn.nn.messages import UNCALLED
from pyg_dfgnn.reference.tolerances import BACKWARD, FORWARD, direction_of, tolerance, worst_beside
from pyg_dfgnn.reference.zoo import EdgeList, edges
from pyg_dfgnn.runtime import launcher
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import EDGE_MLP, FEATURES, REFUSED, TRACED, Case, Inputs, loss_of, outputs_of

CASES: dict[str, Case] = {**TRACED, **EDGE_MLP, **REFUSED}
# An extra of PyG's finds their neighbours.
CASES = {name: case for name, case in CASES.items() if name not in ("GravNetConv", "DynamicEdgeConv")}
Results = dict[str, Tensor]
Form = Callable[[Tensor, int, int, torch.dtype], Any]
Wrap = Callable[[torch.nn.Module, "Given"], Callable[..., Any]]

# A hub (1), a node without edges (7), self-loops (2, 5); no edge is there twice, and targets ascend.
SIMPLE = edges(
    "simple",
    [(1, 0), (3, 0), *((source, 1) for source in (0, 2, 3, 4, 5, 6, 8, 9)), (1, 2), (2, 2), (0, 3), (4, 3), (8, 4)]
    + [(1, 5), (5, 5), (9, 5), (2, 6), (6, 8), (7, 8), (1, 9), (3, 9)],
    10,
)
# The same with edges that are there twice, in no order.
PLAIN = edges("plain", [*map(tuple, SIMPLE.edge_index.t().tolist()), (3, 0), (1, 2)], 10).shuffled()


class NotApplicable(Exception):
    """The condition makes no sense for a layer, or PyG's own layer does not take it; the text says why."""


class Given(Inputs):
    """Inputs whose numbers one dtype holds, in that dtype or in a wider one.

    Args:
        graph: The edges.
        dtype: Of the inputs.
        device: Where they are.
        held: The dtype that holds all numbers.
        form: (edges, number of sources and of targets, dtype) -> the edges as the layer gets them.
        is_pair: Whether features are those of two node sets.
    """

    def __init__(
        self, graph: EdgeList, dtype: torch.dtype, device: str, held: torch.dtype, form: Form | None, is_pair: bool
    ) -> None:
        self.held, self.form, self.is_pair, self.uses_edges = held, form, is_pair, False
        super().__init__(graph, dtype, device)

    def _as_taken(self, ends: Tensor, num_src: int, num_dst: int) -> Any:
        self.uses_edges = True
        return ends if self.form is None else self.form(ends, num_src, num_dst, self.dtype)

    @property
    def edge_index(self) -> Any:
        return self._as_taken(self._ends, self.graph.num_src, self.graph.num_dst)

    @edge_index.setter
    def edge_index(self, ends: Tensor) -> None:
        self._ends, self._turned = ends, ends.flip(0)

    @property
    def back(self) -> Any:
        return self._as_taken(self._turned, self.graph.num_dst, self.graph.num_src)

    def draw(self, name: str, *shape: int, positive: bool = False) -> Tensor:
        drawn = super().draw(name, *shape, positive=positive)
        self.leaves[name] = drawn.detach().to(self.held).to(self.dtype).requires_grad_()
        return self.leaves[name]

    @property
    def x(self) -> Any:
        return self.pair if self.is_pair else super().x

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        x = self.draw("x", self.graph.num_src, FEATURES)
        return x, self.draw("x_dst", self.graph.num_dst, FEATURES)


@contextmanager
def kernels_on(device: str, emulates: bool = True) -> Iterator[list[str]]:
    """Yield the names of the kernels launched so far; on a CPU they are emulated, or there are none."""
    if device == "cpu" and not emulates:
        yield []
        return
    if device == "cpu":
        with emulated_device() as names:
            yield names
        return
    launched: list[str] = []

    def run(spec: Any, entry: str, grid: Any, block: Any, arguments: Any, shared_bytes: int) -> None:
        launched.append(entry)
        kernel = launcher.kernel_of(spec, entry)
        with launcher.override(outer):
            launcher.launch(kernel, grid, block, arguments, torch.device(device), shared_bytes)

    with launcher.override(run) as outer:
        yield launched


def plain(layer: torch.nn.Module, given: Given) -> Callable[..., Any]:
    return layer


def parameters_of(layer: Any) -> dict[str, Tensor]:
    """Return the parameters of a layer by their names in it, whatever torch has put around it."""
    named = layer.named_parameters() if isinstance(layer, torch.nn.Module) else ()
    return {name.replace("_orig_mod.", "").removeprefix("module."): parameter for name, parameter in named}


def results_of(layer: torch.nn.Module, case: Case, given: Given, wrap: Wrap = plain, order: int = 1) -> Results:
    """Return the outputs of a call, and the gradients of its inputs and parameters.

    Args:
        layer: PyG's layer or ours.
        case: How it is called.
        given: With what.
        wrap: Returns what is called in place of the layer.
        order: 0: outputs alone. 2: gradients of a sum over the gradients, too.
    """
    call = wrap(layer, given)
    outs = outputs_of(call, case, given)
    found = {f"out {k}": out for k, out in enumerate(outs)}
    if order == 0:
        return found
    leaves = given.leaves | (parameters_of(call) or parameters_of(layer))
    loss = loss_of(outs)
    for turn in range(order):
        last = turn == order - 1
        grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=not last, allow_unused=True)
        grads = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves.values(), grads, strict=True)]
        found |= {f"grad{'' if turn == 0 else ' of grad'} {name}": g for name, g in zip(leaves, grads, strict=True)}
        if not last:
            loss = loss_of(grads)
            if not loss.requires_grad:
                raise NotApplicable("its gradients do not depend on its inputs")
    return {name: tensor.detach() for name, tensor in found.items()}


def errors_of(actual: Results, expected: Results) -> dict[str, float]:
    """Return `||got - want|| / ||want||` of each output; gradients are measured by the norm of the largest of them.

    The gradient of a score vanishes where a target has one edge, and of the bias of keys always: rounding is left.
    """
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    largest = max((norm for name, norm in norms.items() if direction_of(name) == BACKWARD), default=0.0)
    errors = {}
    for name, want in expected.items():
        norm = (largest if direction_of(name) == BACKWARD else norms[name]) or 1.0
        error = (actual[name].double() - want.double()).norm().item() / norm
        errors[name] = error if isfinite(error) else float("inf")
    return errors


def assert_right(actual: Results, expected: Results, pygs: Results | None, dtype: torch.dtype, op: str) -> None:
    """Nothing is further from float64 than the bound of the table or, beyond it, than twice PyG's own distance."""
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    for name, tensor in actual.items():
        assert tensor.shape == expected[name].shape, f"{name} has shape {tensor.shape}, PyG's {expected[name].shape}"
        if pygs is not None:
            assert tensor.dtype is pygs[name].dtype, f"{name} in {tensor.dtype}, PyG's in {pygs[name].dtype}"
    errors, beside = errors_of(actual, expected), None if pygs is None else errors_of(pygs, expected)
    for direction in (FORWARD, BACKWARD):
        own = {name: error for name, error in errors.items() if direction_of(name) == direction}
        if own:
            worst = worst_beside(own, tolerance(dtype, direction, op).relative, beside)
            assert worst.is_right, worst


@cache
def op_of(kind: type) -> str:
    """Return the op of the table of tolerances whose bounds a layer keeps."""
    drop_in = DROP_INS.get(kind, object)
    if issubclass(drop_in, AttentionConv):
        return "attention"
    return "segment" if issubclass(drop_in, AggregationConv) else "relational"


@dataclass
class Conv:
    """A class of PyG's on a device, and what was seen of ours in its place.

    Attributes:
        name: Name of the class.
        device: "cpu" or "cuda".
        emulates: Whether kernels are emulated on a CPU.
        launched: Names of the kernels that ran.
        why: Why PyG's own code ran.
    """

    name: str
    device: str
    emulates: bool = True
    launched: list[str] = field(default_factory=list)
    why: dict[str, None] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return CASES[self.name]

    def layer(self, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """Return PyG's layer with random parameters, the same ones in each call."""
        torch.manual_seed(3)
        layer = self.case.make()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return layer.to(self.device, dtype)

    def check(
        self,
        wrap: Wrap = plain,
        *,
        of_pyg: Wrap = plain,
        exact: Wrap = plain,
        graphs: Sequence[EdgeList] = (PLAIN,),
        form: Form | None = None,
        pygs_form: Form | None = None,
        dtype: torch.dtype = torch.float32,
        bound: torch.dtype | None = None,
        is_pair: bool = False,
        order: int = 1,
    ) -> None:
        """Compare our layer, called as the condition has it, with PyG's in float64 and in the same dtype.

        Args:
            wrap: Returns what is called in place of our layer.
            of_pyg: Likewise, of PyG's layer in the same dtype.
            exact: Likewise, of PyG's layer in float64.
            graphs: The same layer runs on one after another.
            form: The form of the edges; None: a tensor.
            pygs_form: The form in which PyG's layers get them.
            dtype: Of parameters and inputs.
            bound: The dtype whose row of the table holds; None: `dtype`.
            is_pair: Whether features are those of two node sets.
            order: How often is differentiated.

        Raises:
            NotApplicable: PyG's own layer does not take the call either.
        """
        pygs = self.layer(dtype)
        own = pyg_dfgnn.accelerate(copy.deepcopy(pygs))

        def given(graph: EdgeList, held_in: torch.dtype, form: Form | None) -> Given:
            return Given(graph, held_in, self.device, dtype, form, is_pair)

        def run(layer: torch.nn.Module, graph: EdgeList, wide: bool, wrap: Wrap, form: Form | None) -> Results:
            kind = torch.float64 if wide else dtype
            return results_of(layer, self.case, given(graph, kind, form), wrap, order)

        for graph in graphs:
            try:
                if self.device != "cpu" and pygs_form is None:
                    # An id out of range is an error on a CPU; a GPU would be of no more use to this process.
                    on_cpu = Given(graph, torch.float64, "cpu", dtype, None, is_pair)
                    results_of(self.layer(dtype).double().cpu(), self.case, on_cpu, exact, order)
                expected = run(self.layer(dtype).double(), graph, True, exact, pygs_form)
            except NotApplicable:
                raise
            except Exception as error:
                raise NotApplicable(f"PyG's own layer raises {said(error)}") from error
            if not all(tensor.isfinite().all() for tensor in expected.values()):
                raise NotApplicable("PyG's own results are not finite")
            try:
                beside = run(pygs, graph, False, of_pyg, pygs_form)
            except Exception:
                # PyTorch lacks some operators in 16 bits; the bound of the table alone holds then.
                beside = None
            try:
                with self.seen(own):
                    inputs = given(graph, dtype, form)
                    actual = results_of(own, self.case, inputs, wrap, order)
            except NotApplicable:
                raise
            except Exception as ours:
                try:
                    run(pygs, graph, False, wrap, form)
                except Exception as error:
                    raise NotApplicable(f"PyG's own layer raises {said(error)}") from ours
                raise
            if form is not None and not inputs.uses_edges:
                raise NotApplicable("it takes no edges")
            assert_right(actual, expected, beside, bound or dtype, op_of(type(pygs)))

    @contextmanager
    def seen(self, layer: torch.nn.Module) -> Iterator[None]:
        """Note which kernels run in the block, and why PyG's code does for a layer or a model."""
        before, fallback.logged = fallback.logged, set()
        try:
            with kernels_on(self.device, self.emulates) as launched:
                yield
                self.why.update(dict.fromkeys(row.why for row in pyg_dfgnn.report(layer) if row.why))
                self.why.pop(UNCALLED, None)
        finally:
            self.launched += launched
            said_of = [(name, why) for name, why in sorted(fallback.logged) if name]
            # An aggregation inside has reasons of its own, which count where the layer has none.
            own = [why for name, why in said_of if name == self.name]
            self.why.update(dict.fromkeys(own or [why for _, why in said_of if not self.why]))
            fallback.logged = before

    @property
    def path(self) -> str:
        """What ran: kernels, or PyG's own code."""
        is_drop_in = getattr(pyg, self.name) in DROP_INS
        return "PyG's own path" if not self.launched or (is_drop_in and self.why) else "kernels"


def said(error: BaseException) -> str:
    """Return the type of an error and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}".rstrip(": ")
