"""Drop-in for PyG's AGNNConv on the fused cosine attention."""

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.attention import AttentionConv
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import finalize_dtype, methods_of, promoted_dtype
from pyg_dfgnn.ops.attention.functional import cosine_attention


class AGNNConv(AttentionConv, conv.AGNNConv):
    """PyG's `AGNNConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = sum_j softmax_j(beta cos(x_i, x_j)) x_j`

    Source: Thekumparampil et al., "Attention-based Graph Neural Network for Semi-Supervised Learning", 2018.
    """

    propagate_type = {"x": Tensor, "x_norm": Tensor}
    _upstream_methods = methods_of(conv.AGNNConv)
    _node_dim = -2

    def _problem_fields(self, x: Tensor | None = None) -> tuple[str, int, int]:
        # The length of a range is a constant to torch.compile, as the width has to be, also after other widths.
        return "cosine", 1, len(range(x.size(-1))) if isinstance(x, Tensor) and x.dim() > 0 else 1

    def _call(self, x: Tensor, edge_index: Adj | Graph) -> ConvCall:
        return self._gate(self._problem_fields(x), (x, x), edge_index, self_loops=self.add_self_loops)

    def forward(self, x: Tensor, edge_index: Adj | Graph) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.AGNNConv.forward`."""
        call = self._call(x, edge_index)
        if call.reasons:
            out: Tensor = self._fall_back(call, x)
            return out

        graph, _, _ = self._edges(call)
        # An attribute of a module that is a parameter costs the host more.
        beta = self._parameters.get("beta")
        if beta is None:
            beta = self.beta
        out = cosine_attention(graph, x, beta=beta, heads=1, concat=True)
        dtype = promoted_dtype(x.dtype, beta.dtype, x.is_cuda) if isinstance(beta, Tensor) else x.dtype
        return finalize_dtype(out, dtype, False)

    def _storage_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of `x`, also under autocast: no linear layer comes before the attention."""
        return x.dtype
