"""The meaning of torch's functions in a program: each takes symbols, which stand for tensors on edges and nodes."""

from pyg_dfgnn.ir.torch_front import composed, lookups, pointwise, reductions, shapes  # noqa: F401
from pyg_dfgnn.ir.torch_front.registry import FUNCTIONS
from pyg_dfgnn.ir.torch_front.symbols import Symbol, TraceError, Tracer, fake_sizes
from pyg_dfgnn.ir.torch_front.tidy import tidy

__all__ = ["FUNCTIONS", "TraceError", "Symbol", "Tracer", "fake_sizes", "tidy"]
