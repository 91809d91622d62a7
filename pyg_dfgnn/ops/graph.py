"""The edges of a new graph by target and by source: the host waits for nothing, and reads later what kernels found."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.errors import IdRangeError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.forms import check_edge_index
from pyg_dfgnn.graph.graph import keep
from pyg_dfgnn.graph.refilled import RefilledGraph
from pyg_dfgnn.graph.unmeasured import MEASURED_EDGES, VISITS, UnmeasuredGraph
from pyg_dfgnn.runtime.launcher import Kernel, addresses, kernel_of, launch
from pyg_dfgnn.statements.spec import Spec
from pyg_dfgnn.torch_private import cuda_stream, current_graph_task_id, top_saved_tensors_hooks

LONG_ROW = 2048
"""Edges of a row that one warp still takes in less time than PyG's kernels need to be launched. After a graph with a
longer row, new graphs are measured, so that their long rows are split."""
_REMEMBERED_GRAPHS = 256
_THREADS = 256
_NUM_REPORTS = 7
_ENDS = ("target", "source")
_STEPS = ("count", "place", "order")


class Reports:
    """Findings of kernels in edges since the host last looked: numbers that they write to memory of the host.

    Attributes:
        values: See `kernels/graph/csr.cu`, int64 [7].
        address: Their address, the same for the host and the device.
    """

    def __init__(self, is_cuda: bool) -> None:
        self.values = torch.zeros(_NUM_REPORTS, dtype=torch.int64, pin_memory=is_cuda)
        self.address = self.values.data_ptr()
        self._graphs = 0
        self._read: Any = (ctypes.c_int64 * _NUM_REPORTS).from_address(self.address)
        self.argument: Any = self.address if is_cuda else self.values

    def expects_long_rows(self) -> bool:
        """Return whether one of the last graphs had a row of more than `LONG_ROW` edges."""
        if not self._read[_NUM_REPORTS - 1]:
            return False
        self._graphs += 1
        if self._graphs == _REMEMBERED_GRAPHS:
            self._graphs = 0
            self.values[_NUM_REPORTS - 1] = 0
        return True

    def check(self) -> None:
        """Raise IdRangeError if an id was out of range, once."""
        read = self._read
        if not (read[0] or read[3]):
            return
        faults = [(end, read[place + 1], read[place + 2]) for end, place in zip(_ENDS, (0, 3)) if read[place]]
        self.values[:6] = 0
        # Whose edges they were is not known; built anew, they are found again.
        Graph.forget_unmeasured()
        text = ", ".join(f"{end} id {bad_id} of {size} nodes" for end, bad_id, size in faults)
        raise IdRangeError(
            f"'edge_index' needs ids in [0, number of nodes) (got {text}, in this call or an earlier one)"
        )


@cache
def reports(device_type: str) -> Reports:
    """Return the reports of all devices of a type."""
    return Reports(device_type == "cuda")


def may_run_again(training: bool) -> bool:
    """Return whether what runs now is run once more for gradients, or already is: it has to be what it was then.

    Checkpoints of activations hook what is saved, or run a model in training without gradients first.
    """
    if current_graph_task_id() >= 0 or (training and not torch.is_grad_enabled()):
        return True
    return top_saved_tensors_hooks(True) is not None


def unmeasured_graph(
    visitor: int,
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    self_loops: bool,
    transposed: bool,
    visits: int = VISITS,
    counts: bool = True,
) -> UnmeasuredGraph | None:
    """Return the graph of a call of a layer, None where it is to be measured or has been.

    Args:
        visitor: Number that identifies the layer.
        edge_index: int64 or int32 [2, E].
        num_src: As :meth:`Graph.of`.
        num_dst: As :meth:`Graph.of`.
        self_loops: As :meth:`Graph.of`.
        transposed: Whether row 0 holds the targets.
        visits: Calls of the first layer after which its next one measures the graph.
        counts: Whether this call is one of them.

    Raises:
        TypeError: `edge_index` is no int64 or int32 tensor.
        ValueError: It has another shape.
        IdRangeError: An id of these edges, or of those of an earlier call, is out of range.
    """
    if edge_index.device.type not in fused_device_types:
        return None
    reports(edge_index.device.type).check()
    key = edge_index, num_src, num_dst, self_loops, transposed
    graph = Graph.known(*key)
    if graph is None and self_loops:
        # What is measured of the edges tells all of them with self-loops.
        base = Graph.known(edge_index, num_src, num_dst, False, transposed)
        graph = base if base is not None and base.is_measured else None
    if graph is None:
        if max(edge_index.size(1), num_src, num_dst) >= MEASURED_EDGES or edge_index.is_inference():
            return None
    elif graph.is_measured:
        return None
    stream = cuda_stream(edge_index.device.index) if edge_index.is_cuda else None
    # The default stream, whose handle is 0, cannot be captured.
    if stream and torch.cuda.is_current_stream_capturing():
        # Its arrays stay where they are for as long as the edges live.
        return graph.pin() if isinstance(graph, UnmeasuredGraph) and graph.visits <= visits else None
    before = graph if isinstance(graph, UnmeasuredGraph) else None
    if before is not None:
        if counts and visitor == before.visitor:
            before.visits += 1
        if before.visits > visits:
            return None
        if before.stream == stream:
            return before
    fresh = UnmeasuredGraph(edge_index, key[1:], visitor, stream)
    if before is not None:
        fresh.visitor, fresh.visits = before.visitor, before.visits
    if not _build(fresh, edge_index):
        return None
    keep(fresh, (edge_index,), key[1:])
    return fresh


def refill(graph: RefilledGraph) -> None:
    """Fill in the arrays of a graph from the edges that its tensor now holds; the next step hears of a bad id."""
    _fill(graph, graph.room, graph.arrays, graph.batch_sizes)


def spec_of(is_wide: bool, loops: bool, padded: bool = False) -> Spec:
    """Return the module for ids of int64 or int32, with or without self-loops replaced, or room for batches."""
    flags = ("WIDE_IDS", int(is_wide)), ("LOOPS", int(loops)), ("PADDED", int(padded))
    return Spec("graph/csr.cu", (*flags, ("LONG_ROW", LONG_ROW)))


@cache
def _kernels(is_wide: bool, loops: bool, padded: bool) -> tuple[Kernel, Kernel, Kernel]:
    count, place, order = (kernel_of(spec_of(is_wide, loops, padded), f"graph_{each}") for each in _STEPS)
    return count, place, order


def _build(graph: UnmeasuredGraph, edge_index: Tensor) -> bool:
    """Fill in the arrays of a graph; False where rows may be long enough to be split.

    Raises:
        TypeError: `edge_index` is no int64 or int32 tensor.
        ValueError: It has another shape.
        IdRangeError: An id is out of range, on a CPU.
    """
    report = reports(graph.device.type)
    if report.expects_long_rows():
        return False
    check_edge_index(edge_index)
    _fill(graph, edge_index, graph.make_arrays())
    if graph.device.type != "cuda":
        report.check()
    return True


def _fill(
    graph: UnmeasuredGraph | RefilledGraph, edge_index: Tensor, arrays: tuple[Any, ...], batch: Tensor | None = None
) -> None:
    """Launch the kernels that write the arrays of a graph, of a padded batch whose own sizes are `batch`."""
    device = graph.device
    report = reports(device.type)
    edge_index = edge_index if edge_index.stride(1) == 1 else edge_index.contiguous()
    num_edges, total, num_dst, num_src = edge_index.size(1), graph.num_edges, graph.num_dst, graph.num_src
    counts = torch.zeros(num_dst + num_src, dtype=torch.int32, device=device)
    ranks = torch.empty(2 * total, dtype=torch.int32, device=device)
    sizes = num_edges, total - num_edges, num_dst, num_src
    ends: tuple[Any, ...]
    if device.type == "cuda":
        ids = edge_index.data_ptr()
        ends = ids, ids + edge_index.stride(0) * edge_index.itemsize
    else:
        ends = edge_index.unbind(0)
    ends = ends if graph.transposed else ends[::-1]
    count, place, order = _kernels(edge_index.dtype is torch.int64, graph.self_loops, batch is not None)
    own_sizes = () if batch is None else addresses((batch,))
    counts_at, ranks_at = addresses((counts, ranks))
    _launch(count, total, (*ends, *sizes, counts_at, ranks_at, report.argument, *own_sizes), device)
    sums = torch.cumsum(counts, 0, dtype=torch.int32)
    rowptr, col, perm, source_rowptr, source_col, source_perm = arrays
    placed = *addresses((sums,)), ranks_at, rowptr, perm, source_rowptr, source_perm
    _launch(place, max(total, num_dst + 1, num_src + 1), (*ends, *sizes, *placed), device)
    ordered = rowptr, perm, col, source_rowptr, source_perm, source_col, report.argument
    _launch(order, 32 * (num_dst + num_src), (*ends, num_edges, num_dst, num_src, *ordered), device)


def _launch(kernel: Kernel, threads: int, arguments: tuple[Any, ...], device: torch.device) -> None:
    launch(kernel, (-(-threads // _THREADS), 1, 1), (_THREADS, 1, 1), arguments, device)
