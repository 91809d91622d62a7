"""Times of other packages' attention on graphs (a) to (e), in milliseconds, as data.

They were measured once on one NVIDIA H200 (torch 2.11.0, CUDA 13.0), before this bench existed: medians of CUDA events,
3 to 60 repetitions, warm. Outputs and gradients were compared with float64, and a time whose result was off by more
than 2e-3 is no result.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.case import Peer, Times, peers_of

GRAPHS = "abcde"

no = None


def _wrong(time_ms: float) -> tuple[float]:
    return (time_ms,)


# Package -> times on a, b, c, d, e; None: it cannot run, ran out of memory, or was not run.
_PEERS: Times = {
    ("dot", "1x128", "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (1.31, 0.0422, no, no, 0.1773),
        "DF-GNN hyper, training forward": (1.212, 0.0514, no, no, 0.1716),
        "DF-GNN csr (dgNN style)": (2.507, 0.113, no, 88.11, 0.2988),
        "DF-GNN softmax (PMF)": (2.593, 0.0456, no, 47.7, 0.3284),
        "DF-GNN softmax_gm (PMF)": (2.586, 0.0451, 53.21, 33.28, 0.3181),
        "DF-GNN tiling": (1.744, 0.0488, 35.92, 22.38, 0.3682),
        "turbo-gnn": (0.880, 0.038, 24.1, 14.6, no),
    },
    ("dot", "1x128", "float16", "fwd"): {
        "Fused3S permuteV": (0.2732, 0.0243, 19.21, 12.64, 0.1063),
        "Fused3S scheduled": (0.3833, 0.0307, 29.19, 19.31, 0.1442),
    },
    ("dot", "1x128", "bfloat16", "fwd"): {"turbo-gnn": (0.79, 0.033, 16.9, 10.2, no)},
    ("dot", "1x128", "float32", "fwd+bwd"): {
        "DF-GNN hyper (SMMF)": (3.424, 0.1528, no, no, 0.5094),
        "turbo-gnn": (3.62, 0.19, 105, 62.9, no),
    },
    ("dot", "1x128", "bfloat16", "fwd+bwd"): {"turbo-gnn": (3.37, 0.17, 102, 46.4, no)},
    ("dot", "8x16", "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (4.216, 0.0573, no, no, 0.5801),
        "DF-GNN hyper, training forward": (6.437, 0.0429, no, no, 0.8039),
        "DF-GNN csr (dgNN style)": (7.341, 0.1182, no, 486.4, 0.8997),
        "DF-GNN softmax_gm (PMF)": (no, _wrong(0.0670), no, no, _wrong(1.517)),
    },
    ("dot", "8x16", "float32", "fwd+bwd"): {
        "DF-GNN hyper (SMMF)": (_wrong(15.16), _wrong(0.1334), no, no, _wrong(1.997)),
    },
    ("cosine", "1x128", "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (1.385, 0.0509, no, no, 0.2217),
        "DF-GNN softmax_gm (PMF)": (2.409, 0.0540, 52.99, 32.86, 0.3603),
    },
    ("cosine", "1x128", "float32", "fwd+bwd"): {"DF-GNN hyper (SMMF)": (4.056, 0.2811, no, no, 0.9077)},
    ("add", "1x128", "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (0.4888, 0.0427, no, no, 0.0642),
        "DF-GNN hyper_recompute": (0.4838, 0.0367, 15.55, 8.267, 0.0654),
        "DF-GNN softmax_gm (PMF)": (1.536, 0.0421, 33.2, 20.07, 0.2021),
        "DF-GNN tiling": (1.555, 0.0423, 21.02, 11.66, 0.8892),
        "dgNN inference": (_wrong(0.4693), 0.0186, _wrong(13.53), _wrong(8.05), 0.1122),
        "dgNN training forward": (0.7797, 0.1932, _wrong(14.98), 8.396, 0.3401),
        "cuDNN": (1.35, no, 60.6, 33.3, no),
    },
    ("add", "1x128", "float32", "fwd+bwd"): {
        "dgNN": (2.76, 0.2221, 59.77, 35.93, 0.6647),
        "cuDNN": (11.4, no, 546, 217, no),
    },
    ("add", "8x16", "float32", "fwd"): {
        "DF-GNN hyper (SMMF)": (1.084, 0.0229, no, no, 0.2249),
        "dgNN inference": (1.107, 0.0230, _wrong(25.86), _wrong(15.54), 0.234),
        "dgNN training forward": (2.317, 0.1971, 47.28, 28.08, 0.6818),
    },
    ("add", "8x16", "float32", "fwd+bwd"): {"dgNN": (15.15, 0.2542, 310.1, 189.6, 2.419)},
    ("gatv2", "1x128", "float32", "fwd"): {
        "turbo-gnn": (0.618, 0.030, 17.6, 10.9, no),
        "cuDNN": (1.78, 0.18, no, no, no),
    },
    ("gatv2", "1x128", "bfloat16", "fwd"): {"turbo-gnn": (0.685, 0.028, 16.8, 10.4, no)},
    ("gatv2", "1x128", "float32", "fwd+bwd"): {
        "turbo-gnn": (3.22, 0.17, 84.8, 50.8, no),
        "cuDNN": (12.8, no, no, no, no),
    },
    ("gatv2", "1x128", "bfloat16", "fwd+bwd"): {"turbo-gnn": (3.57, 0.15, 90, 52.8, no)},
}


def peers() -> Iterator[Peer]:
    """Every measured time of another package."""
    return peers_of(_PEERS, GRAPHS)
