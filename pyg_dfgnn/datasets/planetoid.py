"""Tasks of the citation graphs Cora, CiteSeer and PubMed with the public split, from raw files or a download."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import remove_self_loops, to_undirected

from pyg_dfgnn.datasets.files import CACHE, SEARCH, Folders, RawFiles
from pyg_dfgnn.datasets.task import Task, add_masks, one_graph
from pyg_dfgnn.errors import check_choice, need_extra

NAMES = ("Cora", "CiteSeer", "PubMed")
_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


def planetoid(
    name: str,
    *,
    search: Folders = SEARCH,
    cache: str | Path = CACHE,
    download: bool = True,
    normalize_features: bool = True,
) -> Task:
    """Classify the papers of a citation graph (Planetoid's public split).

    Looks for the raw files in the cache, then in the search folders as `planetoid/<name>/raw` or `<name>/raw`, then
    downloads them. Raw files are copied into the cache, so that the source folder stays as it is.

    Args:
        name: "Cora", "CiteSeer" or "PubMed".
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied, downloaded and processed files.
        download: Whether missing files may be downloaded.
        normalize_features: Scale each feature row to sum 1.

    Returns:
        The task: one graph with a mask per split.

    Raises:
        ValueError: `name` is unknown, or the files cannot be read.
        FileNotFoundError: The raw files are missing; the message says where to put them.
        ModuleNotFoundError: scipy is missing.
    """
    check_choice("name", name, NAMES)
    need_extra("scipy.sparse", "the citation graphs", "data")
    root = Path(cache).expanduser() / "planetoid"
    raw_files = _raw_files(name, search)
    dataset = raw_files.load(root / name / "raw", download, lambda: Planetoid(str(root), name))
    return _task(name, dataset[0], dataset.num_classes, normalize_features)


def pubmed_made_features(*, search: Folders = SEARCH, normalize_features: bool = True, seed: int = 0) -> Task:
    """Classify the papers of PubMed with made-up features for those papers that `ind.pubmed.allx` would describe.

    The 60 training and 1,000 test papers keep their real features. Each other paper draws, independently of its label,
    word j with the share of test papers that hold it and a weight from one of those papers. Accuracies on this task
    are not comparable with PubMed's.

    Args:
        search: Folders that may hold the raw files (all but allx), as in :func:`planetoid`.
        normalize_features: Scale each feature row to sum 1.
        seed: Seed of the made-up features.

    Returns:
        The task: one graph with a mask per split.

    Raises:
        FileNotFoundError: The raw files are missing; the message says where to put them.
        ModuleNotFoundError: scipy is missing.
        ValueError: The files cannot be read.
    """
    need_extra("scipy.sparse", "the citation graphs", "data")
    raw_files = _raw_files("PubMed", search, skipped=("allx",))
    raw = raw_files.need()
    with raw_files.reading(raw):
        parts = {part: _read(raw / f"ind.pubmed.{part}") for part in ("x", "tx", "ally", "ty", "graph")}
        test_ids = torch.tensor([int(line) for line in (raw / "ind.pubmed.test.index").read_text().split()])

    y = torch.from_numpy(parts["ally"]).argmax(dim=1)
    num_nodes = len(y) + len(test_ids)
    train_ids = torch.arange(parts["x"].shape[0])
    real_test = torch.from_numpy(parts["tx"].toarray()).float()
    x = _made_features(real_test, num_nodes, seed)
    x[train_ids] = torch.from_numpy(parts["x"].toarray()).float()
    x[test_ids] = real_test
    y = torch.cat([y, y.new_empty(len(test_ids))])
    y[test_ids] = torch.from_numpy(parts["ty"]).argmax(dim=1)

    edges = [(source, target) for source, targets in parts["graph"].items() for target in targets]
    edge_index, _ = remove_self_loops(torch.tensor(edges).t())
    data = Data(x=x, edge_index=to_undirected(edge_index, num_nodes=num_nodes), y=y)
    val_ids = torch.arange(len(train_ids), len(train_ids) + 500)
    add_masks(data, (train_ids, val_ids, test_ids))
    synthetic = "features of all but the training and test papers"
    return _task("PubMed (features made up)", data, int(y.max()) + 1, normalize_features, synthetic)


def _made_features(real: Tensor, num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    share = (real > 0).float().mean(dim=0)
    used = torch.rand(num_rows, real.size(1), generator=generator) < share
    features = torch.zeros(num_rows, real.size(1))
    for word in range(real.size(1)):
        weights = real[real[:, word] > 0, word]
        rows = used[:, word].nonzero().flatten()
        if len(rows):
            features[rows, word] = weights[torch.randint(len(weights), (len(rows),), generator=generator)]
    return features


def _task(name: str, data: Data, num_classes: int, normalize_features: bool, synthetic: str | None = None) -> Task:
    if normalize_features:
        data = NormalizeFeatures()(data)
    return one_graph(name, data, num_classes, synthetic=synthetic)


def _raw_files(name: str, search: Folders, skipped: Sequence[str] = ()) -> RawFiles:
    files = [f"ind.{name.lower()}.{part}" for part in _PARTS if part not in skipped]
    hint = "Without ind.pubmed.allx, data=pubmed_made_features runs on the real graph with made-up features."
    hint = hint if name == "PubMed" and not skipped else ""
    return RawFiles(name, files, (f"planetoid/{name}/raw", f"{name}/raw"), search, hint)


def _read(file: Path) -> Any:
    # The files are pickles of scipy and numpy objects under Python 2.
    with open(file, "rb") as stream:
        return pickle.load(stream, encoding="latin1")
