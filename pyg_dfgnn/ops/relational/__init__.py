"""Programs on row domains, run by generated kernels and products of rows with the weights of their types."""

from pyg_dfgnn.ops.relational.program import apply, reasons_against, rows_of

__all__ = ["apply", "reasons_against", "rows_of"]
