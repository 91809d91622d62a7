"""Tasks of molecules: solubility from bonds, quantum chemistry from positions; of files, of a package, or generated."""

from __future__ import annotations

import csv
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dfgnn.datasets.files import CACHE, SEARCH, Folders, RawFiles, cached, unpack
from pyg_dfgnn.datasets.task import SPLITS, Task, progress, value_task
from pyg_dfgnn.errors import check_choice, check_integer, check_range

log = logging.getLogger(__name__)

MoleculeArrays = Mapping[str, np.ndarray]
"""Arrays of many molecules, joined: `atom_ptr [G + 1]` and `atomic_number [N]`, and what a file has beside them."""

TARGETS = {
    "Dipole_debye": "debye",
    "Polarizability_bohr3": "bohr^3",
    "HOMO_au": "Hartree",
    "LUMO_au": "Hartree",
    "HOMO_LUMO_gap_au": "Hartree",
    "R2_bohr2": "bohr^2",
    "ZPVE_au": "Hartree",
    "InternalEnergy_0K_au": "Hartree",
    "InternalEnergy_298K_au": "Hartree",
    "Enthalphy_298K_au": "Hartree",
    "GibbsFreeEnergy_298K_au": "Hartree",
    "Heatcapacity_Cv_cal_mol_K": "cal/(mol K)",
}
"""Targets of QM9 in their order, as its files spell them, and their units."""
_ORGANIC = (6, 7, 8, 9, 15, 16, 17, 35, 53)
_QM9_ATOMS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
_QM9_SPLIT = (110_000, 10_000)
_GENERATED = {"solubility": 1282, "QM9": 2000}


def solubility(
    *,
    source: str = "auto",
    num_graphs: int | None = None,
    val_share: float = 0.1,
    seed: int = 0,
    search: Folders = SEARCH,
) -> Task:
    """Predict the logarithm of the solubility of drug-like molecules from their atoms and bonds.

    A node has its element, one of nine or another, and its charge, `x [N, 11]`; bonds are edges both ways with their
    order, 1 to 3, `edge_attr [E, 3]`.

    Args:
        source: "file" reads `molecules/solubility.npz` in the search folders, with the published test molecules;
            "generated" draws 1,282 molecules of the same sizes, whose solubility is a made-up function of atoms and
            bonds; "auto" generates where there is no file.
        num_graphs: Number of molecules; None: all.
        val_share: Share of the training molecules that validation takes.
        seed: Seed of that share, of fewer molecules, and of what is generated.
        search: Folders to search for the file, in this order.

    Returns:
        The task at graph level, scored by the mean absolute error.

    Raises:
        FileNotFoundError: The file is missing; the message says where to put it.
        ValueError: An argument is out of range, or the file cannot be read.
    """
    check_choice("source", source, ("auto", "file", "generated"))
    check_range("val_share", val_share, 0.01, 0.9)
    raw = RawFiles("solubility", ("solubility.npz",), ("molecules",), search)
    needed = ("atom_ptr", "atomic_number", "charge", "bond_ptr", "bonds", "bond_order", "log_solubility", "is_test")
    arrays, is_generated = _read(raw, source, needed, lambda: _generate_bonds(seed), _check_bonds)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(~arrays["is_test"]))
    bound = max(1, round(val_share * len(order)))
    ids = _fewer(num_graphs, seed, (order[bound:], order[:bound], np.flatnonzero(arrays["is_test"])))
    splits = _split(_bond_graphs(arrays), ids)
    return _task("solubility", splits, "log10(mol/L)", is_generated)


