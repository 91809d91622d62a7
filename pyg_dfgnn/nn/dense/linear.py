"""Drop-in for PyG's Linear with a kernel for large products."""

import torch
from torch import Tensor
from torch_geometric.nn import dense

from pyg_dfgnn.nn.gate import SCRIPTED, report
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.eager import PLAIN, is_eager, is_plain


class Linear(dense.Linear):
    """PyG's `Linear` with a kernel for large products in float32: same arguments, parameters, results and gradients.

    `Y = X W^T + b`; under autocast, where TF32 is allowed, and for other products PyG's code runs, which no setting
    reports.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [*, F_out] of x [*, F_in]."""
        if self._is_for_kernel(x):
            weight, bias = self._parameters["weight"], self._parameters["bias"]
            assert weight is not None
            if weight.dtype is x.dtype and (bias is None or bias.dtype is x.dtype and bias.shape == weight.shape[:1]):
                return gemm.linear(x, weight, bias)
        return super().forward(x)

    def _is_for_kernel(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling() or not is_plain(x) or not gemm.kernel_is_faster(x, self.out_channels):
            return False
        if not is_eager() or torch._C._is_tracing() or x.is_neg():
            return False
        return gemm.keeps_weight(self._parameters) and type(self._parameters["bias"]) in (*PLAIN, type(None))

    def __prepare_scriptable__(self) -> dense.Linear:
        """TorchScript compiles PyG's own class: `torch.jit.script` puts one in place of this layer, same parameters."""
        if type(self) is not Linear:
            return self
        report(type(self).__name__, [SCRIPTED])
        twin: dense.Linear = object.__new__(dense.Linear)
        twin.__dict__.update(self.__dict__)
        return twin
