"""A graph whose arrays stay where they are while batches pass through it: what a captured CUDA graph may read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyg_dfgnn.errors import check_range
from pyg_dfgnn.graph.adjacency import Adjacency, Side
from pyg_dfgnn.graph.batch import BatchFacts
from pyg_dfgnn.graph.block_sparse import BlockSparse, block_count
from pyg_dfgnn.graph.graph import Graph, keep

# Blocks of dense bits that a batch may have, over those of the batch that a frame was made for.
_BLOCK_ROOM = 1.25
_SEGMENT_UNIT = 64


class Frame:
    """Room for the graphs of batches at fixed addresses; what is behind the nodes of a batch has no edges.

    Kernels captured on the framed graph run on every batch that is put in later, since all they hold are addresses and
    bounds. Rows are not split, for a list of long rows has another length in each batch; windows of dense blocks are as
    many as any batch may have, idle ones without columns.

    Args:
        batch: The graph of a first batch, made with facts.
        edge_index: Fixed edges that convs will be given, int64 [2, room for edges].
        num_nodes: Room for nodes.
        num_graphs: Room for graphs.

    Raises:
        ValueError: The batch has no facts, or does not fit.
    """

    def __init__(self, batch: Graph, edge_index: Tensor, num_nodes: int, num_graphs: int) -> None:
        facts = _facts(batch)
        self.edge_index, self.num_nodes, self.num_graphs = edge_index, num_nodes, num_graphs
        self.num_edges = edge_index.size(1)
        check_range("num_nodes", num_nodes, batch.num_dst)
        check_range("num_edges", self.num_edges, batch.num_edges)
        self.max_degree = 1 << max(facts.max_in_degree, facts.max_out_degree, 1).bit_length()
        self.longest = -(-_longest(facts) // _SEGMENT_UNIT) * _SEGMENT_UNIT
        self.is_simple = facts.is_simple
        self.batch = batch
        self.plain = StaticGraph(self, batch)
        self.looped: StaticGraph | None = None

    @property
    def graphs(self) -> list[StaticGraph]:
        """The framed graph and, if it was asked for, its variant with self-loops."""
        return [self.plain] if self.looped is None else [self.plain, self.looped]

    def takes(self, batch: Graph) -> bool:
        """Whether a batch is within all bounds."""
        facts = _facts(batch)
        return (
            batch.num_dst <= self.num_nodes
            and batch.num_edges <= self.num_edges
            and len(facts.nodes) <= self.num_graphs
            and max(facts.max_in_degree, facts.max_out_degree, facts.max_kept_in + 1, facts.max_kept_out + 1)
            <= self.max_degree
            and _longest(facts) <= self.longest
            and (facts.is_simple or not self.is_simple)
            and all(graph.takes_blocks(facts) for graph in self.graphs)
        )

    def put(self, batch: Graph) -> None:
        """Put a batch in that :meth:`takes` has nothing against; later work of this stream reads it."""
        self.batch = batch
        self.plain.put(batch)
        if self.looped is not None:
            self.looped.put(_looped(batch))

    def register(self) -> None:
        """Let convs find the graph by `edge_index` as it is now; an edit of `edge_index` ends that."""
        for graph in self.graphs:
            keep((id(self.edge_index), *(self.num_nodes,) * 2, graph.self_loops, False), self.edge_index, graph)

    def with_loops(self) -> StaticGraph:
        """The variant with self-loops on the nodes of the batch."""
        if self.looped is None:
            self.looped = StaticGraph(self, _looped(self.batch))
        return self.looped


class StaticGraph(Graph):
    """A graph of a frame, which plans and captures see; made by :class:`Frame`."""

    is_static = True

    def __init__(self, frame: Frame, batch: Graph) -> None:
        loops, device, nodes = batch.self_loops, batch.device, frame.num_nodes
        room = frame.num_edges + (nodes if loops else 0)

        def side() -> Adjacency:
            arrays = (torch.zeros(size, dtype=torch.int32, device=device) for size in (nodes + 1, room, room))
            return Adjacency(Side(*arrays), frame.max_degree)

        segments = batch.node_segments
        assert segments is not None
        super().__init__(
            side(),
            nodes,
            csc=side(),
            self_loops=loops,
            anchor=frame.edge_index,
            graph_ptr=batch.graph_ptr,
            max_graph_nodes=frame.longest,
            node_segments=replace(segments, longest=frame.longest, sizes=None),
        )
        self.frame = frame
        self.put(batch)
        self.pin()

    def put(self, batch: Graph) -> None:
        """Copy a batch into the arrays."""
        self.batch = batch
        for mine, theirs in ((self.csr, batch.csr), (self.csc, batch.csc)):
            mine.rowptr[: theirs.num_rows + 1] = theirs.rowptr
            mine.rowptr[theirs.num_rows + 1 :] = theirs.num_edges
            mine.col[: theirs.num_edges] = theirs.col
            mine.perm[: theirs.num_edges] = theirs.perm
        for key, tiles in self._tiles.items():
            self._put_tiles(tiles, key)

    def with_loops(self) -> Graph:
        """The frame's variant with self-loops."""
        return self.frame.with_loops()

    def takes_blocks(self, facts: BatchFacts) -> bool:
        """Whether the dense blocks of a batch fit into those that were made."""
        return all(
            int(block_count(facts.nodes, rows).sum()) <= tiles.num_blocks for (_, rows, _), tiles in self._tiles.items()
        )

    def tiles(self, rows_are: str, rows: int, compact: bool) -> BlockSparse:
        """Dense blocks of one side with room for other batches, made on first use.

        Raises:
            ValueError: They should list the columns that occur, whose number is not bounded.
        """
        key = (rows_are, rows, compact)
        found = self._tiles.get(key)
        if found is None:
            if compact:
                raise ValueError("'compact' needs False on a graph whose edges change (got True)")
            # Each graph ends with a window that may not be full, and so do the nodes behind the batch.
            num_windows = self.num_dst // rows + self.frame.num_graphs + 2
            num_blocks = int(_BLOCK_ROOM * self.batch.tiles(*key).num_blocks) + self.frame.num_graphs
            made = torch.zeros(num_windows, 8, dtype=torch.int32, device=self.device)
            bits = torch.zeros(num_blocks, rows, dtype=torch.int32, device=self.device)
            found = BlockSparse(made, None, bits, num_windows, num_blocks, self.frame.longest, not self.frame.is_simple)
            self._put_tiles(found, key)
            self._tiles[key] = found
            self.reset_streams()
        return found

    def _put_tiles(self, room: BlockSparse, key: tuple[str, int, bool]) -> None:
        tiles, rows = self.batch.tiles(*key), key[1]
        room.windows[: tiles.num_windows] = tiles.windows
        room.bits[: tiles.num_blocks] = tiles.bits
        # The rows behind the batch have no columns, and so give zeros; windows past the last row have nothing at all.
        idle = room.windows[tiles.num_windows :]
        first = torch.arange(len(idle), dtype=torch.int32, device=self.device).mul_(rows).add_(self.batch.num_dst)
        idle.zero_()
        idle[:, 0] = first.clamp(max=self.num_dst)
        idle[:, 1] = (first + rows).clamp(max=self.num_dst)


def _facts(batch: Graph) -> BatchFacts:
    if batch.facts is None:
        raise ValueError("'batch' needs facts: graphs that went through SortEdges")
    return batch.facts


def _longest(facts: BatchFacts) -> int:
    return int(facts.nodes.max()) if len(facts.nodes) else 0


def _looped(batch: Graph) -> Graph:
    edge_index, num_src, num_dst, _, transposed = batch.key
    return Graph.resolve(edge_index, num_src, num_dst, True, transposed)
