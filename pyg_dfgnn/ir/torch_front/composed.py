"""Functions that are traced as what they are composed of."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, pi, prod
from typing import Any

import torch
import torch.nn.functional as F

from pyg_dfgnn.ir.torch_front.registry import FUNCTIONS, require
from pyg_dfgnn.ir.torch_front.symbols import Tracer


def _register_composed() -> None:
    """Functions that are traced as what they are composed of."""

    def mean(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        total = x.sum() if dim is None else x.sum(dim, keepdim)
        dims = dim if isinstance(dim, (tuple, list)) else range(x.dim()) if dim is None else (dim,)
        return total / prod(x.shape[d] for d in dims)

    def norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        require(p in (1, 2, "fro", None) and dim is not None and dtype is None, "another norm")
        if p == 1:
            return x.abs().sum(dim, keepdim)
        total = (x * x).sum(dim, keepdim)
        # The gradient at zero is zero, as torch has it.
        return torch.where(total == 0, 0.0, torch.where(total == 0, 1.0, total).sqrt())

    def linalg_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        is_matrix = ord not in (None, "fro") and not isinstance(dim, int) and (dim is None or len(dim) > 1)
        require(not is_matrix, "the norm of a matrix by its singular values or its rows")
        return norm(x, 2 if ord is None else ord, dim, keepdim, dtype=dtype)

    def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
        # At the bounds the gradient is zero, where that of `clamp` is one.
        inside = (x > min_val) & (x < max_val)
        return torch.where(inside, x, x.detach().clamp(min_val, max_val))

    def hardsigmoid(x: Any) -> Any:
        return hardtanh(x / 6 + 0.5, 0.0, 1.0)

    def prelu(x: Any, weight: Any) -> Any:
        if weight.numel() > 1 and x.dim() > 2:
            # Of more than two dimensions the second has a weight each.
            weight = weight.view(-1, *(1,) * (x.dim() - 2))
        return torch.where(x > 0, x, weight * x)

    def trunc(x: Any) -> Any:
        return torch.where(x < 0, -(-x).floor(), x.floor())

    def glu(x: Any, dim: int = -1) -> Any:
        rows, gates = x.chunk(2, dim)
        return rows * gates.sigmoid()

    def logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        most = x.amax(dim, keepdim=True).detach()
        most = torch.where(most.abs() == inf, 0.0, most)
        return (x - most).exp().sum(dim, keepdim).log() + (most if keepdim else most.squeeze(dim))

    def var(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> Any:
        correction = int(unbiased) if correction is None else correction
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        require(all(isinstance(d, int) for d in dims) and isinstance(unbiased, bool), "a variance of all rows")
        count = prod(x.shape[d] for d in dims)
        require(count > correction, "as few numbers as the correction")
        centred = x - mean(x, dims, True)
        return (centred * centred).sum(dims, keepdim) / (count - correction)

    def std(x: Any, *args: Any, **named: Any) -> Any:
        square = var(x, *args, **named)
        # The gradient at zero is zero, as torch has it.
        return torch.where(square == 0, 0.0, torch.where(square == 0, 1.0, square).sqrt())

    def extreme(
        x: Any, y: Any = None, keepdim: bool = False, *, dim: Any = None, is_min: bool = False, **named: Any
    ) -> Any:
        other = named.pop("other", y if isinstance(y, torch.Tensor) else None)
        require(other is not None and dim is None and not named, "places of the numbers that it takes")
        return torch.minimum(x, other) if is_min else torch.maximum(x, other)

    def einsum(equation: str, *operands: Any) -> Any:
        left, arrow, result = equation.replace(" ", "").partition("->")
        labels = left.split(",")
        require(bool(arrow) and len(labels) == len(operands) == 2 and "." not in equation, "another form of equation")
        first, second = map(set, labels)
        summed = (first | second) - set(result)
        is_plain = all(len(set(each)) == len(each) for each in (*labels, result))
        # All else is a product of matrices.
        is_nested = first <= second or second <= first
        require(is_plain and summed <= first & second and (is_nested or not summed), "a product of matrices")
        order = result if not summed else max(labels, key=len)
        aligned = []
        for operand, own in zip(operands, labels):
            places = [own.index(label) for label in order if label in own]
            operand = operand if places == sorted(places) else operand.permute(places)
            for place, label in enumerate(order):
                operand = operand if label in own else operand.unsqueeze(place)
            aligned.append(operand)
        product = aligned[0] * aligned[1]
        if summed:
            product = product.sum([place for place, label in enumerate(order) if label in summed])
            order = "".join(label for label in order if label not in summed)
        return product if order == result else product.permute([order.index(label) for label in result])

    def threshold(x: Any, threshold: float, value: float) -> Any:
        return torch.where((x < threshold) | (x == threshold), value, x)

    def normalize(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Any:
        return x / norm(x, p, dim, True).clamp(min=eps)

    def softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        require(dtype is None, "a dtype")
        exp = (x - x.amax(dim, keepdim=True).detach()).exp()
        return exp / exp.sum(dim, keepdim=True)

    def log_softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        require(dtype is None, "a dtype")
        shifted = x - x.amax(dim, keepdim=True).detach()
        return shifted - shifted.exp().sum(dim, keepdim=True).log()

    def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        dims = tuple(range(-len(normalized_shape), 0))
        centred = x - mean(x, dims, True)
        out = centred / (mean(centred * centred, dims, True) + eps).sqrt()
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    def batch_norm(x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *args: Any, **named: Any) -> Any:
        training = named.get("training", args[0] if args else False)
        eps = named.get("eps", args[2] if len(args) > 2 else 1e-5)
        require(not training and mean is not None and x.dim() == 2, "statistics of all edges")
        out = (x - mean) / (var + eps).sqrt()
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    def cosine_similarity(x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
        return (normalize(x, 2, dim, eps) * normalize(y, 2, dim, eps)).sum(dim)

    def ge(x: Any, y: Any) -> Any:
        return (x > y) | (x == y)

    def addmm(c: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        return beta * c + alpha * (x @ y)

    table: dict[str, Callable[..., Any]] = {
        "mean": mean,
        "norm": norm,
        "linalg_norm": linalg_norm,
        "linalg_vector_norm": norm,
        "normalize": normalize,
        "softmax": softmax,
        "log_softmax": log_softmax,
        "layer_norm": layer_norm,
        "batch_norm": batch_norm,
        "cosine_similarity": cosine_similarity,
        "ge": ge,
        "greater_equal": ge,
        "le": lambda x, y: (x < y) | (x == y),
        "less_equal": lambda x, y: (x < y) | (x == y),
        "ne": lambda x, y: ~(x == y),
        "not_equal": lambda x, y: ~(x == y),
        "minimum": lambda x, y: -torch.maximum(-x, -y),
        "square": lambda x: x * x,
        "rsqrt": lambda x: 1 / x.sqrt(),
        "log2": lambda x: x.log() * (1 / log(2)),
        "log10": lambda x: x.log() * (1 / log(10)),
        "ceil": lambda x: -(-x).floor(),
        "trunc": trunc,
        "fix": trunc,
        "frac": lambda x: x - trunc(x),
        "isnan": lambda x: x != x,
        "deg2rad": lambda x: x * (pi / 180),
        "rad2deg": lambda x: x * (180 / pi),
        "glu": glu,
        "softmin": lambda x, dim=None, _stacklevel=3, dtype=None: softmax(-x, dim, _stacklevel, dtype),
        "hardswish": lambda x: x * hardsigmoid(x),
        "tanhshrink": lambda x: x - x.tanh(),
        "logsumexp": logsumexp,
        "var": var,
        "std": std,
        "amin": lambda x, dim=(), keepdim=False: -(-x).amax(dim, keepdim),
        "max": extreme,
        "min": lambda x, *args, **named: extreme(x, *args, is_min=True, **named),
        "einsum": einsum,
        "logsigmoid": lambda x: -F.softplus(-x),
        "relu6": lambda x: hardtanh(x, 0.0, 6.0),
        "hardtanh": hardtanh,
        "hardsigmoid": hardsigmoid,
        "softsign": lambda x: x / (1 + x.abs()),
        "mish": lambda x: x * F.softplus(x).tanh(),
        "selu": lambda x: 1.0507009873554805 * F.elu(x, 1.6732632423543772),
        "celu": lambda x, alpha=1.0: alpha * F.elu(x / alpha),
        "prelu": prelu,
        "threshold": threshold,
        "addcmul": lambda x, y, z, *, value=1: x + value * y * z,
        "lerp": lambda x, y, w: x + w * (y - x),
        "addmm": addmm,
        "tan": lambda x: x.sin() / x.cos(),
        "pairwise_distance": lambda x, y, p=2.0, eps=1e-6, keepdim=False: norm(x - y + eps, p, -1, keepdim),
    }
    for name, composed in table.items():

        def handle(t: Tracer, func: Any, *args: Any, composed: Callable[..., Any] = composed, **kwargs: Any) -> Any:
            with t:
                return composed(*args, **kwargs)

        FUNCTIONS[name] = handle


_register_composed()
