"""Edits in place of an FX graph: each becomes a new value, or all that shares the edited memory stays torch's.

Graphs of TorchDynamo are not functional. A value that nothing else refers to may be replaced by the edited one; a graph
input, a view, and what a custom operator writes may not, and keep their order among all that has an effect.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from pyg_dfgnn.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket

_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_IN_PLACE = frozenset("ipow imatmul ifloordiv imod iand ior ixor ilshift irshift".split())
_OTHER_FORM = frozenset(
    "eq ne lt le gt ge less less_equal greater greater_equal not_equal logical_and logical_or logical_xor logical_not "
    "t transpose swapaxes swapdims squeeze unsqueeze resize set detach requires_grad".split()
)
"""Functions whose edit leaves another dtype, shape or tensor than they return."""
_CONTEXTS = frozenset(
    "_set_grad_enabled _enter_autocast _exit_autocast _enter_inference_mode _exit_inference_mode".split()
)
"""Functions that change how all later ones run."""
_RANDOM = re.compile(
    "_?(rand.*|.*dropout.*|bernoulli|(log_)?normal|multinomial|binomial|poisson|exponential|geometric|cauchy|uniform"
    "|rrelu|gumbel_softmax|standard_gamma|sample_dirichlet|_assert.*|_log_api_usage.*|print|batch_norm|instance_norm)_?"
)
"""Names of functions whose order matters: those that draw, check, or write to running statistics."""


_ARITHMETIC = frozenset("add sub mul truediv div true_divide pow".split())
_OF_NUMBERS = _ARITHMETIC | frozenset("neg sqrt rsqrt exp log log2 power tensor as_tensor scalar_tensor".split())
"""Functions that make a number of numbers."""


class Effects(NamedTuple):
    """Effects in a graph, whose order must stay.

    Attributes:
        before: Node with an effect -> the one before it.
        impure: Nodes that draw, check, or call what nothing is known of: dropouts, and some of those in `before`.
        pinned: Nodes that share memory with what is edited in place.
        context: Name of a function that changes how later ones run, which no region may be moved over; empty if none.
    """

    before: dict[Node, Node | None]
    impure: set[Node]
    pinned: set[Node]
    context: str


def value_of(node: Node) -> Any:
    """Return the example of a node's result."""
    return node.meta.get("example_value")


def name_of(node: Node) -> str:
    """Return the name of the function that a node calls."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    # PyG wraps two of torch's functions.
    return name.removeprefix("_new_")


def memory_of(node: Any) -> list[int]:
    """Return the memory of the tensors of a node's result."""
    values = value_of(node) if isinstance(node, Node) else None
    parts = values if isinstance(values, (tuple, list)) else (values,)
    return [value.untyped_storage()._cdata for value in parts if isinstance(value, Tensor)]


def _edited(node: Node) -> list[Node]:
    """Return the operands that a node edits."""
    if node.op not in ("call_function", "call_method"):
        return []
    name, out = name_of(node), node.kwargs.get("out")
    if isinstance(node.target, OpOverload):
        schema = node.target._schema.arguments
        written = [arg.name for arg in schema if arg.alias_info is not None and arg.alias_info.is_write]
        named = dict(zip((arg.name for arg in schema), node.args)) | node.kwargs
        edited: list[Any] = [named.get(each) for each in written]
    elif out is not None:
        edited = [*out] if isinstance(out, (tuple, list)) else [out]
    else:
        # `and_` and `or_` of Python edit nothing.
        is_named = name.endswith("_") and not name.endswith("__")
        is_named &= getattr(node.target, "__module__", "") != "_operator"
        is_python = node.target in _OPERATORS or node.target is operator.setitem
        is_python |= name in _IN_PLACE
        bound = _bound(node)
        edited = [*node.args[:1]] if is_python or is_named or bound.get("inplace") is True else []
        if name in ("embedding", "embedding_bag") and bound.get("max_norm") is not None:
            edited = [bound.get("weight")]
    flat = [each for operand in edited for each in (operand if isinstance(operand, (tuple, list)) else (operand,))]
    return [operand for operand in flat if isinstance(operand, Node)]


def _bound(node: Node) -> dict[str, Any]:
    """Return the arguments of a Python function of torch by name."""
    if not inspect.isfunction(node.target):
        return dict(node.kwargs)
    try:
        return dict(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments)
    except (TypeError, ValueError):
        return dict(node.kwargs)


