"""Reductions over groups of rows for aggregations, pools and `pyg_dfgnn.utils`: the gate in front, and the fused path.

A call is four arguments as PyG names them: `x`, `index` (the group of each position of `dim`) or `ptr` (offsets of
groups of consecutive positions), and `dim`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter as pygs_scatter

from pyg_dfgnn.dispatch.core import explain, fused_device_types
from pyg_dfgnn.dispatch.segment import FAMILY, SegmentProblem, max_channels
from pyg_dfgnn.fallback import NO_DEVICE, SMALL, report_fallback
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.forms import INDEX_DTYPES
from pyg_dfgnn.graph.segment import graph_of_index, known_graph
from pyg_dfgnn.nn.registry import Description, shown
from pyg_dfgnn.ops import segment
from pyg_dfgnn.ops.eager import is_eager, is_plain
from pyg_dfgnn.ops.visits import is_few, is_left, is_new, is_refilled, may_be_left, may_not_wait
from pyg_dfgnn.statements.segment import EXTREMES, STATS
from pyg_dfgnn.torch_private import is_tracing

NAMES = {"add": "sum", "amax": "max", "amin": "min", **{name: name for name in STATS}}
"""Statistics with kernels, by PyG's names of reductions."""
_SUMS = ("sum", "add")

_FUNCTIONS = torch.nn.Module()
"""Stands for the functions where a layer would be."""


def problem_of(x: Tensor, dim: int, stats: Sequence[str], device: torch.device) -> SegmentProblem:
    """Return what is asked of the kernels: wider features are cut."""
    names = tuple(dict.fromkeys(stats))
    width = x.size(1 - dim % 2) if x.dim() == 2 else x.movedim(dim, 0).shape[1:].numel()
    channels = min(width, max_channels(names))
    return SegmentProblem("copy", names, channels, x.dtype, device)


def reasons_against(
    x: Tensor, index: Tensor | None, ptr: Tensor | None, dim: int, stats: Sequence[str] = ("sum",)
) -> list[str]:
    """Return every reason why PyG's code takes a reduction; empty when the fused kernels can.

    Args:
        x: Values, shape [..., E, ...].
        index: Group of each position, [E].
        ptr: Offsets of the groups, [G + 1]; read where there is no `index`.
        dim: Dimension of `x` that is reduced.
        stats: Statistics, by PyG's names of reductions.
    """
    # torch.compile and torch.func have to see operators of torch.
    if not is_eager() or is_tracing():
        return ["torch traces or transforms the call" if x.device.type in fused_device_types else NO_DEVICE]
    name, groups = ("index", index) if index is not None else ("ptr", ptr)
    for argument, tensor in (("x", x), (name, groups)):
        if not is_plain(tensor):
            return [f"{argument} is a {type(tensor).__name__}"]
    assert groups is not None
    if not -x.dim() <= dim < x.dim():
        return [f"dim is {dim} and x has {x.dim()} dimensions"]
    reasons = [f"the reduction {stat!r} has no fused kernel" for stat in stats if stat not in NAMES]
    if groups.dim() != 1 or groups.dtype not in INDEX_DTYPES:
        reasons.append(f"{name} is no int64 or int32 vector ({groups.dtype}, {list(groups.shape)})")
    elif index is not None and index.numel() != x.size(dim):
        reasons.append(f"index has {index.numel()} elements and x {x.size(dim)} in dimension {dim}")
    if groups.device != x.device:
        reasons.append(f"{name} is on {groups.device} and x on {x.device}")
    if x.device.type in fused_device_types:
        known = [NAMES[stat] for stat in stats if stat in NAMES]
        reasons += FAMILY.unsupported(problem_of(x, dim, known, x.device))
    else:
        reasons.append(NO_DEVICE)
    return reasons


def takes(
    name: str,
    x: Tensor,
    index: Tensor | None,
    ptr: Tensor | None,
    dim: int,
    stats: Sequence[str] = ("sum",),
    owner: torch.nn.Module | None = None,
    dim_size: int | None = None,
    is_whole: bool = True,
) -> bool:
    """Return whether the kernels take a reduction of a layer, or a function; report why not, in the name of it.

    The statistics are to be all that is computed, unless `is_whole` is False.
    """
    if is_left():
        return False
    groups = ptr if index is None else index
    if not is_refilled():
        if is_new(_FUNCTIONS if owner is None else owner, groups, name):
            return False
        if is_whole and isinstance(x, Tensor) and _is_small(x, groups, stats, dim):
            return False
    if may_not_wait(groups) and known_graph(index, ptr, dim_size) is None:
        return False
    reasons = reasons_against(x, index, ptr, dim, stats)
    if reasons:
        report_fallback(name, reasons)
    return not reasons


