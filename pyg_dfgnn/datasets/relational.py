"""Tasks on real graphs with relations: classes of entities, missing links of a knowledge graph, genres of films."""

from __future__ import annotations

import csv
import gzip
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, download_url, extract_tar

from pyg_dfgnn.datasets.files import CACHE, SEARCH, Folders, RawFiles
from pyg_dfgnn.datasets.task import SPLITS, Task, add_masks, add_random_masks, one_graph
from pyg_dfgnn.errors import check_choice, check_integer, check_range

_ENTITIES_URL = "https://data.dgl.ai/dataset/{}.tgz"
# Columns of the tables of labels; one is misspelt in the published files.
_ENTITIES = {
    "AIFB": ("person", "label_affiliation"),
    "MUTAG": ("bond", "label_mutagenic"),
    "BGS": ("rock", "label_lithogenesis"),
    "AM": ("proxy", "label_cateogory"),
}
_TABLES = ("trainingSet.tsv", "testSet.tsv")
# A subject, a predicate and an object up to the full stop.
_TRIPLE = re.compile(r"(<[^>]*>|_:\S+)\s+(<[^>]*>)\s+(.+?)\s*\.\s*$")
_FB15K237_URL = "https://raw.githubusercontent.com/villmow/datasets_knowledge_embedding/master/FB15k-237"
_FILES_OF_SPLITS = dict(zip(SPLITS, ("train.txt", "valid.txt", "test.txt")))

Triples = Mapping[str, Tensor]
"""Split -> triples int64 [T, 3] of source, relation and target."""


def entities(
    name: str,
    *,
    val_share: float = 0.2,
    seed: int = 0,
    search: Folders = SEARCH,
    cache: str | Path = CACHE,
    download: bool = True,
) -> Task:
    """Classify entities of an RDF graph whose nodes have no features, with the published training and test entities.

    Looks for the raw files in the search folders as `entities/<name>/raw` in lower case, then downloads them. Every
    term of the triples is a node; each predicate is a relation, followed by its inverse, the most frequent first.

    Args:
        name: "AIFB", "MUTAG", "BGS" or "AM".
        val_share: Share of the training entities that validation takes; 0: training entities validate, too, as the
            published results train on all of them.
        seed: Seed of that share.
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied and downloaded files.
        download: Whether missing files may be downloaded.

    Returns:
        The task: one graph with `edge_type`, labelled `nodes` and a mask of these per split.

    Raises:
        ValueError: `name` is unknown, `val_share` out of range, or the files cannot be read.
        FileNotFoundError: The raw files are missing; the message says where to put them.

    Source: Schlichtkrull et al., Modeling Relational Data with Graph Convolutional Networks, ESWC 2018, section 5.1.
    """
    check_choice("name", name, tuple(_ENTITIES))
    check_range("val_share", val_share, 0.0, 0.9)
    stem = name.lower()
    root = Path(cache).expanduser() / "entities" / stem
    raw, graph_file = root / "raw", f"{stem}_stripped.nt.gz"
    raw_files = RawFiles(name, (graph_file, *_TABLES), (f"entities/{stem}/raw", f"{stem}/raw"), search)

    def read() -> tuple[Data, int, int]:
        if not raw_files.are_in(raw):
            extract_tar(download_url(_ENTITIES_URL.format(stem), str(root)), str(raw))
        edge_index, edge_type, place, num_relations = _rdf_graph(raw / graph_file)
        node, label = _ENTITIES[name]
        tables = [_columns(raw / table, node, label) for table in _TABLES]
        labels = sorted({text for _, texts in tables for text in texts})
        nodes = torch.tensor([place[f"<{name}>"] for names, _ in tables for name in names])
        y = torch.tensor([labels.index(text) for _, texts in tables for text in texts])
        data = Data(edge_index=edge_index, edge_type=edge_type, nodes=nodes, y=y, num_nodes=len(place))
        return data, len(tables[0][0]), num_relations

    data, num_train, num_relations = raw_files.load(raw, download, read)
    order = torch.randperm(num_train, generator=torch.Generator().manual_seed(seed))
    val = round(val_share * num_train)
    test = torch.arange(num_train, data.y.numel())
    add_masks(data, (order[val:], order[:val] if val else order, test))
    sizes = {"num_features": data.num_nodes, "num_relations": num_relations}
    return one_graph(name, data, int(data.y.max()) + 1, **sizes)