def _plain(node: Node) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return the call that gives what an edit leaves, as a new value; None if there is none."""
    if _edited(node) != [*node.args[:1]]:
        return None
    name, target, first = name_of(node), node.target, value_of(node.args[0])  # type: ignore[arg-type]
    tensors = [value_of(x) for x in node.args if isinstance(x, Node)]
    dtypes = {x.dtype for x in tensors if isinstance(x, Tensor) and x.dim() and x.is_floating_point()}
    if not isinstance(first, Tensor) or len(dtypes) > 1 or "out" in node.kwargs or name.rstrip("_") in _OTHER_FORM:
        return None
    if target is operator.setitem:
        _, place, number = node.args
        like = value_of(place) if isinstance(place, Node) else None
        rows = value_of(number) if isinstance(number, Node) else None
        if isinstance(like, Tensor) and like.dtype is torch.bool and like.dim() == first.dim():
            if isinstance(number, (int, float)):
                return "call_method", "masked_fill", node.args, {}
        if isinstance(like, Tensor) and like.dtype is torch.int64 and isinstance(rows, Tensor):
            # An index in brackets drops leading sizes of 1.
            is_alike = rows.dtype is first.dtype and rows.device == first.device
            if is_alike and rows.dim() < like.dim() + first.dim():
                return "call_function", _put, node.args, {}
        return "call_function", _assigned, node.args, {}
    if target in _OPERATORS:
        return "call_function", _OPERATORS[target], node.args, dict(node.kwargs)
    if node.op == "call_method" and name.endswith("_"):
        # Such as `zero_` and `exponential_` have no other form.
        has_form = callable(getattr(Tensor, name[:-1], None))
        return ("call_method", name[:-1], node.args, dict(node.kwargs)) if has_form else None
    if _bound(node).get("inplace") is True:
        named = {key: value for key, value in _bound(node).items() if key not in ("inplace", "input", "x")}
        return "call_function", target, node.args[:1], named
    plain = (getattr(torch, name[:-1], None) or getattr(F, name[:-1], None)) if name.endswith("_") else None
    return None if plain is None else ("call_function", plain, node.args, dict(node.kwargs))


def _is_idle(node: Node) -> bool:
    """Return whether a dropout drops nothing, or a norm takes its running statistics."""
    named, name = _bound(node), name_of(node)
    if name == "dropout" and named.get("p", 0.5) == 0:
        return True
    return name in ("dropout", "batch_norm") and named.get("training", name == "dropout") is False


def functionalise(graph: Graph) -> Effects:
    """Replace edits of values that nothing else refers to, and return what must keep its order."""
    sharing: dict[int, list[Node]] = {}
    edits: dict[int, list[Node]] = {}
    for node in graph.nodes:
        edited = _edited(node)
        for key in dict.fromkeys(key for each in edited or [node] for key in memory_of(each)):
            sharing.setdefault(key, []).append(node)
            if edited:
                edits.setdefault(key, []).append(node)
    pinned: set[Node] = set()
    for key, of_storage in edits.items():
        # A view that is made after the last edit sees what every later reader sees.
        earlier = sharing[key][: sharing[key].index(of_storage[-1])]
        chain = _chain([*earlier, of_storage[-1]], of_storage)
        plain = dict(zip(of_storage, map(_plain, of_storage)))
        if chain is None and None not in plain.values() and _write_back(sharing[key], of_storage):
            continue
        if chain is None or None in plain.values():
            pinned.update((*earlier, of_storage[-1]))
            _read_after(of_storage[-1], earlier)
            continue
        for base, *of_base in chain:
            _replace(base, {node: plain[node] for node in of_base})
    before: dict[Node, Node | None] = {}
    impure, last, context = set[Node](), None, ""
    for node in graph.nodes:
        if not node.op.startswith("call_"):
            continue
        name = name_of(node)
        context = name if name in _CONTEXTS else context
        is_custom = isinstance(node.target, (OpOverload, HigherOrderOperator))
        is_named = _RANDOM.fullmatch(name) is not None and not _is_idle(node)
        if is_custom or is_named or node.op == "call_module":
            impure.add(node)
        # What a program draws is not what PyG's code would, whatever the order of dropouts.
        is_ordered = node in impure and name != "dropout"
        if is_ordered or node in pinned or any(x in pinned for x in node.all_input_nodes):
            before[node], last = last, node
    return Effects(before, impure, pinned, context)


def drop_unread(graph: Graph, effects: Effects) -> bool:
    """Erase what nothing reads and what has no effect; returns whether there was any."""
    unread = False
    for node in reversed(list(graph.nodes)):
        is_call = node.op.startswith("call_") and isinstance(value_of(node), (Tensor, tuple, list))
        # Nothing is known of a user's operators.
        is_call &= not isinstance(node.target, OpOverloadPacket)
        if is_call and not node.users and node not in effects.before and node not in effects.impure:
            graph.erase_node(node)
            unread = True
    return unread


def _chain(nodes: list[Node], edits: list[Node]) -> list[list[Node]] | None:
    """Return the edits of each value that has some memory after that value; None where an edit shows in another value.

    Args:
        nodes: What has the memory, in order: a value, its edits, a view of the result, the edits of that.
        edits: Those of them that edit.
    """
    if nodes[0].op in ("placeholder", "get_attr"):
        return None
    order = {node: place for place, node in enumerate(nodes[0].graph.nodes)}
    chain: list[list[Node]] = []
    for node in nodes:
        if node not in edits:
            chain.append([node])
        elif chain and node.args[0] in chain[-1]:
            chain[-1].append(node)
        else:
            return None
    for place, values in enumerate(chain):
        later = next((of_base[1] for of_base in chain[place + 1 :] if len(of_base) > 1), None)
        if later is not None and any(order[user] > order[later] for value in values for user in value.users):
            return None
    return chain


_RESHAPES = frozenset("view reshape unsqueeze squeeze flatten contiguous view_as".split())
"""Functions of which a view has all numbers in their order."""


def _write_back(nodes: list[Node], edits: list[Node]) -> bool:
    """Write each edit of a part of rows on edges as a new value of the whole, of which later readers take views.

    Args:
        nodes: What has the memory, in order.
        edits: Those of them that edit, each of which has the form of a new value.

    Returns:
        Whether it is done: all views are ranges, or of all numbers in their order.
    """
    base, counts = nodes[0], _edge_counts(nodes[0].graph)
    if base.op in ("placeholder", "get_attr") or not _has_size(base, counts):
        return False
    # What each has the memory of, and what that is a part of.
    views, wholes = {base: base}, dict[Node, Node]()
    for node in nodes[1 : nodes.index(edits[-1]) + 1]:
        first = node.args[0] if node.args else None
        if not isinstance(first, Node) or first not in views:
            return False
        if node in edits:
            views[node] = views[first]
        elif _place_of(node) is not None and _has_size(node, counts):
            views[node], wholes[node] = node, views[first]
        else:
            return False
    now, graph = {base: base}, base.graph

    def value(view: Node, reader: Node) -> Node:
        """Return a view as a reader sees it."""
        if view not in now:
            whole = value(wholes[view], reader)
            with graph.inserting_before(reader):
                now[view] = graph.create_node(view.op, view.target, (whole, *view.args[1:]))
            now[view].meta["example_value"], now[view].stack_trace = value_of(view), view.stack_trace
        return now[view]

    node = base.next
    while node.op != "root":
        following = node.next
        for operand in node.all_input_nodes:
            if operand in views and not _is_again(node, views, wholes):
                node.replace_input_with(operand, value(views[operand], node))
        if node in edits and _is_again(node, views, wholes):
            graph.erase_node(node)
        elif node in edits:
            plain, view = _plain(node), views[node]
            if plain is None:
                raise TypeError(f"an edit by {name_of(node)} has lost its form")
            node.op, node.target, node.args, node.kwargs = plain
            if value_of(node) is None:
                node.meta["example_value"] = value_of(view)
            above = [view]
            while above[-1] is not base:
                above.append(wholes[above[-1]])
            before = [value(each, node) for each in above]
            now = {view: node}
            for part, whole, old in zip(above, above[1:], before[1:]):
                place = _place_of(part)
                with graph.inserting_after(now[part]):
                    if place == ():
                        now[whole] = graph.call_method("view_as", (now[part], old))
                    else:
                        now[whole] = graph.call_function(_assigned, (old, place, now[part]))
                now[whole].meta["example_value"], now[whole].stack_trace = value_of(whole), node.stack_trace
        elif node in views:
            now[node] = node
        node = following
    return True


def _place_of(node: Node) -> tuple[Any, ...] | None:
    """Return the index of a view in what it is a view of, empty if it has all numbers; None if it is no range of it."""
    name, first = name_of(node), value_of(node.args[0])  # type: ignore[arg-type]
    if node.kwargs or not isinstance(value_of(node), Tensor) or not isinstance(first, Tensor):
        return None
    if name in _RESHAPES:
        return ()
    rest = node.args[1:]
    if name == "getitem":
        key: tuple[Any, ...] = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        bounds = [b for k in key for b in ((k.start, k.stop) if isinstance(k, slice) else (k,))]
        is_whole = all(not isinstance(k, slice) or k.step in (None, 1) for k in key)
        return key if is_whole and all(b is None or b is Ellipsis or type(b) is int for b in bounds) else None
    if name in ("select", "narrow") and all(type(number) is int for number in rest):
        dim, start = rest[0] % first.dim(), rest[1]  # type: ignore[operator]
        part = start if name == "select" else slice(start, start + rest[2])  # type: ignore[operator]
        return None if start < 0 else (*(slice(None),) * dim, part)  # type: ignore[operator]
    return None


def _is_again(node: Node, views: dict[Node, Node], wholes: dict[Node, Node]) -> bool:
    """Return whether a node sets a part to itself, as Python does after an edit such as `x[0] *= 2`."""
    if node.target is not operator.setitem or node.users or node.args[2] not in views:
        return False
    whole, key, part = node.args
    view = views[part]  # type: ignore[index]
    return view in wholes and wholes[view] is views.get(whole) and view.args[1:] == (key,)  # type: ignore[arg-type]


def _edge_counts(graph: Graph) -> list[Any]:
    """Return the numbers of columns of lists of edges."""
    lists = [value_of(node) for node in graph.nodes]
    lists = [x for x in lists if isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)]
    return [x.shape[1] for x in lists if isinstance(x.shape[1], torch.SymInt) and _is_alike(x.shape[0], 2)]


def _has_size(node: Node, counts: list[Any]) -> bool:
    """Return whether a dimension of a tensor is one of some numbers of rows."""
    value = value_of(node)
    return isinstance(value, Tensor) and any(_is_alike(size, count) for size in value.shape for count in counts)


def _put(value: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Return a value with other rows at an index."""
    return value.index_put((index,), rows)


