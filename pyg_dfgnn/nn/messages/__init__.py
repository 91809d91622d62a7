"""Any `MessagePassing`, compiled: its messages and their aggregation are traced into a program that kernels run.

A layer is taken by a mark on the instance and a wrapper around `propagate` and `edge_updater` of its class. A call
looks for a trace whose facts still hold; where there is none the layer's own code is traced once. What is refused, and
all that is no sum over edges, stays PyG's.
"""

from pyg_dfgnn.nn.messages.call import watchers
from pyg_dfgnn.nn.messages.describe import describe, standing
from pyg_dfgnn.nn.messages.intercept import Mark, compilable
from pyg_dfgnn.nn.messages.trace import Trace, clear
from pyg_dfgnn.ops.relational.backend import interpreted

__all__ = ["Mark", "Trace", "clear", "compilable", "describe", "interpreted", "standing", "watchers"]
