"""Real networks: how raw files are read and split, by files made up here; the real ones are in test_published."""

import numpy as np
import pytest
import torch
from torch_geometric.utils import is_undirected

from pyg_dfgnn.datasets import co_purchase, facebook, heterophilous, reddit

sparse = pytest.importorskip("scipy.sparse")


def write_heterophilous(root, name, num_nodes=30):
    rng = np.random.default_rng(0)
    folder = root / "heterophilous" / name / "raw"
    folder.mkdir(parents=True)
    edges = np.array([[0, 1], [1, 0], [0, 1], [2, 2], [3, 4]])
    part = rng.integers(3, size=(10, num_nodes))
    masks = {f"{split}_masks": part == i for i, split in enumerate(("train", "val", "test"))}
    x, y = rng.random((num_nodes, 4)), np.arange(num_nodes) % 2
    np.savez(folder / f"{name}.npz", node_features=x, node_labels=y, edges=edges, **masks)
    return part


@pytest.mark.parametrize(("name", "metric"), [("tolokers", "roc_auc"), ("squirrel", "accuracy")])
def test_heterophilous(tmp_path, name, metric):
    part = write_heterophilous(tmp_path, name)
    options = {"search": [tmp_path], "cache": tmp_path / "cache", "download": False}
    task = heterophilous(name, **options, split=3)
    (graph,) = task.splits["train"]
    assert task.full_graph and (task.metric, task.num_features, task.num_classes) == (metric, 4, 2)
    assert graph.edge_index.tolist() == [[0, 1, 3, 4], [1, 0, 4, 3]]
    for i, split in enumerate(("train", "val", "test")):
        assert torch.equal(graph[f"{split}_mask"], torch.from_numpy(part[3] == i))
    # Once copied, the cache is enough.
    assert heterophilous(name, **{**options, "search": []}).name == name
    with pytest.raises(ValueError, match=r"'split' needs a value in \[0, 9\] \(got 10\)"):
        heterophilous(name, **options, split=10)


def test_facebook(tmp_path):
    from scipy.io import savemat

    folder = tmp_path / "linkx" / "reed98" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    adjacency = np.triu(rng.random((40, 40)) < 0.2, 1)
    info = rng.integers(3, size=(40, 7))
    savemat(folder / "data.mat", {"A": sparse.csc_matrix((adjacency | adjacency.T).astype(float)), "local_info": info})
    tasks = [
        facebook("reed98", search=[tmp_path], cache=tmp_path / "cache", download=False, seed=seed) for seed in (0, 0, 1)
    ]
    first, second, other = (task.splits["train"][0] for task in tasks)
    assert is_undirected(first.edge_index) and first.num_edges == 2 * adjacency.sum()
    masks = torch.stack([first[f"{split}_mask"] for split in ("train", "val", "test")])
    labelled = first.y >= 0
    # Unlabelled nodes belong to no split.
    assert torch.equal(masks.sum(dim=0), labelled.long()) and not labelled.all()
    count = int(labelled.sum())
    assert masks.sum(dim=1).tolist() == [
        round(0.5 * count),
        round(0.25 * count),
        count - round(0.5 * count) - round(0.25 * count),
    ]
    assert torch.equal(first.train_mask, second.train_mask) and not torch.equal(first.train_mask, other.train_mask)
    assert tasks[0].num_classes == 2 and tasks[0].num_features == first.x.size(1)


def test_reddit(tmp_path):
    folder = tmp_path / "reddit" / "raw"
    folder.mkdir(parents=True)
    x, y = np.ones((6, 5)), np.arange(6) % 3
    np.savez(folder / "reddit_data.npz", feature=x, label=y, node_types=np.array([1, 1, 2, 2, 3, 3]))
    adjacency = sparse.coo_matrix((np.ones(2), ([0, 1], [1, 0])), shape=(6, 6))
    sparse.save_npz(folder / "reddit_graph.npz", adjacency)
    task = reddit(search=[tmp_path], cache=tmp_path / "cache", download=False)
    (graph,) = task.splits["val"]
    assert graph.val_mask.nonzero().flatten().tolist() == [2, 3] and graph.edge_index.tolist() == [[0, 1], [1, 0]]
    assert (task.num_features, task.num_classes, task.synthetic) == (5, 3, None)


@pytest.mark.parametrize(
    ("make", "name", "file"),
    [
        (heterophilous, "squirrel", "squirrel.npz"),
        (facebook, "cornell5", "data.mat"),
        (co_purchase, "Photo", "amazon_electronics_photo.npz"),
    ],
    ids=["squirrel", "cornell5", "photo"],
)
def test_missing_files_and_unknown_names(tmp_path, make, name, file):
    options = {"search": [tmp_path], "cache": tmp_path / "cache", "download": False}
    with pytest.raises(FileNotFoundError, match=f"(?s)Put {file} into one of.*{name}.*PYG_DFGNN_DATA"):
        make(name, **options)
    with pytest.raises(ValueError, match=r"'name' needs one of .* \(got 'nothing'\)"):
        make("nothing", **options)


def test_missing_reddit_names_the_generated_one(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"(?s)reddit_data.npz, reddit_graph.npz.*data=reddit_like is generated"
    ):
        reddit(search=[tmp_path], cache=tmp_path / "cache", download=False)
