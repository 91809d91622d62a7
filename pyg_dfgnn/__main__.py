"""`python -m pyg_dfgnn` with info, doctor or clear-cache: versions, whether kernels run, what is kept on disk."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GATConv, MessagePassing, RGCNConv, SAGEConv

import pyg_dfgnn
from pyg_dfgnn.errors import need_extra
from pyg_dfgnn.graph.derived import in_units

PACKAGES = ("torch", "torch_geometric", "numpy", "cupy-cuda12x", "cupy-cuda13x", "hydra-core", "scipy", "torch_sparse")
OLDEST = 80
"""Least compute capability of a GPU, times ten."""
NODES, EDGES, CHANNELS = 300, 2_000, 32


def cache_folder() -> Path:
    """Return the folder in which CuPy keeps compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR", Path.home() / ".cupy" / "kernel_cache"))


def _cached() -> tuple[int, int]:
    """Return the number of files in the cache and their bytes."""
    files = [path for path in cache_folder().rglob("*") if path.is_file()] if cache_folder().is_dir() else []
    return len(files), sum(path.stat().st_size for path in files)


def info() -> int:
    """Print versions, GPUs and the cache of kernels."""
    print(f"pyg_dfgnn {pyg_dfgnn.__version__} in {Path(pyg_dfgnn.__file__).parent}")
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    print(f"PyTorch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs only'}")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        print(
            f"GPU {index}: {found.name}, {in_units(found.total_memory)}, compute capability {found.major}.{found.minor}"
        )
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU")
    count, size = _cached()
    print(f"kernels on disk: {count} files, {in_units(size)} in {cache_folder()}")
    return 0


class _Gate(MessagePassing):
    """A layer of a user's own."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(2 * CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.lin(torch.cat([x_i, x_j], dim=-1))) * x_j


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "attention": lambda: GATConv(CHANNELS, CHANNELS // 4, heads=4),
    "aggregation": lambda: SAGEConv(CHANNELS, CHANNELS),
    "relations": lambda: RGCNConv(CHANNELS, CHANNELS, 3),
    "layers of your own": _Gate,
}
"""A layer of each family of kernels."""


def _error(make: Callable[[], torch.nn.Module], device: torch.device) -> float:
    """Return the largest error of outputs and gradients of a layer on a device, against PyG's in float64 on the CPU.

    Raises:
        UnsupportedError: No kernel runs it.
    """
    torch.manual_seed(0)
    layer, x = make(), torch.randn(NODES, CHANNELS)
    edge_index = torch.randint(NODES, (2, EDGES))
    arguments: tuple[Any, ...] = (torch.randint(3, (EDGES,)),) if isinstance(layer, RGCNConv) else ()

    def results(layer: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = x.to(device, dtype).requires_grad_()
        out = layer(leaf, edge_index.to(device), *(each.to(device) for each in arguments))
        grads = torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])
        return [each.detach().cpu().double() for each in (out, *grads)]

    want = results(layer.double(), torch.device("cpu"), torch.float64)
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(layer.to(device, torch.float32))
    with pyg_dfgnn.local_settings(fallback="error", check_ids="now"):
        got = results(layer, device, torch.float32)
    pairs = zip(got, want, strict=True)
    return max(float((mine - other).abs().max() / other.abs().max().clamp(min=1)) for mine, other in pairs)


def doctor() -> int:
    """Print what is in the way of kernels, then run a layer of each family against PyG's in float64.

    Returns:
        1 if something that should work does not, 0 otherwise.
    """
    if torch.version.cuda is None:
        print("PyTorch is built for CPUs: PyG's own code runs. Whether kernels would run here cannot be told.")
        return 0
    if not torch.cuda.is_available():
        print("FAILED: PyTorch finds no GPU; is a driver installed, and is CUDA_VISIBLE_DEVICES empty?")
        return 1
    try:
        need_extra("cupy", "kernels", f"cuda{torch.version.cuda.partition('.')[0]}")
    except ImportError as problem:
        print(f"FAILED: {problem}")
        return 1
    failed = 0
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if 10 * major + minor < OLDEST:
            print(f"FAILED: GPU {index} has compute capability {major}.{minor}, kernels need {OLDEST / 10}")
            failed = 1
            continue
        for name, make in LAYERS.items():
            try:
                error = _error(make, torch.device("cuda", index))
            except Exception as failure:
                print(f"FAILED: {name} on GPU {index}: {type(failure).__name__}: {failure}")
                failed = 1
                continue
            is_right = error < 1e-4
            print(f"{'ok' if is_right else 'FAILED'}: {name} on GPU {index}, error {error:.1e}")
            failed |= not is_right
    return failed


def clear() -> int:
    """Delete the kernels that CuPy keeps on disk, those of other packages too."""
    count, size = _cached()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    print(f"deleted {count} files, {in_units(size)}, in {cache_folder()}")
    return 0


COMMANDS: dict[str, Callable[[], int]] = {"info": info, "doctor": doctor, "clear-cache": clear}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its status is the result."""
    parser = argparse.ArgumentParser("python -m pyg_dfgnn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=(function.__doc__ or "").strip().splitlines()[0])
    return COMMANDS[parser.parse_args(arguments).command]()


if __name__ == "__main__":
    sys.exit(main())
