"""Times to reach on one H200, and the times of other packages on the same graphs: milliseconds, as data.

Peers were measured on one NVIDIA H200 (torch 2.11.0, CUDA 13.0) on the arrays of graphs (a) to (e): medians of CUDA
events, 3 to 60 repetitions, warm; outputs and gradients were compared with float64, and a time whose result was off by
more than 2e-3 is no result. They were taken once, before this bench existed, and are quoted beside our rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GRAPHS = "abcde"


@dataclass(frozen=True)
class Target:
    """What to reach: ``must`` and ``aim`` of the design, ``release`` of this version where it names one."""

    must: float
    aim: float
    release: float | None = None


Key = tuple[str, int, int, str, str]
"""(score, heads, channels, dtype, direction)."""


def _row(
    graphs: str, must: tuple[float, ...], aim: tuple[float, ...], release: tuple[float, ...] = ()
) -> dict[str, Target]:
    releases: tuple[float | None, ...] = release or (None,) * len(must)
    return {g: Target(m, a, r) for g, m, a, r in zip(graphs, must, aim, releases, strict=True)}


TARGETS: dict[Key, dict[str, Target]] = {
    ("dot", 1, 128, "float32", "fwd"): _row(
        "acde", (0.40, 19, 11.3, 0.072), (0.15, 17, 9.5, 0.048), (0.28, 18.0, 10.3, 0.060)
    ),
    ("dot", 1, 128, "tf32", "fwd"): _row("ae", (0.40, 0.072), (0.15, 0.048), (0.15, 0.055)),
    ("dot", 1, 128, "float32", "fwd+bwd"): _row(
        "acde", (1.55, 55, 31.5, 0.27), (0.50, 52, 28.5, 0.16), (1.0, 54, 29.5, 0.23)
    ),
    ("dot", 1, 128, "bfloat16", "fwd"): _row(
        "acde", (0.25, 9.0, 5.9, 0.055), (0.10, 7.2, 4.8, 0.035), (0.10, 7.4, 5.1, 0.042)
    ),
    ("dot", 1, 128, "bfloat16", "fwd+bwd"): _row(
        "acde", (1.40, 31, 19.5, 0.22), (0.35, 24, 15.5, 0.12), (0.45, 24, 15.0, 0.18)
    ),
    ("dot", 8, 16, "float32", "fwd"): _row("acde", (0.40, 20.5, 11.6, 0.075), (0.15, 17.5, 9.6, 0.05)),
    ("dot", 8, 16, "float32", "fwd+bwd"): _row("acde", (1.4, 57, 32, 0.27), (0.50, 53, 28.5, 0.16)),
    ("cosine", 1, 128, "float32", "fwd"): _row(
        "acde", (0.36, 8.5, 4.9, 0.065), (0.12, 7.7, 4.6, 0.036), (0.25, 7.6, 4.5, 0.055)
    ),
    ("cosine", 1, 128, "float32", "fwd+bwd"): _row(
        "acde", (1.4, 42, 24, 0.25), (0.45, 35, 19, 0.13), (1.0, 33, 18, 0.20)
    ),
    ("add", 1, 128, "float32", "fwd"): _row(
        "acde", (0.26, 8.5, 4.55, 0.045), (0.11, 7.8, 4.4, 0.028), (0.22, 7.9, 4.3, 0.040)
    ),
    ("add", 1, 128, "float32", "fwd+bwd"): _row(
        "acde", (0.90, 27, 15, 0.15), (0.35, 18.5, 10, 0.08), (0.9, 22, 12.5, 0.14)
    ),
    ("add", 8, 16, "float32", "fwd"): _row("acde", (0.30, 9.2, 4.65, 0.047), (0.12, 8.3, 4.5, 0.03)),
    ("add", 8, 16, "float32", "fwd+bwd"): _row("acde", (1.0, 28, 15.5, 0.16), (0.40, 19, 10.5, 0.085)),
    ("gatv2", 1, 128, "float32", "fwd"): _row("acd", (0.30, 10.0, 5.5), (0.15, 8.6, 4.6)),
    ("gatv2", 1, 128, "float32", "fwd+bwd"): _row("acd", (1.2, 40, 22), (0.5, 28, 15)),
}

PEAK_MB: dict[tuple[Key, str], float] = {(("dot", 1, 128, "float32", "fwd+bwd"), "c"): 1200.0}
"""Device memory above the inputs and the cached graph."""

EAGER_MS, REPLAY_MS = 0.025, 0.005
"""A forward of a Cora-sized layer: as the host issues it, and replayed as a CUDA graph."""
HEADS_RATIO = 1.10
"""8 heads of 16 may take so many times the time of 1 head of 128."""
CHOICE_LOSS = 0.05
"""What the schedule that is chosen may lose to the fastest."""
SPEEDUP = {("batch", "fwd"): 5.0, ("full", "fwd"): 3.0, ("all", "fwd+bwd"): 3.0}
"""Geometric means over the data sets, against unfused cuSPARSE calls."""


FASTER_IN_PAPER = {
    **{("GT", graph): "smmf" for graph in ("mnist_like", "cifar10_like")},
    **{("GT", graph): "pmf" for graph in ("reddit_like", "proteins_like")},
    **{("GAT", graph): "smmf" for graph in ("mnist_like", "cifar10_like", "reddit_like", "proteins_like")},
}
"""Which fusion is faster forward with one head. Source: DF-GNN, figure 12."""


@dataclass(frozen=True)
class Peer:
    """The time of another package; ``is_right`` tells whether its result was."""

    name: str
    key: Key
    graph: str
    time_ms: float
    is_right: bool = True


no = None


def _wrong(time_ms: float) -> tuple[float]:
    return (time_ms,)


_Cell = float | tuple[float] | None
_Times = tuple[_Cell, _Cell, _Cell, _Cell, _Cell]

# Package -> times on a, b, c, d, e; None: it cannot run, ran out of memory, or was not run.
_PEERS: dict[Key, dict[str, _Times]] = {
    ("dot", 1, 128, "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (1.31, 0.0422, no, no, 0.1773),
        "DF-GNN hyper, training forward": (1.212, 0.0514, no, no, 0.1716),
        "DF-GNN csr (dgNN style)": (2.507, 0.113, no, 88.11, 0.2988),
        "DF-GNN softmax (PMF)": (2.593, 0.0456, no, 47.7, 0.3284),
        "DF-GNN softmax_gm (PMF)": (2.586, 0.0451, 53.21, 33.28, 0.3181),
        "DF-GNN tiling": (1.744, 0.0488, 35.92, 22.38, 0.3682),
        "turbo-gnn": (0.880, 0.038, 24.1, 14.6, no),
    },
    ("dot", 1, 128, "float16", "fwd"): {
        "Fused3S permuteV": (0.2732, 0.0243, 19.21, 12.64, 0.1063),
        "Fused3S scheduled": (0.3833, 0.0307, 29.19, 19.31, 0.1442),
    },
    ("dot", 1, 128, "bfloat16", "fwd"): {"turbo-gnn": (0.79, 0.033, 16.9, 10.2, no)},
    ("dot", 1, 128, "float32", "fwd+bwd"): {
        "DF-GNN hyper (SMMF)": (3.424, 0.1528, no, no, 0.5094),
        "turbo-gnn": (3.62, 0.19, 105, 62.9, no),
    },
    ("dot", 1, 128, "bfloat16", "fwd+bwd"): {"turbo-gnn": (3.37, 0.17, 102, 46.4, no)},
    ("dot", 8, 16, "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (4.216, 0.0573, no, no, 0.5801),
        "DF-GNN hyper, training forward": (6.437, 0.0429, no, no, 0.8039),
        "DF-GNN csr (dgNN style)": (7.341, 0.1182, no, 486.4, 0.8997),
        "DF-GNN softmax_gm (PMF)": (no, _wrong(0.0670), no, no, _wrong(1.517)),
    },
    ("dot", 8, 16, "float32", "fwd+bwd"): {
        "DF-GNN hyper (SMMF)": (_wrong(15.16), _wrong(0.1334), no, no, _wrong(1.997)),
    },
    ("cosine", 1, 128, "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (1.385, 0.0509, no, no, 0.2217),
        "DF-GNN softmax_gm (PMF)": (2.409, 0.0540, 52.99, 32.86, 0.3603),
    },
    ("cosine", 1, 128, "float32", "fwd+bwd"): {"DF-GNN hyper (SMMF)": (4.056, 0.2811, no, no, 0.9077)},
    ("add", 1, 128, "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (0.4888, 0.0427, no, no, 0.0642),
        "DF-GNN hyper_recompute": (0.4838, 0.0367, 15.55, 8.267, 0.0654),
        "DF-GNN softmax_gm (PMF)": (1.536, 0.0421, 33.2, 20.07, 0.2021),
        "DF-GNN tiling": (1.555, 0.0423, 21.02, 11.66, 0.8892),
        "dgNN inference": (_wrong(0.4693), 0.0186, _wrong(13.53), _wrong(8.05), 0.1122),
        "dgNN training forward": (0.7797, 0.1932, _wrong(14.98), 8.396, 0.3401),
        "cuDNN": (1.35, no, 60.6, 33.3, no),
    },
    ("add", 1, 128, "float32", "fwd+bwd"): {
        "dgNN": (2.76, 0.2221, 59.77, 35.93, 0.6647),
        "cuDNN": (11.4, no, 546, 217, no),
    },
    ("add", 8, 16, "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (1.084, 0.0229, no, no, 0.2249),
        "dgNN inference": (1.107, 0.0230, _wrong(25.86), _wrong(15.54), 0.234),
        "dgNN training forward": (2.317, 0.1971, 47.28, 28.08, 0.6818),
    },
    ("add", 8, 16, "float32", "fwd+bwd"): {"dgNN": (15.15, 0.2542, 310.1, 189.6, 2.419)},
    ("gatv2", 1, 128, "float32", "fwd"): {
        "turbo-gnn": (0.618, 0.030, 17.6, 10.9, no),
        "cuDNN": (1.78, 0.18, no, no, no),
    },
    ("gatv2", 1, 128, "bfloat16", "fwd"): {"turbo-gnn": (0.685, 0.028, 16.8, 10.4, no)},
    ("gatv2", 1, 128, "float32", "fwd+bwd"): {
        "turbo-gnn": (3.22, 0.17, 84.8, 50.8, no),
        "cuDNN": (12.8, no, no, no, no),
    },
    ("gatv2", 1, 128, "bfloat16", "fwd+bwd"): {"turbo-gnn": (3.57, 0.15, 90, 52.8, no)},
}


def peers() -> Iterator[Peer]:
    """Every measured time of another package."""
    for key, packages in _PEERS.items():
        for name, times in packages.items():
            for graph, cell in zip(GRAPHS, times, strict=True):
                if isinstance(cell, tuple):
                    yield Peer(name, key, graph, cell[0], is_right=False)
                elif cell is not None:
                    yield Peer(name, key, graph, cell)


def best_peer(key: Key, graph: str) -> Peer | None:
    """The fastest other package whose result was right; the two 16-bit types stand for each other."""
    score, heads, channels, dtype, direction = key
    dtypes = ("bfloat16", "float16") if dtype in ("bfloat16", "float16") else (dtype,)
    keys = [(score, heads, channels, each, direction) for each in dtypes]
    found = [peer for peer in peers() if peer.key in keys and peer.graph == graph and peer.is_right]
    return min(found, key=lambda peer: peer.time_ms, default=None)


def verdict(value: float, target: float | None) -> str:
    """'reached', or by which factor ``value`` misses ``target``; '' without a target."""
    if target is None:
        return ""
    return "reached" if value <= target else f"missed by {value / target:.2f}x"
