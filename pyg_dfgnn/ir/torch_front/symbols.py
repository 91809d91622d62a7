"""Symbolic tensors: meta tensors of fake size that know their value in the program being written.

One dimension of a symbol with rows is that of a domain, whose number of rows is a prime that no other size equals, so
a shape tells what a tensor is. The rows of a value broadcast to the other sizes of its symbol: what `expand` repeats is
no value of its own. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_dfgnn.ir.domains import D, Domain, E, S
from pyg_dfgnn.ir.program import Builder, Value
from pyg_dfgnn.torch_private import DisableTorchFunction, disabled_torch_function, tree_map

_PRIMES = (1_000_000_007, 1_000_000_009, 1_000_000_021)
FACTS = frozenset(
    "dim ndim ndimension dtype layout is_sparse is_floating_point is_complex size shape numel nelement is_cuda is_leaf "
    "requires_grad grad_fn is_contiguous __len__".split()
)
"""Attributes and methods of a tensor that functions of torch, written in Python, ask for."""


class TraceError(Exception):
    """Code cannot be traced.

    Attributes:
        reasons: One sentence per line of the code that stands in the way.
    """

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = list(dict.fromkeys(reasons))


class Types(NamedTuple):
    """Meaning of ids that name types of edges.

    Attributes:
        name: Name of the argument that holds the type of each edge.
        counted: None for the ids themselves. Else there is a number for each type: the edges of a row of this domain
            that have it.
    """

    name: str
    counted: Domain | None = None


class Sizes(NamedTuple):
    """Numbers of edges, of nodes that are read as sources and of nodes that are aggregated to."""

    edges: int
    sources: int
    targets: int


def fake_sizes(is_square: bool) -> Sizes:
    """Return primes above 10^9; sources and targets share one if they are the same nodes."""
    edges, sources, targets = _PRIMES
    return Sizes(edges, sources, sources if is_square else targets)


class Symbol(Tensor):
    """A tensor whose numbers are rows of a value of the program.

    Attributes:
        number: Id of the value; None after a refused operation.
        rows: Domain of dimension `lead`; None if no dimension is that of rows.
        lead: Number of dimensions in front of that of rows.
        ids: Of ids, the domain whose rows they name, or of types of edges what they are.
        lift: Of node features, the value that holds them on a domain.
        shared: Whether an edit in place would be seen elsewhere.
    """

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    number: int | None
    rows: Domain | None
    lead: int
    ids: Domain | Types | None
    lift: Callable[[Domain], int] | None
    shared: bool

    @staticmethod
    def of(
        meta: Tensor,
        number: int | None,
        rows: Domain | None,
        *,
        lead: int = 0,
        ids: Domain | Types | None = None,
        lift: Callable[[Domain], int] | None = None,
        shared: bool = False,
    ) -> Symbol:
        """Return a symbol with the size and dtype of a tensor."""
        symbol: Symbol = Tensor._make_subclass(Symbol, meta if meta.is_meta else meta.to("meta"))
        symbol.number, symbol.rows, symbol.lead = number, rows, lead
        symbol.ids, symbol.lift, symbol.shared = ids, lift, shared
        return symbol

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of a row."""
        with DisableTorchFunction():
            shape = tuple(self.shape)
        return self.row(shape)

    def row(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape without the dimension of rows."""
        return tuple(shape) if self.rows is None else (*shape[: self.lead], *shape[self.lead + 1 :])

    def axis(self, dim: int) -> int:
        """Return the place among the sizes of a row of a dimension that is not that of rows."""
        return dim - (self.rows is not None and dim > self.lead)


_PRODUCTS = frozenset("linear matmul mm bmm addmm rmatmul".split())
_EXACT = frozenset(
    "acos asin cosh exp expm1 log log10 log1p log2 pow rsqrt sinh softmin tan reciprocal sum norm softmax log_softmax "
    "softplus cosine_similarity layer_norm".split()
)
"""Functions that autocast computes in float32 on CUDA devices."""


def _is_lost(x: Tensor) -> bool:
    """Whether an operation before this one was refused."""
    return isinstance(x, Symbol) and x.number is None and x.ids is None and x.lift is None


def _tensors(operands: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among operands, and in tuples and lists among them."""
    for operand in operands:
        if isinstance(operand, Tensor):
            yield operand
        elif isinstance(operand, (tuple, list)):
            yield from _tensors(operand)


class Tracer(TorchFunctionMode):
    """Write what torch functions do with symbols into a program.

    Args:
        functions: Name of a torch function -> what it does to values (`registry.FUNCTIONS`).
        sizes: Fake numbers of rows.
        device: Where the edges are.
        autocast: Device type and dtype that products have under autocast; None without it.

    Attributes:
        builder: The program so far.
        reasons: What was refused so far.
        line: The line that is being traced.
        widest: The floating dtype that torch's promotion has led to.
        streams: How many masks of dropout there are.
        types: Name of the argument with types of edges that are looked up, and their number; None if there is none.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        sizes: Sizes,
        device: torch.device,
        autocast: tuple[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        self.builder, self.sizes = Builder(share=True), sizes
        self.reasons: list[str] = []
        self.line = ""
        self.widest: torch.dtype | None = None
        self.streams = 0
        self.types: tuple[str, int] | None = None
        self._functions, self._autocast, self.device = functions, autocast, device
        self._flow = (S, D)

    # What tracing begins with ----------------------------------------------------------------------------------------

    def edge_index(self, flow: str) -> Symbol:
        """Return the ids of the edges' ends; row 0 names the sources for the flow "source_to_target"."""
        meta = torch.empty(2, self.sizes.edges, dtype=torch.int64, device="meta")
        symbol = Symbol.of(meta, None, None, shared=True)
        symbol.ids = E
        self._flow = (S, D) if flow == "source_to_target" else (D, S)
        return symbol

    def node_input(self, name: str, tensor: Tensor, domain: Domain | None, axis: int = 0) -> Symbol:
        """Return features of nodes: input `name`_j where rows are read as sources, `name`_i where as targets.

        Args:
            name: Name of the argument.
            tensor: The features, [nodes, ...] or with other dimensions in front.
            domain: The only domain that they are read on; None for both.
            axis: The dimension of nodes.
        """
        size = self.sizes.sources if domain is not D else self.sizes.targets
        shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])

        def lift(on: Domain) -> int:
            if domain not in (None, on):
                raise self.stop(f"features of {domain} are read on {on}")
            return self._input(f"{name}_{'j' if on is S else 'i'}", on, shape)

        meta = torch.empty(*shape[:axis], size, *shape[axis:], dtype=tensor.dtype, device="meta")
        return Symbol.of(meta, None, None, lead=axis, lift=lift, shared=True)

    def row_input(self, name: str, tensor: Tensor, domain: Domain, axis: int = 0) -> Symbol:
        """Return an input with a row per row of a domain; integers have no value, those of edges may be types.

        Args:
            name: Name of the argument.
            tensor: The input.
            domain: The domain.
            axis: The dimension of rows.
        """
        size = {E: self.sizes.edges, D: self.sizes.targets, S: self.sizes.sources}[domain]
        shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
        meta = torch.empty(*shape[:axis], size, *shape[axis:], dtype=tensor.dtype, device="meta")
        if tensor.is_floating_point():
            return Symbol.of(meta, self._input(name, domain, shape), domain, lead=axis, shared=True)
        are_types = domain is E and tensor.dim() == 1 and tensor.dtype in (torch.int64, torch.int32)
        return Symbol.of(meta, None, domain, ids=Types(name) if are_types else None, shared=True)

    def _input(self, name: str, domain: Domain, shape: tuple[int, ...]) -> int:
        known = {value.attrs[0]: i for i, value in enumerate(self.builder.values) if value.op == "input"}
        if name not in known:
            return self.builder.input(name, domain, shape)
        value = self.builder.values[known[name]]
        if (value.domain, tuple(value.shape)) != (domain, tuple(shape)):
            raise self.stop(f"two inputs of the name {name!r}")
        return known[name]

    @property
    def has_autocast(self) -> bool:
        """Whether products have autocast's dtype."""
        return self._autocast is not None

    # Refusing --------------------------------------------------------------------------------------------------------

    def refuse(self, what: str) -> None:
        """Note what stands in the way, with the line that is being traced; tracing goes on without a value."""
        self.reasons.append(f"{self.line}: {what}")

    def stop(self, what: str) -> TraceError:
        """Return the refusal to raise where tracing cannot go on."""
        self.refuse(what)
        return TraceError(*self.reasons)

    # Values ----------------------------------------------------------------------------------------------------------

    def emit(self, op: str, *args: int | float, attrs: Sequence[Any] = ()) -> int:
        """Add a value; a number among the operands stands for a constant. Of views in a row one remains."""
        ids = [arg if isinstance(arg, int) else self.builder.emit("const", attrs=(arg,)) for arg in args]
        if op == "permute":
            order, shape = attrs[0], self.shape(ids[0])
            if [i for i in order if shape[i] != 1] == [i for i in range(len(shape)) if shape[i] != 1]:
                return self.emit("view", *ids, attrs=(tuple(shape[i] for i in order),))
            inner = self.builder.values[ids[0]]
            if inner.op == "permute":
                return self.emit("permute", inner.args[0], attrs=(tuple(inner.attrs[0][i] for i in order),))
        if op == "view" and self.builder.values[ids[0]].op == "view":
            ids[0] = self.builder.values[ids[0]].args[0]
        return self.builder.emit(op, *ids, attrs=attrs)

    def shape(self, number: int) -> tuple[int, ...]:
        """Return the sizes of a value's rows."""
        return self.builder.values[number].shape

    def symbol(self, x: Any) -> Symbol:
        """Return the symbol of an operand: itself, or a constant for a number."""
        if isinstance(x, Symbol):
            return x
        if isinstance(x, (bool, int, float)):
            return Symbol.of(torch.empty((), device="meta"), self.emit("const", attrs=(float(x),)), None)
        if not isinstance(x, Tensor):
            raise TypeError(f"a {type(x).__name__} among the operands")
        raise self.stop("a tensor that is no operand of the graph")

    def id(self, x: Symbol) -> int:
        """Return the id of a symbol's value."""
        if x.number is None:
            raise self.stop("reads ids or integers as numbers")
        return x.number

    def value(self, x: Symbol) -> Value:
        """Return a symbol's value."""
        return self.builder.values[self.id(x)]

    def full(self, x: Symbol) -> int:
        """Return the value with as many numbers in a row as the symbol has."""
        return self.emit("expand", self.id(x), attrs=(x.sizes,))

    def ends_of(self, edge_index: Symbol, row: int) -> Symbol:
        """Return the ids of a row of the edges."""
        return Symbol.of(edge_index.select(0, row), None, E, ids=self._flow[row], shared=True)

    def domain_of_size(self, size: int) -> Domain | None:
        """Return the domain with this fake number of rows, None if there is none."""
        edges, sources, targets = self.sizes
        return {sources: S, targets: D, edges: E}.get(int(size))

    def look_up(self, types: Types, number: int) -> None:
        """Note that types of edges below a number are looked up; all lookups of a program are by the same ones."""
        first, second = self.types or (types.name, number), (types.name, number)
        if first != second:
            both = " and ".join(f"{size} of '{name}'" for name, size in (first, second))
            raise self.stop(f"rows are taken by other types of edges than before ({both})")
        self.types = first

    def keep(self, x: Symbol, p: float) -> int:
        """Return what dropout multiplies the rows of a symbol by; each has a stream of random numbers of its own."""
        self.streams += 1
        return self.emit("dropout_mask", self.builder.seed(), attrs=(x.rows, x.sizes, p, self.streams - 1))

    def aligned(self, *operands: Symbol) -> tuple[list[int], Domain | None, int]:
        """Return values whose rows broadcast as the operands do, and domain and dimension of the result's rows."""
        rank = max(x.dim() for x in operands)
        like = next((x for x in operands if x.rows is not None), operands[0])
        behind, numbers = like.dim() - like.lead - 1, []
        for x in operands:
            number = self.id(x)
            if x.rows is not None and (x.dim() - x.lead - 1 != behind or x.rows is not like.rows):
                raise self.stop("rows meet another dimension")
            shape = self.shape(number)
            at = len(shape) - 1 - behind
            if like.rows is None or x.rows is not None or at < 0:
                numbers.append(number)
            elif shape[at] == 1:
                numbers.append(self.emit("view", number, attrs=((*shape[:at], *shape[at + 1 :]),)))
            else:
                raise self.stop("rows meet another dimension")
        return numbers, like.rows, 0 if like.rows is None else rank - 1 - behind

    # Tracing ---------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = f"{func.__self__.__name__}{'=' if name == '__set__' else ''}"
        if name == "_set_grad_enabled":
            return func(*args, **kwargs)
        return self._record(func, name, args, kwargs)

    def _record(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in FACTS:
            return func(*args, **kwargs)
        if name == "device":
            return self.device
        base, in_place = name, False
        if name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__"):
            base, in_place = name[3:-2], True
        elif name.endswith("_") and not name.endswith("__"):
            base, in_place = name[:-1], True
        elif kwargs.get("inplace"):
            in_place = True
        kwargs = {key: value for key, value in kwargs.items() if key not in ("inplace", "out") or value is None}
        if not args and "input" in kwargs:
            # The first operand of torch's functions by its name.
            args = (kwargs.pop("input"),)
        if kwargs.pop("out", None) is not None:
            raise self.stop(f"`out=` of {name}")
        base = base.strip("_")
        handler = self._functions.get(base)
        tensors: list[Any] = [*_tensors(args), *_tensors(kwargs.values())]
        if any(not isinstance(x, Symbol) for x in tensors) and not base.startswith("as_tensor"):
            args, kwargs = tree_map(lambda x: self.symbol(x) if isinstance(x, Tensor) else x, (args, kwargs))
            tensors = [*_tensors(args), *_tensors(kwargs.values())]
        if in_place and (not tensors or tensors[0].shared):
            raise self.stop(f"`{name}` edits a tensor in place that is read elsewhere")
        if handler is None or (self.reasons and any(_is_lost(x) for x in tensors)):
            return self.unknown(func, name, args, kwargs, is_new=handler is None)
        try:
            result = handler(self, func, *args, **kwargs)
        except (TypeError, ValueError, KeyError, AssertionError) as error:
            raise self.stop(f"`{name}` with these arguments ({error})") from error
        if self._autocast is not None and isinstance(result, Symbol) and result.dtype.is_floating_point:
            result = self._cast(base, result, *self._autocast)
        if not torch.is_grad_enabled() and isinstance(result, Symbol) and result.number is not None:
            result.number = self.emit("detach", result.number)
        if in_place:
            target = tensors[0]
            if result.shape != target.shape or result.dtype != target.dtype:
                raise self.stop(f"`{name}` changes the shape or dtype in place")
            target.number, target.rows, target.lead, target.ids = (
                result.number,
                result.rows,
                result.lead,
                result.ids,
            )
            return target
        return result

    def _cast(self, name: str, result: Symbol, device: str, dtype: torch.dtype) -> Symbol:
        """Return a result with the dtype that autocast gives it; values have one dtype, so nothing is rounded here."""
        if name in _PRODUCTS:
            dtype = torch.float64 if result.dtype is torch.float64 else dtype
        elif name in _EXACT and device == "cuda":
            dtype = torch.promote_types(result.dtype, torch.float32)
        else:
            return result
        meta = result.new_empty(result.shape, dtype=dtype)
        return Symbol.of(meta, result.number, result.rows, lead=result.lead, ids=result.ids, shared=result.shared)

    def unknown(self, func: Any, name: str, args: Any, kwargs: Any, *, is_new: bool) -> Any:
        """Refuse a function and go on, where its size can be told, to find what else stands in the way."""
        if is_new:
            self.refuse(f"`{name}` has no meaning in a program")
        try:
            meta = func(*args, **kwargs)
        except Exception as error:
            raise TraceError(*self.reasons) from error
        if not isinstance(meta, Tensor):
            raise TraceError(*self.reasons)
        return Symbol.of(meta, None, self.domain_of_size(meta.size(0)) if meta.dim() else None)

    def result(self, meta: Tensor, number: int | None, rows: Domain | None, **kwargs: Any) -> Symbol:
        """Return the symbol of a function's result, having checked the value against torch's own size of it."""
        symbol = Symbol.of(meta, number, rows, **kwargs)
        if number is not None:
            if meta.dtype.is_floating_point:
                self.widest = meta.dtype if self.widest is None else torch.promote_types(self.widest, meta.dtype)
            have, want = self.shape(number), symbol.sizes
            if any(size in self.sizes for size in want):
                raise self.stop("rows meet another dimension")
            fits = len(have) <= len(want) and all(a in (1, b) for a, b in zip(have[::-1], want[::-1]))
            counts = {self.sizes.sources, self.sizes.edges if rows is E else self.sizes.targets}
            if not fits or (rows is not None and int(meta.size(symbol.lead)) not in counts):
                raise self.stop(f"a row of {list(want)} that the program takes for {list(have)}")
        return symbol
