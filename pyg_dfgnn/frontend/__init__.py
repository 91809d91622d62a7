"""The front end by PyTorch's own capture: an FX graph's regions on edges become programs, all else stays torch's."""

from pyg_dfgnn.frontend.backend import Captured, Compiler, watchers
from pyg_dfgnn.frontend.capture import captured
from pyg_dfgnn.frontend.run import Region

__all__ = ["Captured", "Compiler", "Region", "captured", "watchers"]