def _assigned(value: Tensor, place: Any, rows: Any) -> Tensor:
    """Return a value of which a part is another one."""
    value = value.clone()
    value[place] = rows
    return value


def _final(value: Any) -> Any:
    """Return a value that nothing edits any more."""
    return value


def _read_after(last: Node, nodes: list[Node]) -> None:
    """Let what comes after the last edit of memory read what is in it from nodes that are not pinned."""
    later, node = set[Node](), last.next
    while node.op != "root":
        later.add(node)
        node = node.next
    for node in (*nodes, last):
        readers = [user for user in node.users if user in later]
        if readers and isinstance(value_of(node), Tensor):
            with node.graph.inserting_after(last):
                final = node.graph.call_function(_final, (node,))
            final.meta["example_value"], final.stack_trace = value_of(node), node.stack_trace
            for user in readers:
                user.replace_input_with(node, final)


def _replace(base: Node, plain: dict[Node, Any]) -> None:
    """Write each edit of a value as a new value, which all that comes later reads."""
    current, names = base, {base}
    node = base.next
    while node.op != "root":
        if names & set(node.all_input_nodes):
            for name in names:
                node.replace_input_with(name, current)
        if node in plain:
            op, target, args, kwargs = plain[node]
            node.op, node.target = op, target
            node.args = (current, *node.args[1 : len(args)])
            node.kwargs = {key: current if value in names else value for key, value in kwargs.items()}
            if value_of(node) is None:
                node.meta["example_value"] = value_of(base)
            current = node
            names.add(node)
        node = node.next


