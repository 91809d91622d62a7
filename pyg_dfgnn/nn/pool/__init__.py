"""Drop-ins for `torch_geometric.nn.pool`."""

from pyg_dfgnn.nn.pool.glob import global_add_pool, global_max_pool, global_mean_pool

__all__ = ["global_add_pool", "global_max_pool", "global_mean_pool"]
