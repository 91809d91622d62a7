"""Linear layers of one input as one product, where their launches take longer than their work."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.dense.linear import Linear

from pyg_dfgnn.ops.eager import PLAIN, is_eager

# Rows of which a product takes about as long as the host needs to launch it.
_MAX_ROWS = 1 << 14
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def project(x: Tensor, *layers: torch.nn.Module) -> Sequence[Tensor]:
    """What each linear layer makes of `x`; of few rows by one batched product if the layers have one shape.

    Args:
        x: Shape [N, F].
        layers: PyG's `Linear`; others, and those with hooks, are called one by one.

    Returns:
        As many tensors [N, F'].
    """
    few = type(x) in PLAIN and x.layout is torch.strided and x.size(0) <= _MAX_ROWS
    if not few or not is_eager() or not all(map(is_plain_linear, layers)):
        return [layer(x) for layer in layers]
    weights = [layer._parameters["weight"] for layer in layers]
    biases = [layer._parameters["bias"] for layer in layers]
    if len({(weight.shape, bias is None) for weight, bias in zip(weights, biases)}) > 1:  # type: ignore[union-attr]
        return [layer(x) for layer in layers]
    weight = torch.stack(weights).transpose(1, 2)  # type: ignore[arg-type]
    rows = x.expand(len(layers), -1, -1)
    if biases[0] is None:
        return torch.bmm(rows, weight).unbind()
    return torch.baddbmm(torch.stack(biases).unsqueeze(1), rows, weight).unbind()  # type: ignore[arg-type]


def is_plain_linear(layer: torch.nn.Module) -> bool:
    """Whether calling the layer is a product with its weight and nothing else."""
    own = layer.__dict__
    return (
        type(layer) is Linear
        # Pruning, weight normalisation and replicas keep the weight elsewhere.
        and type(layer._parameters.get("weight")) in PLAIN
        and "bias" in layer._parameters
        and "forward" not in own
        and not any([own[name] for name in _HOOKS])
        and not _has_any_global_hook()
    )
