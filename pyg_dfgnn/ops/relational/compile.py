"""From the steps of a pass of a program to one Python function that allocates, launches, lets go and returns.

What holds for a graph, such as the sizes of rows and the addresses of lists, is worked out once. The text names none of
it, so that the passes of a program on many graphs have one text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.ir import IndexSpace, One
from pyg_dfgnn.ir.interpreter import run_values
from pyg_dfgnn.ir.kernel_steps import KernelStep, Lowered
from pyg_dfgnn.ops.eager import aligned
from pyg_dfgnn.ops.host_codegen import HostFunction
from pyg_dfgnn.ops.relational import products, traversal
from pyg_dfgnn.ops.relational.dense import Expressions
from pyg_dfgnn.torch_private import unsafe_view

_VIEWS = ("slice", "permute", "view", "gather", "detach", "expand", "fold", "table_rows", "stack")
"""Operators whose result may share the memory of the operand."""


class Functions:
    """The functions of the passes of a program on a graph; they do not keep the rows.

    Args:
        lowered: The steps.
        rows: The rows of its domains.
        dtype: Dtype of the features.
    """

    def __init__(self, lowered: Lowered, rows: IndexSpace, dtype: torch.dtype) -> None:
        self.lowered, self.rows, self.dtype = lowered, rows, dtype
        self.like = torch.empty(0, dtype=dtype, device=rows.device)
        self.exact = {buffer.name for buffer in lowered.buffers.values() if buffer.is_exact}
        self.variables = {name: f"b{place}" for place, name in enumerate(lowered.buffers)}
        self.static: dict[str, Tensor] = {}
        like = self.like.float()
        for step in lowered.static:
            # Kept with the lists, so that other streams wait for them.
            self.static |= rows.derived(("static", step), partial(run_values, step.program, rows, {}, like))
        # In memory; buffers that one row is all of may lack the size of 1, as inputs and results do.
        self.shapes = {name: self.row_shape(name) for name in lowered.buffers}

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that steps of torch take a buffer in."""
        buffer = self.lowered.buffers[name]
        return self.rows.sizes[buffer.domain], *buffer.shape

    def forward(self, inputs: Sequence[str], outputs: Sequence[str]) -> Callable[..., Any]:
        """Return the function of the forward pass: (rows, inputs) to the outputs and what it saves."""
        text = _Pass(self, self.lowered.forward, [self.lowered.outputs[name] for name in outputs])
        parameters = [text.take(name, f"unread_{place}") for place, name in enumerate(inputs)]
        text.steps(self.lowered.saved)
        results = [text.result(place, self.lowered.saved) for place in range(len(outputs))]
        saved = [self.variables[name] for name in self.lowered.saved]
        label = _label("forward", self.lowered.forward)
        return text.function(["rows", *parameters], [_tuple(results), _tuple(saved)], label)

    def backward(self, gradients: Sequence[str], wanted: Sequence[str | None]) -> Callable[..., Any]:
        """Return the function of the backward pass: (rows, list of what was saved, gradients of the outputs) to the
        gradients that are wanted, None for each that is not. It empties the list.
        """
        results = [self.lowered.outputs[name] for name in wanted if name is not None]
        text, saved = _Pass(self, self.lowered.backward, results), self.lowered.saved
        parameters = [text.take(name, f"unread_{place}") for place, name in enumerate(gradients)]
        if saved:
            text.lines += [f"{_tuple([self.variables[name] for name in saved])} = saved", "saved.clear()"]
        for name in saved:
            text.address(self.variables[name])
            text.shared.add(name)
        text.steps(())
        places = iter(range(len(results)))
        return text.function(
            ["rows", "saved", *parameters],
            ["None" if name is None else text.result(next(places), None) for name in wanted],
            _label("backward", self.lowered.backward),
        )


def _label(group: str, steps: Sequence[KernelStep]) -> str:
    """Return the label of a pass in profilers: its kinds of steps."""
    return f"{group} by {', '.join(dict.fromkeys(step.kind for step in steps))}"


