"""The front end by PyTorch's own capture: an FX graph's regions on edges become programs, all else stays torch's."""

from pyg_dfgnn.frontend.backend import Captured, Compiler, watchers
from pyg_dfgnn.frontend.capture import captured

__all__ = ["Captured", "Compiler", "captured", "watchers"]
