"""Values of a program that are stored, and values that steps compute in registers where they read them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

from pyg_dfgnn.ir.domains import FEW, Domain, E, One
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import RANGED, REDUCTIONS, Program, skip_views
from pyg_dfgnn.ir.register_layout import (
    JOINS,
    MAX_JOINED,
    LoweringError,
    folds,
    is_of_heads,
    is_of_parts,
    joins_few,
    stored_row,
)
from pyg_dfgnn.ir.register_matmul import find, is_of_numbers, is_wide, width_of

ADD = "add"
"""The operator that adds a bias to a linear map."""
_MOVES = ("permute", "concat", "slice", "pad", "matmul")
"""Operators that move numbers between lanes: torch runs them on nodes and pairs."""
_ON_LANES = (*POINTWISE, *JOINS, "gather", "expand", "sum", "max")
"""Operators of kernels that read a row as it lies on the lanes."""
_JOINED = "row of parts"
"""Reader that stores a row as a part of another."""
_STORED = ("input", "dense", "linear", "traversal")
"""Kinds of values that are stored whatever reads them."""
_INLINED_READS = 1.5
"""Numbers that a value is recomputed from, for each of its own, above which it is stored."""
_MATRIX = 64
"""Numbers of the largest matrix of an edge that maps its row: PyTorch multiplies by larger ones as fast, and in less
memory.
"""

MOST_OPERATORS = 16
"""Operators on features of edges that a lane rather computes than reads what they make."""


class Materialization:
    """Kind of each value of a program, and the choice of the values that are stored.

    Args:
        program: The program, decomposed.
        outputs: Names of the outputs that the forward pass gives.
        joins_apart: Whether what joins the channels of heads of an edge, as of queries and keys, is stored by steps of
            its own: no kernel can hold it beside values of another width.
        joins_by_torch: Whether torch joins rows of edges of their parts: no kernel can hold parts of several widths.
    """

    def __init__(self, program: Program, outputs: frozenset[str], joins_apart: bool, joins_by_torch: bool) -> None:
        self.program, self.values, self.outputs = program, program.values, outputs
        self.ids = sorted(program.live)
        self.forward = Program("", self.values, tuple((n, i) for n, i in program.outputs if n in outputs)).live
        self.readers: dict[int, set[int]] = {i: set() for i in self.ids}
        for i in self.ids:
            for arg in self.values[i].args:
                self.readers[arg].add(i)
        self.products, self.width = find(program), width_of(program)
        self.joins_apart, self.joins_by_torch = joins_apart, joins_by_torch
        self.is_unrolled = any(stored_row(self.values, i) is not None for i in self.ids)
        self.kinds: dict[int, str] = {}
        # Parts of stored rows that kernels load where they lie.
        self.parts: set[int] = set()
        for i in self.ids:
            self.kinds[i] = self._kind(i)
        # Values that a step leaves for others, unless they turn out to be read by none.
        self.kept: set[int] = {i for i in self.ids if self.kinds[i] not in ("inline", "const")}
        # Numbers of an edge that are float32.
        self.per_edge: set[int] = set()
        self._keep()
        # Those on edges that a traversal stores as it computes them; others may compute them as well before.
        self.stored = {i for i in self.kept - self.operands if self.kinds[i] == "inline" and self.values[i].domain is E}

    def _kind(self, i: int) -> str:
        value, operands = self.values[i], [self.values[arg] for arg in self.values[i].args]
        if value.op in ("input", "const"):
            return value.op
        if value.op in REDUCTIONS and value.attrs[1] not in FEW:
            if value.op in ("count", "is_used"):
                return "static"
            if value.op == "sum" and value.domain is One and self.kinds[self.base(value.args[0])] in _STORED:
                # One row of very many terms, which torch shares out better.
                return "dense"
            return "outer" if value.op == "outer" and i not in self.products.outer else "traversal"
        if self._is_transposed(i) or self._is_of_rows(i):
            return "inline"
        if value.domain in FEW:
            return "dense"
        if self._is_biased(i):
            (product,) = (arg for arg in value.args if self.kinds[arg] == "linear")
            self.kinds[product] = "inline"
            return "linear"
        # Of a map that is sliced the parts are read where it is stored.
        is_sliced = i in self.products.spread and "slice" in self._reading(i)
        if i in self.products.spread | self.products.project | self.products.parts and not is_sliced:
            return "inline"
        if is_of_numbers(self.values, i) or stored_row(self.values, i) is not None:
            return "inline"
        if value.op == "linear" and operands[1].domain is E and prod(operands[1].shape) > _MATRIX:
            raise LoweringError(f"%{i} = {value} : {value.domain}{list(value.shape)} reads a matrix for each edge")
        if value.op == "linear":
            is_dense = operands[1].domain is One and operands[0].domain is value.domain
            return "dense" if is_dense else "linear"
        if value.op in _MOVES or (value.op == "fold" and value.domain is not E and not folds(self.values, i)):
            is_matrix = value.op == "matmul" and any(o.domain not in (One, value.domain) for o in operands)
            if self._is_loaded_part(i):
                self.parts.add(i)
                return "inline"
            if self._is_row_of_parts(i) and not self.joins_by_torch:
                return "inline"
            is_refused = value.domain is E and not (self._is_of_stored(i) or self._is_row_of_parts(i))
            if is_refused or is_matrix:
                why = "needs a matrix per row" if is_matrix else "moves numbers between the lanes of an edge"
                raise LoweringError(f"%{i} = {value} : {value.domain}{list(value.shape)} {why}")
            return "dense"
        if prod(value.shape) == 1 and {self.kinds[arg] for arg in value.args} <= {"const", "static"}:
            return "static"
        return "inline"

    def _is_transposed(self, i: int) -> bool:
        """Whether a value is weights transposed, as which products read them where they lie."""
        value, rank = self.values[i], len(self.values[i].shape)
        swapped = (*range(rank - 2), rank - 1, rank - 2)
        readers = [self.values[reader] for reader in self.readers[i]]
        return (
            value.op == "permute"
            and value.domain in FEW
            and value.attrs[0] == swapped
            and i not in {j for _, j in self.program.outputs}
            and not self.readers[i] & self.products.spread
            and all(v.op == "matmul" or (v.op == "linear" and v.args[1] == i != v.args[0]) for v in readers)
        )

    def _is_of_rows(self, i: int) -> bool:
        """Whether a value is stored rows transposed, of which kernels read single ones where they lie."""
        rows = [stored_row(self.values, reader) for reader in self.readers[i]]
        return bool(rows) and None not in rows

    def _is_of_stored(self, i: int) -> bool:
        """Whether a value is a slice of stored rows."""
        row = skip_views(self.values, self.values[i].args[0])
        return self.values[i].op == "slice" and self.kinds[row] in _STORED and self.values[row].domain not in FEW

    def _is_loaded_part(self, i: int) -> bool:
        """Whether a value is a part of a stored row that kernels alone read, which load it where it lies."""
        is_part = self._is_of_stored(i) and prod(self.values[self.values[i].args[0]].shape[:-1]) <= 1
        return is_part and all(op in (*_ON_LANES, _JOINED) for op in self._reading(i))

    def _is_row_of_parts(self, i: int) -> bool:
        """Whether a value is a row of edges made of parts, of which nothing is computed on lanes."""
        return is_of_parts(self.values, i) and not any(op in _ON_LANES for op in self._reading(i))

    def _reading(self, i: int) -> Iterator[str]:
        """Yield the operators that read a value, through views of it."""
        for reader in self.readers[i]:
            if self.values[reader].op == "view":
                yield from self._reading(reader)
            else:
                yield _JOINED if is_of_parts(self.values, reader) else self.values[reader].op

    def _is_biased(self, i: int) -> bool:
        """Whether a value is a linear map, read by nothing else, and a bias by the type of the map's weight."""
        value = self.values[i]
        if value.op != ADD or {self.kinds[arg] for arg in value.args} not in (
            {"linear", "input"},
            {"linear", "dense"},
        ):
            return False
        product, bias = sorted(value.args, key=lambda arg: self.kinds[arg] != "linear")
        weight = self.values[self.values[product].args[1]]
        fits = self.values[bias].domain is weight.domain and self.values[bias].shape == self.values[product].shape
        return fits and self.values[product].op == "linear" and self.readers[product] == {i}

    def _product_operands(self, i: int) -> Iterator[int]:
        """Yield the values that are stored for the operands of a product."""
        for arg in self.values[i].args:
            if self.kinds[i] == "linear" and self.values[i].op == ADD and self.values[arg].op == "linear":
                yield from self._product_operands(arg)
            else:
                yield self._operand(arg)

    def base(self, i: int) -> int:
        """The value whose rows a value has in another shape; a view on another domain gathers."""
        while self.values[i].op == "view" and self.values[self.values[i].args[0]].domain is self.values[i].domain:
            i = self.values[i].args[0]
        return i

    def _readers_of(self, i: int) -> Iterator[int]:
        """The readers of a value, through views of it."""
        for reader in self.readers[i]:
            if self.kinds[reader] == "inline" and self.values[reader].op == "view":
                yield from self._readers_of(reader)
            else:
                yield reader

    def _keep(self) -> None:
        """Find which values are stored although registers could hold them."""
        consts = {i for i in self.ids if self.kinds[i] == "const"}
        products = [i for i in self.ids if self.kinds[i] in ("dense", "linear", "outer", "static")]
        self.operands = {operand for i in products for operand in self._product_operands(i)} - consts
        short = {i for i in self.products.project if not self._is_added(i)}
        short |= {i for i in self.products.rows if self.kinds[i] == "inline"}
        if self.joins_apart:
            short |= {i for i in self.ids if self.kinds[i] == "inline" and joins_few(self.values, i)}
        self.costly = costly(self.program, {i for i in self.ids if self.kinds[i] == "inline"}, self.width)
        short |= self.costly
        self.operands |= short - {self.base(i) for _, i in self.program.outputs}
        self.per_edge |= short & self.operands
        self.kept |= self.operands | {self.base(i) for _, i in self.program.outputs} - consts
        for i in self.ids:
            if self.kinds[i] == "inline" and self._is_read_often(i):
                self.kept.add(i)
            if self.kinds[i] == "inline" and self._is_joined_twice(i):
                self.kept.add(i)
                self.per_edge.add(i)
        for i in self.ids:
            if self.kinds[i] == "traversal":
                self._keep_instead(i)

    def _is_added(self, i: int) -> bool:
        """Whether a map to a short row is only added to other such maps, which gives a result."""
        results = {self.base(j) for _, j in self.program.outputs}
        while i not in results:
            readers = self.readers[i]
            reader = min(readers, default=i)
            is_sum = len(readers) == 1 and self.values[reader].op == ADD
            if not is_sum or any(
                arg not in self.products.project and self.values[arg].op != ADD for arg in self.values[reader].args
            ):
                return False
            i = reader
        return True

    def _is_joined_twice(self, i: int) -> bool:
        """Whether numbers of an edge, which join the channels of more heads than a group holds, are joined in turn."""
        value = self.values[i]
        rows = max((prod(self.values[arg].shape) for arg in value.args), default=0)
        if (
            value.domain is not E
            or rows <= MAX_JOINED
            or not is_of_heads(self.values, i)
            or is_wide(value.shape, self.width)
        ):
            return False
        reached, waiting = set[int](), [i]
        while waiting:
            for reader in self.readers[waiting.pop()] - reached:
                if self.values[reader].domain is E:
                    reached.add(reader)
                    waiting.append(reader)
        return any(self.values[j].op in JOINS for j in reached)

    def _operand(self, i: int) -> int:
        """Return the value that is stored for the operand of a step that gathers by itself."""
        while self.values[i].op in ("view", "gather", "permute") and self.kinds[i] == "inline":
            i = self.values[i].args[0]
        return i

    def _is_read_often(self, i: int) -> bool:
        """Whether a value on nodes or pairs, read on more rows, is made of more numbers than it has."""
        value = self.values[i]
        if value.domain is E or value.op in ("view", "gather", "expand") or i in self.parts:
            return False
        ranges = {self._range(reader) for reader in self._readers_of(i)}
        numbers = sum(prod(self.values[leaf].shape) for leaf in self.leaves(i, self.kept - {i} | self.parts))
        return ranges != {value.domain} and numbers > _INLINED_READS * prod(value.shape)

    def _range(self, i: int) -> Domain:
        value = self.values[i]
        return value.attrs[1] if value.op in RANGED else value.domain

    def _keep_instead(self, i: int) -> None:
        """Store what alone is made of a reduction rather than the reduction."""
        value, last = self.values[i], i
        results = {self.base(j) for _, j in self.program.outputs}
        while last not in results:
            readers = set(self._readers_of(last))
            reader = min(readers)
            other = self.values[reader]
            # A map to which a bias is added is part of a product.
            is_inner = self.kinds[reader] == "inline" and other.op != "linear" and other.domain is value.domain
            if len(readers) > 1 or not is_inner or prod(other.shape) > prod(value.shape):
                break
            last = reader
        self.kept |= {last}

    def leaves(self, i: int, known: Collection[int]) -> set[int]:
        """The values that a value is computed from: the nearest ones among `known`."""
        reached: set[int] = set()
        waiting, seen = list(self.values[i].args), set[int]()
        while waiting:
            j = waiting.pop()
            if j in seen or self.kinds[j] == "const":
                continue
            seen.add(j)
            if j in known:
                reached.add(j)
            else:
                waiting += self.values[j].args
        return reached


def costly(program: Program, inline: Collection[int], width: int) -> set[int]:
    """Return the numbers per head that much arithmetic makes of features of edges and of values with few rows.

    Of those that follow from each other it is the last, whose readers read more than such features.

    Args:
        program: A decomposed program.
        inline: Values that registers could hold.
        width: Numbers of the widest row of nodes.
    """
    values, arithmetic, found = program.values, dict[int, set[int]](), set[int]()
    last: set[int] = set()
    for i in sorted(program.live):
        value = values[i]
        args = [j for j in value.args if values[j].domain not in FEW]
        cost = 0
        is_made = i in inline and value.domain is E
        if is_made and all(j in arithmetic or (values[j].domain, values[j].op) == (E, "input") for j in args):
            own = {i} if value.op in POINTWISE else set[int]()
            arithmetic[i] = own.union(*(arithmetic[j] for j in args if j in arithmetic))
            cost = sum(prod(values[j].shape) for j in arithmetic[i])
        is_narrow = prod(value.shape) == max(value.shape, default=1) and not is_wide(value.shape, width)
        if is_narrow and cost > MOST_OPERATORS * prod(value.shape):
            found.add(i)
        else:
            last |= found.intersection(value.args)
    return {skip_views(values, i) for i in last}
