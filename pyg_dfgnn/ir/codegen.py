"""Code generation: the CUDA text of a traversal or a map, which `kernels/relational/` includes as `step.cuh`.

Every value of a step is a `Fragment` or `HeadValues` in registers, in the order of the program. Values that a row
determines are computed once per row, all others per position, and what follows from the sums when a row is finished.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from pyg_dfgnn.ir.domains import Domain, One, determines
from pyg_dfgnn.ir.kernel_steps import KernelStep
from pyg_dfgnn.ir.patterns import statistic, weighted
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import REDUCTIONS
from pyg_dfgnn.ir.register_layout import (
    JOINS,
    PARTS,
    ROWS,
    SHORT,
    LoweringError,
    infer_layout,
    loaded_part,
    stored_parts,
    stored_row,
)

MAX_PARAMETERS = 46
"""Arrays of a kernel beside those of the adjacency and its states."""
FORMS = {"": 0, "H": 1, "C": 2, "HC": 3}
"""Number of the form of a row in CUDA; rows have the number of one of them."""
ValueForm = tuple[int, str]
"""A value and the form that it takes."""


@dataclass(frozen=True)
class KernelSource:
    """The kernel of a step.

    Attributes:
        kind: "traversal" or "map".
        text: The text `step.cuh`.
        heads: H.
        channels: C.
        indices: Domains whose rows are looked up by position in the adjacency.
        row_indices: Domains whose rows are looked up by row of the step's domain.
        reads: Buffers in the order of the parameters.
        writes: Buffers in the order of the parameters, after those.
        fragments: Vectors of the state of a row.
        head_values: Numbers per head of the state of a row.
        gathered: Vectors that a lane gathers for a position.
        short: Numbers of the short rows that a lane gathers for a position.
        is_outer: Whether it leaves sums of outer products for pieces of the edges.
        joins_heads: Whether the heads of a row are joined, for which one group of lanes has to hold them all.
        unit: Numbers that every vector in a row begins at a multiple of: parts of rows need not begin at one of C.
    """

    kind: str
    text: str
    heads: int
    channels: int
    indices: tuple[Domain, ...]
    row_indices: tuple[Domain, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    fragments: int
    head_values: int
    gathered: int
    short: int
    is_outer: bool
    joins_heads: bool
    unit: int


def generate(step: KernelStep, exact: Collection[str]) -> KernelSource:
    """Return the kernel of a step.

    Args:
        step: A traversal or a map.
        exact: Names of the buffers that are float32 whatever the dtype of the features.

    Raises:
        Refusal: The values do not fit the lanes of one kernel.
    """
    return _generated(step, frozenset(exact))


@lru_cache(1024)
def _generated(step: KernelStep, exact: frozenset[str]) -> KernelSource:
    return _Generator(step, exact).kernel()


def _number(x: float) -> str:
    if math.isnan(x) or math.isinf(x):
        return f"__int_as_float({0x7FC00000 if math.isnan(x) else 0x7F800000 if x > 0 else -0x800000})"
    return f"{float(x)!r}f"


def _place_of(pointer: str, row: str, size: int, begin: int) -> str:
    """The text of the address of a number of a row of a size."""
    return f"{pointer} + ((i64){row} * {size} + {begin})"


def _place(domains: list[Domain], domain: Domain) -> int:
    """Return where a domain is in a list, to whose end it is added if it is not there."""
    if domain not in domains:
        domains.append(domain)
    return domains.index(domain)


class _Scope:
    """A function that is being written: the values that it has, and its lines."""

    def __init__(self, name: str) -> None:
        self.name, self.lines = name, list[str]()
        self.known: dict[ValueForm, str] = {}


class _Generator:
    def __init__(self, step: KernelStep, exact: Collection[str]) -> None:
        self.step, self.values = step, step.program.values
        self.lanes = infer_layout(step.program)
        self.sums = {name for name, form in self.lanes.roots.items() if form.startswith(ROWS)}
        self.exact = self.sums | set(exact)
        self.reads, self.writes = step.reads, step.writes
        self.seeds = {value.attrs[0] for value in self.values if value.is_seed}
        self.reduced = self._reduced()
        self.indices: list[Domain] = []
        self.row_indices: list[Domain] = []
        self.own, self.edge, self.end = _Scope("own"), _Scope("edge"), _Scope("end")
        self.own_members: dict[ValueForm, str] = {}
        self.weights: dict[ValueForm, str] = {}
        self.gathered: dict[ValueForm, str] = {}
        self.accumulators: list[tuple[str, tuple[ValueForm, ...]]] = []
        """Kind and operands of each."""
        self.averages = dict(self._averages())
        self.joins_heads = False
        self.unit = self.lanes.channels

    def _reduced(self) -> set[int]:
        """The values that depend on a reduction of this step."""
        reduced: set[int] = set()
        for i, value in enumerate(self.values):
            if value.op in REDUCTIONS or reduced & set(value.args):
                reduced.add(i)
        return reduced

    def _averages(self) -> Iterator[tuple[ValueForm, tuple[ValueForm, ValueForm, ValueForm]]]:
        """The sums that a softmax of this step weights: x of the softmax, the vector, and what the sum is scaled by."""
        for i, form in self.lanes.order:
            parts = weighted(self.values, i)
            if parts is not None:
                forms = self.lanes.args[self.values[i].args[0], form]
                weight = forms[1 - parts.place]
                inverse = self.lanes.args[parts.alpha, weight][1]
                x = self.values[parts.most].args[0]
                yield (i, form), ((x, weight), (parts.vector, forms[parts.place]), (parts.inverse, inverse))

    # Texts of values -----------------------------------------------------------------------------------------------

    def _is_fragment(self, form: str) -> bool:
        return "C" in form

    def _type(self, key: ValueForm) -> str:
        i, form = key
        if form == SHORT:
            return f"Short<{prod(self.values[i].shape)}>"
        return "Fragment" if self._is_fragment(form) else "HeadValues"

    def _element(self, text: str, form: str, reader: str) -> str:
        """The text of a number of a value in the loop over those of a reader of a form."""
        if reader == SHORT:
            return f"{text}.x[{'k' if form == SHORT else 0}]"
        return f"{text}.x[h][c]" if self._is_fragment(form) else f"{text}.x[h]"

    def _is_own(self, i: int) -> bool:
        return i not in self.reduced and determines(self.step.domain, self.values[i].domain)

    def _row_of(self, domain: Domain) -> str:
        """The row of a lower domain that a row of the step's domain reads."""
        if domain is One:
            return "0"
        if domain is self.step.domain:
            return "row"
        return f"__ldg(arg.row{_place(self.row_indices, domain)} + row)"

    def _leaf(self, key: ValueForm) -> tuple[str, str]:
        """The type and the pointer of an input or of a part of one."""
        i, form = key
        row, size = self._row_and_place(i)[0], prod(self.values[i].shape)
        name = self.values[row].attrs[0]
        exact, pointer = str(name in self.exact).lower(), f"arg.in{self.reads.index(name)}"
        if form == SHORT:
            return f"ShortLeaf<{exact}, {size}, {self._unit_of(i)}>", pointer
        if form.startswith(ROWS):
            return f"Weights<{exact}, {FORMS[form.removeprefix(ROWS)]}, {self.values[i].shape[0]}>", pointer
        return f"Leaf<{exact}, {FORMS[form]}>", pointer

    def _row_and_place(self, i: int) -> tuple[int, int]:
        """Return the input that a value is, or a part of, and the number of its row at which the value begins."""
        return loaded_part(self.values, i) or (i, 0)

    def _unit_of(self, i: int) -> int:
        """Return the numbers that an input, or a part of one, begins at a multiple of in memory."""
        row, place = self._row_and_place(i)
        return gcd(prod(self.values[row].shape), place, prod(self.values[i].shape))

    def _read(self, key: ValueForm, number: str) -> tuple[str, str]:
        """The pointer and the row number by which an input, or a part of one, is read."""
        pointer, (row, place) = self._leaf(key)[1], self._row_and_place(key[0])
        if row == key[0]:
            return pointer, number
        if self._is_fragment(key[1]):
            self.unit = gcd(self.unit, self._unit_of(key[0]))
        return _place_of(pointer, number, prod(self.values[row].shape), place), "0"

    def text(self, key: ValueForm, scope: _Scope) -> str:
        """Write a value, if it is not there yet, and return its name."""
        if key not in scope.known:
            scope.known[key] = self._write(key, scope)
        return scope.known[key]

    def _write(self, key: ValueForm, scope: _Scope) -> str:
        i, form = key
        value, name = self.values[i], f"v{key[0]}{key[1]}"
        if scope is self.edge and self._is_own(i) and value.op != "const":
            member = self.own_members[key] = f"o{i}{form}"
            self.own.lines.append(f"{member} = {self.text(key, self.own)};")
            return f"own.{member}"
        declared = f"const {self._type(key)} {name}"
        if value.op in REDUCTIONS:
            scope.lines.append(f"{declared} = {self._total(key, scope)};")
            return name
        if value.op == "input" or (value.op == "slice" and not self.lanes.args[key]):
            leaf, domain = self._leaf(key)[0], self.values[self._row_and_place(i)[0]].domain
            if scope is self.edge:
                _place(self.indices, domain)
                self.gathered[key] = f"{leaf} {name};"
                scope.lines.append(f"{declared} = g.{name}.get();")
            else:
                pointer, row = self._read(key, self._row_of(domain))
                scope.lines.append(f"{declared} = read_row<{leaf}>({pointer}, {row}, l);")
            return name
        if value.op == "dropout_mask":
            scope.lines.append(f"{declared} = {self._kept(i, form, scope)};")
            return name
        args = list(zip(value.args, self.lanes.args[key]))
        if value.op in ("view", "gather", "expand") and args[0][1] == form and args[0][0] != i:
            return self.text(args[0], scope)
        if value.op == "linear":
            scope.lines.append(f"{declared} = {self._product(key, scope)};")
            return name
        if value.op in JOINS:
            terms = [self._operand(arg, scope, "HC") for arg in args]
            scope.lines.append(f"{declared} = {self._joined(key, ' * '.join(terms))};")
            return name
        if value.op == "slice" and args[0][1].startswith(ROWS):
            scope.lines.append(f"{declared} = {self._stored_row(key, scope)};")
            return name
        if value.op == "concat":
            numbers = [self._operand(arg, scope, SHORT) for arg in args]
            scope.lines += [f"{self._type(key)} {name};", *(f"{name}.x[{k}] = {x};" for k, x in enumerate(numbers))]
            return name
        loop = "EACH_CHANNEL" if self._is_fragment(form) else "EACH_HEAD"
        if form == SHORT:
            loop = f"EACH_SHORT({prod(value.shape)})"
        expression = self._expression(i, [self._operand(arg, scope, form) for arg in args])
        if value.op == "slice":
            place = value.attrs[0] if form != SHORT else f"k + {value.attrs[0]}"
            expression = f"{self.text(args[0], scope)}.x[{place}]"
        scope.lines += [f"{self._type(key)} {name};", f"{loop} {self._element(name, form, form)} = {expression};"]
        return name

    def _product(self, key: ValueForm, scope: _Scope) -> str:
        """The text of a map between a short row and a wide one."""
        i, form = key
        values, (x, weight) = self.values, self.lanes.args[key]
        rows = values[i].args[1]
        rows = values[rows].args[0] if form == SHORT else rows
        name, pointer = self._weights((rows, weight), scope)
        row = self.text((values[i].args[0], x), scope)
        self.joins_heads |= form == SHORT and "H" in x
        return f"{'project' if form == SHORT else 'spread'}({name}, {pointer}, {row}, l)"

    def _weights(self, key: ValueForm, scope: _Scope) -> tuple[str, str]:
        """Load stored rows, if they are not there yet, and return their name and their pointer."""
        (rows, weight), (kind, pointer) = key, self._leaf(key)
        name = f"w{rows}{weight.removeprefix(ROWS)}"
        if scope is self.edge:
            self.weights[key] = f"{kind} {name};"
            known, lines, name = self.own.lines, [f"{name}.load({pointer}, l);"], f"own.{name}"
        else:
            known, lines = scope.lines, [f"{kind} {name};", f"{name}.load({pointer}, l);"]
        known += [line for line in lines if line not in known]
        return name, pointer

    def _stored_row(self, key: ValueForm, scope: _Scope) -> str:
        """The text of one of stored rows."""
        stored = stored_row(self.values, key[0])
        assert stored is not None
        name, pointer = self._weights((stored[0], self.lanes.args[key][0]), scope)
        return f"{name}.row({pointer}, {stored[1]}, l)"

    def _joined(self, key: ValueForm, term: str) -> str:
        """The text of what joins the channels or heads of a term."""
        i, form = key
        letters = {letter for operand in self.lanes.args[key] for letter in operand} - set(form) or {"C"}
        self.joins_heads |= "H" in letters
        join = "Larger" if self.values[i].op == "amax" else "Plus"
        text = f"[&](int h, int c) {{ return {term}; }}"
        if "C" in letters:
            text = f"over_channels<{join}>(l, {text})"
        if letters == {"H"}:
            return f"over_heads<{join}, {self._type(key)}>(l, {text})"
        return f"over_heads<{join}>(l, {text})" if "H" in letters else text

    def _kept(self, i: int, form: str, scope: _Scope) -> str:
        """The factors of a row that dropout draws."""
        value = self.values[i]
        domain, _, p, stream = value.attrs
        seed = self.reads.index(self.values[value.args[0]].attrs[0])
        row = f"index.i{_place(self.indices, domain)}" if scope is self.edge else self._row_of(domain)
        drawn = f"DropoutRow{{*arg.in{seed}, {row}, {stream}u, {_number(p)}}}"
        return f"{drawn}.{'channels' if self._is_fragment(form) else 'heads'}<{str('H' in form).lower()}>(l)"

    def _operand(self, key: ValueForm, scope: _Scope, reader: str) -> str:
        value = self.values[key[0]]
        if value.op == "const":
            return _number(value.attrs[0])
        return self._element(self.text(key, scope), key[1], reader)

    def _expression(self, i: int, operands: list[str]) -> str:
        value = self.values[i]
        if value.op in POINTWISE:
            return f"point_{value.op}({', '.join([*operands, *map(_number, value.attrs)])})"
        return operands[0] if operands else _number(value.attrs[0])

    # Accumulators --------------------------------------------------------------------------------------------------

    def _accumulator(self, kind: str, *keys: ValueForm) -> str:
        """Add an accumulator of some operands, if it is not there yet, and return its text."""
        if (kind, keys) not in self.accumulators:
            self.accumulators.append((kind, keys))
        return f"s.a{self.accumulators.index((kind, keys))}"

    def _softmax_of(self, key: ValueForm) -> str:
        """The accumulator of the maximum and the sum of a softmax, and of what that weights."""
        vector = next((vector for softmax, vector, _ in self.averages.values() if softmax == key), None)
        return self._accumulator("Softmax", key) if vector is None else self._accumulator("Weighted", key, vector)

    def _total(self, key: ValueForm, scope: _Scope) -> str:
        """Add the accumulator of a reduction and return the text of its result."""
        i, form = key
        if key in self.averages:
            softmax, _, inverse = self.averages[key]
            return f"{self._softmax_of(softmax)}.average({self.text(inverse, scope)})"
        summed = statistic(self.values, i)
        if summed is not None:
            return f"{self._softmax_of((summed.x, form))}.total()"
        if self.values[i].op == "outer":
            return self._accumulator("Outer", *zip(self.values[i].args, self.lanes.args[key]))
        operand = self.values[i].args[0], form
        if self.values[i].op == "sum":
            return f"{self._accumulator('Sum', operand)}.total()"
        sums = [other for j, other in self.lanes.order if (of := statistic(self.values, j)) and of.most == i]
        accumulator = self._softmax_of(operand) if form in sums else self._accumulator("Maximum", operand)
        return f"{accumulator}.most(is_empty)"

    # The text ------------------------------------------------------------------------------------------------------

    def _stores(self) -> Iterator[tuple[str, ValueForm, bool]]:
        """Yield each store: the buffer, the value, and whether it is a row of the domain that is reduced over."""
        for name, i in self.step.program.outputs:
            is_position = self.step.kind == "traversal" and i not in self.reduced
            yield name, (i, self.lanes.roots[name]), is_position

    def _store(self, name: str, key: ValueForm, row: str, scope: _Scope) -> list[str]:
        """The lines that store a value, or the parts of one."""
        exact, pointer = str(name in self.exact).lower(), f"arg.out{self.writes.index(name)}"
        if name in self.sums:
            return [f"{self._total(key, scope)}.write<{FORMS[key[1].removeprefix(ROWS)]}>({pointer}, {row}, l);"]
        if key[1] == PARTS:
            return self._part_stores(key, exact, pointer, row, scope)
        return [self._row_store(key, exact, pointer, row, scope)]

    def _row_store(self, key: ValueForm, exact: str, pointer: str, row: str, scope: _Scope) -> str:
        text = self._materialised(key, scope)
        if key[1] == SHORT:
            return f"write_short({pointer}, {row}, l, {text});"
        return f"write_row<{exact}, {FORMS[key[1]]}>({pointer}, {row}, l, {text});"

    def _part_stores(self, key: ValueForm, exact: str, pointer: str, row: str, scope: _Scope) -> list[str]:
        """The lines that store a row part by part, and zeros in between."""
        i, form = key
        size, lines, last = prod(self.values[i].shape), list[str](), 0
        for (begin, part), part_form in zip(stored_parts(self.values, i), self.lanes.args[key], strict=True):
            if begin > last:
                lines.append(f"write_zeros<{begin - last}>({_place_of(pointer, row, size, last)}, l);")
            last = begin + prod(self.values[part].shape)
            if self._is_fragment(part_form):
                self.unit = gcd(self.unit, size, begin)
            place = _place_of(pointer, row, size, begin)
            lines.append(self._row_store((part, part_form), exact, place, "0", scope))
        if size > last:
            lines.append(f"write_zeros<{size - last}>({_place_of(pointer, row, size, last)}, l);")
        return lines

    def kernel(self) -> KernelSource:
        edge_stores, end_stores = list[str](), list[str]()
        for name, key, is_position in self._stores():
            if is_position:
                row = f"index.i{_place(self.indices, self.step.over)}"
                edge_stores += self._store(name, key, row, self.edge)
            else:
                end_stores += self._store(name, key, "row", self.end)
        adds = []
        for number, (_, keys) in enumerate(self.accumulators):
            adds.append(f"s.a{number}.add({', '.join(self._materialised(key, self.edge) for key in keys)});")
        text = self._assembled(edge_stores, adds, end_stores)
        fragments, head_values = self._planes()
        vectors = sum(self._is_fragment(form) for _, form in self.gathered)
        short = sum(prod(self.values[i].shape) for i, form in self.gathered if form == SHORT)
        return KernelSource(
            self.step.kind,
            text,
            self.lanes.heads,
            self.lanes.channels,
            tuple(self.indices),
            tuple(self.row_indices),
            self.reads,
            self.writes,
            fragments,
            head_values,
            vectors,
            short,
            bool(self.sums),
            self.joins_heads,
            self.unit,
        )

    def _materialised(self, key: ValueForm, scope: _Scope) -> str:
        """The text of an operand of an accumulator or of a store, which may be a constant."""
        if self.values[key[0]].op == "const":
            return f"filled<{self._type(key)}>({_number(self.values[key[0]].attrs[0])})"
        return self.text(key, scope)

    def _planes(self) -> tuple[int, int]:
        """Numbers of vectors and of numbers per head in a state."""
        forms = [form for kind, keys in self.accumulators for form in self._state_forms(kind, keys)]
        fragments = sum(map(self._is_fragment, forms))
        return fragments, len(forms) - fragments

    def _held(self, kind: str, keys: tuple[ValueForm, ...]) -> tuple[ValueForm, ...]:
        """The values of whose types an accumulator is: a softmax of channels weights a number to as many."""
        return keys[:1] * 2 if kind == "Weighted" and self._is_fragment(keys[0][1]) else keys

    def _state_forms(self, kind: str, keys: tuple[ValueForm, ...]) -> list[str]:
        """Return the forms of the values that an accumulator holds."""
        forms = [form for _, form in self._held(kind, keys)]
        if kind == "Outer":
            return forms[1:] * prod(self.values[keys[0][0]].shape)
        return forms[:1] + forms if kind in ("Softmax", "Weighted") else forms

    def _parameters(self) -> list[tuple[str, str]]:
        """Type and name of each parameter."""
        parameters = [("const int*", f"index{number}") for number in range(len(self.indices))]
        parameters += [("const int*", f"row{number}") for number in range(len(self.row_indices))]
        for prefix, const, names in (("in", "const ", self.reads), ("out", "", self.writes)):
            types = [
                f"{const}{'u64' if name in self.seeds else 'float' if name in self.exact else 'storage_t'}*"
                for name in names
            ]
            parameters += [(kind, f"{prefix}{number}") for number, kind in enumerate(types)]
        return parameters

    def _assembled(self, edge_stores: list[str], adds: list[str], end_stores: list[str]) -> str:
        parameters = self._parameters()
        if len(parameters) > MAX_PARAMETERS:
            raise LoweringError(f"a step reads and writes {len(parameters)} arrays (at most {MAX_PARAMETERS})")
        lines = [
            *(['#include "relational/dropout.cuh"'] if self.seeds else []),
            f"#define STEP_PARAMETERS {', '.join(f'{kind} {name}' for kind, name in parameters)}",
            f"#define STEP_ARGUMENTS {{{', '.join(name for _, name in parameters)}}}",
            "struct Arguments {",
            *(f"    {kind} {name};" for kind, name in parameters),
            "};",
        ]
        if self.step.kind == "map":
            head = "const Arguments& arg, int row, const Lanes& l, bool writes"
            lines += self._function("void finish_row", head, self.end.lines, end_stores, "writes")
            return "\n".join(lines) + "\n"
        sets = [f"a.index[{number}] = arg.index{number};" for number in range(len(self.indices))]
        loads = [f"__ldg(a.index[{number}] + position)" for number in range(len(self.indices))]
        lines += self._function("void set_indices", "Adjacency& a, const Arguments& arg", sets)
        lines += ["struct RowIndex {", *(f"    int i{number};" for number in range(len(self.indices)))]
        lines += self._function(
            "static RowIndex load", "const Adjacency& a, int position", [f"return {{{', '.join(loads)}}};"]
        )
        lines += ["};", "struct Own {"]
        lines += [f"    {self._type(key)} {name};" for key, name in self.own_members.items()]
        lines += [f"    {text}" for text in self.weights.values()]
        lines += self._function("void load", "const Arguments& arg, int row, const Lanes& l", self.own.lines)
        lines += ["};", "struct Gathered {", *(f"    {text}" for text in self.gathered.values())]
        gathers = []
        for i, form in self.gathered:
            domain = self.values[self._row_and_place(i)[0]].domain
            pointer, row = self._read((i, form), f"index.i{self.indices.index(domain)}")
            gathers.append(f"v{i}{form}.load({pointer}, {row}, l);")
        lines += self._function("void load", "const Arguments& arg, const RowIndex& index, const Lanes& l", gathers)
        lines += ["};", "struct Accumulators {"]
        for number, (kind, keys) in enumerate(self.accumulators):
            lines.append(f"    {kind}<{', '.join(map(self._type, self._held(kind, keys)))}> a{number};")
        places = " ".join(f"DO(a{number})" for number in range(len(self.accumulators)))
        lines += ["};", f"#define ACCUMULATORS(DO) {places}"]
        head = (
            "Accumulators& s, const Arguments& arg, const Own& own, const Gathered& g, const RowIndex& index, "
            "const Lanes& l, bool counts"
        )
        lines += self._function("void add_terms", head, self.edge.lines, edge_stores + adds, "counts")
        head = "const Accumulators& s, const Arguments& arg, int row, const Lanes& l, bool writes, bool is_empty"
        lines += self._function("void finish_row", head, self.end.lines, end_stores, "writes")
        return "\n".join(lines) + "\n"

    def _function(
        self, name: str, parameters: str, lines: list[str], last: list[str] | None = None, condition: str = ""
    ) -> list[str]:
        static, name = ("static ", name.removeprefix("static ")) if name.startswith("static ") else ("", name)
        body = [f"    {line}" for line in lines]
        if last:
            body += [f"    if ({condition}) {{", *(f"        {line}" for line in last), "    }"]
        return [f"{static}__device__ __forceinline__ {name}({parameters}) {{", *body, "}"]
