"""Programs on row domains, run by generated kernels and products of rows with the weights of their types."""

from pyg_dfgnn.ops.relational.new_edges import MOST_NUMBERS, apply_to_new, joint_pairs_of, pairs_of
from pyg_dfgnn.ops.relational.program import Prepared, apply, index_space_of, prepared_for
from pyg_dfgnn.ops.relational.traced import RowSet, apply_traced

__all__ = [
    "MOST_NUMBERS",
    "Prepared",
    "RowSet",
    "apply",
    "apply_to_new",
    "apply_traced",
    "index_space_of",
    "joint_pairs_of",
    "pairs_of",
    "prepared_for",
]
