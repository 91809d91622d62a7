"""Citation graphs: where files are looked for, what is said when they are missing, PubMed's made-up features."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_dfgnn.datasets import planetoid, pubmed_made_features
from pyg_dfgnn.datasets.files import SEARCH

scipy_sparse = pytest.importorskip("scipy.sparse")


def write_raw(folder, name="Cora", num_classes=3, num_train=6, num_all=520, num_test=10):
    """Raw files in Planetoid's layout: a ring with random features, the test papers last."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    num_nodes = num_all + num_test

    def features(rows):
        return scipy_sparse.csr_matrix((rng.random((rows, 7)) < 0.4).astype(np.float32))

    def labels(rows):
        return np.eye(num_classes, dtype=np.int32)[np.arange(rows) % num_classes]

    graph = {node: [(node - 1) % num_nodes, (node + 1) % num_nodes] for node in range(num_nodes)}
    allx = features(num_all)
    parts = {"x": allx[:num_train], "tx": features(num_test), "allx": allx, "graph": graph}
    parts |= {"y": labels(num_train), "ty": labels(num_test), "ally": labels(num_all)}
    for part, value in parts.items():
        (folder / f"ind.{name.lower()}.{part}").write_bytes(pickle.dumps(value))
    ids = np.arange(num_all, num_nodes)
    (folder / f"ind.{name.lower()}.test.index").write_text("".join(f"{node}\n" for node in ids))
    return parts


@pytest.mark.parametrize("layout", ["planetoid/Cora/raw", "Cora/raw"])
def test_local_files_are_copied_and_loaded(tmp_path, layout):
    source = tmp_path / "source"
    write_raw(source / layout)
    before = sorted(source.rglob("*"))
    task = planetoid("Cora", search=[tmp_path / "empty", source], cache=tmp_path / "cache", download=False)
    graph = task.splits["train"][0]
    assert task.full_graph and task.num_classes == 3 and task.num_features == 7 and task.metric == "accuracy"
    assert graph.num_edges == 2 * 530
    assert [int(graph[f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [6, 500, 10]
    sums = graph.x.sum(dim=1)
    torch.testing.assert_close(sums, (sums > 0).float())
    assert sorted(source.rglob("*")) == before

    # The second time the cache is enough.
    again = planetoid("Cora", search=[], cache=tmp_path / "cache", download=False, normalize_features=False)
    assert set(again.splits["train"][0].x.unique().tolist()) == {0.0, 1.0}


def test_missing_files_are_named(tmp_path):
    raw = tmp_path / "planetoid" / "PubMed" / "raw"
    write_raw(raw, "PubMed")
    (raw / "ind.pubmed.allx").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        planetoid("PubMed", search=[tmp_path], cache=tmp_path / "cache", download=False)
    message = str(caught.value)
    assert f"{raw} (lacks ind.pubmed.allx)" in message
    assert "PYG_DFGNN_DATA" in message and "pubmed_made_features" in message


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'name' needs one of 'Cora', 'CiteSeer', 'PubMed' \(got 'cora'\)"):
        planetoid("cora")


def test_pubmed_made_features(tmp_path):
    raw = tmp_path / "PubMed" / "raw"
    parts = write_raw(raw, "PubMed")
    (raw / "ind.pubmed.allx").unlink()
    task, again = (pubmed_made_features(search=[tmp_path], normalize_features=False) for _ in range(2))
    graph = task.splits["train"][0]
    assert "features made up" in task.name and "features" in task.synthetic
    assert torch.equal(graph.x, again.splits["train"][0].x)
    torch.testing.assert_close(graph.x[:6], torch.from_numpy(parts["x"].toarray()))
    torch.testing.assert_close(graph.x[520:], torch.from_numpy(parts["tx"].toarray()))
    drawn, real = graph.x[6:520], graph.x[520:]
    torch.testing.assert_close((drawn > 0).float().mean(0), (real > 0).float().mean(0), atol=0.08, rtol=0)
    assert torch.equal(graph.y[:520], torch.from_numpy(parts["ally"]).argmax(dim=1))
    assert torch.equal(graph.y[520:], torch.from_numpy(parts["ty"]).argmax(dim=1))
    assert graph.num_edges == 2 * 530


def test_damaged_files_are_named(tmp_path):
    raw = tmp_path / "PubMed" / "raw"
    write_raw(raw, "PubMed")
    (raw / "ind.pubmed.tx").write_text("junk")
    with pytest.raises(ValueError, match=rf"the files of PubMed in {raw}.* may be damaged.*UnpicklingError"):
        pubmed_made_features(search=[tmp_path])


@pytest.mark.parametrize(
    ("name", "nodes", "edges", "split"),
    [("Cora", 2708, 10556, (140, 500, 1000)), ("CiteSeer", 3327, 9104, (120, 500, 1000))],
)
def test_real_files(tmp_path, name, nodes, edges, split):
    if not any((Path(folder) / "planetoid" / name / "raw").is_dir() for folder in SEARCH):
        pytest.skip(f"{name}'s raw files are not here (PYG_DFGNN_DATA)")
    graph = planetoid(name, search=SEARCH, cache=tmp_path, download=False).splits["train"][0]
    assert (graph.num_nodes, graph.num_edges) == (nodes, edges)
    assert tuple(int(graph[f"{part}_mask"].sum()) for part in ("train", "val", "test")) == split


def test_real_pubmed_graph():
    if not any((Path(folder) / "planetoid" / "PubMed" / "raw").is_dir() for folder in SEARCH):
        pytest.skip("PubMed's raw files are not here (PYG_DFGNN_DATA)")
    graph = pubmed_made_features(search=SEARCH).splits["train"][0]
    assert (graph.num_nodes, graph.num_edges) == (19717, 88648)
    assert (graph.x > 0).sum(dim=1).float().mean() == pytest.approx(50.1, rel=0.02)
    assert tuple(int(graph[f"{part}_mask"].sum()) for part in ("train", "val", "test")) == (60, 500, 1000)
