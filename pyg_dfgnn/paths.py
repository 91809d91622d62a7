"""Where the CUDA text and the configs lie, inside a wheel or at the top of a checkout, and compiled kernels."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def _find(name: str) -> Path:
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"'{name}' was found neither in {package} nor in {package.parent}: reinstall pyg_dfgnn")


def kernels_dir() -> Path:
    """The folder of the CUDA text.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    return _find("kernels")


def configs_dir() -> Path:
    """The folder of the Hydra configs.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    return _find("configs")


def kernel_cache_dir() -> Path:
    """The folder in which CuPy keeps compiled kernels and `autotune` its timings."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))
