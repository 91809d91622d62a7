"""Attention of one head with the linear layers of query, key and value absorbed: launches and autograd."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention_absorbed import LAYERS, AbsorbedPass
from pyg_dfgnn.dispatch.attention_problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import products
from pyg_dfgnn.ops.attention_launch import aligned
from pyg_dfgnn.ops.attention_rows import RowsWalk
from pyg_dfgnn.ops.eager import apply_of, once_differentiable
from pyg_dfgnn.runtime.compiler import HOPPER, Spec
from pyg_dfgnn.runtime.launcher import Argument, Kernel, addresses, kernel_of, launch
from pyg_dfgnn.settings import Settings

STEMS = ("images", "forward", "targets", "parameters")
"""Of the kernels that are its own."""


@cache
def _kernel(stem: str, constants: tuple[tuple[str, int], ...]) -> Kernel:
    return kernel_of(Spec(f"attention/absorbed_{stem}.cu", constants, HOPPER), f"attention_absorbed_{stem}")


class AbsorbedKernels:
    """The kernels for one problem on one graph.

    Attributes:
        problem: What they compute.
        settings: Under which they were chosen.
        device_type: Where they run.
        projections: Linear layers that they absorb.
    """

    projections = LAYERS

    def __init__(self, problem: AttentionProblem, graph: Graph, settings: Settings, chosen: AbsorbedPass) -> None:
        self.problem, self.settings, self.chosen = problem, settings, chosen
        self.device, self.device_type = problem.device, problem.device.type
        tiles = graph.row_tiles(chosen.rows, chosen.constants["CHUNK"])
        # Kept for their addresses: two threads may make them at once, of which the graph keeps one.
        self._arrays = tiles.tensors()
        self._filled = tiles.filled
        self._tiles = addresses((tiles.rows, tiles.order, tiles.ptr, tiles.items, tiles.index))
        self._grid = (tiles.num_tiles, 1, 1)
        self._shared_bytes = chosen.shared_bytes(tiles)
        self._sources = RowsWalk("sources", chosen.sources, graph)
        constants = tuple(chosen.constants.items())
        self._images, self._forward, self._targets, self._parameters = (_kernel(stem, constants) for stem in STEMS)
        graph.reset_streams()

    def _over_tiles(self, kernel: Kernel, arguments: Sequence[Argument]) -> None:
        grid, block, shared = self._grid, self.chosen.block, self._shared_bytes
        launch(kernel, grid, block, addresses((*self._tiles, *arguments)), self.device, shared)

    def _images_of(self, layers: Sequence[Tensor]) -> Tensor:
        """The matrices that rows are multiplied with, as the kernels hold them."""
        w_q, w_k, w_v, *biases = layers
        b_q, b_v = biases[::2] if biases else (None, None)
        images = w_q.new_empty((4, self.chosen.image_words), dtype=torch.int32)
        # Four columns of a matrix for each block of two of the four, sixteen of the others.
        grid = (2 * self.chosen.columns // 4 + 2 * self.chosen.columns // 16, 1, 1)
        launch(self._images, grid, (512, 1, 1), addresses((w_q, w_k, w_v, b_q, b_v, images)), self.device)
        return images

    def forward(
        self, x: Tensor, layers: Sequence[Tensor], scale: float, saved: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor] | None]:
        """The output [N, C], and (images, q, z, softmax) for :meth:`backward` if it is to be saved."""
        images, out = self._images_of(layers), torch.empty_like(x)
        q, z, softmax = None, None, None
        if saved:
            q, z, softmax = torch.empty_like(x), torch.empty_like(x), x.new_empty((x.size(0), 2))
        self._over_tiles(self._forward, (x, images, scale, q, z, softmax, out))
        return out, None if q is None or z is None or softmax is None else (images, q, z, softmax)

    def backward(
        self,
        x: Tensor,
        layers: Sequence[Tensor],
        kept: tuple[Tensor, Tensor, Tensor, Tensor],
        scale: float,
        grad_out: Tensor,
        needed: tuple[bool, bool],
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Gradients of x and of the layers' parameters, of each as far as it is needed."""
        images, q, z, softmax = kept
        dz, dq, partial = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        records = x.new_empty((x.size(0), 4))
        self._over_tiles(self._targets, (x, images, scale, q, z, softmax, grad_out, records, dz, dq, partial))
        grad_x = None
        if needed[0]:
            grad_x = torch.empty_like(x)
            ready = addresses((q, x, x, None, None, None, None, None, scale, 0.0, 0.0))
            self._sources.sources(ready, records, dz, None, grad_x, None, partial, None)
        if not needed[1]:
            return grad_x, [None] * len(layers)
        # Of M and m, then of the value.
        matrices, vectors = products.paired_gradients((x, z), (dq, grad_out), self._filled)
        w_q, w_k, _, *biases = layers
        grad_q, grad_k = torch.empty_like(w_q), torch.empty_like(w_k)
        b_q, grad_bq, grad_bk = None, None, None
        if biases:
            b_q, grad_bq, grad_bk = biases[0], *torch.empty((2, x.size(1)), device=x.device).unbind()
        arguments = (w_q, w_k, b_q, matrices[0], vectors[0], grad_q, grad_k, grad_bq, grad_bk)
        channels = self.chosen.channels
        grid = (2 * (channels // 8) * (channels // 32), 1, 1)
        launch(self._parameters, grid, (256, 1, 1), addresses(arguments), self.device)
        if grad_bq is None:
            return grad_x, (grad_q, grad_k, matrices[1])
        return grad_x, (grad_q, grad_k, matrices[1], grad_bq, grad_bk, vectors[1])


class _AbsorbedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: tuple[AbsorbedKernels, float, bool], x: Tensor, *layers: Tensor) -> Tensor:
        kernels, scale, concat = rest
        out, kept = kernels.forward(x, layers, scale, saved=True)
        assert kept is not None
        ctx.rest = rest
        ctx.save_for_backward(x, *kept, *layers)
        ctx.set_materialize_grads(False)
        return out if concat else out.unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Any, ...]:
        _, needs_x, *needed = ctx.needs_input_grad
        if grad_out is None:
            return None, None, *[None] * len(needed)
        kernels, scale, _ = ctx.rest
        # Hooks of saved tensors may give them back elsewhere.
        x, images, q, z, softmax, *layers = map(aligned, ctx.saved_tensors)
        grad_out = aligned(grad_out.flatten(1))
        grad_x, of_layers = kernels.backward(
            x, layers, (images, q, z, softmax), scale, grad_out, (needs_x, any(needed))
        )
        return None, grad_x, *of_layers


_apply = apply_of(_AbsorbedAttention)


def absorbed_attention(
    kernels: AbsorbedKernels,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scale: float,
    concat: bool,
    trained: bool,
) -> Tensor:
    r"""Graph transformer attention among linear projections of x, whose rows are gathered in place of keys and values.

    Args:
        kernels: For this problem, on these edges.
        x: Shape [N, C].
        weights: Of query, key and value, each [C, C].
        biases: As many, each [C], or none.
        scale: The factor of the scores.
        concat: Return [N, C] rather than [N, 1, C].
        trained: Whether autograd has to know.

    Returns:
        The attention :math:`O_i = \sum_j \mathrm{softmax}_j(s \langle q_i, k_j \rangle) v_j`; 0 for a row without
        edges.
    """
    x, layers = aligned(x), [aligned(each) for each in (*weights, *biases)]
    if trained:
        found: Tensor = _apply((kernels, scale, concat), x, *layers)
        return found
    out, _ = kernels.forward(x, layers, scale, saved=False)
    return out if concat else out.unsqueeze(1)
