"""The fixture with which layers run their reference path on a CPU."""

from tests.nn.conftest import fused_on_cpu

__all__ = ["fused_on_cpu"]
