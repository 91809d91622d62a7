"""Linear layers of one input under one node of autograd, and as one product where that is faster; one layer alone."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import dense

from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.nn.gate import SCRIPTED, report, weights_dtype_of
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.attention.projected import projected_attention
from pyg_dfgnn.ops.eager import PLAIN, apply_of, is_batched, is_eager, is_plain, needs_grad, once_differentiable

_hooks = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def project(x: Tensor, heads: int, *layers: torch.nn.Module) -> Sequence[Tensor]:
    r"""What each linear layer makes of `x`, with the heads apart.

    .. math::
        Y_l = X W_l^T + b_l, \quad
        \partial X = \sum_l \partial Y_l W_l, \quad
        \partial W_l = \partial Y_l^T X, \quad
        \partial b_l = \partial Y_l^T 1

    Plain layers of one shape share a node of autograd, which sums the gradient of `x` inside the products. Each of
    these lines is one product for all layers where a kernel takes them (:mod:`pyg_dfgnn.ops.gemm`), else of few
    rows. Under autocast x and the parameters are cast once for all layers.

    Args:
        x: Shape [N, F].
        heads: The number H of heads that the channels of a layer divide into.
        layers: PyG's `Linear` of H * C channels; others, and those with hooks, are called one by one.

    Returns:
        As many tensors [N, H, C].
    """
    parameters = _parameters_of(x, layers)
    if parameters is None:
        return [_apart(layer(x), heads) for layer in layers]
    weights, biases, dtype = parameters
    if dtype is not None:
        x = x.to(dtype)
    tensors = weights + biases
    if needs_grad((x, *tensors)):
        return _apply((heads, len(layers)), x, *tensors)
    return _forward(heads, x, weights, biases)[0]


class Linear(dense.Linear):
    """PyG's `Linear` with a kernel for large products in float32: same arguments,
    parameters, results and gradients.

    `Y = X W^T + b`; under autocast, where TF32 is allowed, and for other products PyG's code runs, which no setting
    reports.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Shape [*, F_out] of x [*, F_in]."""
        if self._is_for_kernel(x):
            weight, bias = self._parameters["weight"], self._parameters["bias"]
            tensors = (x, weight) if bias is None else (x, weight, bias)
            if {each.dtype for each in tensors} == {x.dtype} and (bias is None or bias.shape == weight.shape[:1]):
                if needs_grad(tensors):
                    out: Tensor = _apply_product(*tensors)
                    return out
                return _product(*tensors)
        return super().forward(x)

    def _is_for_kernel(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling() or not is_plain(x) or not gemm.pays(x, self.out_channels):
            return False
        if not is_eager() or torch._C._is_tracing() or x.is_neg():
            return False
        return _keeps_weight(self._parameters) and type(self._parameters["bias"]) in (*PLAIN, type(None))

    def __prepare_scriptable__(self) -> dense.Linear:
        """TorchScript compiles PyG's own class: `torch.jit.script` puts one in place of this layer, same parameters."""
        if type(self) is not Linear:
            return self
        report(type(self).__name__, [SCRIPTED])
        twin: dense.Linear = object.__new__(dense.Linear)
        twin.__dict__.update(self.__dict__)
        return twin


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By a kernel, where one takes the tensors as they lie."""
    found = gemm.apart(x, (weight,), () if bias is None else (bias,))
    return F.linear(x, weight, bias) if found is None else found[0]


class _Product(torch.autograd.Function):
    """One linear layer. Gradients that are to be differentiated, and batches of them, are products of torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *biases: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = (weight, *biases)
        return _product(x, weight, *biases)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_batched(grad) or not is_plain(grad):
            grad_x = grad @ weight if needs_x else None
            grad_weight = grad.t() @ x if needs_weight else None
            return grad_x, grad_weight, *(grad.sum(0) if needed else None for needed in needs_bias)
        wanted = needs_x, needs_weight, any(needs_bias)
        grad_x, of_layer = gemm.gradients(x, 1, (weight,), ctx.layer, (grad,), wanted)
        return grad_x, *of_layer


_apply_product = apply_of(_Product)


def project_one(x: Tensor, heads: int, layer: torch.nn.Module) -> Tensor:
    """What one linear layer makes of `x`, with the heads apart; a large product by a kernel, as :func:`project` does.

    For a small one the host is the limit, which calls the layer in less time than it plans a launch.

    Args:
        x: Shape [N, F].
        heads: The number H of heads.
        layer: PyG's `Linear` of H * C channels; others, and those with hooks, are called.

    Returns:
        Shape [N, H, C].
    """
    if is_eager() and gemm.is_large(x, getattr(layer, "out_channels", 0)):
        return project(x, heads, layer)[0]
    return _apart(layer(x), heads)


def attend(
    graph: Graph | EdgeSet, score: str, x: Tensor, heads: int, *layers: torch.nn.Module, **options: Any
) -> Sequence[Tensor] | None:
    """What `projected_attention` makes of x and plain layers, the attention in PyG's dtype; None where it takes none.

    Args:
        graph: The edges.
        score: As :func:`~pyg_dfgnn.ops.attention.projected.projected_attention` has it, like the options.
        x: Shape [N, F].
        heads: The number of heads.
        layers: PyG's `Linear`.
    """
    parameters = _parameters_of(x, layers)
    if parameters is None:
        return None
    weights, biases, dtype = parameters
    if dtype is None:
        return projected_attention(graph, score, x, weights, biases, heads, **options)
    vector = options.get("parameter")
    out_dtype = weights_dtype_of(dtype, dtype if vector is None else vector.dtype, x.is_cuda)
    if out_dtype not in (dtype, torch.float32):
        return None
    return projected_attention(graph, score, x, weights, biases, heads, dtype=dtype, out_dtype=out_dtype, **options)