def detach_no_grad(graph: Graph, is_enabled: bool) -> None:
    """Let what runs without gradients read detached tensors, in place of a change of the mode.

    Args:
        graph: The graph.
        is_enabled: Whether gradients are recorded where it begins.
    """
    changes = [node for node in graph.nodes if name_of(node) == "_set_grad_enabled"]
    if not changes or not is_enabled or any(not isinstance(node.args[0], bool) for node in changes):
        return
    blocks, is_on = list[Node](), True
    for node in graph.nodes:
        is_on = node.args[0] if node in changes else is_on
        blocks += [node] if not is_on and node.op.startswith("call_") and node not in changes else []
    if any(isinstance(value_of(node), Tensor) and value_of(node).requires_grad for node in blocks):
        # Such a result is its operand itself, whose gradient goes on.
        return
    inside, detached, is_on = set[Node](), dict[Node, Node](), True
    for node in list(graph.nodes):
        if node in changes:
            is_on = node.args[0]
            graph.erase_node(node)
        elif not is_on and node.op.startswith("call_"):
            inside.add(node)
            for operand in node.all_input_nodes:
                value = value_of(operand)
                if operand in inside or not isinstance(value, Tensor) or not value.requires_grad:
                    continue
                if operand not in detached:
                    with graph.inserting_before(node):
                        detached[operand] = graph.call_method("detach", (operand,))
                    detached[operand].meta["example_value"] = value.detach()
                    detached[operand].stack_trace = node.stack_trace
                node.replace_input_with(operand, detached[operand])