def _is_small(x: Tensor, groups: Tensor | None, stats: Sequence[str], dim: int) -> bool:
    """Return whether PyG's code takes a reduction in less time, however often its groups come."""
    if len(stats) != 1 or not -x.dim() <= dim < x.dim():
        return False
    # Rows along another dimension than the first are copied, twice.
    is_first = dim in (0, -x.dim())
    if stats[0] not in _SUMS and (is_first or stats[0] != "mean"):
        return False
    rows = x.size(dim) if is_first else x.size(dim) // 4
    return is_few(rows, x.numel() // max(x.size(dim), 1)) and may_be_left(groups)


def graph_of(index: Tensor | None, ptr: Tensor | None, dim_size: int | None) -> Graph:
    """Return the graph of a reduction, from the cache where the index or the offsets are known.

    Raises:
        IndexError: A group is outside of [0, dim_size), which PyG's `Aggregation` looks for.
        ValueError: The offsets do not begin at 0, or descend.
    """
    if index is None:
        assert ptr is not None
        return Graph.of_ptr(ptr)
    if dim_size is None:
        dim_size = int(index.max()) + 1 if index.numel() > 0 else 0
    return graph_of_index(index, dim_size)


def check_offsets(x: Tensor, ptr: Tensor) -> None:
    """Check offsets of a CPU's tensors, of which PyG's code would read past the end.

    Raises:
        ValueError: They do not begin at 0, descend, or do not end at the number of rows of `x`.
    """
    if is_eager() and is_plain(x) and is_plain(ptr) and ptr.device.type == "cpu" and ptr.dtype in INDEX_DTYPES:
        num_edges = Graph.of_ptr(ptr).num_edges
        if num_edges != x.size(0):
            raise ValueError(f"'ptr' needs to end at the number of rows {x.size(0)} (got {num_edges})")


def as_rows(x: Tensor, dim: int) -> Tensor:
    """Return the values as a matrix [E, F]."""
    if x.dim() == 2 and dim in (0, -2):
        return x
    rows = x.movedim(dim, 0)
    return rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1)


def shaped(rows: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return a matrix [G, F] in the shape of `x`, with G in place of E."""
    if x.dim() == 2 and dim in (0, -2):
        return rows
    rest = x.movedim(dim, 0).shape[1:]
    return rows.reshape(rows.size(0), *rest).movedim(0, dim).contiguous()


def reduce(
    x: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None, dim: int, stats: Sequence[str]
) -> list[Tensor]:
    """Return statistics of groups, all from one gather, for arguments that nothing is against.

    Args:
        x: Values, shape [..., E, ...].
        index: Group of each position, [E].
        ptr: Offsets of the groups, [G + 1]; read where there is no `index`.
        dim_size: Number of groups G; of `index` None for the largest group and one.
        dim: Dimension of `x` that is reduced.
        stats: Statistics, by PyG's names of reductions.

    Returns:
        One tensor [..., G, ...] per statistic.
    """
    graph, rows = graph_of(index, ptr, dim_size), as_rows(x, dim)
    names = [NAMES[stat] for stat in stats]
    # PyG takes `torch.segment_reduce` where it has offsets alone, and `scatter_reduce` elsewhere.
    apart = {name for name in names if name in EXTREMES} if index is None else set()
    together = [name for name in names if name not in apart]
    outs = [segment.aggregate(graph, rows, together[0])] if len(together) == 1 else []
    if len(together) > 1:
        outs = list(segment.aggregate(graph, rows, together).unbind(1))
    waiting = iter(outs)
    return [
        shaped(segment.segment_extreme(graph, rows, name) if name in apart else next(waiting), x, dim) for name in names
    ]


def softmax(x: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None, dim: int) -> Tensor:
    """Return the softmax within groups in the shape of `x`; the arguments are those of :func:`reduce`."""
    return shaped(segment.softmax(graph_of(index, ptr, dim_size), as_rows(x, dim)), x, dim)


def scatter(
    src: Tensor, index: Tensor, dim: int, dim_size: int | None, reduction: str, name: str = "scatter"
) -> Tensor:
    """Return what PyG's `scatter` does, in the name of the function that the user has called."""
    if reduction in ("var", "std") or not takes(name, src, index, None, dim, (reduction,), dim_size=dim_size):
        return pygs_scatter(src, index, dim, dim_size, reduction)
    return reduce(src, index, None, dim_size, dim, (reduction,))[0]


def describe(
    layer: Any,
    device: torch.device | None,
    reasons: Sequence[str],
    stats: Sequence[str],
    is_whole: bool,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
) -> Description:
    """Return what a reduction of a layer would run; see :func:`pyg_dfgnn.describe_plan`.

    Args:
        layer: The layer.
        device: Where it would run, None for where `x` is.
        reasons: What the layer itself has against the fused kernels.
        stats: Statistics that the kernels would compute, by PyG's names of reductions.
        is_whole: Whether these are all that is computed.
        x: Values; the further arguments are those of the call.
        index: Group of each position.
        ptr: Offsets of the groups.
        dim_size: Number of groups.
        dim: Dimension of `x` that is reduced.
    """
    if index is None and ptr is None:
        index = torch.zeros(x.size(dim), dtype=torch.int64, device=x.device)
    against = [*reasons, *reasons_against(x, index, ptr, dim, stats)]
    problem = problem_of(
        x, dim, [NAMES[stat] for stat in stats if stat in NAMES], x.device if device is None else device
    )
    # On a device without kernels a call is not told of other reasons, which would be no news there.
    against = [*(reason for reason in against if reason != NO_DEVICE), *FAMILY.unsupported(problem)]
    if against:
        return Description(shown(layer), tuple(dict.fromkeys(against)), problem)
    if is_whole and _is_small(x, ptr if index is None else index, stats, dim):
        return Description(shown(layer), (SMALL,), problem)
    graph = graph_of(index, ptr, dim_size)
    plan = explain(FAMILY, problem, graph, torch.is_grad_enabled())
    return Description(shown(layer), (), problem, plan, f"{graph.num_edges} rows in {graph.num_dst} groups")
