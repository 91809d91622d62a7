"""Drop-in for PyG's AGNNConv on the fused cosine attention."""

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj

from pyg_dfgnn.nn.gate import Call, FusedConv, methods_of, weights_dtype
from pyg_dfgnn.ops.attention.functional import cosine_attention_of_rows


class AGNNConv(FusedConv, conv.AGNNConv):
    """PyG's `AGNNConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = sum_j softmax_j(beta cos(x_i, x_j)) x_j`

    Source: Thekumparampil et al., "Attention-based Graph Neural Network for Semi-Supervised Learning", 2018.
    """

    propagate_type = {"x": Tensor, "x_norm": Tensor}
    _upstream_methods = methods_of(conv.AGNNConv)

    def _call(self, x: Tensor, edge_index: Adj) -> Call:
        """The gate's view of a forward call with these arguments."""
        return self._gate(
            "cosine",
            (x, x),
            edge_index,
            heads=1,
            # The length of a range is a constant to torch.compile, as the width has to be, also after other widths.
            channels=len(range(x.size(-1))) if isinstance(x, Tensor) and x.dim() > 0 else 0,
            self_loops=self.add_self_loops,
            node_dim=-2,
        )

    def forward(self, x: Tensor, edge_index: Adj) -> Tensor:
        """PyG's forward; see `torch_geometric.nn.AGNNConv.forward`."""
        call = self._call(x, edge_index)
        if call.reasons:
            self._report(call.reasons)
            return super().forward(x, edge_index)

        edges, _, _ = self._edges(call)
        # An attribute of a module that is a parameter costs the host most of a microsecond.
        beta = self._parameters.get("beta")
        if beta is None:
            beta = self.beta
        attended = cosine_attention_of_rows(edges, x, beta)
        dtype = weights_dtype(x, beta) if isinstance(beta, Tensor) else x.dtype
        return attended if attended.dtype is dtype else attended.to(torch.promote_types(attended.dtype, dtype))

    def _storage_dtype(self, x: Tensor) -> torch.dtype:
        """That of `x`, also under autocast: no linear layer comes before the attention."""
        return x.dtype
