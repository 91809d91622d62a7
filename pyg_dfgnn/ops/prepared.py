"""Prepared ops, the kernels of an op on one graph: chosen once, prepared when first needed, and kept with the graph."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.dispatch.core import FORWARD, fused_device_types
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import tuning
from pyg_dfgnn.ops.function import INFER, TRAIN
from pyg_dfgnn.ops.host_codegen import compile_group
from pyg_dfgnn.runtime.launcher import compiled_together
from pyg_dfgnn.settings import current
from pyg_dfgnn.statements.op import Statement

MAX_PLANS = 256
"""Bounds what a graph remembers when a number is another one in each call."""
_MAX_KINDS = 4096
# Prepared ops of unmeasured graphs, whose arrays come with each call.
_of_any: dict[Any, Any] = {}


class PreparedPass(Protocol):
    """One pass of a schedule, ready to launch on its graph, which it owns the arrays of, or on any unmeasured one."""

    plan: Any
    """How the pass runs."""
    head_groups: int = 1
    """Groups of heads that thread blocks of their own take."""

    def __call__(self, graph: Graph, arguments: Sequence[Any], carry: Any = None) -> Any:
        """Launch the pass on arguments in the order of its statement, and return what the next pass needs beside them.

        All results are written whole, rows without edges as zeros.
        """

    def num_blocks(self, graph: Graph) -> int:
        """Return the rows of the values that thread blocks leave as partial results."""
        return 0

    def derives(self, name: str, saved: bool, shared: bool) -> str:
        """Return what the pass does with a derived argument: "reads", "writes" or "ignores" it."""
        return "reads"


class PreparedOp:
    """The kernels for one problem on one graph. Passes after the forward one are prepared when first needed.

    Attributes:
        op: What they compute.
        problem: For which problem.
        settings: Under which settings they were chosen.
        final: Whether the next call would take the same.
        casts: Which inputs are cast to what before they reach the kernels.
        drops: Whether a seed is drawn for each call.
    """

    def __init__(
        self,
        op: Any,
        problem: Any,
        graph: Graph,
        heads: int,
        channels: int,
        present: frozenset[str],
        casts: Any,
    ) -> None:
        self.op, self.problem, self.settings = op, problem, current()
        self.heads, self.channels, self.present, self.casts = heads, channels, present, casts
        self.device, self.device_type = problem.device, problem.device.type
        self.drops = "seed" in op.statement.input_names and bool(problem.dropout)
        self.present |= {"seed"} if self.drops else set()
        self.edge_place = op.edge_place
        self.keeps_exact = bool(op.statement.exact_outputs) and problem.dtype.itemsize == 2
        saved = op.statement.saved_inputs
        # None where all are kept.
        kept = tuple(name in saved for name in op.statement.input_names)
        self.saves = None if all(kept) else kept
        self.keeps_output = op.statement.reads_output and not self.keeps_exact
        self.num_outputs = len(op.statement.outputs)
        self.shape = op.shape(problem, graph, heads, channels, self.present)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._passes: dict[Any, tuple[PreparedPass, ...]] = {}
        self._optional: frozenset[str] | None = None
        choices = self._choose(problem, graph, FORWARD)
        self.final = all(choice.final for choice in choices)
        self._passes[FORWARD, frozenset()] = self._prepare(choices, graph, frozenset())

    def _choose(self, problem: Any, graph: Graph, directions: tuple[str, ...]) -> tuple[dispatch.Choice, ...]:
        if self.settings.schedule == "autotune":
            tuning.tune(self.op, problem, graph, self.shape, directions, self.settings)
        return dispatch.choose(self.op.family, problem, graph, directions, self.settings)

    def _prepare(
        self, choices: Sequence[dispatch.Choice], graph: Graph, flags: frozenset[str]
    ) -> tuple[PreparedPass, ...]:
        with compiled_together(self.device):
            return tuple(self._pass(choice.direction, choice.plan, graph, flags) for choice in choices)

    def _pass(self, direction: str, plan: Any, graph: Graph, flags: frozenset[str]) -> PreparedPass:
        return self.op.prepare(self.problem, direction, plan, graph, flags)

    def passes(
        self, group: tuple[str, ...], optional: frozenset[str], graph: Graph
    ) -> tuple[tuple[PreparedPass, ...], bool]:
        """Return the passes of a group, prepared on first use, and whether the next call would take the same.

        Args:
            group: ``FORWARD``, the backward passes of the statement, or the name of a pass that no dispatch chooses.
            optional: Flags of optional values that the forward pass leaves.
            graph: The edges.
        """
        known = self._passes.get((group, optional))
        if known is not None:
            return known, True
        backward = self.op.statement.backward_directions
        if group == backward:
            problem = self.op.family.after_forward(self.problem, optional)
            choices = self._choose(problem, graph, backward)
            passes = self._prepare(choices, graph, optional)
            if not all(choice.final for choice in choices):
                return passes, False
        else:
            # The fallback of the family runs these whatever was chosen for the others.
            family = self.op.family
            names = sorted(optional) if group == FORWARD else group
            plans = [family.by_name[family.fallback].plan_pass(self.problem, name, graph) for name in names]
            passes = tuple(self._pass(name, plan, graph, optional) for name, plan in zip(names, plans, strict=True))
            self._passes[group, optional] = passes
        return passes, True

    def optional(self, graph: Graph) -> frozenset[str]:
        """Return the flags of optional values that a forward pass leaves when gradients follow."""
        if self._optional is None:
            self._optional = self.op.optional(self.problem, graph, self.settings)
        return self._optional

    def num_stats(self, shared: bool) -> int:
        """Return how many of the values that a forward pass leaves the pass over edges reads."""
        return len(self.op.statement.kept(_on(stats=True, shared=shared)))

    def forward(self, mode: int, concat: bool, shared: bool, graph: Graph) -> Callable[..., Any]:
        """Return the function of the forward pass: inputs and numbers to the output and what it leaves.

        Args:
            mode: ``INFER``, ``STATS`` or ``TRAIN``.
            concat: Whether the heads of the output are side by side.
            shared: Whether target and value are one tensor.
            graph: The edges.
        """
        key = mode | concat << 2 | shared << 3
        function = self._functions.get(key)
        if function is None:
            flags = _on(stats=mode != INFER, concat=concat, shared=shared)
            function = self.compiled("forward", flags | self._saved(graph) if mode == TRAIN else flags, graph, key)
        return function

    def backward(self, shared: bool, edge_grad: bool, graph: Graph) -> Callable[..., Any]:
        """Return the function of the backward passes: inputs, kept values, output, its gradient and numbers to the
        gradients of the inputs.
        """
        key = 16 | shared << 3 | edge_grad << 5
        function = self._functions.get(key)
        if function is None:
            flags = _on(stats=True, shared=shared, edge_grad=edge_grad) | self._saved(graph)
            function = self.compiled("backward", flags, graph, key)
        return function

    def edge_pass(self, shared: bool, graph: Graph) -> Callable[..., Any]:
        """Return the function of the pass that writes one value per edge."""
        key = 64 | shared << 3
        function = self._functions.get(key)
        if function is None:
            function = self.compiled("edge", _on(stats=True, shared=shared), graph, key)
        return lambda *arguments: function(graph, *arguments)[0]

    def _saved(self, graph: Graph) -> frozenset[str]:
        """Return the flags of what a forward pass leaves where gradients follow."""
        return _on(saved=True, exact=self.problem.dtype.itemsize == 2) | self.optional(graph)

    def compiled(
        self, group: str, flags: frozenset[str], graph: Graph, key: int | tuple[str, frozenset[str]] | None = None
    ) -> Callable[..., Any]:
        """Return the function of a group of passes in a variant; it is kept unless other passes may follow.

        Args:
            group: "forward", "backward" or "edge".
            flags: Flags of the variant.
            graph: The edges.
            key: What finds the function again; the group and flags by default.
        """
        key = (group, flags) if key is None else key
        function = self._functions.get(key)
        if function is not None:
            return function
        statement = self.op.statement
        optional = flags & statement.optional_flags
        directions: tuple[str, ...] = {"forward": FORWARD, "backward": statement.backward_directions}.get(group, ())
        if group == "edge":
            assert statement.edge_pass is not None
            directions, optional = (statement.edge_pass.direction,), frozenset()
        passes, is_final = self.passes(directions, optional, graph)
        function = compile_group(self.shape, group, flags, passes)
        if is_final:
            self._functions[key] = function
        return function


def _on(**flags: bool) -> frozenset[str]:
    """Return the names of the flags that are on."""
    return frozenset(name for name, is_on in flags.items() if is_on)


def present_of(statement: Statement, tensors: Sequence[Tensor | None]) -> frozenset[str]:
    """Return the names of the inputs that are there; a seed is where weights are dropped."""
    names = zip(statement.input_names, tensors, strict=True)
    return frozenset(name for name, tensor in names if tensor is not None) - {"seed"}


def recall(graph: Any, signature: Any) -> Any:
    """Return the prepared op for arguments like these, if such have passed all checks on this graph before, or on an
    unmeasured one of its kind where it is unmeasured.
    """
    if signature is None:
        return None
    try:
        if graph.is_measured:
            plans = graph.get("plans")
            if plans is None:
                return None
            prepared = plans.get(signature)
        else:
            prepared = _of_any.get((graph.kind, signature))
    except TypeError:
        # A number that is not even hashable: the checks will name it.
        return None
    if prepared is None or prepared.device_type not in fused_device_types:
        return None
    settings = current()
    # Most often they are the same object; each `with` block has one of its own.
    if prepared.settings is not settings and prepared.settings != settings:
        return None
    if not prepared.problem.is_current:
        return None
    if prepared.device_type == "cuda":
        graph.on_this_stream()
    return prepared


def remember(graph: Graph, signature: Any, prepared: PreparedOp) -> None:
    """Keep the prepared op for arguments like these with the graph, while there is room."""
    if signature is None:
        return
    plans = plans_of(graph)
    if graph.is_measured:
        if len(plans) < MAX_PLANS:
            plans[signature] = prepared
        return
    if len(plans) >= _MAX_KINDS:
        plans.clear()
    plans[graph.kind, signature] = prepared  # type: ignore[attr-defined]


def plans_of(graph: Graph) -> dict[Any, Any]:
    """Return where prepared ops are kept: with a measured graph, once for all unmeasured ones."""
    return graph.derived("plans", dict) if graph.is_measured else _of_any
