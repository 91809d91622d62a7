"""Programs on row domains, run by generated kernels and products of rows with the weights of their types."""

from pyg_dfgnn.ops.relational.program import apply, edge_rows, reasons_against, rows_of

__all__ = ["apply", "edge_rows", "reasons_against", "rows_of"]
