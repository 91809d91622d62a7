"""Molecules of files, of a package and generated: what a graph holds, and which files are refused."""

import csv
import sys

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pyg_dfgnn.datasets import molecules, qm9, solubility
from pyg_dfgnn.datasets.files import SEARCH
from pyg_dfgnn.datasets.task import value_task

# Two molecules: C-N=O, and C=C with a charge.
BONDS = {
    "atom_ptr": np.array([0, 3, 5, 7, 9, 11]),
    "atomic_number": np.array([6, 7, 8, 6, 6, 6, 5, 6, 6, 6, 6], dtype=np.uint8),
    "charge": np.array([0, 0, -1, 0, 1, 0, 0, 0, 0, 0, 0], dtype=np.int8),
    "bond_ptr": np.array([0, 2, 3, 4, 5, 6]),
    "bonds": np.array([[0, 1], [1, 2], [0, 1], [0, 1], [0, 1], [0, 1]], dtype=np.uint8),
    "bond_order": np.array([1, 2, 2, 1, 3, 1], dtype=np.uint8),
    "log_solubility": np.array([-1.0, 2.0, -4.0, 3.0, 0.5], dtype=np.float32),
    "is_test": np.array([False, False, False, False, True]),
}
POSITIONS = {
    "atom_ptr": np.array([0, 3, 5, 7]),
    "atomic_number": np.array([6, 1, 1, 7, 8, 9, 9], dtype=np.uint8),
    "position": np.array(
        [[0, 0, 0], [3, 4, 0], [6, 8, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 9]], dtype=np.float32
    ),
    "targets": np.arange(36, dtype=np.float64).reshape(3, 12) ** 2 - 400,
    "split": np.array([0, 0, 1], dtype=np.uint8),
}


def write(folder, name, arrays):
    (folder / "molecules").mkdir(exist_ok=True)
    np.savez(folder / "molecules" / name, **arrays)
    return folder / "molecules" / name


def all_graphs(task):
    return [graph for graphs in task.splits.values() for graph in graphs]


def test_bonds_are_edges_both_ways(tmp_path):
    write(tmp_path, "solubility.npz", BONDS)
    task = solubility(search=[tmp_path], val_share=0.25)
    assert {split: len(graphs) for split, graphs in task.splits.items()} == {"train": 3, "val": 1, "test": 1}
    (graph,) = (graph for graph in all_graphs(task) if graph.num_nodes == 3)
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert graph.edge_attr.tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert graph.x.nonzero().tolist() == [[0, 0], [1, 1], [2, 2], [2, 10]] and graph.x[2, 10] == -1
    # An element beside the nine has a column for all of these.
    assert any((graph.x[:, 9] == 1).any() for graph in all_graphs(task))
    assert (task.level, task.metric, task.unit, task.synthetic) == ("graph", "mae", "log10(mol/L)", None)
    (test,) = task.splits["test"]
    assert (test.y * task.scale + task.shift).item() == pytest.approx(0.5)


def test_targets_are_scaled_by_the_training_split_alone(tmp_path):
    write(tmp_path, "solubility.npz", BONDS)
    task = solubility(search=[tmp_path], val_share=0.25)
    train = torch.cat([graph.y for graph in task.splits["train"]]) * task.scale + task.shift
    assert train.mean().item() == pytest.approx(task.shift) and train.std(correction=0).item() == pytest.approx(
        task.scale
    )
    moved = BONDS | {"log_solubility": np.where(BONDS["is_test"], 1e6, BONDS["log_solubility"])}
    write(tmp_path, "solubility.npz", moved)
    again = solubility(search=[tmp_path], val_share=0.25)
    assert (again.shift, again.scale) == (task.shift, task.scale)


def test_values_of_one_graph_are_scaled_by_its_training_nodes():
    mask = torch.tensor([True, True, False, False])
    graph = Data(
        x=torch.ones(4, 1), edge_index=torch.zeros(2, 0, dtype=torch.long), y=torch.tensor([1.0, 3.0, 7.0, 9.0])
    )
    graph.update({"train_mask": mask, "val_mask": ~mask, "test_mask": ~mask})
    task = value_task("x", dict.fromkeys(("train", "val", "test"), [graph]), "m")
    assert (task.shift, task.scale) == (2.0, 1.0) and graph.y.tolist() == [-1.0, 1.0, 5.0, 7.0]
    alike = Data(x=graph.x, y=torch.ones(4))
    with pytest.raises(
        ValueError, match=r"'splits' needs finite and different training values of x \(got deviation 0.0"
    ):
        value_task("x", {"train": [alike]}, "m")


def test_edges_by_radius(tmp_path):
    write(tmp_path, "qm9_24k.npz", POSITIONS)
    arrays = POSITIONS | {"split": np.array([0, 0, 1, 2])[:3]}
    write(tmp_path, "qm9_24k.npz", arrays)
    task = qm9(search=[tmp_path], source="file", target="Dipole_debye")
    first, second = task.splits["train"]
    assert first.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]] and first.edge_attr.tolist() == [[5.0]] * 4
    assert second.edge_attr.tolist() == [[1.0]] * 2 and task.splits["val"][0].num_edges == 0
    assert first.x.tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert [round((graph.y * task.scale + task.shift).item()) for graph in (first, second)] == [-400, -256]
    assert task.unit == "debye" and set(first.keys()) == {"x", "pos", "edge_index", "edge_attr", "y"}
    wide = qm9(search=[tmp_path], source="file", radius=10.0)
    assert wide.splits["train"][0].num_edges == 6 and wide.unit == "Hartree"