def fold_numbers(graph: Graph) -> None:
    """Put numbers in the place of tensors that are made of numbers alone, such as NumPy's, where arithmetic reads them.

    They are on a CPU, whatever the features are on.
    """
    known = dict[Node, Tensor]()
    for node in list(graph.nodes):
        name = name_of(node).removeprefix("wrapped_")
        if not node.op.startswith("call_") or node.kwargs or name not in _OF_NUMBERS:
            continue
        operands = [known.get(arg, arg) if isinstance(arg, Node) else arg for arg in node.args]
        if all(type(operand) in (int, float, Tensor) for operand in operands):
            function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
            try:
                value = function(*operands)
            except (ArithmeticError, TypeError, ValueError):
                continue
            if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
                known[node] = value
        elif name in _ARITHMETIC and any(arg in known for arg in node.all_input_nodes):
            others = [value_of(arg) for arg in node.all_input_nodes if arg not in known]
            if all(isinstance(other, Tensor) and other.is_floating_point() and other.dim() for other in others):
                node.args = map_arg(node.args, lambda arg: known[arg].item() if arg in known else arg)
    for node in reversed(known):
        if not node.users:
            graph.erase_node(node)


def fold_sizes(graph: Graph) -> None:
    """Read sizes from the arguments of a graph in place of tensors in it, and make constants like no tensor.

    So no tensor is computed for the sake of its size or dtype.
    """
    sizes = _Sizes(graph)
    for node in list(graph.nodes):
        value, name = value_of(node), name_of(node)
        if node.op == "placeholder":
            continue
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            known = sizes.of(value)
            if known is not None and known is not node:
                _use(node, known)
            elif isinstance(value, torch.SymInt):
                sizes.known.setdefault(value.node.expr, node)
        elif isinstance(value, torch.Size):
            every = [sizes.of(size) for size in value]
            if None not in every:
                _use(node, tuple(every))
        elif name in ("new_zeros", "new_ones", "new_full") and isinstance(value, Tensor):
            if "requires_grad" in node.kwargs:
                continue
            is_last = name == "new_full" and "fill_value" not in node.kwargs
            rest = node.args[1 : -1 if is_last else None]
            size = node.kwargs.get("size", rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest)
            fill = (node.kwargs.get("fill_value", node.args[-1]),) if name == "new_full" else ()
            node.op, node.target, node.args = "call_function", getattr(torch, name[4:]), (size, *fill)
            node.kwargs = {"dtype": value.dtype, "device": value.device}
        elif name == "expand_as" and isinstance(value, Tensor):
            have = [None] * (value.dim() - value_of(node.args[0]).dim()) + [*value_of(node.args[0]).shape]
            every = [-1 if _is_alike(one, size) else sizes.of(size) for one, size in zip(have, value.shape)]
            if None not in every:
                node.op, node.target, node.args = "call_method", "expand", (node.args[0], *every)
    for node in reversed(list(graph.nodes)):
        is_call, is_size = node.op.startswith("call_"), isinstance(value_of(node), (int, torch.SymInt, torch.Size))
        if is_call and is_size and not node.users:
            graph.erase_node(node)


def _is_alike(one: Any, other: Any) -> bool:
    first, second = (x.node.expr if isinstance(x, torch.SymInt) else x for x in (one, other))
    return bool(first == second)


class _Sizes:
    """Nodes that are sizes, some read from the arguments of a graph when they are asked for."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.known = graph, dict[Any, Node]()
        self.read: dict[Any, tuple[Node, int]] = {}
        for node in graph.nodes:
            value = value_of(node)
            if node.op == "placeholder" and isinstance(value, torch.SymInt):
                self.known.setdefault(value.node.expr, node)
            if node.op == "placeholder" and isinstance(value, Tensor):
                for axis, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        self.read.setdefault(size.node.expr, (node, axis))
        self.last = [node for node in graph.nodes if node.op == "placeholder"][-1:]

    def of(self, size: Any) -> Any:
        """Return a size as a number or a node; None if it is known to no argument."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if expression not in self.known and expression in self.read:
            node, axis = self.read[expression]
            with self.graph.inserting_after(self.last[0]):
                self.known[expression] = self.graph.call_method("size", (node, axis))
            self.known[expression].meta["example_value"] = size
        return self.known.get(expression)


def _use(node: Node, value: Any) -> None:
    """Let the readers of a node take a value, which is a number, a node or a tuple of such."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda x: value if x is node else x)  # type: ignore[assignment]
        user.kwargs = map_arg(user.kwargs, lambda x: value if x is node else x)  # type: ignore[assignment]