class _Pass(HostFunction):
    """The text of one pass.

    Args:
        functions: What the passes share.
        todo: The steps.
        results: The buffer and the sizes of a row of each result.
    """

    def __init__(
        self, functions: Functions, todo: Sequence[KernelStep], results: Sequence[tuple[str, tuple[int, ...]]]
    ) -> None:
        super().__init__(functions.lowered.name.removesuffix("_backward"), functions.rows.device.type == "cuda")
        self.functions, self.todo, self.results = functions, todo, results
        self.named("like", functions.like)
        # Buffers that are read by others than torch, as they lie in memory.
        self.whole = set[str]()
        # What else refers to: a result that shares its memory is copied.
        self.shared = set(functions.static)
        for name, tensor in functions.static.items():
            variable = self.named(functions.variables[name], tensor)
            self.arguments[variable] = variable
            if self.is_cuda:
                self.arguments[variable] = self.named(f"{variable}_at", tensor.data_ptr())

    def take(self, name: str, unread: str) -> str:
        """Bring an input, as kernels read it; returns the name of its parameter."""
        buffer = self.functions.lowered.buffers.get(name)
        if buffer is None:
            return unread
        if buffer.domain is One:
            self.functions.shapes[name] = buffer.shape
        self.load(self.functions.variables[name])
        self.shared.add(name)
        return self.functions.variables[name]

    def steps(self, kept: Sequence[str]) -> None:
        """Write the steps; buffers that none reads later are let go, but for results and those that are kept."""
        functions = self.functions
        later = {*kept, *functions.static, *(name for name, _ in self.results)}
        self.whole = later.union(*(step.reads for step in self.todo if step.kind != "dense"))
        done: list[list[str]] = []
        for step in reversed(self.todo):
            done.append(sorted({*step.reads, *step.writes} - later))
            later |= {*step.reads, *step.writes}
        for place, (step, names) in enumerate(zip(self.todo, reversed(done), strict=True)):
            if step.kind in ("traversal", "map"):
                self._launch(place, step)
            elif step.kind in ("linear", "outer"):
                self._multiply(place, step)
            else:
                self._call(place, step)
            if names:
                self.lines.append(f"del {', '.join(functions.variables[name] for name in names)}")

    def result(self, place: int, saved: Sequence[str] | None) -> str:
        """Return the expression of a result.

        Args:
            place: Its place.
            saved: What is saved beside outputs; None for gradients, which autograd takes as they come.
        """
        functions, name = self.functions, self.results[place][0]
        variable, shape = functions.variables[name], self._result_shape(place)
        is_reshaped, before = functions.shapes[name] != shape, {other for other, _ in self.results[:place]}
        may_share = saved is None and not is_reshaped and name not in functions.static
        if name in functions.exact and functions.dtype is not torch.float32:
            variable = f"{variable}.to(like.dtype)"
        elif not may_share and name in self.shared | before | set(saved or ()):
            # Users may edit outputs in place.
            variable = f"{variable}.clone()"
        if not is_reshaped:
            return variable
        # No view, which autograd would not let a user edit in place.
        return f"{self.named('reshaped', unsafe_view)}({variable}, {self.named(f'result_{place}', shape)})"

    def _result_shape(self, place: int) -> tuple[int, ...]:
        name, row = self.results[place]
        buffer = self.functions.lowered.buffers[name]
        return (*(() if buffer.domain is One else (self.functions.rows.sizes[buffer.domain],)), *row)

    def _allocate(self, name: str, dtype: torch.dtype) -> None:
        """Allocate a buffer that a launch writes, in the shape of a result if it is one."""
        functions, variable = self.functions, self.functions.variables[name]
        shapes = [self._result_shape(place) for place, (other, _) in enumerate(self.results) if other == name]
        functions.shapes[name] = shapes[0] if shapes else functions.row_shape(name)
        self._empty(variable, functions.shapes[name], dtype)

    def _empty(self, variable: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        of_dtype = "" if dtype is self.functions.dtype else f", dtype={dtype}"
        self.assign(variable, f"like.new_empty({self.named(f'{variable}_shape', shape)}{of_dtype})")

    def _launch(self, place: int, step: KernelStep) -> None:
        """Write the launch of a traversal or a map."""
        functions, variables = self.functions, self.functions.variables
        launch = traversal.prepare(step, functions.exact, functions.lowered.compares, functions.rows, functions.dtype)
        arguments = {name: self.arguments.get(variables[name], "") for name in launch.names}
        for name in step.writes:
            if name in launch.pieces:
                self._empty(parts := f"{variables[name]}_parts", launch.pieces[name], torch.float32)
                arguments[name] = self.arguments[parts]
            else:
                self._allocate(name, torch.float32 if name in functions.exact else functions.dtype)
                arguments[name] = self.arguments[variables[name]]
        run, fixed = self.named(f"run_{place}", launch.run), self.named(f"fixed_{place}", launch.fixed)
        self.lines.append(f"{run}(None, (*{fixed}, {', '.join(arguments.values())}))")
        for name in launch.pieces:
            # The row of the result may be the sum itself.
            row, parts = functions.lowered.buffers[name].shape, f"{variables[name]}_parts"
            is_result = any(other == name and self._result_shape(k) == row for k, (other, _) in enumerate(self.results))
            functions.shapes[name] = row if is_result else functions.row_shape(name)
            added = f"{parts}.sum({'0' if is_result else '0, keepdim=True'})"
            is_narrow = name not in functions.exact and functions.dtype is not torch.float32
            self.assign(variables[name], f"{added}.to(like.dtype)" if is_narrow else added)
            self.lines.append(f"del {parts}")

    def _multiply(self, place: int, step: KernelStep) -> None:
        """Write the call of a linear map or of a sum of outer products."""
        (output,) = step.writes
        functions, variables = self.functions, self.functions.variables
        product = products.prepare(step, functions.exact, functions.rows, functions.dtype)
        self._allocate(output, product.result)
        operands = ["None" if name is None else self._features(name) for name in product.reads]
        run = self.named(f"run_{place}", product.run)
        self.lines.append(f"{run}({', '.join([*operands, variables[output]])})")

    def _call(self, place: int, step: KernelStep) -> None:
        """Write the expressions of a step that torch runs."""
        functions, buffers = self.functions, self.functions.lowered.buffers
        inputs, outputs, fitting = dict[str, str](), dict[str, tuple[str, str]](), set[str]()
        for name in step.reads:
            inputs[name] = self._features(name)
            if functions.shapes[name] != functions.row_shape(name):
                inputs[name] += f".view({self.named(f'{functions.variables[name]}_rows', functions.row_shape(name))})"
        roots, results = dict(step.program.outputs), {name for name, _ in self.results}
        for name in step.writes:
            function = self.named("aligned", aligned) if name in self.whole else ""
            if name in results and step.program.values[roots[name]].op in _VIEWS:
                # Of an input, or of another result, which users and optimizers may edit in place.
                function = self.named("copied", _copied)
            outputs[name] = function, functions.variables[name]
        for name, i in step.program.inputs.items():
            fitting |= {name} if buffers[name].shape == step.program.values[i].shape else set()
        expressions = Expressions(
            step.program,
            functions.exact.intersection(step.writes),
            functions.like,
            functions.rows.sizes,
            self.named,
            f"d{place}",
        )
        self.lines += expressions.lines(inputs, outputs, fitting)
        for name in step.writes:
            if name in self.whole:
                self.address(functions.variables[name])

    def _features(self, name: str) -> str:
        """Return a buffer in the dtype of features."""
        is_wide = name in self.functions.exact and self.functions.dtype is not torch.float32
        return self.functions.variables[name] + (".to(like.dtype)" if is_wide else "")


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _tuple(parts: Sequence[str]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"
