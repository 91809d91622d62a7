"""Drop-ins for `torch_geometric.nn.dense`."""

from torch_geometric.nn import dense as upstream

from pyg_dfgnn.nn.dense.linear import Linear
from pyg_dfgnn.nn.drop_ins import DROP_INS

DROP_INS[upstream.Linear] = Linear
__all__ = ["Linear"]
