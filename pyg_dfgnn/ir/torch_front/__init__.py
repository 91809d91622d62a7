"""The front end for torch code on edges: a function that PyG calls with gathered rows is traced into a program."""

from pyg_dfgnn.ir.torch_front import composed, facts, lookups, pointwise, reductions, shapes  # noqa: F401
from pyg_dfgnn.ir.torch_front.counts import Guard, Sizes
from pyg_dfgnn.ir.torch_front.registry import FUNCTIONS
from pyg_dfgnn.ir.torch_front.symbols import (
    Line,
    Refusal,
    Symbol,
    Tracer,
    fake_sizes,
    is_of_libraries,
    line_of_user,
)
from pyg_dfgnn.ir.torch_front.tidy import tidy

__all__ = [
    "FUNCTIONS",
    "Guard",
    "Line",
    "Refusal",
    "Sizes",
    "Symbol",
    "Tracer",
    "fake_sizes",
    "is_of_libraries",
    "line_of_user",
    "tidy",
]