def _apart(rows: Tensor, heads: int) -> Tensor:
    """The channels [..., H * C] as [..., H, C]."""
    return rows.view(*rows.shape[:-1], heads, rows.size(-1) // heads)


_LINEAR = (dense.Linear, Linear)
_Parameters = tuple[list[Tensor], list[Tensor], torch.dtype | None]


def _parameters_of(x: Tensor, layers: Sequence[torch.nn.Module]) -> _Parameters | None:
    """The weights and biases of layers that are products with matrices of one shape, which nothing watches or changes.

    Biases are as many, or none. Then the dtype that autocast has for the products, None without autocast. None where
    calling a layer may be more than its product.
    """
    if not is_eager() or not is_plain(x) or x.layout is not torch.strided:
        return None
    if _has_any_global_hook():
        return None
    dtype: torch.dtype | None
    if torch.is_autocast_enabled(x.device.type):
        cast = torch.get_autocast_dtype(x.device.type)
        dtype = _dtype_under_autocast(cast, x, layers)
        if dtype is None:
            return None
    else:
        dtype, cast = x.dtype, None
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        if not _is_product(layer):
            return None
        own: Any = layer._parameters
        weight, bias = own["weight"], own["bias"]
        if weight.dtype is not dtype:
            return None
        if not weights:
            shape = weight.shape
            channels = shape[:1]
        elif weight.shape != shape:
            return None
        weights.append(weight)
        if bias is not None:
            # PyG broadcasts a bias of one element, and refuses those of another shape.
            if bias.dtype is not dtype or bias.shape != channels:
                return None
            biases.append(bias)
    return (weights, biases, cast) if len(biases) in (0, len(weights)) else None


def _dtype_under_autocast(cast: torch.dtype, x: Tensor, layers: Sequence[torch.nn.Module]) -> torch.dtype | None:
    """The dtype that all parameters need where autocast casts these and x to one of 16 bits; None where it may not."""
    if cast.itemsize != 2:
        return None
    # Autocast leaves float64 alone.
    dtypes = cast, torch.float32
    if type(layers[0]) not in _LINEAR:
        return None
    weight = layers[0]._parameters.get("weight")
    return weight.dtype if weight is not None and weight.dtype in dtypes and x.dtype in dtypes else None


def _forward(
    heads: int, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The results, and the weights for backward in the dtype of x: of few rows, without a kernel, as one."""
    found = gemm.apart(x, weights, biases)
    if found is not None:
        return [_apart(each, heads) for each in found], weights
    count, rows = len(weights), x.size(0)
    if rows > gemm.MAX_ROWS or count == 1:
        weights, biases = gemm.in_dtype(x.dtype, weights, biases)
        added: Sequence[Tensor | None] = biases or [None] * count
        layers = zip(weights, added, strict=True)
        return [_apart(F.linear(x, weight, bias), heads) for weight, bias in layers], weights
    out, kept = gemm.beside(x, weights, biases)
    apart = out.view(rows, count, heads, weights[0].size(0) // heads)
    return apart.transpose(0, 1).contiguous().unbind(), kept


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: tuple[int, int], x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        heads, count = rest
        found, weights = _forward(heads, x, tensors[:count], tensors[count:])
        ctx.save_for_backward(x, *weights)
        ctx.layers = tensors
        # A layer whose result nothing reads gets no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        count, layers = len(grads), ctx.layers
        used = [index for index, grad in enumerate(grads) if grad is not None]
        if len(weights) == 1 < count and len(used) == count:
            # One weight has the rows of all layers.
            given = [torch.stack(grads, 1).view(x.size(0), weights[0].size(0))]  # type: ignore[arg-type]
        else:
            weights = weights if len(weights) == count else list(weights[0].chunk(count))
            weights = [weights[index] for index in used]
            given = [grads[index].flatten(1) for index in used]  # type: ignore[union-attr]
        _, needs_x, *needed = ctx.needs_input_grad
        if not used:
            return None, None, *[None] * len(needed)
        places = [*used, *([index + count for index in used] if len(layers) > count else ())]
        wanted = needs_x, any(needed[:count]), any(needed[count:])
        of_used = [layers[place] for place in places]
        grad_x, found = gemm.gradients(x, len(used), weights, of_used, given, wanted)
        of_layers = dict(zip(places, found, strict=True))
        return None, grad_x, *[of_layers.get(place) for place in range(len(needed))]


_apply = apply_of(_Projection)


def is_plain_linear(layer: torch.nn.Module) -> bool:
    """Whether calling the layer is a product with its weight and nothing else."""
    return _is_product(layer) and not _has_any_global_hook()


def _is_product(layer: torch.nn.Module) -> bool:
    """The same, but for what all modules share."""
    if type(layer) not in _LINEAR:
        return False
    own = layer.__dict__
    return _keeps_weight(own["_parameters"]) and "forward" not in own and not any(_hooks(own))


def _keeps_weight(parameters: Any) -> bool:
    """Whether a layer's weight and bias are among its parameters: pruning, norms and replicas keep them elsewhere."""
    weight = parameters.get("weight")
    return type(weight) in PLAIN and weight.layout is torch.strided and "bias" in parameters
