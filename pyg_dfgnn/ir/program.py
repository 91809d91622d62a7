"""Programs: values on row domains, in the order in which they are computed.

A value has a domain (what its rows are), a row shape, an operator, operands and attributes. An operand's domain may be
lower than what the operator ranges over: its rows are then gathered, in kernels by an index, so that no gathered copy
is a value. Passes are functions program -> program; the meaning of a program is its interpreter
(:mod:`pyg_dfgnn.ir.interpreter`).

================= ======================== ======================================================================
operator          attributes               row of the result
================= ======================== ======================================================================
input             name                     given by the caller; one with a second attribute is a seed, one int64 number
const             number                   the number
linear x w                                 x W: [..., K] times [..., K, N]; leading sizes broadcast
matmul a b                                 A B of two weights
inner x y                                  sum over the last size of x y
a pointwise one   numbers                  :data:`~pyg_dfgnn.ir.pointwise.POINTWISE`; sizes broadcast as in torch
view, permute     shape; order             the row's numbers in another shape; its sizes in another order
expand, fold      shape                    sizes of 1 repeated; its adjoint, the sum over repeated sizes
concat x...                                rows joined along the last size
slice, pad        begin, end; before, after a range of the last size; its adjoint, zeros around it
detach x                                   x, without a derivative
table_rows x      domain                   row r of `domain` is entry r of the first size of x, which all rows share
stack x           size                     its adjoint: the rows of a domain, of which there are `size`, as one value
amax x                                     the largest of the last size; its derivative is shared by equal numbers
gather x          domain                   the row of x that the row of `domain` determines
sum, max x        domain, over             over the rows of `over` that belong to the row of `domain`; empty: 0
count             domain, over             the number of such rows, at least 1
dropout_mask seed domain, shape, p, stream 1 / (1 - p) with probability 1 - p, else 0, drawn per number of such a row
outer x y         domain, over             sum over such rows of the outer product of x and y
softmax x         domain, over             exp(x - max) / (sum + 1e-16) among the rows of `over` of one row of `domain`
================= ======================== ======================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from pyg_dfgnn.ir.domains import Domain, One, determines, join
from pyg_dfgnn.ir.pointwise import POINTWISE

Shape = tuple[int, ...]
REDUCTIONS = ("sum", "max", "count", "is_used", "outer")
SEED = "@seed"
"""Name of the seed of a program; no argument and no parameter has it."""
RANGED = (*REDUCTIONS, "softmax")
"""Operators with the attributes (domain, over): they range over the rows of `over`, whatever the operand's domain."""


@dataclass(frozen=True)
class Value:
    """One value of a program; its position in the program is its id.

    Attributes:
        op: Operator.
        args: Ids of the operands.
        attrs: Attributes of the operator.
        domain: What the rows are.
        shape: Sizes of a row.
    """

    op: str
    args: tuple[int, ...]
    attrs: tuple[Any, ...]
    domain: Domain
    shape: Shape

    @property
    def is_seed(self) -> bool:
        """Whether the value is an input that masks are drawn with: one int64 number, not one of the common dtype."""
        return self.op == "input" and len(self.attrs) > 1

    def __str__(self) -> str:
        attrs = [f"{self.attrs[1]}->{self.attrs[0]}"] if self.op in RANGED else [str(attr) for attr in self.attrs]
        return " ".join([self.op, *(f"%{arg}" for arg in self.args), *attrs])


_NON_DIFFERENTIABLE = frozenset("detach greater eq heaviside in_range count is_used dropout_mask".split())
"""Operators whose results torch gives no gradient."""


