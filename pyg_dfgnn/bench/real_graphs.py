"""Real graphs from raw data files: edges only, made symmetric, without loops and duplicates."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyg_dfgnn.datasets.generators import Device, Edges, symmetric


def find_raw_file(name: str) -> Path:
    """The data file ``name`` below $PYG_DFGNN_DATA, ``data/`` or ``../shared/data``, the first that has it."""
    given = os.environ.get("PYG_DFGNN_DATA")
    roots = [Path(given)] if given else [Path("data"), Path("../shared/data")]
    for root in roots:
        if (root / name).is_file():
            return root / name
    raise FileNotFoundError(
        f"no {name} below {', '.join(map(str, roots))}; set PYG_DFGNN_DATA to the folder that has it"
    )


def real_graph(read: Callable[[Path], tuple[Tensor, Tensor, int]], file: str, device: Device) -> Edges:
    """The edges of a raw data file.

    Args:
        read: One of the readers below: a path to (sources, targets, number of nodes).
        file: Where the file lies below the data folder.
        device: Where to keep the edges.

    Raises:
        FileNotFoundError: The file is not there; says where to put it.
    """
    source, target, num_nodes = read(find_raw_file(file))
    return Edges(symmetric(source.to(device), target.to(device), num_nodes), num_nodes)


def planetoid_edges(path: Path) -> tuple[Tensor, Tensor, int]:
    """A Planetoid ``ind.*.graph`` file: a pickled dict of neighbour lists."""
    with path.open("rb") as file:
        neighbours: dict[int, list[int]] = pickle.load(file, encoding="latin1")
    source = torch.tensor([node for node, others in neighbours.items() for _ in others])
    target = torch.tensor([other for others in neighbours.values() for other in others])
    return source, target, max(neighbours) + 1


def matlab_edges(path: Path) -> tuple[Tensor, Tensor, int]:
    """A MATLAB file whose ``A`` is the sparse adjacency."""
    from scipy.io import loadmat  # an optional dependency of these graphs alone

    adjacency = loadmat(str(path))["A"].tocoo()
    return torch.from_numpy(adjacency.row).long(), torch.from_numpy(adjacency.col).long(), adjacency.shape[0]


def npz_edges(path: Path) -> tuple[Tensor, Tensor, int]:
    """A NumPy archive with ``edges`` [E, 2] and ``node_labels`` [N], or with the arrays of a CSR adjacency."""
    with np.load(path) as arrays:
        if "edges" in arrays:
            source, target = torch.from_numpy(arrays["edges"]).long().t()
            return source, target, len(arrays["node_labels"])
        ptr, target = (torch.from_numpy(arrays[f"adj_{name}"]).long() for name in ("indptr", "indices"))
    num_nodes = ptr.numel() - 1
    return torch.arange(num_nodes).repeat_interleave(ptr.diff()), target, num_nodes


def csv_edges(path: Path) -> tuple[Tensor, Tensor, int]:
    """A gzipped CSV: a header that starts with the number of nodes, then one pair of ids from 1 per line."""
    with gzip.open(path, "rt") as file:
        num_nodes = int(file.readline().split(",")[0])
        source, target = torch.from_numpy(np.loadtxt(file, dtype=np.int64, delimiter=",")).t() - 1
    return source, target, num_nodes
