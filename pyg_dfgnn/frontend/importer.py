"""Nodes of an FX graph, run one by one as functions of symbols: what is on edges becomes values of a program."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from pyg_dfgnn.frontend.functional import name_of, value_of
from pyg_dfgnn.ir.domains import D, Domain, E, One, S
from pyg_dfgnn.ir.torch_front import FUNCTIONS, Symbol, TraceError, Tracer, fake_sizes
from pyg_dfgnn.ir.torch_front.pointwise import filled
from pyg_dfgnn.settings import current
from pyg_dfgnn.torch_private import DisableTorchFunction

CONSTANTS = {
    name: float("ones" in name) for kind in ("zeros", "ones", "empty") for name in (kind, f"new_{kind}", f"{kind}_like")
}
FILLS = frozenset({"full", "new_full", "full_like"})
VIEWS = frozenset("view reshape unsqueeze squeeze expand expand_as flatten view_as".split()) | frozenset(
    "contiguous detach to float double long clone".split()
)
REDUCTIONS = frozenset({"scatter_add", "scatter_reduce", "index_add", "index_reduce"})
_SIZED = VIEWS | FILLS | CONSTANTS.keys() | {"Size", "repeat", "broadcast_to", "unflatten"}
"""Functions that take sizes, which may be numbers of rows."""
_LOOKUPS = frozenset({"getitem", "index_select", "embedding"})
WIDE = frozenset({"linear", "matmul", "mm", "bmm", "addmm"})
_NARROW = 16
"""Widest row of an edge that is mapped in registers, whose map may so become part of a program."""
_KEPT = 1024
"""Numbers of a weight that lanes keep in registers: of a wider map whose result is cut, kernels rather read parts."""
_CUTS = frozenset("split chunk split_with_sizes tensor_split unsafe_chunk unbind narrow select".split())
_ARGUMENT = re.compile("l_(.+)_")
_INSIDE = re.compile("_(?:modules|parameters|buffers)_")
"""Parts of the names that TorchDynamo gives the arguments of a graph."""
_FILE = re.compile(r'File "(.+)", line (\d+)')
_GENERATED = re.compile(r"_(propagate|edge_updater|collect)_\w+\.py$")
"""Names of the files that PyG writes for each class."""


def expression_of(size: Any) -> Any:
    """Return a size as a number, or as the expression that the sizes of other tensors are compared with."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.shape_env.replace(size.node.expr)
    return int(expression) if expression.is_number else expression


_LIBRARIES = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parents[1]}/",
    "/torch_geometric/",
    "/torch_scatter/",
)


def line_of(node: Node) -> str:
    """Return the line of a user's code that a node comes from, with its text; of PyG's where there is no other."""
    frames = [(file, int(line)) for file, line in _FILE.findall(node.stack_trace or "")]
    frames = [frame for frame in frames if not _GENERATED.search(frame[0])]
    own = [frame for frame in frames if is_users(frame[0])]
    of_pyg = [frame for frame in frames if "/torch_geometric/nn/" in frame[0]]
    # The last comes after the one that called it.
    found = own or of_pyg or frames
    if not found:
        return "the call"
    return place_of(*found[-1])


def is_users(file: str) -> bool:
    """Return whether a file is a user's, and no library's."""
    return not any(part in file for part in _LIBRARIES)


def place_of(file: str, line: int) -> str:
    """Return a line of a file with its text."""
    return f"{'/'.join(file.split('/')[-2:])}:{line} `{linecache.getline(file, line).strip()}`"


class Ends(NamedTuple):
    """Ids of one end of the edges: the tensor of the edges, and its row."""

    edges: Node
    row: int


class Mesh(NamedTuple):
    """The sizes of a graph, as expressions: its edges, and the nodes that each row of the edges points to.

    Attributes:
        edges: Number of edges.
        nodes: Numbers of nodes.
        target: Row of the edges that most reductions go to.
        largest: Largest ids plus one, which code takes for a number of targets that it was not told.
    """

    edges: Any
    nodes: tuple[Any, Any]
    target: int
    largest: frozenset[Any] = frozenset()

    @property
    def is_square(self) -> bool:
        """Whether both rows point to the nodes of one set."""
        return bool(self.nodes[0] == self.nodes[1])


