"""From a group of prepared passes to one Python function that brings inputs in shape, allocates, launches and returns.

A call of an op on a small graph costs the host more than the device, so what a statement says is worked out once: the
function's text holds the allocations and the arguments of each launch, in the order of the kernels' ABI.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.profiling import program
from pyg_dfgnn.statements.op import FEATURES, Pass, Precomputed, Statement, TensorSpec

_COUNTS = {"targets": "num_dst", "sources": "num_src", "edges": "num_edges"}
"""Attribute of a graph with the number of rows of a domain."""


@dataclass(frozen=True)
class CallShape:
    """Facts that the functions of an op are compiled for; numbers of nodes and edges come with each call.

    Attributes:
        statement: The op.
        device_type: Where it runs.
        has_room: Whether the arrays of the graph have room for more edges than there are.
        heads: Number of heads.
        channels: Channels per head.
        edge_channels: Channels of an edge's row that all heads share.
        present: Names of the inputs that are there.
        derive: Makes the function that computes a derived argument.
    """

    statement: Statement
    device_type: str
    has_room: bool
    heads: int
    channels: int
    edge_channels: int
    present: frozenset[str]
    derive: Callable[[Precomputed], Callable[[Tensor], Tensor]]

    def row(self, value: TensorSpec, groups: int = 1) -> tuple[int, ...]:
        """Return the shape of one row of a value; `groups` counts groups of heads."""
        letters: dict[Any, Any] = {"H": self.heads, "C": self.channels, "D": self.edge_channels, "G": groups}
        return tuple(letters.get(letter, letter) for letter in value.shape)

    def sizes(self, value: TensorSpec, graph: Graph) -> tuple[int, ...]:
        """Return the shape of a value on a graph, without partial results of thread blocks."""
        first = () if value.domain == "whole" else (count_of(graph, value.domain),)
        return *first, *self.row(value)


def count_of(graph: Graph, domain: str) -> int:
    """Return the number of rows of a domain."""
    return graph.num_dst if domain == "targets" else graph.num_src if domain == "sources" else graph.num_edges


class HostFunction:
    """The text of one function, and the objects that it names.

    Args:
        name: What the function is called in tracebacks.
        is_cuda: Whether launches take addresses; those of an emulator take tensors.
    """

    def __init__(self, name: str, is_cuda: bool) -> None:
        self.name, self.is_cuda = name, is_cuda
        self.lines: list[str] = []
        # `__name__` tells which module allocates.
        self.names: dict[str, Any] = {"torch": torch, "__name__": __name__}
        self.arguments: dict[str, str] = {}

    def load(self, name: str, checked: bool = True) -> None:
        """Make a tensor contiguous and aligned to 16 bytes, and its address an argument of launches."""
        test, copy = f"not {name}.is_contiguous()", f"{name} = {name}.clone(memory_format=torch.contiguous_format)"
        if not self.is_cuda:
            self.lines += [f"if {test} or {name}.data_ptr() & 15:", f"    {copy}"]
        self.address(name)
        if self.is_cuda and checked:
            address = self.arguments[name]
            self.lines += [f"if {address} & 15 or {test}:", f"    {copy}", f"    {address} = {name}.data_ptr()"]

    def named(self, name: str, value: Any) -> str:
        """Name an object, which stays out of the text."""
        self.names[name] = value
        return name

    def assign(self, name: str, expression: str) -> None:
        """Allocate a tensor, and make its address an argument of launches."""
        self.lines.append(f"{name} = {expression}")
        self.address(name)

    def address(self, name: str) -> None:
        """Make the address of a tensor an argument of launches."""
        if self.is_cuda:
            self.lines.append(f"{name}_at = {name}.data_ptr()")
        self.arguments[name] = f"{name}_at" if self.is_cuda else name

    def alias(self, name: str, other: str) -> None:
        """Give a value the tensor of another one."""
        self.arguments[name] = self.arguments[other]

    def function(self, parameters: Sequence[str], results: Sequence[str], label: str) -> Callable[..., Any]:
        """Compile the function, whose calls have this label in profilers."""
        body = "\n    ".join([*self.lines, f"return ({''.join(f'{result}, ' for result in results)})"])
        text = f"def run({', '.join(parameters)}):\n    {body}\n"
        exec(_code(text, self.name), self.names)  # noqa: S102
        # Its globals are these names, and nothing of them refers to it.
        run: Any = self.names.pop("run")
        program(run, f"pyg_dfgnn {self.name} {label}")
        return run


class _Passes(HostFunction):
    """The text of the function of a group of passes."""

    def __init__(self, shape: CallShape, flags: frozenset[str]) -> None:
        super().__init__(shape.statement.name, shape.device_type == "cuda")
        self.shape, self.flags, self.statement = shape, flags, shape.statement
        self.arguments |= {number.name: f"float({number.name})" for number in self.statement.numbers}

    def allocate(self, value: TensorSpec, near: str, run: Any = None) -> None:
        """Allocate a value that a pass writes.

        Args:
            value: What is written.
            near: A tensor on the device, in the dtype of features.
            run: The pass, for partial results of its thread blocks.
        """
        rows = ""
        if value.domain == "blocks":
            rows = f"{self.named(f'{value.name}_blocks', run.num_blocks)}(graph), "
        elif value.domain != "whole":
            rows = f"graph.{_COUNTS[value.domain]}, "
        make = "zeros" if value.domain == "edges" and self.shape.has_room else "empty"
        if value.like and value.domain == "blocks":
            self.assign(value.name, f"{value.like}.new_empty(({rows}*{value.like}.shape))")
        elif value.like:
            self.assign(value.name, f"torch.{make}_like({value.like})")
        else:
            row = self.shape.row(value, 1 if run is None else run.head_groups)
            names = (self.statement.output.name, *self.statement.exact_outputs[:1])
            if value.name in names and "concat" in self.flags:
                row = (self.shape.heads * self.shape.channels,)
            sizes = rows + "".join(f"{size}, " for size in row)
            dtype = "" if value.dtype == FEATURES else f", dtype=torch.{value.dtype}"
            self.assign(value.name, f"{near}.new_{make}(({sizes}){dtype})")

    def launch(self, place: int, stated: Pass, run: Any, carry: str = "") -> str:
        """Launch a pass; returns the name of what it hands to the next one."""
        nothing = "0" if self.is_cuda else "None"
        arguments = ", ".join(self.arguments.get(name, nothing) for name in stated.arguments)
        run_name, more = self.named(f"pass_{place}", run), f", {carry}" if carry else ""
        self.lines.append(f"carry_{place} = {run_name}(graph, ({arguments},){more})")
        return f"carry_{place}"


@cache
def _code(text: str, name: str) -> CodeType:
    """Return a text as bytecode."""
    return compile(text, f"<{name}>", "exec")


def compile_group(shape: CallShape, group: str, flags: frozenset[str], passes: Sequence[Any]) -> Callable[..., Any]:
    """Return the function of a group of passes.

    Args:
        shape: What it is compiled for.
        group: "forward": (graph, inputs, numbers) to (outputs, kept values); "backward": (graph, inputs, kept values,
            outputs, gradients of the outputs, numbers) to the gradients of the inputs; "edge": (graph, inputs, kept
            values, numbers) to the value per edge.
        flags: Flags of the variant.
        passes: The prepared passes.
    """
    text = _Passes(shape, flags)
    label = f"{group} by {', '.join(dict.fromkeys(run.plan.schedule for run in passes))}"
    statement, inputs = text.statement, list(text.statement.input_names)
    numbers = [number.name for number in statement.numbers]
    kept = list(statement.kept(flags))
    text.lines.append("")
    _bring_inputs(text, group, passes[0] if group == "forward" else None)
    has_value = group != "backward" or "value" in statement.saved_inputs
    near = "value" if has_value else f"grad_{statement.output.name}"
    if group == "forward":
        for value in statement.outputs:
            text.allocate(value, near)
        for value in statement.saved:
            if value.name in kept:
                text.allocate(value, near)
        for place, (stated, run) in enumerate(zip(statement.forward, passes, strict=True)):
            text.launch(place, stated, run)
        results = [*(value.name for value in statement.outputs), *kept]
        return text.function(["graph", *inputs, *numbers], results, label)
    for name in kept:
        text.load(name)
    for precomputed in statement.precomputed:
        if precomputed.same_as and "shared" in flags:
            text.alias(precomputed.value.name, precomputed.same_as)
    if group == "edge":
        assert statement.edge_value is not None and statement.edge_pass is not None
        text.allocate(statement.edge_value, near)
        text.launch(0, statement.edge_pass, passes[0])
        return text.function(["graph", *inputs, *kept, *numbers], [statement.edge_value.name], label)
    return _backward(text, label, passes, inputs, kept, numbers, near)


def _bring_inputs(text: _Passes, group: str, forward: Any | None) -> None:
    """Bring the inputs that are there, and before a forward pass compute the arguments that derive from them."""
    statement, present = text.statement, text.shape.present
    shared = "shared" in text.flags
    for value in statement.inputs:
        if value.name == "target" and shared:
            continue
        if value.name in present and (group != "backward" or value.name in statement.saved_inputs):
            text.load(value.name, checked=value.dtype != "int64")
    if shared:
        text.lines.append("target = value")
        text.alias("target", "value")
    if forward is None:
        return
    saved = bool(text.flags & {"stats", "saved"})
    for precomputed in statement.precomputed:
        name = precomputed.value.name
        if precomputed.same_as and shared:
            if precomputed.same_as in text.arguments:
                text.lines.append(f"{name} = {precomputed.same_as}")
                text.alias(name, precomputed.same_as)
            continue
        use = forward.derives(name, saved, shared)
        if use == "ignores":
            continue
        if use == "writes":
            sizes = "".join(f"{size}, " for size in text.shape.row(precomputed.value))
            rows = f"graph.{_COUNTS[precomputed.value.domain]}"
            text.assign(
                name, f"{precomputed.source}.new_empty(({rows}, {sizes}), dtype=torch.{precomputed.value.dtype})"
            )
        else:
            text.assign(name, f"{text.named(f'derive_{name}', text.shape.derive(precomputed))}({precomputed.source})")


def _backward(
    text: _Passes,
    label: str,
    passes: Sequence[Any],
    inputs: list[str],
    kept: list[str],
    numbers: list[str],
    near: str,
) -> Callable[..., Any]:
    statement, flags, present = text.statement, text.flags, text.shape.present
    outputs = [value.name for value in statement.outputs]
    output_grads = [f"grad_{name}" for name in outputs]
    for place, name in enumerate(outputs):
        exact = statement.exact_outputs[place] if statement.exact_outputs else ""
        if exact in kept:
            text.alias(name, exact)
        elif statement.reads_output:
            text.load(name)
        text.load(output_grads[place])
    for value in statement.scratch:
        text.allocate(value, near, passes[0])
    results: dict[str, str] = {}
    for gradient in statement.gradients:
        name = gradient.value.name
        is_there = gradient.input in present or (gradient.input == "target" and "shared" in flags)
        if not is_there or (gradient.when and gradient.when not in flags):
            continue
        if name not in text.arguments:
            writers = [run for stated, run in zip(statement.backward, passes, strict=True) if name in stated.arguments]
            text.allocate(gradient.value, near, writers[0] if writers else passes[0])
        if gradient.input == "target" and "shared" in flags:
            text.arguments["added"] = text.arguments[name]
            continue
        results[gradient.input] = name
    carry = ""
    for place, (stated, run) in enumerate(zip(statement.backward, passes, strict=True)):
        carry = text.launch(place, stated, run, carry)
    for gradient in statement.gradients:
        if gradient.reduce and gradient.input in results:
            name = gradient.value.name
            results[gradient.input] = {
                "all": f"{name}.sum().reshape({gradient.input}.shape)",
                "rows": f"{name}.sum(0)",
                "groups": f"{name}.squeeze(1)" if passes[0].head_groups == 1 else f"{name}.sum(1)",
            }[gradient.reduce]
    parameters = ["graph", *inputs, *kept, *outputs, *output_grads, *numbers]
    return text.function(parameters, [results.get(name, "None") for name in inputs], label)
