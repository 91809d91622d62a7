"""PyG's `scatter`, `segment` and `softmax` for users' own layers: fused on CUDA, PyG's code elsewhere."""

from torch import Tensor
from torch_geometric.utils import scatter as pygs_scatter
from torch_geometric.utils import segment as pygs_segment
from torch_geometric.utils import softmax as pygs_softmax

from pyg_dfgnn.nn import segment as segments
from pyg_dfgnn.nn.scripted import scripts


@scripts(pygs_scatter)
def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """PyG's `scatter`: reduce the values of each group.

    Args:
        src: Values, shape [..., E, ...].
        index: Group of each position of `dim`, [E], in any order.
        dim: The dimension that is reduced.
        dim_size: Number of groups G, None for the largest and one.
        reduce: `"sum"`, `"mean"`, `"max"`, `"min"`, `"mul"`; `"any"` is PyG's own.

    Returns:
        Shape [..., G, ...]; 0 for an empty group, 1 for a product.

    Raises:
        IndexError: A group is outside of [0, dim_size); on a CPU a RuntimeError of PyTorch.
        ValueError: As PyG's function.
    """
    return segments.scatter(src, index, dim, dim_size, reduce)


@scripts(pygs_segment)
def segment(src: Tensor, ptr: Tensor, reduce: str = "sum") -> Tensor:
    """PyG's `segment`: reduce ranges of the first dimension.

    Gradients of a maximum or minimum are those of `torch.segment_reduce`: ties share a positive one evenly, and each
    gets a negative one in full. PyG itself takes `torch_scatter` in its place where that is installed.

    Args:
        src: Values, shape [E, ...].
        ptr: Offsets of the ranges, [G + 1].
        reduce: `"sum"`, `"mean"`, `"max"` or `"min"`.

    Returns:
        Shape [G, ...]; 0 for an empty range, and for an extreme that is infinite.

    Raises:
        ValueError: The offsets do not begin at 0, descend, or do not end at E.
    """
    if reduce not in ("sum", "mean", "max", "min"):
        return pygs_segment(src, ptr, reduce)
    if not segments.takes("segment", src, None, ptr, 0, (reduce,)):
        segments.check_offsets(src, ptr)
        return pygs_segment(src, ptr, reduce)
    return segments.reduce(src, None, ptr, None, 0, (reduce,))[0]


@scripts(pygs_softmax)
def softmax(
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    dim: int = 0,
) -> Tensor:
    """PyG's `softmax`: normalise the values of each group.

    Args:
        src: Values, shape [..., E, ...].
        index: Group of each position of `dim`, [E], in any order.
        ptr: Offsets of groups of consecutive positions, [G + 1]; read in place of `index` where both are there.
        num_nodes: Number of groups of `index`, None for the largest and one.
        dim: The dimension that is normalised.

    Returns:
        The shape of `src`.

    Raises:
        IndexError: A group is outside of [0, num_nodes); on a CPU a RuntimeError of PyTorch.
    """
    index = None if ptr is not None and ptr.dim() == 1 else index
    if not segments.takes("softmax", src, index, ptr, dim, ("sum",), dim_size=num_nodes, is_whole=False):
        return pygs_softmax(src, index, ptr, num_nodes, dim)
    return segments.softmax(src, index, ptr, num_nodes, dim)
