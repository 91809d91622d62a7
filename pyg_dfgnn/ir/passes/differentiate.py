"""Reverse-mode differentiation: the backward of a program is a program of the same operators.

A value's gradient may lie on a lower domain than the value and is then the same for all rows that share a row of it.
The adjoint of reading a lower domain is a sum over the rows that read, so that the gradient of a node's features is a
sum over pairs, and that of a weight a sum of outer products over pairs: nothing has a row per edge that has none
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import RANGED, Builder, Program, Value


def differentiate(program: Program, wrt: Sequence[str], prefix: str = "d_") -> Program:
    """Return the program that also takes the gradient of each output and returns the gradient of each input of `wrt`.

    Args:
        program: The program.
        wrt: Names of inputs.
        prefix: What the names of outputs and inputs get in front to name their gradients.

    Raises:
        ValueError: An input is unknown, or a name with the prefix is taken.
    """
    inputs, names = program.inputs, dict(program.outputs)
    taken = {prefix + n for n in names} & inputs.keys() | {prefix + n for n in wrt} & names.keys()
    if taken:
        raise ValueError(
            f"'prefix' needs one that makes new names (got {prefix!r}, which makes {', '.join(sorted(taken))})"
        )
    if unknown := [name for name in wrt if name not in inputs]:
        raise ValueError(f"'wrt' needs inputs of the program, {', '.join(inputs)} (got {', '.join(unknown)})")
    tape = _Tape(program, {inputs[name] for name in wrt})
    for name, i in program.outputs:
        value = program.values[i]
        tape.add(i, tape.builder.input(prefix + name, value.domain, value.shape))
    for i in range(len(program.values) - 1, -1, -1):
        if i in tape.gradients and i in tape.active:
            tape.backward(i)
    outputs = dict(program.outputs)
    for name in wrt:
        outputs[prefix + name] = tape.gradient_of(inputs[name])
    return tape.builder.build(f"{program.name}_backward", outputs)


class _Tape:
    """The program being extended: its values keep their ids."""

    def __init__(self, program: Program, wrt: set[int]) -> None:
        self.builder, self.values = Builder(values=list(program.values)), program.values
        self.gradients: dict[int, int] = {}
        # The values that depend on what is differentiated in.
        self.active = set(wrt)
        for i, value in enumerate(program.values):
            if self.active & set(value.args) and value.op != "detach":
                self.active.add(i)
        # Torch selects: 0 times an infinite slope is no number. Elsewhere later passes move products out of sums.
        self.selects = any(self._is_steep(program.values[i]) for i in self.active)

    def _is_steep(self, value: Value) -> bool:
        """Return whether the derivative of a value may be infinite."""
        return value.op in ("log", "pow", "sqrt") or (value.op == "div" and value.args[1] in self.active)

    def emit(self, op: str, *operands: int | float, attrs: Sequence[Any] = ()) -> int:
        ids = [self.builder.emit("const", attrs=(x,)) if isinstance(x, float) else x for x in operands]
        return self.builder.emit(op, *ids, attrs=attrs)

    def accumulate(self, arg: int, gradient: int, reader: Value) -> None:
        """Add a gradient that has a row for each row of the domain on which `reader` reads a value."""
        value = self.values[arg]
        if arg not in self.active:
            return
        gradient = self.emit("fold", gradient, attrs=(value.shape,))
        over = reader.attrs[1] if reader.op in RANGED else reader.domain
        if value.domain is not over:
            gradient = self.emit("sum", gradient, attrs=(value.domain, over))
        self.add(arg, gradient)

    def add(self, i: int, gradient: int) -> None:
        """Add a gradient whose domain is at most the value's."""
        known = self.gradients.get(i)
        self.gradients[i] = gradient if known is None else self.emit("add", known, gradient)

    def gradient_of(self, i: int) -> int:
        """The gradient of an input on the input's own domain; zeros if no output depends on it."""
        value, gradient = self.values[i], self.gradients.get(i)
        if gradient is None:
            gradient = self.emit("expand", self.emit("const", attrs=(0.0,)), attrs=(value.shape,))
        return self.emit("gather", gradient, attrs=(value.domain,))

    def backward(self, i: int) -> None:
        """Hand the gradient of a value on to its operands."""
        value, g = self.values[i], self.gradients[i]
        args, attrs = value.args, value.attrs
        if value.op in POINTWISE:
            self._pointwise(i, value, g)
        elif value.op in ("linear", "matmul"):
            self._product(value, g)
        elif value.op == "inner":
            g = self.emit("view", g, attrs=((*value.shape, 1),))
            for arg, other in (args, args[::-1]):
                self.accumulate(arg, self.emit("mul", g, other), value)
        elif value.op == "outer":
            x, y = args
            # Sums of x_k y_n g_kn over n and over k; x and y may have fewer leading sizes than g.
            self.accumulate(y, self.emit("linear", x, g), value)
            self.accumulate(x, self.emit("linear", y, self._transposed(g)), value)
        elif value.op == "view":
            self.accumulate(args[0], self.emit("view", g, attrs=(self.values[args[0]].shape,)), value)
        elif value.op == "permute":
            order = tuple(attrs[0].index(k) for k in range(len(attrs[0])))
            self.accumulate(args[0], self.emit("permute", g, attrs=(order,)), value)
        elif value.op == "fold":
            self.accumulate(args[0], self.emit("expand", g, attrs=(self.values[args[0]].shape,)), value)
        elif value.op == "concat":
            begin = 0
            for arg in args:
                end = begin + self.values[arg].shape[-1]
                self.accumulate(arg, self.emit("slice", g, attrs=(begin, end)), value)
                begin = end
        elif value.op == "slice":
            after = self.values[args[0]].shape[-1] - attrs[1]
            self.accumulate(args[0], self.emit("pad", g, attrs=(attrs[0], after)), value)
        elif value.op == "pad":
            size = value.shape[-1]
            self.accumulate(args[0], self.emit("slice", g, attrs=(attrs[0], size - attrs[1])), value)
        elif value.op == "softmax":
            weighted = self.emit("mul", i, g)
            total = self.emit("sum", weighted, attrs=attrs)
            self.accumulate(args[0], self.emit("sub", weighted, self.emit("mul", i, total)), value)
        elif value.op == "max":
            self._max(i, value, g)
        elif value.op == "amax":
            self._largest(i, value, g)
        elif value.op == "table_rows" and args[0] in self.active:
            rows = self.emit("gather", g, attrs=(value.domain,))
            self.add(args[0], self.emit("stack", rows, attrs=(self.values[args[0]].shape[0],)))
        elif value.op in ("expand", "gather", "sum"):
            # What is read more often than it is there is summed where it is handed on.
            self.accumulate(args[0], g, value)

    def _pointwise(self, i: int, value: Value, g: int) -> None:
        for arg, derivative in zip(value.args, POINTWISE[value.op].derivatives):
            if derivative is None or arg not in self.active:
                continue
            slope = derivative(self.emit, value.args, value.attrs, i)
            if isinstance(slope, float):
                gradient = g if slope == 1.0 else self.emit("neg", g) if slope == -1.0 else self.emit("mul", g, slope)
            elif self.selects and value.op in ("clamp", "maximum", "relu", "where"):
                chosen = self.emit("mul", g, slope) if value.op == "maximum" else g
                gradient = self.emit("where", slope, chosen, 0.0)
            elif value.op == "mul" and self.values[arg].shape[-1:] == (1,) != value.shape[-1:]:
                # A factor per head: a dot product, so that no row of products is a value.
                columns = value.shape[-len(self.values[slope].shape) :]
                gradient = self.emit("inner", g, self.emit("expand", slope, attrs=(columns,)))
                gradient = self.emit("view", gradient, attrs=((*value.shape[:-1], 1),))
            else:
                gradient = self.emit("mul", g, slope)
            self.accumulate(arg, gradient, value)

    def _transposed(self, i: int) -> int:
        rank = len(self.builder.values[i].shape)
        return self.emit("permute", i, attrs=((*range(rank - 2), rank - 1, rank - 2),))

    def _product(self, value: Value, g: int) -> None:
        x, w = value.args
        if value.op == "matmul":
            self.accumulate(x, self.emit("matmul", g, self._transposed(w)), value)
            self.accumulate(w, self.emit("matmul", self._transposed(x), g), value)
            return
        if x in self.active:
            self.accumulate(x, self.emit("linear", g, self._transposed(w)), value)
        if w in self.active:
            outer = self.emit("outer", x, g, attrs=(self.values[w].domain, value.domain))
            self.add(w, self.emit("fold", outer, attrs=(self.values[w].shape,)))

    def _largest(self, i: int, value: Value, g: int) -> None:
        x, kept = value.args[0], (*value.shape, 1)
        is_largest = self.emit("eq", x, self.emit("view", i, attrs=(kept,)))
        count = self.emit("fold", is_largest, attrs=(kept,))
        share = self.emit("div", self.emit("view", g, attrs=(kept,)), count)
        self.accumulate(x, self.emit("mul", is_largest, share), value)

    def _max(self, i: int, value: Value, g: int) -> None:
        """Share the gradient equally among equal maxima and, as torch does, with the initial 0 if that is one."""
        is_max = self.emit("eq", value.args[0], i)
        zero = self.emit("eq", i, 0.0)
        count = self.emit("add", self.emit("sum", is_max, attrs=value.attrs), zero)
        self.accumulate(value.args[0], self.emit("mul", is_max, self.emit("div", g, count)), value)
