"""Programs on row domains, run by generated kernels and products of rows with the weights of their types."""

from pyg_dfgnn.ops.relational.program import Prepared, apply, index_space_of, prepared_for
from pyg_dfgnn.ops.relational.traced import RowSet, apply_traced

__all__ = ["Prepared", "RowSet", "apply", "apply_traced", "index_space_of", "prepared_for"]
