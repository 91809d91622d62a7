"""Drop-ins for `torch_geometric.nn.dense`, and for torch's own linear layer."""

import torch
from torch_geometric.nn import dense as upstream

from pyg_dfgnn.nn.dense.hetero_linear import HeteroDictLinear, HeteroLinear
from pyg_dfgnn.nn.dense.linear import Linear
from pyg_dfgnn.nn.dense.torch_linear import Linear as TorchLinear
from pyg_dfgnn.nn.drop_ins import DROP_INS

__all__ = ["HeteroDictLinear", "HeteroLinear", "Linear"]
DROP_INS.update({getattr(upstream, name): globals()[name] for name in __all__})
DROP_INS[torch.nn.Linear] = TorchLinear
