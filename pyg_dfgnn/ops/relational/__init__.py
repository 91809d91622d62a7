"""Programs on row domains, run by generated kernels and products of rows with the weights of their types."""

from pyg_dfgnn.ops.relational.program import Prepared, apply, prepared_for, rows_of
from pyg_dfgnn.ops.relational.traced import RowSet, apply_traced

__all__ = ["Prepared", "RowSet", "apply", "apply_traced", "prepared_for", "rows_of"]
