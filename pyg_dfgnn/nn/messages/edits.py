"""Whether a forward may wait with values of edges: not if it edits what they are made of, lets them out unread, or asks
what they are.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections.abc import Collection, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.ir.torch_front import is_of_libraries
from pyg_dfgnn.nn.messages.spec import STEPS, original
from pyg_dfgnn.nn.reads import is_plain_name
from pyg_dfgnn.nn.stand_ins import asks_kinds

_UNREAD = frozenset(
    "sparse_coo_tensor sparse_csr_tensor SparseTensor tensor as_tensor Tensor Parameter checkpoint apply to_dlpack "
    "from_dlpack".split()
)
"""Functions that read the memory of a tensor without asking its class, or pass it on to such."""
_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def may_wait_in(layer: Any) -> bool:
    """Whether values of edges may be computed after the call that gives them, in the forward of a layer as written."""
    known = _known.get(layer)
    if known is None:
        is_edited = any(getattr(module, "inplace", False) for module in layer.modules())
        known = _known[layer] = not is_edited and not _edits_arguments(type(layer))  # type: ignore[arg-type]
    return known


@cache
def _edits_arguments(kind: type) -> bool:
    own = kind.__mro__[: kind.__mro__.index(MessagePassing)]
    entries = [(name, inspect.unwrap(original(entry))) for base in own for name, entry in vars(base).items()]
    functions = [(name, entry) for name, entry in entries if isinstance(entry, FunctionType)]
    methods = frozenset(name for name, _ in functions if name not in STEPS)
    if any(asks_kinds(function) for name, function in functions if is_plain_name(name)):
        return True
    return any(_function_edits_arguments(function, methods) for _, function in functions)


def _function_edits_arguments(function: FunctionType, methods: frozenset[str]) -> bool:
    """Whether a function edits, after a call that gives values of edges, a name that it passes to one.

    Args:
        function: The function.
        methods: Names of the layer's methods, which may edit what they are given.
    """
    if STEPS.keys().isdisjoint(function.__code__.co_names):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return True
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_of(node.func) in STEPS]
    if any(isinstance(node, ast.Call) and _name_of(node.func) in _UNREAD for node in ast.walk(tree)):
        return True
    passed = {name for call in calls for part in (*call.args, *call.keywords) for name in _names_in(part)}
    # Views, and whatever else may share memory.
    for _ in range(2):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and not passed.isdisjoint(_shared_by(node.value)):
                passed.update(name for target in node.targets for name in _names_in(target))
    users = {name for name, value in function.__globals__.items() if isinstance(value, FunctionType)}
    users = {name for name in users if not is_of_libraries(function.__globals__[name].__code__.co_filename)}
    has_loop = any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(tree))
    first = 0 if has_loop else min((call.lineno for call in calls), default=0)
    return any(line >= first and (name is None or name in passed) for line, name in _edits(tree, methods | users))


def _shared_by(value: ast.expr) -> Iterator[str]:
    """The names that a value may share its memory with: itself, or what it is a part, an attribute or a view of."""
    while isinstance(value, (ast.Subscript, ast.Attribute, ast.Call)):
        value = value.func if isinstance(value, ast.Call) else value.value
    return _names_in(value)


def _edits(tree: ast.AST, editors: Collection[str]) -> Iterator[tuple[int, str | None]]:
    """Yield the line and the name of each edit in place; None for one of an attribute.

    Args:
        tree: The function.
        editors: Names of functions and methods that may edit what they are given.
    """
    for node in (part for part in ast.walk(tree) if isinstance(part, (ast.stmt, ast.expr))):
        targets: list[ast.expr] = []
        if isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.Call):
            name = _name_of(node.func)
            if isinstance(node.func, ast.Attribute) and name.endswith("_") and hasattr(torch.Tensor, name):
                targets = [node.func.value]
            elif name in editors:
                targets = [*node.args, *(keyword.value for keyword in node.keywords)]
            elif name.endswith("_") and (hasattr(torch, name) or hasattr(torch.nn.functional, name)):
                targets = node.args[:1]
            elif any(isinstance(part, ast.Constant) and part.value is True for part in node.args):
                targets = node.args[:1]
            elif any(keyword.arg in ("inplace", "out") for keyword in node.keywords):
                targets = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "out")]
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute):
                yield node.lineno, None
            yield from ((node.lineno, name) for name in _names_in(target) if name != "self")


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _names_in(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