def qm9(
    *,
    target: str = "HOMO_LUMO_gap_au",
    radius: float = 5.0,
    source: str = "auto",
    num_graphs: int | None = None,
    seed: int = 0,
    search: Folders = SEARCH,
    cache: str | Path | None = CACHE,
) -> Task:
    """Predict a property of small molecules from the positions of their atoms.

    A node has its element, `x [N, 5]`; edges link atoms up to a radius apart, both ways, and carry the distance in
    Angstrom, `edge_attr [E, 1]`.

    Args:
        target: One of `TARGETS`.
        radius: Largest distance of two linked atoms in Angstrom.
        source: "package" reads all 130,831 molecules from the Python package qm9pack, if it is installed, of which
            110,000 are drawn for training and 10,000 for validation; "file" reads 24,000 from `molecules/qm9_24k.npz`
            in the search folders; "generated" draws 2,000 molecules of the same sizes with made-up positions and
            targets; "auto" takes the first of these that is there.
        num_graphs: Number of molecules; None: all.
        seed: Seed of the split of the package, of fewer molecules, and of what is generated.
        search: Folders to search for the file, in this order.
        cache: Folder that keeps the molecules of the package; None: they are not kept.

    Returns:
        The task at graph level, scored by the mean absolute error.

    Raises:
        FileNotFoundError: The file is missing; the message says where to put it.
        ModuleNotFoundError: The package is missing.
        ValueError: An argument is out of range, or a file cannot be read.

    Source: Ramakrishnan et al., Quantum chemistry structures and properties of 134 kilo molecules, Sci. Data 2014.
    """
    check_choice("target", target, tuple(TARGETS))
    check_range("radius", radius, 0.1)
    check_choice("source", source, ("auto", "package", "file", "generated"))
    raw = RawFiles("QM9", ("qm9_24k.npz",), ("molecules",), search)
    package = importlib.util.find_spec("qm9pack") if source in ("auto", "package") else None
    if package is None and source == "package":
        raise ModuleNotFoundError("source=package needs qm9pack: pip install qm9pack")
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parent / "data"
        files = RawFiles("qm9pack", [f"qm9_part{part}.csv" for part in (1, 2, 3)], (".",), [folder])

        def make() -> dict[str, list[Data]]:
            with files.reading(files.need()):
                arrays = _join_rows(folder, files.files)
                _check_positions(arrays)
                return {"all": _position_graphs(arrays)}

        parameters = {"bytes": files.sizes(files.need()), "recipe": 1}
        graphs, is_generated = cached(cache, "qm9", parameters, make)["all"], False
        order = np.random.default_rng(seed).permutation(len(graphs))
        ids = np.split(order, np.cumsum(_QM9_SPLIT))
    else:
        needed = ("atom_ptr", "atomic_number", "position", "targets", "split")
        arrays, is_generated = _read(raw, source, needed, lambda: _generate_positions(seed), _check_positions)
        graphs = _position_graphs(arrays)
        ids = [np.flatnonzero(arrays["split"] == part) for part in range(len(SPLITS))]
    splits = _split(graphs, _fewer(num_graphs, seed, ids))
    column = list(TARGETS).index(target)
    for chosen in splits.values():
        _link(chosen, radius)
        for graph in chosen:
            graph.y = graph.targets[:, column]
            del graph.targets
    return _task(f"QM9 {target}", splits, TARGETS[target], is_generated)


def _task(name: str, splits: dict[str, list[Data]], unit: str, is_generated: bool) -> Task:
    name, synthetic = (f"{name} (generated)", "molecules and targets") if is_generated else (name, None)
    return value_task(name, splits, unit, level="graph", synthetic=synthetic)


def _read(
    raw: RawFiles,
    source: str,
    needed: tuple[str, ...],
    make: Callable[[], MoleculeArrays],
    check: Callable[[MoleculeArrays], None],
) -> tuple[MoleculeArrays, bool]:
    """Return the arrays of a file, or of molecules that are generated in its place, and whether they are."""
    folder = None if source == "generated" else raw.need() if source == "file" else raw.find()
    if folder is None:
        if source == "auto":
            told = raw.name, raw.files[0], ", ".join(raw.places), _GENERATED[raw.name]
            log.warning("%s: no %s in %s of a data folder: %d molecules are generated, with made-up values", *told)
        return make(), True
    file = folder / raw.files[0]
    with raw.reading(file), np.load(file) as stored:
        if missing := [name for name in needed if name not in stored]:
            raise ValueError(f"the file needs arrays {', '.join(needed)} (lacks {', '.join(missing)})")
        arrays = {name: stored[name] for name in needed}
        check(arrays)
    return arrays, False


def _check_ptr(arrays: MoleculeArrays, ptr: str, values: tuple[str, ...], per_graph: tuple[str, ...]) -> None:
    starts = arrays[ptr].astype(np.int64)
    count, num_graphs = int(starts[-1]), len(arrays["atom_ptr"]) - 1
    if starts[0] != 0 or (np.diff(starts) < 0).any() or len(starts) != num_graphs + 1:
        raise ValueError(f"'{ptr}' needs {num_graphs + 1} ascending offsets from 0")
    for name, needed in [*((name, count) for name in values), *((name, num_graphs) for name in per_graph)]:
        if len(arrays[name]) != needed:
            raise ValueError(f"'{name}' needs {needed} rows (got {len(arrays[name])})")
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"'{name}' needs finite numbers")


