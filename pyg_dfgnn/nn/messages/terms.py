"""Attention terms in the forward of a compiled layer: `(x * self.a).sum(-1)` by one kernel.

The forward is compiled again from its source, with a call of a method in place of each such product with an attribute
of the layer. Its result stands for the product until the sum asks for a kernel, or is the product where there is none.
Lines stay, so that tracebacks and debuggers show the user's code. Where Python makes other code of the unchanged source
than the forward has, the source is not that of the forward, which then runs as it is.
"""

from __future__ import annotations
import __future__

import ast
import linecache
import warnings
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.nn.stand_ins import codes_in
from pyg_dfgnn.ops.attention.terms import attention_terms, has_kernel
from pyg_dfgnn.ops.eager import intercepts_functions, is_eager, is_plain
from pyg_dfgnn.settings import current

_FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
_Scope = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
_COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


class _Product:
    """The product of rows with a vector, of which only the sum is asked for; `sum` and `torch.sum` return it.

    Args:
        x: The rows.
        vector: The vector.
    """

    __slots__ = ("x", "vector")

    def __init__(self, x: Tensor, vector: Tensor) -> None:
        self.x, self.vector = x, vector

    def sum(self, *_: Any, **__: Any) -> Tensor:
        """Return the sum over the last dimension."""
        term, _nothing = attention_terms(self.x, self.vector)
        return term.to(torch.result_type(self.x, self.vector))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return args[0].sum()  # type: ignore[no-any-return]


def _pyg_dfgnn_product(_: Any, left: Any, right: Any, x_is_left: bool) -> Any:
    """Return `left * right`, or what stands for it where a kernel makes its sum."""
    x, vector = (left, right) if x_is_left else (right, left)
    return _Product(x, vector) if _has_sum(x, vector) else left * right


METHOD = _pyg_dfgnn_product
"""Method, by its own name, of classes of compiled layers."""


def _has_sum(x: Any, vector: Any) -> bool:
    """Return whether a kernel sums the products of a tensor [N, H, C] or [N, C] with a vector for each of its rows."""
    if not (is_plain(x) and is_plain(vector) and has_kernel(x, [vector]) and current().compile_messages):
        return False
    # Torch keeps less for gradients of one of them, and what it does not keep may be edited.
    if torch.is_grad_enabled() and x.requires_grad is not vector.requires_grad:
        return False
    if not is_eager() or intercepts_functions() or torch._C._is_tracing():
        return False
    return not (torch.is_autocast_enabled(x.device.type) or x.is_neg() or vector.is_neg())


def with_terms(forward: Any) -> Any:
    """Return a forward whose attention terms may be made by kernels; the forward itself if it has none."""
    if type(forward) is not FunctionType or "sum" not in forward.__code__.co_names:
        return forward
    try:
        # What Python says of the source it has said before.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = _with_products(forward)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return forward
    if code is None:
        return forward
    function = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__, function.__qualname__ = forward.__kwdefaults__, forward.__qualname__
    return function


def _with_products(forward: FunctionType) -> CodeType | None:
    """Return the code of a forward with products replaced; None if there are none, or its source is not found."""
    code = forward.__code__
    found = _module_of(code, forward.__globals__)
    if found is None or not code.co_argcount or _compiled(found[0], code) != code:
        return None
    module, scope = found
    own = code.co_varnames[0]
    if any(
        isinstance(node, ast.Name) and node.id == own and isinstance(node.ctx, ast.Store) for node in ast.walk(scope)
    ):
        return None
    is_local = "torch" in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    products = _Products(own, forward.__globals__.get("torch") is torch and not is_local)
    scope.body = [products.visit(statement) for statement in scope.body]
    replaced = _compiled(module, code)
    return replaced if replaced != code and replaced is not None and replaced.co_freevars == code.co_freevars else None


def _module_of(code: CodeType, names: dict[str, Any]) -> tuple[ast.Module, _Scope] | None:
    """Return the module that defines a function, without other classes and functions, and it; None without source.

    What the module imports stays: by that Python chooses how methods are called.
    """
    module = ast.parse("".join(linecache.getlines(code.co_filename, names)))
    found = (scopes for scopes in _scopes(module, ()) if _is_of(scopes[-1], code))
    scopes = next(found, None)
    if scopes is None:
        return None
    module.body = [node for node in module.body if node is scopes[0] or not isinstance(node, _SCOPES)]
    for outer, inner in zip(scopes, scopes[1:]):
        outer.body = [inner]
    return module, scopes[-1]


def _scopes(node: ast.AST, around: tuple[_Scope, ...]) -> Iterator[tuple[_Scope, ...]]:
    """Yield each class and function in a tree, with those around it before it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _SCOPES):
            yield (*around, child)
            yield from _scopes(child, (*around, child))
        else:
            yield from _scopes(child, around)


def _is_of(scope: _Scope, code: CodeType) -> bool:
    first = min(node.lineno for node in (scope, *scope.decorator_list))
    return scope.name == code.co_name and first == code.co_firstlineno


def _compiled(module: ast.Module, like: CodeType) -> CodeType | None:
    """Return the code of the function of a module that has the name and the place of another, compiled as that was."""
    compiled = compile(module, like.co_filename, "exec", like.co_flags & _FUTURE, True)
    place = like.co_name, like.co_firstlineno
    return next((code for code in codes_in(compiled) if (code.co_name, code.co_firstlineno) == place), None)


class _Products(ast.NodeTransformer):
    """Replaces `x * self.a` in `(x * self.a).sum(-1)` by a call of the method.

    Args:
        own: What the forward calls its layer.
        has_torch: Whether `torch` is the library.
    """

    def __init__(self, own: str, has_torch: bool) -> None:
        self.own, self.has_torch = own, has_torch

    def visit(self, node: ast.AST) -> Any:
        """Return what stands for a node; scopes inside may call something else as the forward calls its layer."""
        return node if isinstance(node, (*_SCOPES, ast.Lambda, *_COMPREHENSIONS)) else super().visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.BinOp(_, ast.Mult(), _) as product, "sum") as called, args, keywords):
                if _is_last(args, keywords):
                    called.value = self._call(product)
            case ast.Call(
                ast.Attribute(ast.Name("torch"), "sum"), [ast.BinOp(_, ast.Mult(), _) as product, *args], keywords
            ):
                if self.has_torch and _is_last(args, keywords):
                    node.args[0] = self._call(product)
        return node

    def _call(self, product: ast.BinOp) -> ast.expr:
        """Return the call for a product, or the product if neither side is an attribute of the layer."""
        for vector, is_right in ((product.right, True), (product.left, False)):
            match vector:
                case ast.Attribute(ast.Name(self.own)):
                    # On the line where the product begins: Python has a call on the last line of its method's name.
                    method = ast.Attribute(ast.Name(self.own, ast.Load()), METHOD.__name__, ast.Load())
                    call = ast.Call(method, [product.left, product.right, ast.Constant(is_right)], [])
                    for new in (method.value, method, call.args[-1], call):
                        ast.copy_location(new, product)
                        new.end_lineno, new.end_col_offset = product.lineno, product.col_offset
                    return call
        return product


def _is_last(args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> bool:
    """Return whether the arguments of a sum name the last dimension alone."""
    match [*args], [*keywords]:
        case ([dim], []) | ([], [ast.keyword("dim" | "axis", dim)]):
            return ast.dump(dim) == ast.dump(ast.parse("-1", mode="eval").body)
    return False
