"""Training on several processes, one per GPU, on shares of mini-batches or on one graph with partitioned nodes.

Processes communicate by collectives of torch.distributed: NCCL between GPUs, gloo between CPUs.
"""

from pyg_dfgnn.distributed.group import Group
from pyg_dfgnn.distributed.hetero import PartitionedHeteroGraph, own_hetero_part, partition_hetero, remote_share
from pyg_dfgnn.distributed.model import wrap
from pyg_dfgnn.distributed.partition import PartitionedGraph, own_part, partition
from pyg_dfgnn.distributed.sampler import SharedBatches, edges_of, empty_graph, own_share, shared_loader

__all__ = [
    "Group",
    "PartitionedGraph",
    "PartitionedHeteroGraph",
    "SharedBatches",
    "edges_of",
    "empty_graph",
    "own_hetero_part",
    "own_part",
    "own_share",
    "partition",
    "partition_hetero",
    "remote_share",
    "shared_loader",
    "wrap",
]
