"""CUDA kernels on the CPU: compiles their text with g++ and runs every CUDA thread as a fiber."""

from tests.emu.loader import ORDERS, EmulationError, Kernel

__all__ = ["ORDERS", "EmulationError", "Kernel"]
