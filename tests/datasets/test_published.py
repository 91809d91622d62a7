"""Published counts against what the data configs load."""

import pytest
import torch
from hydra.utils import instantiate
from torch_geometric.data import Data

from pyg_dfgnn.datasets import Task
from pyg_dfgnn.datasets.files import SEARCH
from pyg_dfgnn.paths import configs_dir
from tests.configs.train import train_config
from tests.datasets.sizes import DATA, TABLE_1, Entry, Size, deviations, load, size_of

CONFIGS = sorted(path.stem for path in (configs_dir() / "data").glob("*.yaml"))
SMALL = [name for name in CONFIGS if name.endswith("_small")]
REAL = ["cora", "citeseer", "pubmed_made_features", "cornell5", "tolokers", "minesweeper", "squirrel", "photo"]
RELATIONAL = ["aifb", "mutag", "fb15k237", "imdb"]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty cache and no data files."""
    monkeypatch.setenv("PYG_DFGNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYG_DFGNN_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_entries_and_configs_agree():
    # A graph in pieces has no edge_index to count; molecules are compared in tests of their own.
    others = {*SMALL, "papers100M_like", "solubility", "qm9"}
    assert len(TABLE_1) == 12 and set(DATA) | others == set(CONFIGS)
    for name, entry in DATA.items():
        assert all(tolerance >= 0 for tolerance in entry.tolerance), name


@pytest.mark.parametrize("name", [*REAL, *RELATIONAL])
def test_real_files_have_the_published_counts(name, tmp_path):
    task_config = train_config(f"data={name}").data.task
    make = instantiate(task_config, _partial_=True)
    changes = {"search": SEARCH, "cache": tmp_path, "download": False}
    try:
        task = make(**{key: value for key, value in changes.items() if key in task_config})
    except (FileNotFoundError, ModuleNotFoundError) as error:
        pytest.skip(str(error))
    size, published = size_of(task), DATA[name].size
    # The largest degree of some data sets is not published.
    assert published in (size, size._replace(max_degree=None))
    (graph,) = task.splits["train"]
    if task.level == "link":
        assert [len(task.splits[split][0].y) for split in ("train", "val", "test")] == [544_230, 35_070, 40_932]
        return
    assert task.full_graph
    masks = torch.stack([getattr(graph, f"{split}_mask") for split in ("train", "val", "test")])
    assert (masks.sum(dim=0) <= 1).all() and (masks.sum(dim=1) > 0).all()
    assert (graph.y[masks.any(dim=0)] >= 0).all()


@pytest.mark.parametrize("name", SMALL)
def test_small_sets_load(name, here):
    task = load(name)
    assert task.synthetic
    y = torch.cat([graph.y for graphs in task.splits.values() for graph in graphs])
    assert 0 <= int(y.min()) <= int(y.max()) < task.num_classes
    assert max(graph.num_nodes for graphs in task.splits.values() for graph in graphs) < 12_000


@pytest.mark.parametrize(
    "name", [name for name in DATA if name.split("_")[0] in ("am", "bgs", "mag", "wikikg2", "biokg")]
)
def test_graphs_with_relations_keep_their_counts_when_scaled(name, here):
    scale, entry = 1 / 200, DATA[name]
    task = load(name, [f"task.scale={scale}", "task.device=cpu"])
    size = size_of(task)
    assert size.nodes == pytest.approx(scale * entry.size.nodes, rel=0.01) and "rho_s" in task.synthetic
    assert size.edges == pytest.approx(scale * entry.size.edges, rel=0.02)


@pytest.mark.parametrize("name", ["reddit_like", "proteins_like", "ppa_like"])
def test_large_graphs_keep_their_degrees_when_scaled(name, here):
    """A 16th of the nodes with a 16th of the edges at each."""
    scale, entry = 1 / 16, DATA[name]
    mean = scale * entry.size.mean_degree
    overrides = [f"task.scale={scale}", f"task.mean_degree={mean}", "task.num_features=4", "task.cache=null"]
    size = size_of(load(name, overrides))
    assert size.nodes == round(scale * entry.size.nodes)
    assert size.mean_degree == pytest.approx(mean, rel=0.05)
    assert size.max_degree == pytest.approx(scale * entry.size.max_degree, rel=0.15)


def test_size_and_deviations():
    edge_index = torch.tensor([[0, 1, 2], [1, 1, 0]])
    graphs = [Data(x=torch.ones(3, 2), edge_index=edge_index, y=torch.zeros(3)), Data(x=torch.ones(1, 2))]
    graphs[1].edge_index = edge_index[:, :0]
    size = size_of(Task("x", {"train": graphs, "test": graphs[:1]}, 2, 2))
    assert size == Size(2, 2.0, 1.5, 2, 2, 2) and size.mean_degree == 0.75
    entry = Entry("X", Size(2, 2.5, 1.5, None, 2, 2), (0.3, 0.1, 0.0))
    assert deviations(size, entry) == {"nodes": (pytest.approx(-0.2), 0.3), "edges": (0.0, 0.1)}
