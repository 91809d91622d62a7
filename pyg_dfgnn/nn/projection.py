"""Linear layers in convs: which of them are nothing but a product, and several of one input."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.nn import dense

from pyg_dfgnn.nn.dense import torch_linear
from pyg_dfgnn.nn.dense.linear import Linear, is_for_kernel, product
from pyg_dfgnn.nn.gate import is_plain_layer

_DROP_INS = (Linear, torch_linear.Linear)
_LINEAR = (dense.Linear, torch.nn.Linear, *_DROP_INS)


def is_plain_linear(layer: torch.nn.Module) -> bool:
    """Return whether calling the layer is a product with its weight and nothing else."""
    return is_plain_layer(layer, _LINEAR)


def project(x: Tensor, *layers: torch.nn.Module) -> Sequence[Tensor]:
    """Return what each linear layer makes of x; drop-ins with weights of one shape share the launches of a kernel."""
    is_joined = type(layers[0]) in _DROP_INS and all(is_plain_layer(layer, _DROP_INS) for layer in layers)
    return product(x, layers) if is_joined and is_for_kernel(x, layers) else [layer(x) for layer in layers]
