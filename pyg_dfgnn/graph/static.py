"""A graph whose arrays stay where they are while batches pass through it: what a captured CUDA graph may read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.errors import check_range
from pyg_dfgnn.graph.adjacency import Adjacency, offsets
from pyg_dfgnn.graph.block_sparse import KEY, SIMPLE, BlockSparse, block_count, of
from pyg_dfgnn.graph.build import Built
from pyg_dfgnn.graph.derived import Value
from pyg_dfgnn.graph.facts import BatchFacts
from pyg_dfgnn.graph.graph import HAS_LOOPS, Graph, keep
from pyg_dfgnn.graph.node_ranges import KEY as DIAGONAL
from pyg_dfgnn.graph.node_ranges import diagonal_blocks

# Blocks of dense bits that a batch may have, over those of the batch that the graph was made for.
_BLOCK_ROOM = 1.25
_NODE_UNIT = 64


class StaticGraph(Graph):
    """Room for the graphs of batches at fixed addresses; what is behind the nodes of a batch has no edges.

    Kernels captured on it run on every batch that is put in later, since all they hold are addresses and bounds. Rows
    are not split, for a list of long rows has another length in each batch; windows of dense blocks are as many as any
    batch may have, idle ones without columns.

    Args:
        batch: The graph of a first batch, made with facts.
        edge_index: Fixed edges that convs will be given, int64 [2, room for edges]; only weakly referred to.
        num_nodes: Room for nodes.
        num_graphs: Room for graphs.
        plain: The graph whose variant with self-loops this is.

    Raises:
        ValueError: The batch has no facts, or does not fit.

    Attributes:
        looped: The variant with self-loops, once it was asked for.
        max_degree: Edges that a row of a batch may have.
        max_graph_nodes: Nodes that a graph of a batch may have.
    """

    is_static = True

    def __init__(
        self, batch: Graph, edge_index: Tensor, num_nodes: int, num_graphs: int, plain: StaticGraph | None = None
    ) -> None:
        facts, loops = _facts(batch), batch.self_loops
        room = edge_index.size(1) + (num_nodes if loops else 0)
        check_range("num_nodes", num_nodes, batch.num_dst)
        check_range("num_edges", room, batch.num_edges)
        if plain is None:
            max_degree = 1 << max(facts.max_in_degree, facts.max_out_degree, 1).bit_length()
            longest = -(-facts.max_nodes // _NODE_UNIT) * _NODE_UNIT
        else:
            max_degree, longest = plain.max_degree, plain.max_graph_nodes

        def side(rows: str, cols: str) -> Adjacency:
            rowptr, col, perm = (
                torch.zeros(n, dtype=torch.int32, device=batch.device) for n in (num_nodes + 1, room, room)
            )
            return Adjacency(rowptr, col, perm, num_nodes, max_degree, rows, cols)

        built = Built(side("targets", "sources"), side("sources", "targets"), max_graph_nodes=longest)
        super().__init__(built, (edge_index,), (num_nodes, num_nodes, loops, False), self_loops=loops)
        self.num_graphs = num_graphs
        self.max_degree: int = max_degree
        self.max_graph_nodes: int = longest
        self.is_simple: bool = facts.is_simple if plain is None else plain.is_simple
        self.looped: StaticGraph | None = None
        diagonal = diagonal_blocks(batch)
        assert diagonal is not None
        self.derived(DIAGONAL, lambda: replace(diagonal, longest=longest, sizes=None))
        self.derived(SIMPLE, lambda: self.is_simple)
        self.put(batch)
        self.pin()

    @property
    def kept(self) -> Tensor | None:
        """Nothing: how many edges are self-loops differs from batch to batch.

        Raises:
            ValueError: The graph has replaced self-loops, to which edge features would have to follow.
        """
        if self.self_loops:
            raise ValueError("'edge_attr' needs layers without self-loops on a graph whose edges change")
        return None

    @property
    def has_loops(self) -> bool:
        """As :attr:`Graph.has_loops`."""
        return self.derived(HAS_LOOPS, lambda: bool(_facts(self.batch).loops.any()))

    def takes(self, batch: Graph) -> bool:
        """Whether a batch is within all bounds."""
        facts = _facts(batch)
        degrees = (facts.max_in_degree, facts.max_out_degree, facts.max_kept_in + 1, facts.max_kept_out + 1)
        return (
            batch.num_dst <= self.num_dst
            and batch.num_edges <= self.num_edges
            and len(facts.nodes) <= self.num_graphs
            and max(degrees) <= self.max_degree
            and facts.max_nodes <= self.max_graph_nodes
            and (facts.is_simple or not self.is_simple)
            and (self.peek(HAS_LOOPS) is not False or not bool(facts.loops.any()))
            and all(
                int(block_count(facts.nodes, rows).sum()) <= blocks.num_blocks
                for graph in (self, self.looped)
                if graph is not None
                for (_, _, rows, _), blocks in graph._block_sparse().items()
            )
        )

    def put(self, batch: Graph) -> None:
        """Put a batch in that :meth:`takes` has nothing against; later work of this stream reads it."""
        self.batch = batch
        room: list[Tensor] = []
        filling: list[Tensor] = []
        for mine, theirs in ((self.csr, batch.csr), (self.csc, batch.csc)):
            room += [array[: len(of)] for array, of in zip(mine.arrays, theirs.arrays)]
            filling += theirs.arrays
            mine.rowptr[len(theirs.rowptr) :] = theirs.num_edges
        torch._foreach_copy_(room, filling)
        for key, blocks in self._block_sparse().items():
            self._put_blocks(blocks, key)
        if self.looped is not None:
            self.looped.put(_looped(batch))

    def register(self) -> None:
        """Let convs find the graph by `edge_index` as it is now; an edit of `edge_index` ends that."""
        for graph in (self, self.looped):
            if graph is not None:
                anchors: tuple[Any, ...] = tuple(ref() for ref in graph._anchors)
                graph._versions = tuple(anchor._version for anchor in anchors)
                keep(graph, anchors, graph._sizes)

    def with_loops(self) -> StaticGraph:
        """The variant with self-loops on the nodes of the batch."""
        if self.looped is None:
            edge_index: Any = self._anchors[0]()
            self.looped = StaticGraph(_looped(self.batch), edge_index, self.num_dst, self.num_graphs, plain=self)
        return self.looped

    def derived(self, key: Hashable, build: Callable[[], Value], anchors: Sequence[Tensor] = ()) -> Value:
        """As :meth:`Graph.derived`; dense blocks get room for those of other batches.

        Raises:
            ValueError: The blocks should list the columns that occur, whose number is not bounded.
        """
        if isinstance(key, tuple) and key[0] == KEY:
            return super().derived(key, lambda: self._make_blocks(key))  # type: ignore[arg-type, return-value]
        return super().derived(key, build, anchors)

    def _block_sparse(self) -> dict[tuple[str, str, int, bool], BlockSparse]:
        return {key: blocks for key, blocks in self._derived.items() if key[0] == KEY}  # type: ignore[index, misc]

    def _make_blocks(self, key: tuple[str, str, int, bool]) -> BlockSparse:
        _, domain, rows, compact = key
        if compact:
            raise ValueError("'compact' needs False on a graph whose edges change (got True)")
        # Each graph ends with a window that may not be full, and so do the nodes behind the batch.
        num_windows = self.num_dst // rows + self.num_graphs + 2
        num_blocks = int(_BLOCK_ROOM * of(self.batch, domain, rows, False).num_blocks) + self.num_graphs
        windows = torch.zeros(num_windows, 8, dtype=torch.int32, device=self.device)
        bits = torch.zeros(num_blocks, rows, dtype=torch.int32, device=self.device)
        longest = self.max_graph_nodes
        blocks = BlockSparse(num_windows, num_blocks, longest, windows, None, bits)
        self._put_blocks(blocks, key)
        return blocks

    def _put_blocks(self, room: BlockSparse, key: tuple[str, str, int, bool]) -> None:
        _, domain, rows, _ = key
        blocks = of(self.batch, domain, rows, False)
        room.windows[: blocks.num_windows] = blocks.windows
        room.bits[: blocks.num_blocks] = blocks.bits
        # The rows behind the batch have no columns, and so give zeros; windows past the last row have nothing at all.
        idle = room.windows[blocks.num_windows :]
        first = torch.arange(len(idle), dtype=torch.int32, device=self.device).mul_(rows).add_(self.batch.num_dst)
        idle.zero_()
        idle[:, 0] = first.clamp(max=self.num_dst)
        idle[:, 1] = (first + rows).clamp(max=self.num_dst)


class StaticGroups(Graph):
    """The graph of a reduction over groups of consecutive rows, at fixed addresses while other groups are put in.

    Args:
        index: Group of each row, ascending, int64 or int32 [N]; its values may change. Only weakly referred to.
        num_groups: Number of groups.
    """

    is_static = True

    def __init__(self, index: Tensor, num_groups: int) -> None:
        count = index.numel()
        rows = torch.arange(count + 1, dtype=torch.int32, device=index.device)
        by_group = Adjacency(torch.zeros_like(rows[:1]).repeat(num_groups + 1), rows[:-1], rows[:-1], count, count)
        by_row = Adjacency(rows, torch.zeros_like(rows[:-1]), rows[:-1], num_groups, 1, "sources", "targets")
        super().__init__(Built(by_group, by_row, source_sorted=True), (index,), (num_groups,))
        self.pin()

    @property
    def edge_index(self) -> Tensor:
        """The edges as they are now, int64 [2, N]: row 0 the rows, row 1 their groups."""
        return torch.stack([self.csc.perm.long(), self.csc.col.long()])

    def refill(self, index: Tensor) -> None:
        """Take the groups that the index now holds."""
        self.csr.rowptr.copy_(offsets(index, self.num_dst))
        self.csc.col.copy_(index)

    def register(self, index: Tensor) -> None:
        """Let reductions find the graph by the index as it is now; an edit of that ends it."""
        self._versions = (index._version,)
        keep(self, (index,), self._sizes)


def _facts(batch: Graph) -> BatchFacts:
    if batch.facts is None:
        need = "graphs that went through SortEdges, in a batch of a loader or of a DeviceDataset"
        raise ValueError(f"'batch' needs facts: {need}")
    return batch.facts


def _looped(batch: Graph) -> Graph:
    edge_index, num_src, num_dst, _, transposed = batch.key
    return Graph.resolve(edge_index, num_src, num_dst, True, transposed)
