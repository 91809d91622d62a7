"""Tasks of node classification on one real network, from local raw files or a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data, download_url
from torch_geometric.datasets import Amazon, LINKXDataset, Reddit
from torch_geometric.utils import remove_self_loops, to_undirected

from pyg_dfgnn.datasets.files import CACHE, SEARCH, Folders, RawFiles
from pyg_dfgnn.datasets.task import SPLITS, Task, add_random_masks, one_graph
from pyg_dfgnn.errors import check_choice, check_integer, need_extra

_HETEROPHILOUS_URL = "https://github.com/yandex-research/heterophilous-graphs/raw/main/data"
# The metrics are those of the published results.
_HETEROPHILOUS = {"tolokers": "roc_auc", "minesweeper": "roc_auc", "squirrel": "accuracy", "chameleon": "accuracy"}
_FACEBOOK = ("cornell5", "reed98", "amherst41", "johnshopkins55")
_CO_PURCHASE = ("Photo", "Computers")


def heterophilous(
    name: str, *, split: int = 0, search: Folders = SEARCH, cache: str | Path = CACHE, download: bool = True
) -> Task:
    """Classify the nodes of a network whose neighbours often differ in their label, with its ten published splits.

    Looks for `<name>.npz` in the search folders as `heterophilous/<name>/raw` or `heterophilous`, then downloads it.
    Edges are made symmetric; loops and duplicates are dropped.

    Args:
        name: "tolokers", "minesweeper" (both scored by ROC AUC), "squirrel" or "chameleon" (both scored by accuracy).
        split: Number of the published split, from 0.
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied and downloaded files.
        download: Whether missing files may be downloaded.

    Returns:
        The task: one graph with a mask per split.

    Raises:
        ValueError: `name` is unknown, `split` out of range, or the file cannot be read.
        FileNotFoundError: The raw file is missing; the message says where to put it.

    Source: Platonov et al., A Critical Look at the Evaluation of GNNs under Heterophily, ICLR 2023.
    """
    check_choice("name", name, tuple(_HETEROPHILOUS))
    raw = Path(cache).expanduser() / "heterophilous" / name / "raw"
    raw_files = RawFiles(name, (f"{name}.npz",), (f"heterophilous/{name}/raw", "heterophilous"), search)

    def read() -> dict[str, np.ndarray]:
        if not (raw / f"{name}.npz").is_file():
            download_url(f"{_HETEROPHILOUS_URL}/{name}.npz", str(raw))
        with np.load(raw / f"{name}.npz") as arrays:
            return dict(arrays)

    arrays = raw_files.load(raw, download, read)
    masks = {part: torch.from_numpy(arrays[f"{part}_masks"]).bool() for part in SPLITS}
    check_integer("split", split, 0, len(masks["train"]) - 1)
    edge_index, _ = remove_self_loops(torch.from_numpy(arrays["edges"]).long().t().contiguous())
    y = torch.from_numpy(arrays["node_labels"]).long()
    data = Data(
        x=torch.from_numpy(arrays["node_features"]).float(),
        edge_index=to_undirected(edge_index, num_nodes=len(y)),
        y=y,
        **{f"{part}_mask": masks[part][split] for part in SPLITS},
    )
    return one_graph(name, data, int(y.max()) + 1, metric=_HETEROPHILOUS[name])


def facebook(
    name: str, *, seed: int = 0, search: Folders = SEARCH, cache: str | Path = CACHE, download: bool = True
) -> Task:
    """Predict the reported gender of users from Facebook friendships at a university in 2005.

    Looks for `data.mat` in the search folders as `linkx/<name>/raw`, then downloads it. The nodes with a label are
    split at random, 50 / 25 / 25 %, as where the data set was proposed.

    Args:
        name: "cornell5", "reed98", "amherst41" or "johnshopkins55".
        seed: Seed of the split.
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied, downloaded and processed files.
        download: Whether missing files may be downloaded.

    Returns:
        The task: one graph with a mask per split; nodes without a label are in none.

    Raises:
        ValueError: `name` is unknown, or the file cannot be read.
        FileNotFoundError: The raw file is missing; the message says where to put it.
        ModuleNotFoundError: scipy is missing.

    Source: Lim et al., Large Scale Learning on Non-Homophilous Graphs, NeurIPS 2021.
    """
    check_choice("name", name, _FACEBOOK)
    need_extra("scipy.io", "the Facebook networks", "data")
    root = Path(cache).expanduser() / "linkx"
    raw_files = RawFiles(name, ("data.mat",), (f"linkx/{name}/raw", f"{name}/raw"), search)
    data = raw_files.load(root / name / "raw", download, lambda: LINKXDataset(str(root), name)[0])
    add_random_masks(data, (data.y >= 0).nonzero().flatten(), (0.5, 0.25), seed)
    return one_graph(name, data, 2)


def co_purchase(
    name: str, *, seed: int = 0, search: Folders = SEARCH, cache: str | Path = CACHE, download: bool = True
) -> Task:
    """Predict the category of goods that Amazon's customers bought together.

    Looks for the raw file in the search folders as `amazon/<name>/raw`, then downloads it. The nodes are split at
    random, 60 / 20 / 20 %.

    Args:
        name: "Photo" or "Computers".
        seed: Seed of the split.
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied, downloaded and processed files.
        download: Whether missing files may be downloaded.

    Returns:
        The task: one graph with a mask per split.

    Raises:
        ValueError: `name` is unknown, or the file cannot be read.
        FileNotFoundError: The raw file is missing; the message says where to put it.
        ModuleNotFoundError: scipy is missing.

    Source: Shchur et al., Pitfalls of Graph Neural Network Evaluation, 2018.
    """
    check_choice("name", name, _CO_PURCHASE)
    need_extra("scipy.sparse", "the co-purchase graphs", "data")
    root = Path(cache).expanduser() / "amazon"
    file = f"amazon_electronics_{name.lower()}.npz"
    raw_files = RawFiles(name, (file,), (f"amazon/{name}/raw", f"{name}/raw"), search)
    data = raw_files.load(root / name / "raw", download, lambda: Amazon(str(root), name)[0])
    add_random_masks(data, torch.arange(data.num_nodes), (0.6, 0.2), seed)
    return one_graph(f"Amazon {name}", data, int(data.y.max()) + 1)


def reddit(*, search: Folders = SEARCH, cache: str | Path = CACHE, download: bool = True) -> Task:
    """Predict the community of Reddit posts that common commenters link; the download has 1.3 GB.

    Looks for the raw files in the search folders as `reddit/raw`, then downloads them.

    Args:
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied, downloaded and processed files.
        download: Whether missing files may be downloaded.

    Returns:
        The task: one graph with a mask per split.

    Raises:
        FileNotFoundError: The raw files are missing; the message says where to put them.
        ModuleNotFoundError: scipy is missing.
        ValueError: The files cannot be read.

    Source: Hamilton et al., Inductive Representation Learning on Large Graphs, NeurIPS 2017.
    """
    need_extra("scipy.sparse", "Reddit", "data")
    root = Path(cache).expanduser() / "reddit"
    files = ("reddit_data.npz", "reddit_graph.npz")
    raw_files = RawFiles("Reddit", files, ("reddit/raw",), search, "data=reddit_like is generated instead.")
    data = raw_files.load(root / "raw", download, lambda: Reddit(str(root))[0])
    return one_graph("Reddit", data, int(data.y.max()) + 1)
