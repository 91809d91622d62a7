"""Drop-in for torch's Linear, which stands in the networks of nodes that layers take and in users' own layers."""

import torch
from torch import Tensor

from pyg_dfgnn.nn.dense.linear import KernelLinear
from pyg_dfgnn.nn.registry import Description


class Linear(KernelLinear, torch.nn.Linear):
    """Torch's `Linear` with a kernel for large products in float32: same arguments, parameters, results and gradients.

    `Y = X W^T + b`; under autocast, where TF32 is allowed, and for other products torch's code runs, which no setting
    reports.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return shape [*, F_out] of the input [*, F_in]."""
        out = self._by_kernel(input)
        return super().forward(input) if out is None else out

    def _describe(self, device: torch.device | None, input: Tensor) -> Description:
        return super()._describe(device, input)

    def _channels(self) -> int:
        return self.out_features