def _check_bonds(arrays: MoleculeArrays) -> None:
    _check_ptr(arrays, "atom_ptr", ("atomic_number", "charge"), ("log_solubility", "is_test"))
    _check_ptr(arrays, "bond_ptr", ("bonds", "bond_order"), ())
    atoms = np.diff(arrays["atom_ptr"]).repeat(np.diff(arrays["bond_ptr"]))
    if not (arrays["bonds"] < atoms[:, None]).all():
        raise ValueError("'bonds' needs numbers of atoms inside of each molecule")
    if not np.isin(arrays["bond_order"], (1, 2, 3)).all():
        raise ValueError("'bond_order' needs orders 1, 2 and 3")


def _check_positions(arrays: MoleculeArrays) -> None:
    _check_ptr(arrays, "atom_ptr", ("atomic_number", "position"), ("targets", "split"))
    if arrays["position"].shape[1:] != (3,) or arrays["targets"].shape[1:] != (len(TARGETS),):
        shapes = f"{arrays['position'].shape} and {arrays['targets'].shape}"
        raise ValueError(f"'position' and 'targets' need shapes [N, 3] and [G, {len(TARGETS)}] (got {shapes})")
    if not np.isin(arrays["atomic_number"], list(_QM9_ATOMS.values())).all():
        raise ValueError("'atomic_number' needs elements H, C, N, O and F")


def _one_hot(values: np.ndarray, choices: tuple[int, ...], *, other: bool = False) -> Tensor:
    """Return one column per choice `[N, K]`, and with `other` one for all other values."""
    columns = (values[:, None] == np.asarray(choices)).astype(np.float32)
    return torch.from_numpy(np.hstack([columns, 1 - columns.sum(1, keepdims=True)]) if other else columns)


def _bond_graphs(arrays: MoleculeArrays) -> list[Data]:
    atoms, bonds = (torch.from_numpy(np.diff(arrays[name]).astype(np.int64)) for name in ("atom_ptr", "bond_ptr"))
    charge = torch.from_numpy(arrays["charge"].astype(np.float32))[:, None]
    both = arrays["bonds"].astype(np.int64)
    order = _one_hot(arrays["bond_order"], (1, 2, 3)).repeat_interleave(2, dim=0)
    y = torch.from_numpy(arrays["log_solubility"])
    columns = {
        "x": (torch.cat([_one_hot(arrays["atomic_number"], _ORGANIC, other=True), charge], dim=1), atoms),
        "edge_index": (torch.from_numpy(np.stack([both.ravel(), both[:, ::-1].ravel()])), 2 * bonds),
        "edge_attr": (order, 2 * bonds),
        "y": (y, torch.ones_like(atoms)),
    }
    return unpack(columns)


def _position_graphs(arrays: MoleculeArrays) -> list[Data]:
    """Return graphs with `x`, `pos` and all `targets`, still without edges."""
    atoms = torch.from_numpy(np.diff(arrays["atom_ptr"]).astype(np.int64))
    columns = {
        "x": (_one_hot(arrays["atomic_number"], tuple(_QM9_ATOMS.values())), atoms),
        "pos": (torch.from_numpy(arrays["position"].astype(np.float32)), atoms),
        "targets": (torch.from_numpy(arrays["targets"]), torch.ones_like(atoms)),
    }
    return unpack(columns)


def _link(graphs: list[Data], radius: float) -> None:
    """Give graphs with `pos [N, 3]` their edges up to a radius, and the distances as `edge_attr`."""
    with progress("edges by radius", len(graphs)) as bar:
        for graph in graphs:
            distance = torch.cdist(graph.pos, graph.pos, compute_mode="donot_use_mm_for_euclid_dist")
            edge_index = (distance <= radius).fill_diagonal_(False).nonzero().t().contiguous()
            graph.edge_index = edge_index
            graph.edge_attr = distance[edge_index[0], edge_index[1]][:, None]
            bar.update()


