"""Training steps as CUDA graphs: captured once and replayed, so that one launch runs all kernels of a step."""

from pyg_dfgnn.capture.buckets import Buckets, Capacity
from pyg_dfgnn.capture.recorder import Recorder
from pyg_dfgnn.capture.step import CapturedStep, Step, capture_step

__all__ = ["Buckets", "Capacity", "CapturedStep", "Recorder", "Step", "capture_step"]
