"""Programs on row domains: relational layers, users' own and traced message passing, before a kernel is chosen."""

from pyg_dfgnn.ir.dense_pairs import DensePairs
from pyg_dfgnn.ir.domains import D, Domain, E, One, R, S, Td, Ts, U, V
from pyg_dfgnn.ir.index_space import IndexSpace
from pyg_dfgnn.ir.interpreter import interpret
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ir.trace import concat, dot, leaky_relu, logsumexp_to, max_to, mean_to, relational, softmax, sum_to, to

__all__ = [
    "D",
    "DensePairs",
    "Domain",
    "E",
    "One",
    "Program",
    "R",
    "IndexSpace",
    "S",
    "Td",
    "Ts",
    "U",
    "V",
    "concat",
    "dot",
    "interpret",
    "leaky_relu",
    "logsumexp_to",
    "max_to",
    "mean_to",
    "relational",
    "softmax",
    "sum_to",
    "to",
]
