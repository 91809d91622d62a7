"""Drop-in for PyG's Linear, and what it shares with that for torch's: kernels for large products, for those who ask."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.nn import dense

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import device_reasons
from pyg_dfgnn.dispatch.gemm import strips_of
from pyg_dfgnn.nn.gate import keeps_weight
from pyg_dfgnn.nn.registry import Description, shown
from pyg_dfgnn.nn.scripted import Scripted
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.eager import PLAIN, is_eager, is_plain
from pyg_dfgnn.torch_private import is_tracing


class KernelLinear(Scripted, torch.nn.Module):
    """In front of a linear layer: `Y = X W^T + b` by a kernel, where products are large and in float32."""

    weight: Tensor

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Return the result by a kernel; None where the layer's own code is to run."""
        return product(x, (self,))[0] if is_for_kernel(x, (self,)) else None

    def _channels(self) -> int:
        raise NotImplementedError

    def _standing_reasons(self, like: Tensor | None = None) -> list[str]:
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
        sizes = 1, rows, features, channels, device
        if rows * features * channels <= gemm.SMALL_PRODUCT:
            sizes_text = f"[{rows}, {features}] x [{features}, {channels}]"
            reasons.append(f"{sizes_text} is so small that a kernel saves no more than its autograd costs the host")
        elif not reasons and any(strips_of(backward, *sizes) is None for backward in (False, True)):
            reasons.append(f"no kernel is faster than torch for {features} features and {channels} channels")
        return reasons


def is_for_kernel(x: Any, layers: Sequence[Any]) -> bool:
    """Return whether a kernel is faster for all of these layers, and takes their parameters."""
    if not is_eager() or is_tracing() or not is_plain(x) or x.is_neg():
        return False
    if not gemm.kernel_is_faster(x, layers[0]._channels(), len(layers)):
        return False
    if not all(keeps_weight(layer._parameters) for layer in layers):
        return False
    weights, biases = zip(*((layer._parameters["weight"], layer._parameters["bias"]) for layer in layers))
    shape = layers[0]._channels(), x.size(1)
    has_biases = biases[0] is not None
    return all(_fits(x, shape, weight) for weight in weights) and all(
        _fits(x, shape[:1], bias) if has_biases else bias is None for bias in biases
    )


def _fits(x: Tensor, shape: tuple[int, ...], parameter: Any) -> bool:
    """Return whether a parameter has this shape, and the dtype and device of x."""
    if type(parameter) not in PLAIN or parameter.shape != shape:
        return False
    return parameter.dtype is x.dtype and parameter.device == x.device  # type: ignore[no-any-return]


def product(x: Tensor, layers: Sequence[Any]) -> Sequence[Tensor]:
    """Return what each of these layers makes of x, by one launch."""
    biases = [layer._parameters["bias"] for layer in layers]
    return gemm.project(x, [layer._parameters["weight"] for layer in layers], [] if biases[0] is None else biases)


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
