"""Orders of the nodes that put neighbours close to each other, and the share of gathers that miss a cache.

An order is a permutation `perm` int64 [N]: the new node i is the old node `perm[i]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.errors import check_choice, check_range, need_extra
from pyg_dfgnn.graph.adjacency import INT32_MAX, offsets, pull, sort_rows
from pyg_dfgnn.graph.build import bounds_of, check_sizes, refuse_ids
from pyg_dfgnn.graph.forms import check_edge_index

PART_NODES = 64
"""Nodes of a METIS part, inside of which they keep their order; smaller parts cost time and gain little."""
_PACKAGES = {"rcm": "scipy.sparse.csgraph", "metis": "pymetis"}
_ROUNDS = 4
"""Rounds of moves per level of communities; each takes a sort of the edges, and fewer rounds take more levels."""


def check_method(method: str) -> None:
    """Check that a method is one of :data:`METHODS` and that its package is installed.

    Raises:
        ValueError: The method is unknown.
        ModuleNotFoundError: scipy ("rcm") or pymetis ("metis") is missing.
    """
    check_choice("method", method, tuple(METHODS))
    if method in _PACKAGES:
        need_extra(_PACKAGES[method], f"orders of nodes by {method!r}", "reorder")


def node_order(edge_index: Tensor, num_nodes: int, method: str) -> Tensor:
    """Order the nodes of a graph by a method of :data:`METHODS`, every time alike.

    Args:
        edge_index: int64 or int32 [2, E]; directions, duplicates and self-loops are allowed.
        num_nodes: N.
        method: "degree" (most edges first), "rcm" (reverse Cuthill-McKee), "community" (nested communities by
            modularity) or "metis" (parts with few edges between them).

    Returns:
        The order, int64 [N] on the device of the edges; a graph without edges keeps its order.

    Raises:
        TypeError: `edge_index` is no integer tensor.
        ValueError: The method is unknown, an id is out of range, or scipy or METIS cannot count the edges.
        ModuleNotFoundError: scipy ("rcm") or pymetis ("metis") is missing.
    """
    check_method(method)
    check_edge_index(edge_index)
    check_sizes(num_nodes, num_nodes)
    refuse_ids(pull(*bounds_of(*edge_index)), num_nodes, num_nodes, edge_index.size(1))
    if edge_index.size(1) == 0:
        return torch.arange(num_nodes, device=edge_index.device)
    return METHODS[method](edge_index.long(), num_nodes)


def inverse_of(perm: Tensor) -> Tensor:
    """Return the inverse of a permutation [N]: the new place of each old node."""
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel(), dtype=perm.dtype, device=perm.device)
    return inverse


def gather_misses(col: Tensor, cache_rows: int, count_first: bool = True) -> float:
    """Estimate the share of the gathered rows that a cache of the most recently used rows does not hold.

    A window of w gathers reads on average fp(w) distinct rows. The cache of c rows holds what the last w gathers read,
    where w is the largest window with fp(w) <= c; a gather misses if its row was last read longer ago, or never.

    Args:
        col: Row that each gather reads, int [E], in the order of the gathers: `Graph.csr.col` for a pass over targets.
        cache_rows: c, which is the bytes of the cache over the bytes of a row.
        count_first: Whether the first gather of each row counts, which always misses; False for a stretch of more.

    Returns:
        The share in [0, 1]; 0 without gathers that count.

    Source: Xiang et al., HOTL: a Higher Order Theory of Locality, ASPLOS 2013, sections 3.1 and 4.
    """
    check_range("cache_rows", cache_rows, 1)
    num_gathers = col.numel()
    if num_gathers == 0:
        return 0.0
    row, time = sort_rows(col, int(col.max()) + 1)
    is_first = torch.ones_like(row, dtype=torch.bool)
    is_first[1:] = row[1:] != row[:-1]
    is_last = is_first.roll(-1)
    num_rows = int(is_first.sum())
    # A window of w misses a row in idle - w places of each stretch of `idle` gathers from one use to the next.
    reuse = time.diff()[~is_first[1:]]
    idle = torch.cat([reuse, time[is_first] + 1, num_gathers - time[is_last]]).sort().values
    sums = torch.cat([idle.new_zeros(1), idle.cumsum(0)])

    def footprint(window: int) -> float:
        place = int(torch.searchsorted(idle, window, right=True))
        missed = int(sums[-1] - sums[place]) - window * (idle.numel() - place)
        return num_rows - missed / (num_gathers - window + 1)

    low, high = 0, num_gathers
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if footprint(middle) <= cache_rows else (low, middle - 1)
    missed = int((reuse > low).sum())
    return (num_rows + missed) / num_gathers if count_first else missed / max(1, num_gathers - num_rows)


def degree_order(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Order by the number of edges into and out of a node, most first, ties by id."""
    return edge_index.flatten().bincount(minlength=num_nodes).argsort(descending=True, stable=True)


