"""A graph as the sparse matrices that cuSPARSE multiplies with, for the baselines of several families."""

import torch
from torch import Tensor


class Sparse:
    """The CSR of edges [2, E] and of their transpose as index arrays, with the permutation between their orders."""

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int) -> None:
        self.order = torch.argsort(edge_index[1], stable=True)
        source, target = edge_index[:, self.order]
        self.shape = num_dst, num_src
        self.row, self.col = target, source.int()
        self.row_ptr = _pointer(torch.bincount(target, minlength=num_dst))
        self.row_offsets = self.row_ptr.long()
        self.transpose = torch.argsort(source, stable=True)
        self.transposed_ptr = _pointer(torch.bincount(source, minlength=num_src))
        self.transposed_offsets = self.transposed_ptr.long()
        self.transposed_col = target[self.transpose].int()
        self.source = source

    def matrix(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.row_ptr, self.col, values, self.shape, check_invariants=False)

    def transposed(self, values: Tensor) -> Tensor:
        """The transposed matrix of ``values`` in row order."""
        values = values[self.transpose]
        return torch.sparse_csr_tensor(
            self.transposed_ptr, self.transposed_col, values, self.shape[::-1], check_invariants=False
        )

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """<left_i, right_j> for every edge [E]: the sampled dense-dense product."""
        pattern = self.matrix(left.new_zeros(self.row.numel()))
        return torch.sparse.sampled_addmm(pattern, left, right.t(), beta=0.0).values()

    def row_sum(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", offsets=self.row_offsets, unsafe=True, initial=0.0)

    def softmax(self, score: Tensor) -> Tensor:
        row_max = torch.segment_reduce(score, "max", offsets=self.row_offsets, unsafe=True, initial=float("-inf"))
        weight = (score - row_max[self.row]).exp()
        return weight / self.row_sum(weight)[self.row]

    def softmax_backward(self, weight: Tensor, grad: Tensor) -> Tensor:
        return weight * (grad - self.row_sum(weight * grad)[self.row])


def _pointer(degree: Tensor) -> Tensor:
    return torch.cat([degree.new_zeros(1), degree.cumsum(0)]).int()
