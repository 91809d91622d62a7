"""Drop-in for PyG's Linear, and what it shares with that for torch's: a kernel for large products."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.nn import dense

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import device_reasons
from pyg_dfgnn.dispatch.gemm import strips_of
from pyg_dfgnn.nn.drop_ins import Description, shown
from pyg_dfgnn.nn.fallback import Scripted
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.eager import PLAIN, is_eager, is_plain


class _Watch(threading.local):
    """Whom linear layers of a thread ask for their result first.

    Attributes:
        result: (layer, x) -> the result, or None where the layer is to compute it; None where nobody is asked.
    """

    result: "Callable[[KernelLinear, Any], Tensor | None] | None" = None


watch = _Watch()


class KernelLinear(Scripted, torch.nn.Module):
    """In front of a linear layer: `Y = X W^T + b` by a kernel, where products are large and in float32."""

    weight: Tensor

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Return the result by a kernel; None where the layer's own code is to run."""
        if not torch.compiler.is_compiling() and watch.result is not None:
            result = watch.result(self, x)
            if result is not None:
                return result
        if self._is_for_kernel(x):
            weight, bias = self._parameters["weight"], self._parameters["bias"]
            assert weight is not None
            if weight.dtype is x.dtype and (bias is None or bias.dtype is x.dtype and bias.shape == weight.shape[:1]):
                return gemm.linear(x, weight, bias)
        return None

    def _channels(self) -> int:
        raise NotImplementedError

    def _is_for_kernel(self, x: Any) -> bool:
        if torch.compiler.is_compiling() or not is_plain(x) or not gemm.kernel_is_faster(x, self._channels()):
            return False
        if not is_eager() or torch._C._is_tracing() or x.is_neg():
            return False
        return gemm.keeps_weight(self._parameters) and type(self._parameters["bias"]) in (*PLAIN, type(None))

    def _standing_reasons(self) -> list[str]:
        """Return what is against the kernel whatever the input."""
        weight = self.weight
        return self._reasons_against(weight.dtype, weight.device)

    def _describe(self, device: torch.device | None, x: Tensor) -> Description:
        """Return what a call would run; see :func:`pyg_dfgnn.describe_plan`."""
        device = x.device if device is None else device
        return Description(shown(self), tuple(self._reasons_against(x.dtype, device, x.shape)))

    def _reasons_against(
        self, dtype: torch.dtype, device: torch.device, shape: Sequence[int] | None = None
    ) -> list[str]:
        """Return every reason why torch takes the product, as :func:`pyg_dfgnn.ops.gemm.kernel_is_faster` decides."""
        reasons = device_reasons(device)
        if dtype is not torch.float32 or torch.is_autocast_enabled(device.type):
            reasons.append(f"only float32 without autocast has a kernel (got {dtype})")
        elif tf32_allowed(torch.float32):
            reasons.append("torch may round to TF32, which makes its own product as fast")
        if shape is None:
            return reasons
        if len(shape) != 2:
            return [*reasons, f"the input needs shape [N, F] (got {list(shape)})"]
        (rows, features), channels = shape, self._channels()
        sizes = 1, rows, features, channels, True, device
        if rows * features * channels <= gemm.SMALL_PRODUCT:
            product = f"[{rows}, {features}] x [{features}, {channels}]"
            reasons.append(f"{product} is so small that a kernel saves no more than its autograd costs the host")
        elif not reasons and any(strips_of(backward, *sizes) is None for backward in (False, True)):
            reasons.append(f"no kernel is faster than torch for {features} features and {channels} channels")
        return reasons


class Linear(KernelLinear, dense.Linear):
    """PyG's `Linear` with a kernel for large products in float32: same arguments, parameters, results and gradients.

    `Y = X W^T + b`; under autocast, where TF32 is allowed, and for other products PyG's code runs, which no setting
    reports.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [*, F_out] of x [*, F_in]."""
        out = self._by_kernel(x)
        return super().forward(x) if out is None else out

    def _channels(self) -> int:
        return cast(int, self.out_channels)
