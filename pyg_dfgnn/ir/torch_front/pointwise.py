"""Pointwise functions, conversions and constants."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dfgnn.ir.torch_front.registry import FUNCTIONS, names, pointwise, require, size_and_dtype, values
from pyg_dfgnn.ir.torch_front.symbols import Symbol, Tracer, Types

_OF_ONE = (
    "neg abs exp log sqrt sin cos erf relu sigmoid tanh sign silu sinh cosh asin acos atan asinh acosh atanh expm1 "
    "log1p floor round"
)
for _name in _OF_ONE.split():
    FUNCTIONS[_name] = lambda t, func, x, op=_name: pointwise(t, size_and_dtype(func, x), op, x)
FUNCTIONS.update(negative=FUNCTIONS["neg"], absolute=FUNCTIONS["abs"], special_expit=FUNCTIONS["sigmoid"])
FUNCTIONS.update(sgn=FUNCTIONS["sign"], **{f"arc{_name}": FUNCTIONS[f"a{_name}"] for _name in ("sin", "cos", "tan")})
FUNCTIONS.update({f"arc{_name}": FUNCTIONS[f"a{_name}"] for _name in ("sinh", "cosh", "tanh")})
_OF_TWO = {"mul multiply rmul": "mul", "gt greater": "greater", "maximum": "maximum", "eq": "eq"}
for _names, _op in {**_OF_TWO, "atan2 arctan2": "atan2", "remainder mod": "remainder"}.items():
    _dtype = torch.bool if _op in ("greater", "eq") else None
    for _name in _names.split():
        FUNCTIONS[_name] = lambda t, func, x, y, op=_op, dtype=_dtype: pointwise(
            t, size_and_dtype(func, x, y, dtype=dtype), op, x, y
        )
for _name, _op in {"lt": "greater", "less": "greater", "rsub": "sub", "rdiv": "div", "rtruediv": "div"}.items():
    _dtype = torch.bool if _op == "greater" else None
    FUNCTIONS[_name] = lambda t, func, x, y, op=_op, dtype=_dtype: pointwise(
        t, size_and_dtype(func, x, y, dtype=dtype), op, y, x
    )


@names("add", "radd", "sub", "subtract")
def _add(t: Tracer, func: Any, x: Any, y: Any, *, alpha: float = 1) -> Symbol:
    meta, op = size_and_dtype(func, x, y), "sub" if "sub" in func.__name__ else "add"
    if meta.dtype is torch.bool:
        # The sum of two masks is true where one is.
        return pointwise(t, meta, "maximum", x, y)
    return pointwise(t, meta, op, x, y if alpha == 1 else pointwise(t, t.symbol(y), "mul", y, alpha))


@names("div", "divide", "true_divide")
def _div(t: Tracer, func: Any, x: Any, y: Any, *, rounding_mode: None = None) -> Symbol:
    require(rounding_mode is None, "a rounding mode")
    return pointwise(t, size_and_dtype(func, x, y), "div", x, y)


@names("reciprocal")
def _reciprocal(t: Tracer, func: Any, x: Any) -> Symbol:
    return pointwise(t, size_and_dtype(func, x), "div", 1.0, x)


@names("pow")
def _pow(t: Tracer, func: Any, x: Any, exponent: Any) -> Symbol:
    meta = size_and_dtype(func, x, exponent)
    if isinstance(exponent, (int, float)):
        return pointwise(t, meta, "pow", x, attrs=(exponent,))
    base, power = values(t, x, exponent, any_axis=True)
    value = t.value(base)
    if value.op != "clamp" or not value.attrs[0] > 0:
        raise t.stop("a power whose exponent is a tensor, of numbers that may not be positive")
    return pointwise(t, meta, "exp", pointwise(t, meta, "mul", pointwise(t, base, "log", base), power))


@names("clamp", "clip", "clamp_min", "clamp_max")
def _clamp(t: Tracer, func: Any, x: Symbol, min: Any = None, max: Any = None) -> Symbol:
    low, high = min, max
    name = func.__name__.strip("_")
    if name == "clamp_max" and high is None:
        low, high = None, low
    low, high = -inf if low is None else low, inf if high is None else high
    require(isinstance(low, (int, float)) and isinstance(high, (int, float)), "bounds that are tensors")
    (symbol,) = values(t, x, any_axis=True)
    value = t.value(symbol)
    ones = t.builder.values[t.emit("const", attrs=(1.0,))]
    if value.op == "sum" and (low, high) == (1, inf) and t.builder.values[value.args[0]] == ones:
        return t.result(x, t.emit("count", attrs=value.attrs), symbol.rows)
    return pointwise(t, x, "clamp", symbol, attrs=(float(low), float(high)))


@names("leaky_relu")
def _leaky_relu(t: Tracer, func: Any, x: Symbol, negative_slope: float = 0.01) -> Symbol:
    return pointwise(t, size_and_dtype(func, x), "leaky_relu", x, attrs=(float(negative_slope),))


@names("elu")
def _elu(t: Tracer, func: Any, x: Symbol, alpha: float = 1.0) -> Any:
    if alpha == 1.0:
        return pointwise(t, size_and_dtype(func, x), "elu", x)
    with t:
        # Without an overflow where x is large, whose gradient would not be a number.
        return torch.where(x > 0, x, alpha * F.elu(torch.where(x > 0, 0.0, x)))


@names("gelu")
def _gelu(t: Tracer, func: Any, x: Symbol, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        with t:
            # The square root of 2 / pi.
            return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return pointwise(t, size_and_dtype(func, x), "gelu", x)


@names("softplus")
def _softplus(t: Tracer, func: Any, x: Symbol, beta: float = 1, threshold: float = 20) -> Any:
    require(threshold == 20, "another threshold")
    if beta != 1:
        with t:
            return F.softplus(beta * x) / beta
    return pointwise(t, size_and_dtype(func, x), "softplus", x)


@names("where")
def _where(t: Tracer, func: Any, condition: Symbol, *others: Any) -> Symbol:
    if not others:
        raise t.stop("`where` with one argument selects by numbers")
    # `x.where(condition, y)` has its operands in another order than `torch.where(condition, x, y)`.
    mask, x = (others[0], condition) if func is Tensor.where else (condition, others[0])
    return pointwise(t, func(condition, *others), "where", mask, x, others[1])


@names("masked_fill")
def _masked_fill(t: Tracer, func: Any, x: Symbol, mask: Symbol, value: Any) -> Symbol:
    return pointwise(t, func(x, mask, value), "where", mask, value, x)


@names("and", "logical_and", "bitwise_and", "or", "logical_or", "bitwise_or", "invert", "logical_not", "bitwise_not")
def _logical(t: Tracer, func: Any, *operands: Any) -> Symbol:
    name = func.__name__.strip("_").split("_")[-1]
    require(all(x.dtype is torch.bool for x in values(t, *operands, any_axis=True)), "numbers that are no masks")
    if name in ("not", "invert"):
        return pointwise(t, func(*operands), "sub", 1.0, *operands)
    return pointwise(t, func(*operands), "mul" if name == "and" else "maximum", *operands)


@names("float", "double", "half", "bfloat16", "to", "type_as", "type", "clone", "contiguous", "alias", "long", "int")
def _converted(t: Tracer, func: Any, x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    if func.__name__ == "type" and not args and not kwargs:
        raise t.stop("`type` names the class of a tensor")
    args = tuple(a for a in args if not isinstance(a, (torch.device, str)) and a is not None)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
    is_plain = not args and not kwargs and func.__name__ in ("to", "type")
    meta = x if is_plain else func(x, *args, **kwargs)
    are_types = isinstance(x.ids, Types) and meta.dtype in (torch.int64, torch.int32)
    # A program has one floating dtype, in which nothing is rounded on the way.
    is_exact = x.dtype.is_floating_point and not t.has_autocast
    if meta.dtype is not x.dtype and (is_exact or not (meta.dtype.is_floating_point or are_types)):
        raise t.stop(f"a conversion of {x.dtype} to {meta.dtype}")
    is_new = func.__name__ == "clone" or meta.dtype is not x.dtype
    x.shared |= not is_new
    return t.result(meta, x.number, x.rows, lead=x.lead, ids=x.ids, lift=x.lift, shared=not is_new)


@names("detach")
def _detach(t: Tracer, func: Any, x: Symbol) -> Symbol:
    (x,) = values(t, x, any_axis=True)
    x.shared = True
    return t.result(x, t.emit("detach", t.id(x)), x.rows, lead=x.lead, shared=True)


FUNCTIONS[".data"] = lambda t, x: _detach(t, None, t.symbol(x))


@names("dropout")
def _dropout(t: Tracer, func: Any, x: Symbol, p: float = 0.5, training: bool = True) -> Symbol:
    require(0.0 <= p <= 1.0, "a probability outside of 0 to 1")
    if not training or p == 0.0:
        return x
    (x,) = values(t, x, any_axis=True)
    if p == 1.0:
        return pointwise(t, x, "mul", x, 0.0)
    if x.rows is None:
        raise t.stop("dropout of what all edges share")
    return t.result(x, t.emit("mul", t.full(x), t.keep(x, float(p))), x.rows, lead=x.lead)


@names("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def _other_dropout(t: Tracer, func: Any, x: Symbol, p: float = 0.5, training: bool = True) -> Symbol:
    if not training or p == 0.0:
        return x
    raise t.stop(f"`{func.__name__}` in training")


# Constants ------------------------------------------------------------------------------------------------------------


def filled(t: Tracer, size: Sequence[int], number: float, dtype: torch.dtype) -> Symbol:
    """Return a tensor of one number; its rows are those of the domain whose number of rows is among its sizes."""
    meta = torch.empty(tuple(size), dtype=dtype, device="meta")
    lead = next((k for k, n in enumerate(meta.shape) if t.domain_of_size(n) is not None), 0)
    rows = t.domain_of_size(meta.size(lead)) if meta.dim() else None
    return t.result(meta, t.emit("const", attrs=(float(number),)), rows, lead=lead)


def size_of(size: Sequence[Any]) -> tuple[int, ...]:
    """Return a size that was passed as a tuple or as several arguments."""
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)


def _constant(number: float, of_tensor: bool) -> Any:
    def fill(t: Tracer, func: Any, *args: Any, size: Any = None, dtype: Any = None, **_: Any) -> Symbol:
        if not of_tensor:
            return filled(t, size_of(args) if size is None else size, number, dtype or torch.get_default_dtype())
        like, *rest = args
        if size is None:
            size = tuple(like.shape) if func.__name__.endswith("_like") else size_of(rest)
        return filled(t, size, number, dtype or like.dtype)

    return fill


# What is not initialised may be zeros.
for _name, _number in (("zeros", 0.0), ("ones", 1.0), ("empty", 0.0)):
    FUNCTIONS[_name] = _constant(_number, of_tensor=False)
    FUNCTIONS[f"new_{_name}"] = FUNCTIONS[f"{_name}_like"] = _constant(_number, of_tensor=True)


@names("full", "new_full", "full_like")
def _full(t: Tracer, func: Any, *args: Any, dtype: Any = None, **_: Any) -> Symbol:
    x = args[0] if isinstance(args[0], Tensor) else None
    size = x.shape if func.__name__ == "full_like" and x is not None else args[-2]
    default = torch.get_default_dtype() if x is None else x.dtype
    require(isinstance(args[-1], (int, float)), "a number that is a tensor")
    return filled(t, tuple(size), args[-1], dtype or default)


@names("fill", "zero")
def _fill(t: Tracer, func: Any, x: Symbol, value: float = 0.0) -> Symbol:
    return filled(t, tuple(x.shape), value, x.dtype)


@names("tensor", "as_tensor", "scalar_tensor")
def _tensor(t: Tracer, func: Any, data: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    if isinstance(data, Tensor):
        return t.symbol(data)
    numbers = data if isinstance(data, (list, tuple)) else [data]
    require(len(numbers) == 1 and isinstance(numbers[0], (int, float)), "several numbers")
    return filled(t, (1,) if numbers is data else (), numbers[0], dtype or torch.tensor(data).dtype)
