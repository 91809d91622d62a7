"""Programs that a hand-written family computes as they stand: attention with one of the scores, and aggregations.

Users write such messages as PyG does; :func:`match` finds them, whatever the order of their operands and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.family import row_reasons
from pyg_dfgnn.dispatch.segment import SegmentProblem, max_channels, unsupported_reasons
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir.domains import D, Domain, E, One, S
from pyg_dfgnn.ir.program import Program, Value
from pyg_dfgnn.ops.attention.functional import edge_attention
from pyg_dfgnn.ops.segment import aggregate
from pyg_dfgnn.statements.scores import ADD, DOT, GATV2


class Match(NamedTuple):
    """A program as a call of a family.

    Attributes:
        name: The family and what it computes.
        run: (graph, inputs by name) -> the only output.
        reasons: (dtype, device) -> why the family's kernels do not take it.
    """

    name: str
    run: Callable[[Graph, Mapping[str, Tensor]], Tensor]
    reasons: Callable[[torch.dtype, torch.device], list[str]]


def match(program: Program, output: str) -> Match | None:
    """Return the call of a family that gives an output of a program; None if there is none."""
    reader = _Reader(program)
    i = dict(program.outputs)[output]
    return reader.attention(i) or reader.aggregation(i)


class _Input(NamedTuple):
    """An input: its name, and how many numbers its rows have."""

    name: str
    width: int


class _Reader:
    def __init__(self, program: Program) -> None:
        self.values = program.values

    def _bare(self, i: int) -> int:
        """The value whose numbers a value has, in another shape or on other rows."""
        while self.values[i].op in ("view", "gather"):
            i = self.values[i].args[0]
        return i

    def _args(self, i: int, op: str) -> tuple[int, ...]:
        """The bare operands of a value of an operator; none of another."""
        value = self.values[self._bare(i)]
        return tuple(map(self._bare, value.args)) if value.op == op else ()

    def _input(self, i: int, domain: Domain) -> _Input | None:
        value = self.values[self._bare(i)]
        return _Input(value.attrs[0], prod(value.shape)) if value.op == "input" and value.domain is domain else None

    def _pair(self, i: int, op: str, *domains: Domain) -> tuple[_Input, ...]:
        """The two operands of a commutative operator that are inputs on two domains, in the order of these."""
        args = self._args(i, op)
        for first, second in (args, args[::-1]) if len(args) == 2 else ():
            operands = self._input(first, domains[0]), self._input(second, domains[1])
            if operands[0] is not None and operands[1] is not None:
                return operands[0], operands[1]
        return ()

    # Attention -------------------------------------------------------------------------------------------------------

    def attention(self, i: int) -> Match | None:
        """Read sum(softmax(logits) v) of rows [H, C] and one of the scores."""
        total = self.values[i]
        if total.op != "sum" or total.attrs != (D, E) or self.values[total.args[0]].op != "mul":
            return None
        for weight, vector in (args := self.values[total.args[0]].args, args[::-1]):
            softmax, keep = self._dropped(weight)
            value = self._input(vector, S)
            if softmax.op == "softmax" and softmax.attrs == (D, E) and value is not None:
                heads = prod(softmax.shape)
                channels = value.width // heads
                rows = tuple(n for n in self.values[vector].shape if n > 1)
                is_by_head = rows == tuple(n for n in (heads, channels) if n > 1)
                if is_by_head and prod(total.shape) == value.width and self._spreads(weight, vector, heads):
                    return self._with_score(softmax.args[0], value, heads, channels, total, keep)
        return None

    def _spreads(self, weight: int, vector: int, heads: int) -> bool:
        """Whether a product multiplies all channels of a head by its weight."""
        shape, rows = self.values[weight].shape, self.values[vector].shape
        full = (1,) * (len(rows) - len(shape)) + shape
        return prod(shape) == heads and len(full) == len(rows) and (heads == 1 or full[-1] == 1)

    def _dropped(self, i: int) -> tuple[Value, Value | None]:
        """A weight, and what dropout multiplies it by."""
        weight = self.values[self._bare(i)]
        if weight.op == "mul":
            for first, second in (weight.args, weight.args[::-1]):
                inner, mask = (self.values[self._bare(arg)] for arg in (first, second))
                # The first mask of a call is the one that attention draws.
                is_first = mask.op == "dropout_mask" and mask.attrs[0] is E and mask.attrs[3] == 0
                if is_first and inner.shape == mask.shape:
                    return inner, mask
        return weight, None

    def _with_score(
        self, logits: int, value: _Input, heads: int, channels: int, out: Value, keep: Value | None
    ) -> Match | None:
        scale, logits = self._scaled(logits)
        numbers: dict[str, Any] = {} if keep is None else {"dropout_p": keep.attrs[2]}
        seed = None if keep is None else self.values[keep.args[0]].attrs[0]
        width = heads * channels
        both = self._pair(logits, "inner", D, S)
        leaky = self._args(logits, "leaky_relu")
        if both and self._is_by_head(logits, heads, channels):
            score, numbers["scale"] = DOT, scale
            named = {"target": both[0], "key": both[1], "value": value}
        elif scale == 1.0 and leaky:
            score, numbers["slope"] = ADD, self.values[self._bare(logits)].attrs[0]
            ends, edge = self._pair(leaky[0], "add", D, S), None
            if not ends:
                args = self._args(leaky[0], "add")
                for inner, other in (args, args[::-1]) if args else ():
                    if (pair := self._pair(inner, "add", D, S)) and (edge := self._input(other, E)) is not None:
                        ends = pair
                        break
            if not ends or any(part.width != heads for part in (*ends, *filter(None, (edge,)))):
                return None
            named = {"target_scalars": ends[0], "source_scalars": ends[1], "value": value}
            named |= {"edge": edge} if edge is not None else {}
        elif scale == 1.0 and self._args(logits, "inner") and self._is_by_head(logits, heads, channels):
            score = GATV2
            args = self._args(logits, "inner")
            for hidden, parameter in (args, args[::-1]):
                weight = self._input(parameter, One)
                ends = self._pair(self._args(hidden, "leaky_relu")[0], "add", D, S) if weight else ()
                if weight and ends and ends[1] == value and weight.width == ends[0].width == width:
                    numbers["slope"] = self.values[hidden].attrs[0]
                    named = {"target": ends[0], "value": value, "parameter": weight}
                    break
            else:
                return None
        else:
            return None
        narrow = ("target_scalars", "source_scalars", "edge")
        if any(part.width != (heads if role in narrow else width) for role, part in named.items()):
            return None

        def run(graph: Graph, inputs: Mapping[str, Tensor]) -> Tensor:
            rows = {role: (-1,) if role != "parameter" else () for role in named}
            sizes = {role: (heads,) if role in narrow else (heads, channels) for role in named}
            operands: dict[str, Any] = {
                role: inputs[part.name].reshape(rows[role] + sizes[role]) for role, part in named.items()
            }
            key = None if seed is None else inputs[seed]
            result: Tensor = edge_attention(graph, score, **operands, **numbers, seed=key)
            return result.reshape(-1, *out.shape)

        return Match(f"attention with the score {score.name!r}", run, lambda *kind: row_reasons(heads, channels, *kind))

    def _scaled(self, i: int) -> tuple[float, int]:
        """The constant that a value is multiplied with, and what is multiplied."""
        i, scale = self._bare(i), 1.0
        while self.values[i].op in ("mul", "div"):
            left, right = map(self._bare, self.values[i].args)
            if self.values[right].op == "const":
                number = self.values[right].attrs[0]
                i, scale = left, scale * number if self.values[i].op == "mul" else scale / number
            elif self.values[left].op == "const" and self.values[i].op == "mul":
                i, scale = right, scale * self.values[left].attrs[0]
            else:
                break
        return scale, i

    def _is_by_head(self, i: int, heads: int, channels: int) -> bool:
        """Whether an inner product sums over the channels of each head."""
        value = self.values[self._bare(i)]
        sizes = [self.values[arg].shape for arg in value.args]
        return prod(value.shape) == heads and all(shape[-1] == channels for shape in sizes)

    # Aggregation -----------------------------------------------------------------------------------------------------

    def aggregation(self, i: int) -> Match | None:
        """Read statistics of one message, alone or side by side."""
        parts = self.values[i].args if self.values[i].op == "concat" else (i,)
        statistics = [self._statistic(part) for part in parts]
        stats = tuple(stat for stat, _ in statistics)
        if "" in stats or len(set(stats)) != len(stats) or len({operand for _, operand in statistics}) > 1:
            return None
        if len(parts) > 1 and any(len(self.values[part].shape) != 1 for part in parts):
            return None
        message = self._message(statistics[0][1])
        if message is None:
            return None
        kind, named = message
        width, shape = named["x"].width, self.values[i].shape
        is_narrow = kind == "weight"
        if any(part.width != (1 if role == "edge" and is_narrow else width) for role, part in named.items()):
            return None
        if prod(self.values[statistics[0][1]].shape) != width or kind == "gate" and not set(stats) <= {"sum", "mean"}:
            return None

        def run(graph: Graph, inputs: Mapping[str, Tensor]) -> Tensor:
            operands: dict[str, Any] = {
                role: inputs[part.name].reshape((-1,) if role == "edge" and is_narrow else (-1, width))
                for role, part in named.items()
            }
            return aggregate(graph, stats=stats, message=kind, **operands).reshape(-1, *shape)

        def reasons(dtype: torch.dtype, device: torch.device) -> list[str]:
            return unsupported_reasons(SegmentProblem(kind, stats, min(width, max_channels(stats)), dtype, device))

        return Match(f"aggregation of {', '.join(stats)}", run, reasons)

    def _statistic(self, i: int) -> tuple[str, int]:
        """The name of a statistic over the edges of a target, "" if a value is none, and the message."""
        value = self.values[self._bare(i)]
        if value.op in ("sum", "max") and value.attrs == (D, E):
            return value.op, self._bare(value.args[0])
        if value.op == "div":
            total, count = (self.values[self._bare(arg)] for arg in value.args)
            if total.op == "sum" and count.op == "count" and total.attrs == count.attrs == (D, E):
                return "mean", self._bare(total.args[0])
        return "", i

    def _message(self, i: int) -> tuple[str, dict[str, _Input]] | None:
        """The message of the family that a value is, and its operands."""
        if (source := self._input(i, S)) is not None:
            return "copy", {"x": source}
        if ends := self._pair(i, "mul", E, S):
            return "weight", {"edge": ends[0], "x": ends[1]}
        for kind, inner in (("add", i), ("relu_add", (self._args(i, "relu") or (i,))[0])):
            if ends := self._pair(inner, "add", E, S):
                return kind, {"edge": ends[0], "x": ends[1]}
        args = self._args(i, "mul")
        for gate, rest in (args, args[::-1]) if len(args) == 2 else ():
            source, sigmoid = self._input(rest, S), self._args(gate, "sigmoid")
            ends = self._pair(sigmoid[0], "add", D, S) if sigmoid else ()
            if source is not None and ends:
                return "gate", {"target": ends[0], "key": ends[1], "x": source}
        return None
