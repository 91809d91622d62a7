"""The steps of a program that torch runs, as Python expressions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.ir import IndexSpace, One
from pyg_dfgnn.ir.interpreter import run_value
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Program, Value

Named = Callable[[str, Any], str]
"""(name, object) -> the name by which a text refers to the object."""

_PRODUCTS = ("linear", "matmul", "inner", "outer")


class Expressions:
    """The expressions of one step.

    Args:
        program: What the step computes.
        exact: Names of outputs that are float32 whatever the dtype of features.
        like: A tensor in the dtype of features.
        sizes: Number of rows of each domain.
        named: Names an object.
        prefix: Of the names.
    """

    def __init__(
        self,
        program: Program,
        exact: Collection[str],
        like: Tensor,
        sizes: Mapping[Any, int],
        named: Named,
        prefix: str,
    ) -> None:
        self.program, self.like, self.sizes, self.named, self.prefix = program, like, sizes, named, prefix
        self.exact = {i for name, i in program.outputs if name in exact}

    def lines(
        self, inputs: Mapping[str, str], outputs: Mapping[str, Sequence[str]], fitting: Collection[str]
    ) -> list[str]:
        """Return the lines that compute outputs.

        Args:
            inputs: Name -> expression of the rows of an input.
            outputs: Name -> the function that its value goes through, or nothing, and the variable of an output.
            fitting: Names of inputs whose rows have the shape that the program has them in.
        """
        values, texts, lines = self.program.values, dict[int, str](), list[str]()
        uses = Counter(arg for value in values for arg in value.args)
        wanted: dict[int, list[Sequence[str]]] = {}
        for name, i in self.program.outputs:
            wanted.setdefault(i, []).append(outputs[name])
        # Values whose shape in memory is the one that the program states.
        known, passing = set[int](), list[str]()
        for i, value in enumerate(values):
            if value.op == "input":
                texts[i] = inputs[value.attrs[0]]
                known |= {i} if value.attrs[0] in fitting else set()
            else:
                text = self._expression(i, value, texts) if known.issuperset(value.args) else None
                texts[i] = self._called(i, value, texts) if text is None else text
                known |= {i} if value.op != "const" else set()
            if i in wanted:
                for function, variable in wanted[i]:
                    lines.append(f"{variable} = {function}({texts[i]})" if function else f"{variable} = {texts[i]}")
                    texts[i] = variable
            elif uses[i] > 1 and not texts[i].isidentifier():
                passing.append(name := f"{self.prefix}_{i}")
                lines.append(f"{name} = {texts[i]}")
                texts[i] = name
        if passing:
            lines.append(f"del {', '.join(passing)}")
        return lines

    def _called(self, i: int, value: Value, texts: Mapping[int, str]) -> str:
        """A call of what the interpreter does for a value."""
        operands, like, is_exact = [self.program.values[arg] for arg in value.args], self.like, i in self.exact

        def run(rows: IndexSpace, *tensors: Tensor) -> Tensor:
            return run_value(value, list(zip(operands, tensors)), rows, like, is_exact)

        return f"{self._name(i, run)}({', '.join(['rows', *(texts[arg] for arg in value.args)])})"

    def _name(self, i: int, what: Any) -> str:
        return self.named(f"{self.prefix}_do_{i}", what)

    def _expression(self, i: int, value: Value, texts: Mapping[int, str]) -> str | None:
        """The operator of torch that a value is; None where it is more than one."""
        if i in self.exact and (self.like.dtype is not torch.float32 or value.op in _PRODUCTS):
            return None
        op, attrs, shape = value.op, value.attrs, value.shape
        operands, args = [self.program.values[arg] for arg in value.args], [texts[arg] for arg in value.args]
        domains = [operand.domain for operand in operands]
        if op in POINTWISE:
            # Those of the one row of all are broadcast.
            fits = value.domain in domains and all(domain in (value.domain, One) for domain in domains)
            fits &= all(len(operand.shape) == len(shape) for operand in operands)
            if not fits:
                return None
            # By name: the text of an infinite number, or of one of NumPy's, is no expression.
            args += [self.named(f"{self.prefix}_of_{i}_{k}", number) for k, number in enumerate(attrs)]
            return f"{self._name(i, POINTWISE[op].compute)}({', '.join(args)})"
        if op == "linear":
            # A matrix that all rows share.
            (x, w) = operands
            fits = domains == [value.domain, One] and len(x.shape) == len(shape) == 1 and len(w.shape) == 2
            return f"({args[0]} @ {args[1]}[0])" if fits else None
        if op == "sum":
            fits = domains == [attrs[1]] and attrs[0] is One and attrs[1] is not One and operands[0].shape == shape
            return f"{args[0]}.sum(0, keepdim=True)" if fits else None
        if any(domain is not value.domain for domain in domains):
            return None
        if op in ("gather", "detach"):
            return args[0]
        if op == "slice":
            return f"{args[0]}[..., {attrs[0]}:{attrs[1]}]"
        if op == "permute":
            return f"{args[0]}.permute({(0, *(1 + k for k in attrs[0]))})"
        if op == "view":
            return f"{args[0]}.reshape({self._name(i, (self.sizes[value.domain], *shape))})"
        if op == "concat":
            return f"torch.cat(({', '.join(args)},), dim=-1)"
        if op == "pad":
            return f"torch.constant_pad_nd({args[0]}, {list(attrs)})"
        return None