class Draft:
    """A region while its nodes are being traced.

    Args:
        edges: Node with the tensor of the edges.
        level: How many regions, one after another, it waits for.
        mesh: Sizes of the graph.
        ends: Nodes with ids -> what they are.
        device: Device of the edges.
        autocast: Device type and dtype of autocast; None without it.

    Attributes:
        symbols: Node -> its symbol, or a tuple of them; in the order of tracing.
        reads: Node -> the nodes whose symbols it was traced with.
        sources: Name of an input -> the node it comes from, and the dimension of rows.
    """

    def __init__(
        self,
        edges: Node,
        level: int,
        mesh: Mesh,
        ends: dict[Node, Ends],
        device: torch.device,
        autocast: tuple[str, torch.dtype] | None,
    ) -> None:
        self.edges, self.level, self.mesh = edges, level, mesh
        # Ids of other edges are numbers here.
        self.ends = {node: end for node, end in ends.items() if end.edges is edges}
        self.primes = fake_sizes(mesh.is_square)
        self.tracer = Tracer(FUNCTIONS, self.primes, device, autocast)
        self.edge_symbol = self.tracer.edge_index("source_to_target" if mesh.target else "target_to_source")
        self.symbols: dict[Node, Any] = {}
        self.reads: dict[Node, list[Node]] = {}
        self.sources: dict[str, tuple[Node, int]] = {}
        self.inputs: dict[tuple[Node, Domain | None], Symbol] = {}
        self.titles: dict[Node, str] = {}

    # Sizes -----------------------------------------------------------------------------------------------------------

    def fake(self, size: Any, *, may_fix: bool = False) -> int:
        """Return the fake size that stands for a size of the FX graph.

        Args:
            size: The size.
            may_fix: Whether one that is no number of rows may be fixed, so that other numbers compile anew.

        Raises:
            Refusal: It is no number of rows of this graph, and may not be fixed.
        """
        found, (first, second), target = expression_of(size), self.mesh.nodes, self.mesh.target
        source_size, target_size = (first, second) if target else (second, first)
        for known, prime in zip((self.mesh.edges, source_size, target_size), self.primes):
            if found == known:
                return prime
        if isinstance(found, int):
            return found
        if found in self.mesh.largest:
            # Rows of nodes without edges are read by none.
            return self.primes.targets
        if not may_fix or not isinstance(size, torch.SymInt) or found.free_symbols & self._row_symbols():
            raise self.tracer.stop("a size that neither edges nor their ends have")
        return int(size)

    def _row_symbols(self) -> set[Any]:
        sizes = (self.mesh.edges, *self.mesh.nodes)
        return {symbol for size in sizes if not isinstance(size, int) for symbol in size.free_symbols}

    def shape_of(self, value: Tensor, axis: int | None = None) -> tuple[int, ...]:
        """Return the fake shape of an example; sizes but that of an axis may be fixed."""
        return tuple(self.fake(size, may_fix=axis is not None and dim != axis) for dim, size in enumerate(value.shape))

    def _meta(self, value: Tensor, axis: int | None = None) -> Tensor:
        return torch.empty(self._rows_of(value, axis), dtype=value.dtype, device="meta")

    def _rows_of(self, value: Tensor, axis: int | None) -> tuple[int, ...]:
        """Return the fake shape of an example, of which one dimension at most is that of rows.

        Raises:
            Refusal: Two are.
        """
        shape = self.shape_of(value, axis)
        if sum(self.tracer.domain_of_size(size) is not None for size in shape) > 1:
            raise self.tracer.stop("rows meet another dimension")
        return shape

    # Operands --------------------------------------------------------------------------------------------------------

    def domain(self, row: int) -> Domain:
        """Return the domain of the nodes that a row of the edges points to."""
        return D if row == self.mesh.target else S

    def axis_of(self, value: Any, *counts: Any) -> int | None:
        """Return the dimension of an example that is one of some numbers of rows, of the first of them that there is.

        By default they are those of edges, and of nodes that are reduced to.
        """
        sizes = [expression_of(size) for size in value.shape] if isinstance(value, Tensor) else []
        counts = counts or (self.mesh.edges, self.mesh.nodes[self.mesh.target])
        return next((sizes.index(count) for count in counts if count in sizes), None)

    def is_row_of_edge(self, node: Node) -> bool:
        """Return whether a node's tensor has a row for each edge."""
        return self.axis_of(value_of(node), self.mesh.edges) is not None

    def features(self, node: Node, row: int, axis: int) -> Symbol:
        """Return node features that are gathered by a row of the edges."""
        domain = None if self.mesh.is_square else self.domain(row)
        key = node, domain
        if key not in self.inputs:
            value = value_of(node)
            if expression_of(value.shape[axis]) != self.mesh.nodes[row]:
                raise self.tracer.stop("a size that neither edges nor their ends have")
            meta = self._meta(value, axis)
            others = (*meta.shape[:axis], *meta.shape[axis + 1 :])
            if any(self.tracer.domain_of_size(size) is not None for size in others):
                raise self.tracer.stop("rows meet another dimension")
            name = self.title(node)
            for suffix in ("_i", "_j"):
                self.sources[name + suffix] = node, axis
            self.inputs[key] = self.tracer.node_input(name, meta, domain, axis)
        return self.inputs[key]

    def title(self, node: Node) -> str:
        """Return the name of an input, of which no other input has a form: that of an argument, parameter or buffer."""
        if node not in self.titles:
            found = _ARGUMENT.fullmatch(node.name) if node.op == "placeholder" else None
            title = base = node.name if found is None else _INSIDE.sub(".", found[1]).removeprefix("self.")
            count, taken = 1, {form for other in self.titles.values() for form in _forms(other)}
            while taken & _forms(title):
                count += 1
                title = f"{base}_{count}"
            self.titles[node] = title
        return self.titles[node]

    def external(self, node: Node) -> Symbol:
        """Return a tensor that the rest of the graph computes.

        Raises:
            Refusal: Its rows are neither those of edges nor of their ends, or its numbers are no floats.
        """
        value = value_of(node)
        if not isinstance(value, Tensor):
            raise self.tracer.stop("reads what is no tensor")
        key = node, One
        if key in self.inputs:
            return self.inputs[key]
        axis = self.axis_of(value)
        domain = One if axis is None else E if axis == self.axis_of(value, self.mesh.edges) else D
        meta = self._meta(value, axis)
        t, name, axis = self.tracer, self.title(node), axis or 0
        row = tuple(meta.shape) if domain is One else (*meta.shape[:axis], *meta.shape[axis + 1 :])
        if any(t.domain_of_size(size) is not None for size in row):
            raise t.stop("rows meet another dimension")
        if meta.dtype is torch.bool:
            number = t._input(name, domain, row)
            symbol = Symbol.of(meta, number, None if domain is One else domain, lead=axis, shared=True)
        elif domain is One:
            if not meta.is_floating_point():
                raise t.stop("integers that all edges share")
            symbol = Symbol.of(meta, t._input(name, One, row), None, shared=True)
        else:
            symbol = t.row_input(name, meta, domain, axis)
        self.sources[name] = node, axis
        self.inputs[key] = symbol
        return symbol

    def operand(self, node: Node) -> Any:
        """Return the symbol of a node: its own, one that is traced here again, or an input."""
        if node in self.symbols:
            return self.symbols[node]
        if node in self.ends or name_of(node) in CONSTANTS or name_of(node) in FILLS:
            return self.trace(node)
        if self.may_repeat(node):
            reasons = len(self.tracer.reasons)
            try:
                return self.trace(node)
            except TraceError:
                del self.tracer.reasons[reasons:]
        return self.external(node)

    def may_repeat(self, node: Node) -> bool:
        """Return whether a node that is computed elsewhere may be computed here too: it waits for no reduction, and
        reads less than it gives.
        """
        if not node.op.startswith("call_") or node.meta.keys() & {"effect", "random", "derived"}:
            return False
        name, tensors = name_of(node), [x for x in node.all_input_nodes if isinstance(value_of(x), Tensor)]
        if gathered(node, self.ends) is not None:
            return True
        if name in VIEWS and tensors and (self.may_repeat(tensors[0]) or tensors[0] in self.symbols):
            return True
        if name in VIEWS and tensors and self.is_row_of_edge(tensors[0]) and self.axis_of(value_of(node)):
            # Rows that are repeated for the items of a batch are read once.
            return True
        if not self.is_row_of_edge(node) or any(x in self.ends for x in tensors):
            return False
        if name in _LOOKUPS:
            return any(self.is_row_of_edge(x) and not value_of(x).is_floating_point() for x in tensors)
        if name in WIDE:
            rows, mapped = value_of(tensors[0]), value_of(node)
            if not self.is_row_of_edge(tensors[0]) or rows.dim() != 2:
                return False
            width, own = expression_of(rows.shape[1]), expression_of(mapped.shape[-1])
            if current().edge_chunks:
                return True
            if not isinstance(width, int) or not isinstance(own, int) or not width <= _NARROW or not width < own:
                return False
            return width * own <= _KEPT or not self._is_cut(node)
        if "place" in node.meta:
            return "light" in node.meta
        return all(self.is_row_of_edge(x) or x.op == "placeholder" or _is_shared(value_of(x)) for x in tensors)

    def _is_cut(self, node: Node) -> bool:
        """Return whether parts of what a node gives for each edge are read apart, maybe of a function of it."""
        waiting, seen = list(node.users), {node}
        while waiting:
            user = waiting.pop()
            name = name_of(user)
            if name in _CUTS or (name == "getitem" and _is_part(user.args[1])):
                return True
            if user not in seen and self.is_row_of_edge(user) and name not in WIDE:
                seen.add(user)
                waiting += user.users
        return False

    def is_light(self, node: Node) -> bool:
        """Return whether a traced node waits for no reduction of its region."""
        if name_of(node) in REDUCTIONS or name_of(node) in WIDE or "random" in node.meta:
            return False
        places = [x for x in self.reads.get(node, ()) if x.meta.get("place") is self]
        return all("light" in x.meta for x in places)

    # Tracing ---------------------------------------------------------------------------------------------------------

    def trace(self, node: Node) -> Any:
        """Run a node on symbols.

        Raises:
            Refusal: It has no meaning in a program.
        """
        tracer, before = self.tracer, self.tracer.line
        tracer.line = line_of(node)
        try:
            symbol = self._traced(node)
        finally:
            tracer.line = before
        self.symbols[node] = symbol
        return symbol

    def _traced(self, node: Node) -> Any:
        name, value, tracer, reads = name_of(node), value_of(node), self.tracer, list[Node]()
        if name in CONSTANTS or name in FILLS:
            number = CONSTANTS.get(name, node.kwargs.get("fill_value", node.args[-1] if node.args else None))
            if not isinstance(number, (int, float)):
                raise tracer.stop("a number that is a tensor")
            with torch.enable_grad():
                return filled(tracer, self._rows_of(value, self.axis_of(value)), number, value.dtype)
        if node in self.ends and (len(node.all_input_nodes) < 1 or node.all_input_nodes[0] not in self.ends):
            return tracer.ends_of(self.edge_symbol, self.ends[node].row)

        def convert(arg: Any) -> Any:
            if not isinstance(arg, Node):
                return arg
            if isinstance(value_of(arg), Tensor) or arg in self.symbols:
                reads.append(arg)
                symbol = self._gathered(node, arg)
                return self.operand(arg) if symbol is None else symbol
            return map_aggregate(value_of(arg), lambda x: self._number(x, name))

        args: Any = map_aggregate(node.args, convert)
        kwargs: Any = map_aggregate(node.kwargs, convert)
        function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        reasons = len(tracer.reasons)
        try:
            with tracer, torch.enable_grad():
                result = function(*args, **kwargs)
        except TraceError:
            raise
        except Exception as error:
            is_of_ours = any(str(size) in str(error) for size in self.primes)
            what = "rows meet another dimension" if is_of_ours else f"{type(error).__name__}: {error}"
            raise tracer.stop(f"`{name}`: {what}") from error
        if len(tracer.reasons) > reasons:
            raise TraceError(*tracer.reasons[reasons:])
        self.reads[node] = reads
        if isinstance(result, (tuple, list)):
            return tuple(result)
        return self._checked(result, value)

    def _gathered(self, node: Node, arg: Node) -> Symbol | None:
        """Return the symbol of what a node gathers from the rest of the graph; None if it is no such operand."""
        place = gathered(node, self.ends)
        if place is None or arg is not node.args[0] or arg in self.symbols:
            return None
        value, (ends, dim) = value_of(arg), place
        return self.features(arg, ends.row, dim % value.dim())

    def _number(self, value: Any, name: str) -> Any:
        """Return a number of the graph as the program has it."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        if not isinstance(value, torch.SymInt) or name not in _SIZED:
            raise self.tracer.stop("computes with numbers that differ from call to call")
        return self.fake(value, may_fix=True)

    def _checked(self, symbol: Any, value: Any) -> Any:
        """Return a symbol whose size and dtype are those of the FX graph."""
        if not isinstance(symbol, Symbol) or not isinstance(value, Tensor):
            raise self.tracer.stop("a result that is no tensor")
        with DisableTorchFunction():
            have, dtype = tuple(symbol.shape), symbol.dtype
        if have != self.shape_of(value, symbol.lead):
            raise self.tracer.stop(f"a shape of {list(value.shape)} that a program has no rows of")
        if dtype is value.dtype:
            return symbol
        if not self.tracer.has_autocast:
            raise self.tracer.stop(f"{dtype} in place of {value.dtype}")
        with DisableTorchFunction():
            meta = torch.empty(have, dtype=value.dtype, device="meta")
        return Symbol.of(
            meta, symbol.number, symbol.rows, lead=symbol.lead, ids=symbol.ids, lift=symbol.lift, shared=symbol.shared
        )


def _is_part(key: Any) -> bool:
    """Return whether an index takes a part of some dimension."""
    keys = key if isinstance(key, tuple) else (key,)
    return any(isinstance(k, int) or (isinstance(k, slice) and k != slice(None)) for k in keys)


def _forms(title: str) -> set[str]:
    """Return the names of the inputs that a title may give."""
    return {title, f"{title}_i", f"{title}_j"}


def _is_shared(value: Tensor) -> bool:
    """Return whether a tensor has the same sizes in all calls, and so no row for a node or an edge."""
    return all(isinstance(expression_of(size), int) for size in value.shape)


def gathered(node: Node, ends: dict[Node, Ends]) -> tuple[Ends, int] | None:
    """Return the ids and the dimension by which a node gathers rows of its first operand; None if it does not."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], Node):
        return None
    name, found, dim = name_of(node), cast(Any, None), cast(Any, None)
    if name == "getitem" and len(node.args) == 2:
        key = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if key and all(k == slice(None) for k in key[:-1]):
            found, dim = key[-1], len(key) - 1
    elif name == "index_select":
        bound = dict(zip(("input", "dim", "index"), node.args)) | dict(node.kwargs)
        found, dim = bound.get("index"), bound.get("dim")
    else:
        return None
    is_ids = isinstance(found, Node) and found in ends and isinstance(dim, int)
    return (ends[found], dim) if is_ids and node.args[0] not in ends else None