def test_all_of_qm9_from_its_package(tmp_path, monkeypatch):
    """The package is found, not imported, and its tables are read once."""
    data = tmp_path / "qm9pack" / "data"
    data.mkdir(parents=True)
    (tmp_path / "qm9pack" / "__init__.py").write_text("raise ImportError('read, not imported')")
    fields = ["Elements", "XYZ_Ang", *molecules.TARGETS]
    for part in (1, 2, 3):
        with open(data / f"qm9_part{part}.csv", "w", newline="") as stream:
            writer = csv.DictWriter(stream, fields)
            writer.writeheader()
            values = {name: part + place for place, name in enumerate(molecules.TARGETS)}
            writer.writerow({"Elements": "['C','H']", "XYZ_Ang": f"[[2.5E-1,0.,0.],[-1.0,0.,{part}.]]", **values})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(molecules, "_QM9_SPLIT", (2, 0))
    for _ in range(2):
        task = qm9(search=[], cache=tmp_path / "cache")
        assert task.synthetic is None and len(all_graphs(task)) == 3 and "qm9pack" not in sys.modules
        distances = sorted(graph.edge_attr[0].item() for graph in all_graphs(task))
        assert distances == pytest.approx([(1.25**2 + part**2) ** 0.5 for part in (1, 2, 3)])
        (data / "qm9_part2.csv").write_bytes((data / "qm9_part2.csv").read_bytes())
    (data / "qm9_part1.csv").write_text("nothing")
    with pytest.raises(ValueError, match=f"the files of qm9pack in {data} may be damaged"):
        qm9(search=[], cache=None, source="package")


def test_missing_files_are_generated_or_asked_for(tmp_path, caplog):
    for make, file in ((solubility, "solubility.npz"), (qm9, "qm9_24k.npz")):
        with pytest.raises(FileNotFoundError, match=f"Put {file} into one of"):
            make(source="file", search=[tmp_path])
        task = make(search=[tmp_path], num_graphs=30)
        assert task.name.endswith("(generated)") and task.synthetic == "molecules and targets"
        assert f"no {file} in molecules of a data folder" in caplog.text and "molecules are generated" in caplog.text
        again = make(source="generated", num_graphs=30)
        for first, second in zip(all_graphs(task), all_graphs(again), strict=True):
            assert torch.equal(first.x, second.x) and torch.equal(first.edge_attr, second.edge_attr)
            assert torch.equal(first.y, second.y)
    with pytest.raises(ModuleNotFoundError, match="source=package needs qm9pack: pip install qm9pack"):
        qm9(source="package", search=[])


@pytest.mark.parametrize(
    ("make", "file", "arrays", "change", "message"),
    [
        (solubility, "solubility.npz", BONDS, {"bonds": None}, r"\(lacks bonds\)"),
        (solubility, "solubility.npz", BONDS, {"bonds": BONDS["bonds"] + 1}, "'bonds' needs numbers of atoms inside"),
        (solubility, "solubility.npz", BONDS, {"bond_ptr": BONDS["bond_ptr"][::-1]}, "'bond_ptr' needs 6 ascending"),
        (solubility, "solubility.npz", BONDS, {"charge": BONDS["charge"][1:]}, r"'charge' needs 11 rows \(got 10\)"),
        (solubility, "solubility.npz", BONDS, {"log_solubility": np.full(5, np.nan)}, "'log_solubility' needs finite"),
        (solubility, "solubility.npz", BONDS, {"bond_order": np.full(6, 4)}, "'bond_order' needs orders 1, 2 and 3"),
        (
            qm9,
            "qm9_24k.npz",
            POSITIONS,
            {"position": np.zeros((7, 2))},
            r"'position' and 'targets' need shapes \[N, 3\]",
        ),
        (qm9, "qm9_24k.npz", POSITIONS, {"atomic_number": np.full(7, 15)}, "'atomic_number' needs elements H, C, N, O"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and len(value) == 1 else "",
)
def test_bad_files_are_refused_by_name(tmp_path, make, file, arrays, change, message):
    path = write(tmp_path, file, {name: value for name, value in (arrays | change).items() if value is not None})
    with pytest.raises(ValueError, match=rf"in {path} may be damaged; replace or remove them: .*{message}"):
        make(source="file", search=[tmp_path])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"in {path} may be damaged"):
        make(source="file", search=[tmp_path])


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (qm9, {"target": "gap"}, r"'target' needs one of 'Dipole_debye', .* \(got 'gap'\)"),
        (qm9, {"radius": 0.0}, r"'radius' needs a value >= 0.1 \(got 0.0\)"),
        (qm9, {"source": "web"}, r"'source' needs one of 'auto', 'package', 'file', 'generated' \(got 'web'\)"),
        (solubility, {"val_share": 1.0}, r"'val_share' needs a value in \[0.01, 0.9\] \(got 1.0\)"),
        (solubility, {"num_graphs": 2, "source": "generated"}, r"'num_graphs' needs a value >= 3 \(got 2\)"),
    ],
    ids=["target", "radius", "source", "val_share", "num_graphs"],
)
def test_wrong_arguments(make, wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)


@pytest.mark.parametrize("make", [solubility, qm9])
def test_generated_molecules_are_as_large_as_real_ones(make):
    try:
        real = make(source="file", search=SEARCH, **({"num_graphs": 2000} if make is qm9 else {}))
    except FileNotFoundError as error:
        pytest.skip(str(error).splitlines()[0])
    means = []
    for task in (real, make(source="generated")):
        graphs = all_graphs(task)
        nodes, edges = (sum(getattr(graph, name) for graph in graphs) for name in ("num_nodes", "num_edges"))
        means.append([nodes / len(graphs), edges / nodes])
    assert means[1] == pytest.approx(means[0], rel=0.05)
    sizes = {"train": 1025 - 102, "val": 102, "test": 257}
    assert make is qm9 or {split: len(graphs) for split, graphs in real.splits.items()} == sizes
