"""Drop-ins for `torch_geometric.nn.dense`, and for those who ask for kernels for linear layers of PyG and torch."""

import torch
from torch_geometric.nn import dense as upstream

from pyg_dfgnn.nn.dense.hetero_linear import HeteroDictLinear, HeteroLinear
from pyg_dfgnn.nn.dense.linear import Linear
from pyg_dfgnn.nn.dense.torch_linear import Linear as TorchLinear
from pyg_dfgnn.nn.registry import DROP_INS, LINEAR_DROP_INS

__all__ = ["HeteroDictLinear", "HeteroLinear"]
DROP_INS.update({getattr(upstream, name): globals()[name] for name in __all__})
LINEAR_DROP_INS.update({upstream.Linear: Linear, torch.nn.Linear: TorchLinear})
