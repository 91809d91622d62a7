"""Products of a sparse and a dense matrix by cuSPARSE, through CuPy's low-level binding.

What cuSPARSE needs of a matrix and a width is made once: descriptors, workspace, preprocessing. A call sets two
addresses.
"""

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.torch_private import cuda_device, cuda_stream

ALGORITHMS = {"default": 0, "csr_alg3": 12}
"""Algorithms of a product with a matrix in CSR by the number that cuSPARSE gives them; only csr_alg3 gives the same
bits in every run."""

_ROW_MAJOR, _INT32, _ZERO_BASED, _FLOAT32 = 2, 2, 0, 0
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_calls = threading.Lock()


def _binding() -> Any:
    from cupy_backends.cuda.libs import cusparse

    return cusparse


@cache
def _handle(device_index: int) -> int:
    """Return the handle of a device; its stream is set before each call."""
    with torch.cuda.device(device_index):
        return int(_binding().create())


@cache
def _preprocess() -> Any:
    """Return cuSPARSE's `cusparseSpMM_preprocess`, which CuPy does not bind; None where the library has none."""
    try:
        return ctypes.CDLL("libcusparse.so.12").cusparseSpMM_preprocess
    except (OSError, AttributeError):
        return None


class SpMM:
    """``C = A B`` with A in CSR, ready to be called for any B [columns, F] and C [rows, F] in row-major order.

    Sums are in float32 whatever the storage.

    Args:
        rowptr: Row offsets, int32 [rows + 1].
        col: Column indices, int32 [E].
        values: Values of A, [E] in the dtype of B.
        num_cols: Columns of A.
        channels: Columns F of B.
        algorithm: One of ``ALGORITHMS``.
    """

    def __init__(
        self, rowptr: Tensor, col: Tensor, values: Tensor, num_cols: int, channels: int, algorithm: str
    ) -> None:
        binding, kind = _binding(), _TYPES[values.dtype]
        # Kept for their addresses.
        self._tensors = rowptr, col, values
        self._index = values.device.index or 0
        num_rows = rowptr.numel() - 1
        with _calls, torch.cuda.device(self._index):
            self._matrix = binding.createCsr(
                num_rows, num_cols, col.numel(), rowptr.data_ptr(), col.data_ptr(), values.data_ptr(),
                _INT32, _INT32, _ZERO_BASED, kind,
            )  # fmt: skip
            empty = values.new_empty(max(num_rows, num_cols, 1) * channels)
            self._input = binding.createDnMat(num_cols, channels, channels, empty.data_ptr(), kind, _ROW_MAJOR)
            self._output = binding.createDnMat(num_rows, channels, channels, empty.data_ptr(), kind, _ROW_MAJOR)
            handle = _handle(self._index)
            binding.setStream(handle, torch.cuda.current_stream().cuda_stream)
            one, zero = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)
            dense = self._input, zero, self._output, _FLOAT32, ALGORITHMS[algorithm]
            self._head = (handle, 0, 0, one, self._matrix, *dense)
            # Preprocessing leaves its findings in the workspace, which therefore belongs to this matrix alone.
            size = int(binding.spMM_bufferSize(*self._head))
            self._workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=values.device)
            preprocess = _preprocess()
            if preprocess is not None:
                self._prepare(preprocess)

    def _prepare(self, preprocess: Any) -> None:
        handle, op_a, op_b, one, matrix, dense, zero, result, kind, algorithm = self._head
        pointer = ctypes.c_void_p
        status = preprocess(
            pointer(handle), op_a, op_b, pointer(one), pointer(matrix), pointer(dense), pointer(zero), pointer(result),
            kind, algorithm, pointer(self._workspace.data_ptr()),
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cusparseSpMM_preprocess returned status {status}")

    def __call__(self, b: int, c: int) -> None:
        """Launch the product on torch's current stream.

        Args:
            b: Address of B.
            c: Address of C.
        """
        if self._index != cuda_device():
            with torch.cuda.device(self._index):
                self(b, c)
            return
        binding = _binding()
        # The handle and the two matrices hold what a call has set until it has launched.
        with _calls:
            binding.setStream(self._head[0], cuda_stream(self._index))
            binding.dnMatSetValues(self._input, b)
            binding.dnMatSetValues(self._output, c)
            binding.spMM(*self._head, self._workspace.data_ptr())

    def __del__(self) -> None:
        for name, destroy in (("_matrix", "destroySpMat"), ("_input", "destroyDnMat"), ("_output", "destroyDnMat")):
            descriptor = getattr(self, name, 0)
            if descriptor:
                getattr(_binding(), destroy)(descriptor)