def rcm_order(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Order by reverse Cuthill-McKee, so that edges are short: breadth-first, by degree inside a level, reversed.

    Source: George and Liu, Computer Solution of Large Sparse Positive Definite Systems, 1981, chapter 4.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    rowptr, col = _compressed(edge_index, num_nodes)
    ones = torch.ones(len(col), dtype=torch.int8, device="cpu")
    matrix = csr_matrix((ones.numpy(), col, rowptr), shape=(num_nodes, num_nodes))
    order = torch.from_numpy(reverse_cuthill_mckee(matrix, symmetric_mode=True).copy())
    return order.to(edge_index.device, torch.int64)


def community_order(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Order by nested communities: depth-first through the tree of communities that raise the modularity.

    On each level, a node of degree d_u moves to the community v of a neighbour with the largest `w_uv - d_u d_v / 2m`,
    if that is more than where it is; w_uv are its edges into v, and d_v is the degree of v without u. In each round
    half of the nodes may move, drawn from a fixed seed. The communities are the nodes of the next level.

    Source: Blondel et al., Fast Unfolding of Communities in Large Networks, Journal of Statistical Mechanics, 2008, for
        the levels; Arai et al., Rabbit Order: Just-in-time Parallel Reordering for Fast Graph Analysis, IPDPS 2016, for
        the order.
    """
    row, col, weight = _undirected(edge_index, num_nodes)
    degree = torch.zeros(num_nodes, dtype=torch.int64, device=row.device).index_add_(0, row, weight)
    both_ways = weight.sum()
    generator = torch.Generator().manual_seed(0)
    levels: list[Tensor] = []
    while True:
        num, total = degree.numel(), degree
        community = torch.arange(num, device=row.device)
        for _ in range(_ROUNDS):
            node, other, links = _summed(row, community[col], weight, num)
            is_own = other == community[node]
            own_links = torch.zeros_like(degree).index_add_(0, node[is_own], links[is_own])
            stay = own_links - degree.double() * (total[community] - degree) / both_ways
            gain = links - degree[node].double() * total[other] / both_ways
            best = stay.scatter_reduce(0, node[~is_own], gain[~is_own], "amax")
            is_goal = ~is_own & (gain > stay[node]) & (gain == best[node])
            goal = torch.full_like(degree, num).scatter_reduce_(0, node[is_goal], other[is_goal], "amin")
            is_drawn = torch.rand(num, generator=generator, device="cpu").lt(0.5).to(row.device)
            community = torch.where(is_drawn & (goal < num), goal, community)
            total = torch.zeros_like(degree).index_add_(0, community, degree)
        names, community = community.unique(return_inverse=True)
        if names.numel() == num and not bool((goal < num).any()):
            break
        levels.append(community)
        degree = total[names]
        crosses = community[row] != community[col]
        row, col, weight = _summed(community[row[crosses]], community[col[crosses]], weight[crosses], names.numel())
    # Nodes without neighbours come last.
    order = (degree == 0).to(torch.uint8).argsort(stable=True)
    for community in reversed(levels):
        order = inverse_of(order)[community].argsort(stable=True)
    return order


def metis_order(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Order by the parts of METIS's recursive bisection, so that close parts have close numbers; inside a part by id.

    Source: Karypis and Kumar, A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs, SIAM Journal
        on Scientific Computing 20, 1998.
    """
    import pymetis

    graph = pymetis.CSRAdjacency(*_compressed(edge_index, num_nodes))
    _, part = pymetis.part_graph(-(-num_nodes // PART_NODES), graph, recursive=True)
    return torch.as_tensor(part, device=edge_index.device).argsort(stable=True)


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "degree": degree_order,
    "rcm": rcm_order,
    "community": community_order,
    "metis": metis_order,
}
"""Name of a method -> the function that orders the nodes of `edge_index [2, E]` with at least one edge."""


def _summed(row: Tensor, col: Tensor, weight: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and weights by row and column, with the weights of equal pairs added, int64 each."""
    keys, place = (row * num_cols + col).unique(return_inverse=True)
    return keys // num_cols, keys % num_cols, torch.zeros_like(keys).index_add_(0, place, weight)


def _undirected(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and multiplicities of the symmetric adjacency without loops, as :func:`_summed`."""
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    ones = torch.ones(2 * source.numel(), dtype=torch.int64, device=source.device)
    return _summed(torch.cat([source, target]), torch.cat([target, source]), ones, num_nodes)


def _compressed(edge_index: Tensor, num_nodes: int) -> tuple[Any, Any]:
    """The symmetric adjacency without loops as NumPy arrays `rowptr` and `col`, int32."""
    row, col, _ = _undirected(edge_index.cpu(), num_nodes)
    if col.numel() > INT32_MAX:
        raise ValueError(f"'edge_index' needs at most {INT32_MAX} edges both ways for this method (got {col.numel()})")
    return offsets(row, num_nodes).numpy(), col.int().numpy()
