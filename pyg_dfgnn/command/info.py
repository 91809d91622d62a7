"""The command that lists what is installed, what runs here, and what is kept on disk."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.utils import collect_env

import pyg_dfgnn
from pyg_dfgnn.command.cache import cached
from pyg_dfgnn.graph.derived import in_units
from pyg_dfgnn.paths import kernel_cache_dir
from pyg_dfgnn.runtime.compiler import nvrtc_version

PACKAGES = (
    *("torch", "torch_geometric", "numpy", "cupy-cuda12x", "cupy-cuda13x", "triton"),
    *("hydra-core", "scipy", "torch_sparse", "torch_scatter", "pyg-lib"),
)
TESTED = {"torch": ("2.10", "2.15"), "torch_geometric": ("2.7", "2.8")}
"""Oldest and newest release of a package that the tests have passed with."""


def _tested(name: str, installed: str) -> str:
    """Return which releases of a package were tested, and where the installed one is none of them."""
    oldest, newest = TESTED[name]
    release, low, high = (tuple(map(int, each.split(".")[:2])) for each in (installed, oldest, newest))
    where = "older than these" if release < low else "newer than these" if release > high else ""
    return f"tested with {oldest} to {newest}{', this is ' * bool(where)}{where}"


def info() -> int:
    """Print versions, GPUs, the driver and the cache of kernels."""
    print(f"pyg_dfgnn {pyg_dfgnn.__version__} in {Path(pyg_dfgnn.__file__).parent}")
    print(f"Python {platform.python_version()} on {collect_env.get_os(collect_env.run)}, {platform.platform()}")
    for name in PACKAGES:
        try:
            installed = version(name)
            print(f"{name} {installed}{f' ({_tested(name, installed)})' if name in TESTED else ''}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    print(f"PyTorch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs only'}")
    nvrtc, problem = nvrtc_version()
    print(f"NVRTC {nvrtc}" if nvrtc else f"NVRTC: unknown, {problem}")
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    print(f"driver {driver}" if driver else "driver: unknown, nvidia-smi finds none")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        print(f"GPU {index}: {gpu.name}, {in_units(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}")
    if not torch.cuda.is_available():
        print('PyTorch finds no GPU; pyg_dfgnn.describe_plan(..., device="cuda") shows what kernels would do on one')
    count, size = cached()
    print(f"kernels on disk: {count} files, {in_units(size)} in {kernel_cache_dir()}")
    return 0
