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
from pyg_dfgnn.ops.attention_launch import all_aligned
from pyg_dfgnn.ops.attention_rows import RowsWalk
from pyg_dfgnn.ops.eager import apply_of, once_differentiable
from pyg_dfgnn.runtime.compiler import HOPPER, Spec
from pyg_dfgnn.runtime.launcher import Kernel, Parts, addresses, kernel_of, launch
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
        given = addresses((tiles.rows, tiles.order, tiles.ptr, tiles.items, tiles.index, tiles.filled, None))
        *self._tiles, self._filled, self._null = given
        self._grid = (tiles.num_tiles, 1, 1)
        self._shared_bytes = chosen.shared_bytes(tiles)
        self._sources = RowsWalk("sources", chosen.sources, graph)
        constants = tuple(chosen.constants.items())
        self._images, self._forward, self._targets, self._parameters = (_kernel(stem, constants) for stem in STEMS)
        rows, channels = graph.num_dst, chosen.channels
        # Four columns of a matrix for each block of two of the four images, sixteen of the others.
        self._images_grid = (2 * chosen.columns // 4 + 2 * chosen.columns // 16, 1, 1)
        self._parameters_grid = (2 * (channels // 8) * (channels // 32), 1, 1)
        self._sums = products.paired_gradients(rows, channels, chosen.split, 2, self.device)
        nodes, matrix = rows * channels, channels * channels
        # q, z and the softmax.
        self._kept = Parts(nodes, nodes, 2 * rows)
        # Gradients of z and q, what x has of its own as a target, the records of targets, and what shares leave.
        self._scratch = Parts(nodes, nodes, nodes, 4 * rows, self._sums.partial)
        # Of weights and biases: the sums, which are those of the value and of M, then those of query and key.
        self._found = Parts(self._sums.numbers, matrix, matrix, channels, channels)
        self._sizes = (matrix, matrix, channels, channels) * 2
        self._summed = Parts(*self._sizes)
        # Both and the sizes are of one buffer, without gaps.
        assert self._found.size == self._summed.size == sum(self._sizes)
        graph.reset_streams()

    def _over_tiles(self, kernel: Kernel, arguments: Sequence[Any]) -> None:
        grid, block, shared = self._grid, self.chosen.block, self._shared_bytes
        launch(kernel, grid, block, (*self._tiles, *arguments), self.device, shared)

    def forward(
        self, x: Tensor, given: Sequence[Any], scale: float, saved: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The output [N, C], and what :meth:`backward` needs: images of matrices, and the rest if it is to be saved.

        Given are x and the parameters of the layers, weights first, as kernels take them.
        """
        x_at, w_q, w_k, w_v, *biases = given
        b_q, _, b_v = biases or (self._null,) * 3
        # The matrices that rows are multiplied with, as the kernels hold them.
        images = x.new_empty(4 * self.chosen.image_words, dtype=torch.int32)
        out, kept = torch.empty_like(x), x.new_empty(self._kept.size) if saved else None
        images_at, out_at = addresses((images, out))
        launch(self._images, self._images_grid, (512, 1, 1), (w_q, w_k, w_v, b_q, b_v, images_at), self.device)
        states = (self._null,) * 3 if kept is None else self._kept.of(kept)
        self._over_tiles(self._forward, (x_at, images_at, scale, *states, out_at))
        return out, images, kept

    def backward(
        self, x: Tensor, kept: Tensor, given: Sequence[Any], scale: float, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Gradients of x and of the parameters of the layers, biases among them, if they are needed.

        Given are x, the images, the gradient of the output, the weights of query and key, and the bias of the query if
        it has one, as kernels take them.
        """
        x_at, images, grad_out, w_q, w_k, *b_q = given
        q, z, softmax = self._kept.of(kept)
        scratch, null = x.new_empty(self._scratch.size), self._null
        dz, dq, dx, records, partial = self._scratch.of(scratch)
        self._over_tiles(self._targets, (x_at, images, scale, q, z, softmax, grad_out, records, dz, dq, dx))
        grad_x = None
        if needed[0]:
            grad_x = torch.empty_like(x)
            ready = (q, x_at, x_at, null, null, null, null, null, scale, 0.0, 0.0)
            self._sources.sources(ready, records, dz, None, grad_x, None, dx, None)
        if not needed[1]:
            return grad_x, (None,) * 6
        found = x.new_empty(self._found.size)
        sums, *of_layers = self._found.of(found)
        self._sums.launch((z, x_at), (grad_out, dq), self._filled, partial, sums, self.device)
        _, grad_m, _, grad_bias, *_ = self._summed.of(found)
        arguments = (w_q, w_k, *(b_q or (null,)), grad_m, grad_bias, *of_layers)
        launch(self._parameters, self._parameters_grid, (256, 1, 1), arguments, self.device)
        grad_v, _, grad_bv, _, grad_q, grad_k, grad_bq, grad_bk = found.split_with_sizes(self._sizes)
        shape = x.size(1), x.size(1)
        return grad_x, (grad_q.view(shape), grad_k.view(shape), grad_v.view(shape), grad_bq, grad_bk, grad_bv)


class _AbsorbedAttention(torch.autograd.Function):
    """Takes x and the parameters of the layers, and these once more, as kernels do."""

    @staticmethod
    def forward(
        ctx: Any, rest: tuple[AbsorbedKernels, float, bool, Sequence[Any]], x: Tensor, *layers: Tensor
    ) -> Tensor:
        kernels, scale, concat, given = rest
        out, images, kept = kernels.forward(x, given, scale, saved=True)
        ctx.rest, ctx.layers = (kernels, scale), layers
        # Of the value's weight backward reads the image, and of the biases that of the query.
        ctx.save_for_backward(x, kept, images, *layers[:2], *layers[LAYERS : LAYERS + 1])
        ctx.set_materialize_grads(False)
        return out if concat else out.unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Any, ...]:
        _, needs_x, *needed = ctx.needs_input_grad
        if grad_out is None:
            return None, None, *[None] * len(needed)
        kernels, scale = ctx.rest
        x, kept, images, *layers = ctx.saved_tensors
        # Hooks of saved tensors may give them back elsewhere.
        tensors, (_, *given) = all_aligned((kept, x, images, grad_out, *layers))
        grad_x, of_layers = kernels.backward(tensors[1], tensors[0], given, scale, (needs_x, any(needed)))
        return None, grad_x, *of_layers[: len(needed)]


_apply = apply_of(_AbsorbedAttention)


def absorbed_attention(
    kernels: AbsorbedKernels,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scale: float,
    concat: bool,
    trained: bool,
) -> Tensor | None:
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
        edges. None where the tensors are not all on the device of x.
    """
    if set(map(Tensor.get_device, (*weights, *biases))) != {x.get_device()}:
        return None
    tensors, given = all_aligned((x, *weights, *biases))
    if trained:
        found: Tensor = _apply((kernels, scale, concat, given), *tensors)
        return found
    out, *_ = kernels.forward(tensors[0], given, scale, saved=False)
    return out if concat else out.unsqueeze(1)
