"""Whether kernels run on this machine, and what is in their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pyg_dfgnn
from pyg_dfgnn.command.layers import LAYERS, RELATIONS
from pyg_dfgnn.errors import need_extra

OLDEST = 80
"""Least compute capability of a GPU, times ten."""
NODES, EDGES, CHANNELS = 300, 2_000, 32


def error_of(make: Callable[[int], torch.nn.Module], device: torch.device) -> float:
    """Return the largest error of outputs and gradients of a layer on a device, against PyG's in float64 on the CPU.

    Raises:
        UnsupportedError: No kernel runs it.
    """
    torch.manual_seed(0)
    layer, x = make(CHANNELS), torch.randn(NODES, CHANNELS)
    edge_index = torch.randint(NODES, (2, EDGES))
    has_relations = make is LAYERS["relations"]
    arguments: tuple[Any, ...] = (torch.randint(RELATIONS, (EDGES,)),) if has_relations else ()

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
                error = error_of(make, torch.device("cuda", index))
            except Exception as failure:
                print(f"FAILED: {name} on GPU {index}: {type(failure).__name__}: {failure}")
                failed = 1
                continue
            is_right = error < 1e-4
            print(f"{'ok' if is_right else 'FAILED'}: {name} on GPU {index}, error {error:.1e}")
            failed |= not is_right
    return failed