def _rdf_graph(file: Path) -> tuple[Tensor, Tensor, dict[str, int], int]:
    """Return edges and their inverses, their relations, the place of each term, and the number of relations."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        matches = [_TRIPLE.match(line.strip()) for line in lines if line.strip() and not line.startswith("#")]
    if not matches or None in matches:
        raise ValueError(f"{file.name} needs one triple per line")
    triples = sorted({match.groups() for match in matches if match})
    place = {term: i for i, term in enumerate(sorted({term for s, _, o in triples for term in (s, o)}))}
    counts: dict[str, int] = {}
    for _, predicate, _ in triples:
        counts[predicate] = counts.get(predicate, 0) + 1
    relation = {name: i for i, name in enumerate(sorted(counts, key=lambda name: (-counts[name], name)))}
    source, kind, target = torch.tensor([(place[s], 2 * relation[p], place[o]) for s, p, o in triples]).t()
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    return edge_index, torch.cat([kind, kind + 1]), place, 2 * len(relation)


def _columns(file: Path, *names: str) -> list[list[str]]:
    """Return columns of a table; labels that are numbers are written with or without a fraction."""
    with open(file, newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    return [[row[name].removesuffix(".0") for row in rows] for name in names]


def fb15k237(
    *,
    num_train: int | None = None,
    num_val: int | None = None,
    num_test: int | None = None,
    search: Folders = SEARCH,
    cache: str | Path = CACHE,
    download: bool = True,
) -> Task:
    """Predict missing links of FB15k-237, a part of Freebase, by the filtered mean reciprocal rank.

    Looks for `fb15k237/FB15k-237.tar.gz` or the text files in `fb15k237/raw` in the search folders, then downloads the
    text files.

    Args:
        num_train: Number of training triples, the first of the file; None: all.
        num_val: Number of validation triples; None: all.
        num_test: Number of test triples; None: all.
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied and downloaded files.
        download: Whether missing files may be downloaded.

    Returns:
        The task: training triples and their inverses as edges, queries in both directions.

    Raises:
        ValueError: A number is out of range, or the files cannot be read.
        FileNotFoundError: The raw files are missing; the message says where to put them.

    Source: Toutanova and Chen, Observed versus Latent Features for Knowledge Base and Text Inference, CVSC 2015.
    """
    archive = RawFiles("FB15k-237", ("FB15k-237.tar.gz",), ("fb15k237",), search)
    raw = Path(cache).expanduser() / "fb15k237" / "raw"
    names = tuple(_FILES_OF_SPLITS.values())

    def read() -> list[list[str]]:
        for name in names:
            if not (raw / name).is_file():
                download_url(f"{_FB15K237_URL}/{name}", str(raw))
        return [(raw / name).read_text().splitlines() for name in names]

    packed = archive.find()
    if packed is not None:
        with archive.reading(packed), tarfile.open(packed / archive.files[0]) as tar:
            lines = [tar.extractfile(name).read().decode().splitlines() for name in names]  # type: ignore[union-attr]
    else:
        lines = RawFiles("FB15k-237", names, ("fb15k237/raw",), search).load(raw, download, read)
    rows = [[tuple(line.split("\t")) for line in part] for part in lines]
    every = [row for part in rows for row in part]
    node = {name: i for i, name in enumerate(sorted({end for s, _, t in every for end in (s, t)}))}
    relation = {name: i for i, name in enumerate(sorted({name for _, name, _ in every}))}
    triples = {}
    for split, part, count in zip(SPLITS, rows, (num_train, num_val, num_test)):
        if count is not None:
            check_integer(f"num_{split}", count, 1, len(part))
        triples[split] = torch.tensor([(node[s], relation[r], node[t]) for s, r, t in part[:count]])
    return link_task("FB15k-237", triples, len(node), len(relation))


def link_task(name: str, triples: Triples, num_nodes: int, num_relations: int, **options: str | None) -> Task:
    """Return the task that predicts either end of each triple from the other end and the relation.

    The inverse of relation r is relation `num_relations + r`, so that a missing source is the missing target of an
    inverse triple. Training triples and their inverses are the edges of the graph.

    Args:
        name: Name shown in results.
        triples: Triples of each split.
        num_nodes: Number of nodes N.
        num_relations: Number of relations without inverses.
        options: `synthetic` of :class:`Task`.
    """

    def both_ways(part: Tensor) -> Tensor:
        source, relation, target = part.t()
        return torch.cat([part, torch.stack([target, relation + num_relations, source], dim=1)])

    parts = {split: both_ways(triples[split]) for split in SPLITS}
    source, edge_type, target = parts["train"].t().contiguous()
    graph = {"edge_index": torch.stack([source, target]), "edge_type": edge_type, "num_nodes": num_nodes}
    node, relation, other = torch.cat([parts[split] for split in SPLITS]).t()
    known = ((node * 2 * num_relations + relation) * num_nodes + other).unique()
    known = torch.stack([known // num_nodes, known % num_nodes])
    splits = {
        split: [Data(**graph, queries=part[:, :2].contiguous(), y=part[:, 2].contiguous())]
        for split, part in parts.items()
    }
    for split in ("val", "test"):
        splits[split][0].known = known
    sizes = {"num_features": num_nodes, "num_classes": num_nodes, "num_relations": 2 * num_relations}
    return Task(name, splits, **sizes, level="link", metric="mrr", **options)  # type: ignore[arg-type]


def imdb(*, seed: int = 0, search: Folders = SEARCH) -> Task:
    """Predict one of three genres of a film from keywords, actors and directors: a graph with three node types.

    Looks for `imdb.npz` in the search folders as `hetero-small`. The films with a genre are split at random,
    60 / 20 / 20 %. Edges are there in both directions.

    Args:
        seed: Seed of the split.
        search: Folders to search for the raw file, in this order.

    Returns:
        The task: one `HeteroData`, whose first node type is "movie", with a mask per split.

    Raises:
        FileNotFoundError: The raw file is missing; the message says where to put it.
        ValueError: The file cannot be read.
    """
    raw_files = RawFiles("IMDB", ("imdb.npz",), ("hetero-small",), search)
    folder = raw_files.need()
    with raw_files.reading(folder), np.load(folder / "imdb.npz") as file:
        arrays = {name: torch.from_numpy(file[name].astype(np.int64)) for name in file.files}
    data = HeteroData()
    for kind in ("movie", "actor", "director"):
        data[kind].x = torch.zeros(*arrays[f"{kind}_x_shape"].tolist())
        data[kind].x[tuple(arrays[f"{kind}_x_indices"])] = 1.0
    for source, name in (("actor", "acted_in"), ("director", "directed_in")):
        edge_index = arrays[f"{source}__{name}__movie"]
        data[source, name, "movie"].edge_index = edge_index
        data["movie", f"rev_{name}", source].edge_index = edge_index.flip(0)
    data.y = arrays["movie_genre"]
    add_random_masks(data, (data.y >= 0).nonzero().flatten(), (0.6, 0.2), seed)
    return one_graph("IMDB", data, 3, num_features=data["movie"].num_features)
