"""CUDA kernels on the CPU: compiles their text with Clang and runs every CUDA thread as a fiber."""

import pytest

from tests.emu.loader import ORDERS, EmulationError, Kernel, build, compiler

__all__ = ["ORDERS", "EmulationError", "Kernel", "build", "needs_compiler", "require_compiler"]

MISSING = "needs the compiler of ziglang (pip install ziglang)"
needs_compiler = pytest.mark.skipif(compiler() is None, reason=MISSING)


def require_compiler() -> None:
    """Skip the test that runs where kernels cannot be emulated."""
    if compiler() is None:
        pytest.skip(MISSING)
