"""Zero-copy exchange with CuPy through DLPack, for everything that crosses once."""

from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.runtime.compiler import import_cupy


def to_cupy(tensor: Tensor) -> Any:
    """Return a CuPy array that shares the memory of a CUDA tensor.

    Args:
        tensor: Any strided CUDA tensor. Gradients are not tracked across the bridge. bfloat16 arrives as CuPy's
            bfloat16 where ``ml_dtypes`` is installed, else as int16 with the same bits.

    Raises:
        ValueError: The tensor is not on a CUDA device.
    """
    if tensor.device.type != "cuda":
        raise ValueError(f"'tensor' needs to be on a CUDA device (got {tensor.device})")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    cupy = import_cupy()
    with torch.cuda.device(tensor.device):
        if tensor.dtype != torch.bfloat16:
            return cupy.from_dlpack(tensor)
        array = cupy.from_dlpack(tensor.view(torch.int16))
        try:
            import ml_dtypes
        except ImportError:
            return array
        return array.view(ml_dtypes.bfloat16)


def from_cupy(array: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a CUDA tensor that shares the memory of a CuPy array.

    Args:
        array: A CuPy array.
        dtype: Reinterpret the bits as this type of the same size (``torch.bfloat16`` for an int16 array).
    """
    if array.dtype.name == "bfloat16":
        array, dtype = array.view("int16"), torch.bfloat16
    tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.view(dtype)
