"""Drop-ins for functions of `torch_geometric.utils`."""

from pyg_dfgnn.utils.functional import scatter, segment, softmax

__all__ = ["scatter", "segment", "softmax"]
