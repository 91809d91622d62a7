"""The front end: a Python function whose arguments are annotated with domains is traced into a program.

Example:
    >>> @relational
    ... def rgcn(x: S, weight: R, norm: E):
    ...     return sum_to(D, norm[..., None] * (x @ weight))
    >>> print(rgcn.program(x=(16,), weight=(16, 8), norm=()))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from math import prod
from types import FunctionType
from typing import Any

from pyg_dfgnn.errors import check_choice, check_type
from pyg_dfgnn.ir.domains import Domain, E
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Builder, Program, Shape


class Var:
    """A value while a function is traced: rows of a domain, on which arithmetic, `@` and the functions below work.

    `x @ w` is a linear map of each row by the weight of the row; `x[..., None]` appends a size of 1.

    Attributes:
        domain: What the rows are.
        shape: Sizes of a row.
    """

    def __init__(self, builder: Builder, number: int) -> None:
        self._builder, self.number = builder, number
        self.domain, self.shape = builder.values[number].domain, builder.values[number].shape

    def __repr__(self) -> str:
        return f"{self.domain}{list(self.shape)}"

    def __bool__(self) -> bool:
        raise TypeError(f"a program has no branches on values, whose numbers differ from row to row (got {self})")

    def __eq__(self, other: Any) -> Any:
        return self.emit("eq", other)

    __hash__ = object.__hash__

    def emit(self, op: str, *others: Any, attrs: Sequence[Any] = (), domain: Domain | None = None) -> Var:
        """Add a value that has this one as first operand."""
        ids = [self._id(operand) for operand in (self, *others)]
        return Var(self._builder, self._builder.emit(op, *ids, attrs=attrs, domain=domain))

    def _id(self, operand: Any) -> int:
        if isinstance(operand, Var):
            return operand.number
        if isinstance(operand, (int, float)) and not isinstance(operand, bool):
            return self._builder.emit("const", attrs=(float(operand),))
        raise TypeError(f"'operand' needs a value of the program or a number (got {type(operand).__name__})")

    def _constant(self, number: Any) -> Var:
        return Var(self._builder, self._id(number))

    def __add__(self, other: Any) -> Var:
        return self.emit("add", other)

    def __sub__(self, other: Any) -> Var:
        return self.emit("sub", other)

    def __mul__(self, other: Any) -> Var:
        return self.emit("mul", other)

    def __truediv__(self, other: Any) -> Var:
        return self.emit("div", other)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Var:
        return self._constant(other) - self

    def __rtruediv__(self, other: Any) -> Var:
        return self._constant(other) / self

    def __pow__(self, exponent: float) -> Var:
        return self.emit("pow", attrs=(exponent,))

    def __neg__(self) -> Var:
        return self.emit("neg")

    def __matmul__(self, weight: Var) -> Var:
        return self.emit("linear", weight)

    def __getitem__(self, key: Any) -> Var:
        if key != (..., None):
            raise ValueError(f"'key' needs (..., None): rows have no order in a program (got {key!r})")
        return self.view(*self.shape, 1)

    def view(self, *shape: int) -> Var:
        """Return the numbers of each row in another shape, of which one size may be -1."""
        rest = prod(self.shape) // max(prod(size for size in shape if size != -1), 1)
        shape = tuple(rest if size == -1 else size for size in shape)
        return self.emit("view", attrs=(shape,))

    def permute(self, *order: int) -> Var:
        """Return the rows with their sizes in another order."""
        return self.emit("permute", attrs=(order,))

    def apply(self, function: str, *others: Any, attrs: Sequence[Any] = ()) -> Var:
        """Return a function of :data:`~pyg_dfgnn.ir.pointwise.POINTWISE` of this and other operands.

        Raises:
            ValueError: There is no such function, or it takes other operands or attributes.
        """
        check_choice("function", function, tuple(POINTWISE))
        return self.emit(function, *others, attrs=attrs)


def _check(x: Var, **domains: Domain) -> None:
    """Check a value, and domains by the names of the arguments that they were given as."""
    check_type("x", x, Var, "a value of the program")
    for name, domain in domains.items():
        check_type(name, domain, Domain, "a domain such as pyg_dfgnn.ir.D")


def _emitted(op: str, x: Var, **domains: Domain) -> Var:
    """Add a value that is an operator of x and of domains."""
    _check(x, **domains)
    return x.emit(op, attrs=tuple(domains.values()))


def to(domain: Domain, x: Var) -> Var:
    """Return `y_r = x_s` for each row r of `domain`, s being the row of x that r determines: of an edge its source.

    Args:
        domain: Domain of the result.
        x: A value [*shape] on a domain of which each row of `domain` has one row.

    Returns:
        A value [*shape] on `domain`.

    Raises:
        TypeError: `domain` is no domain, or `x` no value of the program.
        ValueError: A row of `domain` determines no row of x.
    """
    return _emitted("gather", x, domain=domain)


def sum_to(domain: Domain, x: Var, *, over: Domain = E) -> Var:
    """Return `y_r = sum_s x_s` over the rows s of `over` that belong to each row r of `domain`; 0 where there are none.

    Args:
        domain: Domain of the result.
        x: A value [*shape] on `over`, or on a domain of which each row of `over` has one row.
        over: Domain of the terms, each row of which belongs to one row of `domain`.

    Returns:
        A value [*shape] on `domain`.

    Raises:
        TypeError: `domain` or `over` is no domain, or `x` no value of the program.
        ValueError: A row of `over` determines no row of `domain`, or none of x.
    """
    return _emitted("sum", x, domain=domain, over=over)


def mean_to(domain: Domain, x: Var, *, over: Domain = E) -> Var:
    """Return the mean of x over the rows of `over` that belong to each row of `domain`; 0 where there are none.

    Arguments, result and errors are those of :func:`sum_to`.
    """
    _check(x, domain=domain, over=over)
    count = x._builder.emit("count", attrs=(domain, over))
    return sum_to(domain, x, over=over) / Var(x._builder, count)


def max_to(domain: Domain, x: Var, *, over: Domain = E) -> Var:
    """Return the maximum of x over the rows of `over` that belong to each row of `domain`; 0 where there are none.

    Arguments, result and errors are those of :func:`sum_to`. Rows that share a maximum share its gradient evenly.
    """
    return _emitted("max", x, domain=domain, over=over)


def softmax(x: Var, *, among: Domain, over: Domain = E) -> Var:
    """Return `y_s = exp(x_s) / sum_t exp(x_t)`, t being the rows of `over` that belong to the same row of `among` as s.

    Arguments and errors are those of :func:`sum_to` with `among` as `domain`; the result is a value [*shape] on `over`.
    """
    return _emitted("softmax", x, among=among, over=over)


def logsumexp_to(domain: Domain, x: Var, *, over: Domain = E) -> Var:
    """Return `log(sum exp x)` over the rows of `over` that belong to each row of `domain`, each of which has some.

    Arguments, result and errors are those of :func:`sum_to`.
    """
    most = max_to(domain, x, over=over).emit("detach")
    return most + sum_to(domain, (x - most).apply("exp"), over=over).apply("log")


def dot(x: Var, y: Var) -> Var:
    """Return `sum_c x_c y_c`.

    Args:
        x: A value [*shape, C].
        y: A value [*shape, C] on any domain of whose rows, and of those of x, edges determine one.

    Returns:
        A value [*shape].

    Raises:
        ValueError: The shapes differ.
    """
    return x.emit("inner", y)


def concat(*operands: Var) -> Var:
    """Return values [*shape, C_i] joined along their last size: a value [*shape, sum C_i].

    Raises:
        ValueError: Their other sizes differ.
    """
    return operands[0].emit("concat", *operands[1:])


def leaky_relu(x: Var, slope: float = 0.01) -> Var:
    """Return `x` where it is positive, else `slope * x`, for each number of a value [*shape]."""
    return x.apply("leaky_relu", attrs=(slope,))


class Relational:
    """A function on rows of domains, traced once for each set of row shapes.

    Args:
        function: Its arguments are annotated with domains, those with the default None may be left out; it returns a
            value or a dict of values.

    Raises:
        TypeError: An argument has no domain as annotation.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        self.domains: dict[str, Domain] = {}
        self._needed: set[str] = set()
        self._programs: dict[tuple[tuple[str, Shape], ...], Program] = {}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            if not isinstance(parameter.annotation, Domain):
                raise TypeError(f"'{name}' needs a domain as annotation (got {parameter.annotation!r})")
            self.domains[name] = parameter.annotation
            if parameter.default is not None:
                self._needed.add(name)

    def __reduce__(self) -> str:
        # Found by its name, as the function is. What is prepared for it is found by the object: copies are the object.
        return self.__qualname__

    def takes(self, names: Set[str]) -> bool:
        """Return whether inputs of these names are all that the function needs, and no others."""
        return self._needed <= names <= self.domains.keys()

    def program(self, **shapes: Shape) -> Program:
        """Return the program for inputs with these row shapes, which is made once: the function has to be pure.

        Args:
            shapes: Name of an argument -> sizes of one of its rows.

        Raises:
            TypeError: The names are not those of the arguments, or the function returned no value.
            ValueError: Domains or shapes do not fit an operator.
        """
        if not self.takes(shapes.keys()):
            raise TypeError(f"'shapes' needs {', '.join(self.domains)} (got {', '.join(shapes) or 'none'})")
        if not all(type(size) is int for shape in shapes.values() for size in shape):
            # A size that torch.compile does not know.
            return self._trace(shapes)
        key = tuple((name, tuple(shape)) for name, shape in shapes.items())
        known = self._programs.get(key)
        if known is None:
            known = self._programs[key] = self._trace(shapes)
        return known

    def _trace(self, shapes: Mapping[str, Shape]) -> Program:
        builder = Builder()
        args = {
            name: Var(builder, builder.input(name, domain, shapes[name]))
            for name, domain in self.domains.items()
            if name in shapes
        }
        returned = self.function(**args)
        outputs = returned if isinstance(returned, Mapping) else {"out": returned}
        for name, value in outputs.items():
            if not isinstance(value, Var):
                raise TypeError(f"'{name}' needs a value of the program to be returned (got {type(value).__name__})")
        return builder.build(self.__name__, {name: value.number for name, value in outputs.items()})


def relational(function: Callable[..., Any]) -> Relational:
    """Make a function on rows of domains a program.

    Args:
        function: Its arguments are annotated with domains, those with the default None may be left out; it returns a
            value, or a dict of values by their names.

    Returns:
        The program, for :func:`pyg_dfgnn.ops.relational.apply`; it is traced for each set of row shapes.

    Raises:
        TypeError: An argument has no domain as annotation.

    Source: Wu et al., Hector, ASPLOS 2024, whose programs loop over nodes and edges in the same terms.
    """
    check_type("function", function, FunctionType, "a function")
    return Relational(function)