@dataclass(frozen=True)
class Program:
    """Values in an order of computation and the named ones that are returned; `str` gives the text dump.

    Attributes:
        name: What the program is called.
        values: The values.
        outputs: Pairs of name and id.
    """

    name: str
    values: tuple[Value, ...]
    outputs: tuple[tuple[str, int], ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.values, self.outputs))

    def __hash__(self) -> int:
        # Programs are keys of what was made of them, for each graph anew.
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has other hashes.
        return Program, (self.name, self.values, self.outputs)

    @cached_property
    def inputs(self) -> dict[str, int]:
        """Name -> id of the inputs."""
        return {value.attrs[0]: i for i, value in enumerate(self.values) if value.op == "input"}

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs of the common dtype: all but seeds."""
        return tuple(name for name, i in self.inputs.items() if not self.values[i].is_seed)

    @cached_property
    def live(self) -> set[int]:
        """The ids that outputs need."""
        live = {i for _, i in self.outputs}
        for i in range(len(self.values) - 1, -1, -1):
            if i in live:
                live |= set(self.values[i].args)
        return live

    @cached_property
    def differentiable_inputs(self) -> dict[str, frozenset[str]]:
        """Output -> the inputs that torch would give it a gradient in."""
        found: list[frozenset[str]] = []
        for value in self.values:
            if value.op == "input":
                found.append(frozenset[str]() if value.is_seed else frozenset({value.attrs[0]}))
            else:
                parts = [found[arg] for arg in value.args]
                found.append(frozenset[str]() if value.op in _NON_DIFFERENTIABLE else frozenset[str]().union(*parts))
        return {name: found[i] for name, i in self.outputs}

    @cached_property
    def uses(self) -> Counter[int]:
        """How many operands of live values, and outputs, refer to each id."""
        return Counter([arg for i in self.live for arg in self.values[i].args] + [i for _, i in self.outputs])

    def __str__(self) -> str:
        texts = [f"%{i} = {value}" for i, value in enumerate(self.values)]
        width = max(map(len, texts), default=0)
        rows = [f"  {text:<{width}} : {v.domain}{list(v.shape)}" for text, v in zip(texts, self.values)]
        lines = [f"program {self.name}", *rows]
        return "\n".join([*lines, "  return " + ", ".join(f"{name}=%{i}" for name, i in self.outputs)])


def skip_views(values: Sequence[Value], i: int, *ops: str) -> int:
    """Return the value that some operators of one operand, views unless others are named, are applied to."""
    while values[i].op in (ops or ("view",)):
        i = values[i].args[0]
    return i


def broadcast(name: str, *shapes: Shape) -> Shape:
    """Return the shape that shapes broadcast to, as in torch.

    Raises:
        ValueError: They do not broadcast.
    """
    if shapes and shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    rank = max(map(len, shapes), default=0)
    columns = list(zip(*((1,) * (rank - len(shape)) + shape for shape in shapes)))
    if any(len(set(sizes) - {1}) > 1 for sizes in columns):
        raise ValueError(f"'{name}' needs row shapes that broadcast (got {', '.join(str(list(s)) for s in shapes)})")
    return tuple(1 if set(sizes) == {1} else max(set(sizes) - {1}) for sizes in columns)


def _need(op: str, is_right: bool, need: str, operands: Sequence[Value]) -> None:
    if not is_right:
        shapes = ", ".join(f"{value.domain}{list(value.shape)}" for value in operands)
        raise ValueError(f"'{op}' needs {need} (got {shapes})")


def _shape(op: str, args: Sequence[Value], attrs: tuple[Any, ...]) -> Shape:
    """Return the row shape of a value, having checked those of its operands."""
    shapes = [value.shape for value in args]
    if op in POINTWISE:
        taken = len(POINTWISE[op].derivatives)
        _need(op, len(args) == taken, f"{taken} operand{'s' * (taken > 1)}", args)
        numbers = POINTWISE[op].attributes
        if len(attrs) != numbers or not all(isinstance(number, (int, float)) for number in attrs):
            raise ValueError(f"'{op}' needs a tuple of {numbers} numbers as attributes (got {attrs})")
        return broadcast(op, *shapes)
    if op in ("linear", "matmul"):
        least = 1 if op == "linear" else 2
        x, w = shapes
        is_right = len(x) >= least and len(w) >= 2 and x[-1] == w[-2]
        _need(op, is_right, f"row shapes {'[..., K]' if least == 1 else '[..., M, K]'} and [..., K, N]", args)
        rows = len(x) - least
        return broadcast(op, x[:rows], w[:-2]) + x[rows:-1] + w[-1:]
    if op == "inner":
        _need(op, all(shapes) and shapes[0][-1] == shapes[1][-1], "row shapes [..., K] and [..., K]", args)
        return broadcast(op, *shapes)[:-1]
    if op == "amax":
        _need(op, bool(shapes[0]) and shapes[0][-1] > 0, "a last size above 0", args)
        return shapes[0][:-1]
    if op == "outer":
        _need(op, all(shapes), "row shapes [..., K] and [..., N]", args)
        return broadcast(op, *(shape[:-1] for shape in shapes)) + (shapes[0][-1], shapes[1][-1])
    if op == "view":
        _need(op, prod(shapes[0]) == prod(attrs[0]), f"as many numbers in a row as {list(attrs[0])} has", args)
        return attrs[0]
    if op == "permute":
        _need(op, sorted(attrs[0]) == list(range(len(shapes[0]))), f"the sizes that {list(attrs[0])} orders", args)
        return tuple(shapes[0][i] for i in attrs[0])
    if op in ("expand", "fold"):
        small, large = (shapes[0], attrs[0]) if op == "expand" else (attrs[0], shapes[0])
        _need(op, broadcast(op, small, large) == large, f"a row shape that {list(attrs[0])} is broadcast with", args)
        return attrs[0]
    if op == "concat":
        is_right = all(shapes) and len({shape[:-1] for shape in shapes}) == 1
        _need(op, is_right, "row shapes that differ in the last size only", args)
        return shapes[0][:-1] + (sum(shape[-1] for shape in shapes),)
    if op == "slice":
        begin, end = attrs
        _need(op, bool(shapes[0]) and 0 <= begin <= end <= shapes[0][-1], f"a last size above {end}", args)
        return shapes[0][:-1] + (end - begin,)
    if op == "dropout_mask":
        return attrs[1]
    if op == "table_rows":
        _need(op, bool(shapes[0]) and args[0].domain is One, "one value [rows, ...]", args)
        return shapes[0][1:]
    if op == "stack":
        return (attrs[0], *shapes[0])
    if op == "pad":
        return shapes[0][:-1] + (sum(attrs) + shapes[0][-1],)
    return () if op in ("const", "count", "is_used") else shapes[0]


def _domain(op: str, args: Sequence[Value], attrs: tuple[Any, ...]) -> Domain:
    """Return the domain of a value, having checked those of its operands."""
    if op == "gather":
        _need(op, determines(attrs[0], args[0].domain), f"an operand that a row of {attrs[0]} determines", args)
        return attrs[0]
    if op == "dropout_mask":
        _need(op, args[0].is_seed, "a seed", args)
        return attrs[0]
    if op in ("table_rows", "stack"):
        return attrs[0] if op == "table_rows" else One
    if op in RANGED:
        domain, over = attrs
        if not determines(over, domain):
            raise ValueError(f"'{op}' needs a domain that a row of {over} determines (got {domain})")
        _need(op, all(determines(over, v.domain) for v in args), f"operands that a row of {over} determines", args)
        return over if op == "softmax" else domain
    return join(One, *(value.domain for value in args))


@dataclass
class Builder:
    """A program being written.

    Args:
        share: Whether equal values become one.
    """

    share: bool = False
    values: list[Value] = field(default_factory=list)
    _ids: dict[Value, int] = field(default_factory=dict)

    def input(self, name: str, domain: Domain, shape: Sequence[int]) -> int:
        """Add an input."""
        return self._add(Value("input", (), (name,), domain, tuple(shape)))

    def seed(self) -> int:
        """Add the input that masks are drawn with."""
        return self._add(Value("input", (), (SEED, "int64"), One, (1,)))

    def emit(self, op: str, *args: int, attrs: Sequence[Any] = (), domain: Domain | None = None) -> int:
        """Add a value and return its id, or the operand's id if the operator changes nothing.

        Args:
            op: Operator.
            args: Ids of the operands.
            attrs: Attributes of the operator.
            domain: What the rows are; by default the join of the operands' domains, which it must determine.

        Raises:
            ValueError: The operands' domains or shapes do not fit the operator.
        """
        operands, attrs = [self.values[arg] for arg in args], tuple(attrs)
        lowest, shape = _domain(op, operands, attrs), _shape(op, operands, attrs)
        domain = lowest if domain is None else domain
        if domain is not lowest and not determines(domain, lowest):
            raise ValueError(f"'{op}' needs a domain that determines {lowest} (got {domain})")
        if args and op in ("view", "permute", "expand", "fold", "gather", "concat", "slice", "pad"):
            is_same = shape == operands[0].shape and domain is operands[0].domain and len(args) == 1
            if is_same and (op != "permute" or attrs[0] == tuple(sorted(attrs[0]))):
                return args[0]
        return self._add(Value(op, args, attrs, domain, shape))

    def _add(self, value: Value) -> int:
        new = len(self.values)
        known = self._ids.setdefault(value, new) if self.share else new
        if known == new:
            self.values.append(value)
        return known

    def build(self, name: str, outputs: Mapping[str, int] | Sequence[tuple[str, int]]) -> Program:
        """Return the program of the values so far."""
        return Program(name, tuple(self.values), tuple(dict(outputs).items()))

    def copy(self, value: Value, args: Sequence[int], domain: Domain | None = None) -> int:
        """Add a value of another program with other operands."""
        if value.op == "input":
            return self._add(value)
        return self.emit(value.op, *args, attrs=value.attrs, domain=domain or value.domain)


RewriteRule = Callable[[Builder, int, Value, dict[int, int]], "int | None"]
"""(new program, id in the old one, value, old id -> new id) -> the new id, or None to copy the value."""


def rewrite(program: Program, rule: RewriteRule, *, share: bool = False) -> Program:
    """Return the program in which a rule has replaced values; outputs stay on their domains."""
    builder, ids = Builder(share), dict[int, int]()
    for i, value in enumerate(program.values):
        new = rule(builder, i, value, ids)
        ids[i] = builder.copy(value, [ids[arg] for arg in value.args]) if new is None else new
    outputs = {n: builder.emit("gather", ids[i], attrs=(program.values[i].domain,)) for n, i in program.outputs}
    return builder.build(program.name, outputs)
