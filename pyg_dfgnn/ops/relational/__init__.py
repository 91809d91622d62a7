"""Programs on row domains, run by generated kernels and products of rows with the weights of their types."""

from pyg_dfgnn.ops.relational.program import apply, edge_rows, reasons_against, rows_of
from pyg_dfgnn.ops.relational.traced import RowSet, apply_traced

__all__ = ["RowSet", "apply", "apply_traced", "edge_rows", "reasons_against", "rows_of"]