def _fewer(num_graphs: int | None, seed: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Draw molecules of each split, in the same shares, so that there are about so many in all."""
    if num_graphs is None:
        return list(ids)
    check_integer("num_graphs", num_graphs, len(SPLITS))
    share, rng = min(1.0, num_graphs / sum(map(len, ids))), np.random.default_rng(seed)
    return [rng.permutation(part)[: max(1, round(share * len(part)))] for part in ids]


def _split(graphs: list[Data], ids: list[np.ndarray]) -> dict[str, list[Data]]:
    return {split: [graphs[place] for place in part.tolist()] for split, part in zip(SPLITS, ids)}


def _join_rows(folder: Path, files: Sequence[str]) -> MoleculeArrays:
    """Return the molecules in the tables of qm9pack, in their order."""
    csv.field_size_limit(sys.maxsize)
    numbers, positions, targets = [], [], []
    with progress("QM9", 130_831, "molecule") as bar:
        for file in files:
            with open(folder / file, newline="") as stream:
                table = csv.DictReader(stream)
                if missing := {"Elements", "XYZ_Ang", *TARGETS} - set(table.fieldnames or ()):
                    raise ValueError(f"{file} needs columns {', '.join(sorted(missing))}")
                for row in table:
                    numbers.append([_QM9_ATOMS[atom] for atom in re.findall(r"\w+", row["Elements"])])
                    # Numbers such as 0. are no JSON.
                    coordinates = re.findall(r"[-+.\dEe]+", row["XYZ_Ang"])
                    positions.append(np.array(coordinates, dtype=np.float64).reshape(-1, 3))
                    targets.append([float(row[name]) for name in TARGETS])
                    bar.update()
    return {
        "atom_ptr": np.cumsum([0, *map(len, numbers)]),
        "atomic_number": np.concatenate(numbers),
        "position": np.concatenate(positions),
        "targets": np.array(targets),
        "split": np.zeros(len(targets), dtype=np.uint8),
    }


def _sizes(rng: np.random.Generator, name: str, mean: float, deviation: float, low: int, high: int) -> np.ndarray:
    return rng.normal(mean, deviation, _GENERATED[name]).round().clip(low, high).astype(np.int64)


def _generate_bonds(seed: int) -> MoleculeArrays:
    """Return molecules as chains with branches and rings, with sizes, elements and bonds as frequent as in the file."""
    rng = np.random.default_rng(seed)
    sizes = _sizes(rng, "solubility", 13.0, 6.3, 2, 47)
    total = int(sizes.sum())
    number = rng.choice(_ORGANIC[:7], total, p=[0.76, 0.06, 0.12, 0.006, 0.002, 0.012, 0.04]).astype(np.uint8)
    bonds, counts = [], []
    for size in sizes.tolist():
        atoms = np.arange(1, size)
        links = {(int(atom - rng.integers(1, min(atom, 2) + 1)), int(atom)) for atom in atoms}
        links |= {(atom, atom + 5) for atom in range(size - 5) if rng.random() < 0.17}
        bonds += sorted(links)
        counts.append(len(links))
    order = rng.choice([1, 2, 3], len(bonds), p=[0.737, 0.261, 0.002]).astype(np.uint8)
    graph, graph_of_bond = np.arange(len(sizes)).repeat(sizes), np.arange(len(sizes)).repeat(counts)
    per_atom = np.select([number == 6, np.isin(number, (7, 8))], [-0.35, 0.6], -0.8)
    value = np.bincount(graph, per_atom) + 0.2 * np.bincount(graph_of_bond, order - 1.0, len(sizes))
    return {
        "atom_ptr": np.cumsum([0, *sizes]),
        "atomic_number": number,
        "charge": rng.choice([-1, 0, 1], total, p=[0.0025, 0.995, 0.0025]).astype(np.int8),
        "bond_ptr": np.cumsum([0, *counts]),
        "bonds": np.array(bonds),
        "bond_order": order,
        "log_solubility": (value + 0.3 * rng.standard_normal(len(sizes))).astype(np.float32),
        "is_test": np.arange(len(sizes)) % 5 == 4,
    }


def _generate_positions(seed: int) -> MoleculeArrays:
    """Return molecules as clouds of atoms, as large and as dense as those of QM9, with sums over pairs as targets."""
    rng = np.random.default_rng(seed)
    sizes = _sizes(rng, "QM9", 18.0, 3.0, 4, 29)
    number = rng.choice([1, 6, 7, 8, 9], int(sizes.sum()), p=[0.512, 0.353, 0.056, 0.078, 0.001])
    position = rng.normal(0.0, 1.4, (len(number), 3)).astype(np.float32)
    ptr, reach = np.cumsum([0, *sizes]), 1 + np.arange(len(TARGETS)) / 4
    targets = np.empty((len(sizes), len(TARGETS)))
    for graph, (first, last) in enumerate(zip(ptr, ptr[1:])):
        distance = np.linalg.norm(position[first:last, None] - position[first:last], axis=2)[..., None]
        pairs = np.sqrt(np.outer(number[first:last], number[first:last]))[..., None] * np.exp(-distance / reach)
        targets[graph] = pairs.sum(axis=(0, 1)) / (last - first)
    split = np.where(np.arange(len(sizes)) % 10 < 8, 0, np.arange(len(sizes)) % 10 - 7).astype(np.uint8)
    return {"atom_ptr": ptr, "atomic_number": number, "position": position, "targets": targets, "split": split}
