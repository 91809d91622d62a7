"""The front end by PyTorch's own capture: an FX graph's regions on edges become programs, all else stays torch's."""

from pyg_dfgnn.frontend.backend import Captured, backend, watchers
from pyg_dfgnn.frontend.capture import clear, compile_layer, release_layer
from pyg_dfgnn.ops.relational.backend import interpreted

__all__ = ["Captured", "backend", "clear", "compile_layer", "interpreted", "release_layer", "watchers"]
