"""Calls of drop-ins on a CPU: they are PyG's, and little is asked about them once users have been told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.fallback import CPU, is_told_of_cpu
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.registry import is_described
from pyg_dfgnn.ops.visits import is_left


class Shortcut:
    """Whether calls on a CPU may take the short way, where nothing counts them."""

    is_open = True


def is_on_cpu(x: Any) -> bool:
    """Return whether PyG's code takes a call because of this tensor, whatever else the call has."""
    if type(x) is not Tensor or not x.is_cpu or not Shortcut.is_open or "cpu" in fused_device_types:
        return False
    # A description wants every reason.
    return not torch.compiler.is_compiling() and is_told_of_cpu() and not is_described()


def is_pygs(x: Any) -> bool:
    """Return whether PyG's code takes a reduction of these values: its layer is PyG's, or it is on a CPU."""
    return is_left() or (type(x) is Tensor and not x.is_cuda and is_on_cpu(x))


def call_on_cpu(edge_index: Any) -> ConvCall | None:
    """Return the call of a conv with edges on a CPU, whatever else it has; None where more has to be asked."""
    # What is wrong with other edges is told before PyG's code runs.
    if not is_on_cpu(edge_index) or edge_index.dtype is not torch.int64:
        return None
    is_pair = edge_index.dim() == 2 and edge_index.size(0) == 2
    return ConvCall(CPU, (), edge_index, "tensor") if is_pair else None
