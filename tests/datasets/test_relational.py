"""Graphs with relations: how raw files are read, what is generated, and the queries of links."""

import gzip
import io
import tarfile

import numpy as np
import pytest
import torch

from pyg_dfgnn.datasets import entities, entities_like, fb15k237, imdb, links_like
from pyg_dfgnn.datasets.generators import TypedEdges, typed_graph, zipf_sizes
from pyg_dfgnn.datasets.relational import link_task
from pyg_dfgnn.datasets.relational_like import LIKE, published, relational_graph
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.relations import ratio

TRIPLES = """\
<p/1> <worksFor> <g/a> .
<p/1> <name> "A \\"b\\" c . d"^^<string> .
<p/2> <worksFor> <g/b> .

# a comment
<p/2> <worksFor> <g/b> .
_:x <knows> <p/1> .
<p/3> <name> "A \\"b\\" c . d"@en .
"""


def write_aifb(root, triples=TRIPLES):
    folder = root / "entities" / "aifb" / "raw"
    folder.mkdir(parents=True)
    with gzip.open(folder / "aifb_stripped.nt.gz", "wt") as file:
        file.write(triples)
    (folder / "trainingSet.tsv").write_text("person\tid\tlabel_affiliation\np/1\t1.0\tg/a\np/2\t2.0\tg/b\n")
    (folder / "testSet.tsv").write_text("person\tid\tlabel_affiliation\np/3\t3.0\tg/a\n")
    return {"search": [root], "cache": root / "cache", "download": False}


def test_entities(tmp_path):
    options = write_aifb(tmp_path)
    task = entities("AIFB", **options, val_share=0.5)
    (graph,) = task.splits["train"]
    # Terms: the blank node, two texts that differ in their language, two groups and three persons.
    assert graph.num_nodes == task.num_features == 8 and (task.num_classes, task.num_relations) == (2, 6)
    assert graph.y.tolist() == [0, 1, 0] and graph.x is None
    # Five different triples, then their inverses; 'name' and 'worksFor' are as frequent and in order of their names.
    assert graph.edge_type.bincount().tolist() == [2, 2, 2, 2, 1, 1]
    assert torch.equal(graph.edge_index[:, :5].flip(0), graph.edge_index[:, 5:])
    assert torch.equal(graph.edge_type[:5] + 1, graph.edge_type[5:])
    works = graph.edge_index[:, graph.edge_type == 2]
    assert works[0].tolist() == graph.nodes[:2].tolist()
    masks = torch.stack([graph[f"{split}_mask"] for split in ("train", "val", "test")])
    assert masks.sum(dim=1).tolist() == [1, 1, 1] and masks[2].tolist() == [False, False, True]
    (all_train,) = entities("AIFB", **{**options, "search": []}, val_share=0).splits["train"]
    assert all_train.train_mask.tolist() == all_train.val_mask.tolist() == [True, True, False]


def test_wrong_entities(tmp_path):
    options = write_aifb(tmp_path, "no triple\n")
    with pytest.raises(ValueError, match=r"the files of AIFB in .* may be damaged.*needs one triple per line"):
        entities("AIFB", **options)
    with pytest.raises(ValueError, match=r"'name' needs one of 'AIFB', 'MUTAG', 'BGS', 'AM' \(got 'aifb'\)"):
        entities("aifb", **options)
    with pytest.raises(ValueError, match=r"'val_share' needs a value in \[0.0, 0.9\] \(got 1\)"):
        entities("AIFB", **options, val_share=1)
    with pytest.raises(FileNotFoundError, match="(?s)Put mutag_stripped.nt.gz.*entities/mutag/raw"):
        entities("MUTAG", **options)


SPLITS = {"train": "a\tr\tb\nb\ts\tc\na\tr\tc\n", "valid": "c\tr\ta\n", "test": "a\tr\td\n"}


@pytest.mark.parametrize("packed", [True, False])
def test_fb15k237(tmp_path, packed):
    folder = tmp_path / "fb15k237" / ("" if packed else "raw")
    folder.mkdir(parents=True)
    files = {f"{split}.txt": text.replace("\n", "\r\n").encode() for split, text in SPLITS.items()}
    if packed:
        with tarfile.open(folder / "FB15k-237.tar.gz", "w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    else:
        for name, text in files.items():
            (folder / name).write_bytes(text)
    options = {"search": [tmp_path], "cache": tmp_path / "cache", "download": False}
    task = fb15k237(**options)
    assert (task.level, task.metric, task.num_classes, task.num_relations) == ("link", "mrr", 4, 4)
    train, test = (task.splits[split][0] for split in ("train", "test"))
    assert train.edge_index.tolist() == [[0, 1, 0, 1, 2, 2], [1, 2, 2, 0, 1, 0]]
    assert train.edge_type.tolist() == [0, 1, 0, 2, 3, 2] and not task.full_graph
    assert train.queries.tolist() == [[0, 0], [1, 1], [0, 0], [1, 2], [2, 3], [2, 2]]
    assert train.y.tolist() == train.edge_index[1].tolist() and "known" not in train
    assert test.queries.tolist() == [[0, 0], [3, 2]] and test.y.tolist() == [3, 0]
    # Of all splits and in both directions; (a, r) has the answers b, c and d, and as an inverse c.
    assert sorted(zip(*test.known.tolist()))[:4] == [(0, 1), (0, 2), (0, 3), (2, 2)] and test.known.size(1) == 10
    few = fb15k237(**options, num_train=1)
    assert few.splits["train"][0].num_edges == 2 and few.num_classes == 4
    with pytest.raises(ValueError, match=r"'num_val' needs a value in \[1, 1\] \(got 2\)"):
        fb15k237(**options, num_val=2)


def write_imdb(folder):
    """A file of five movies, of three genres."""
    folder.mkdir()
    x = {kind: (np.array([[0, 2], [1, 0]]), np.array([size, 4])) for kind, size in (("movie", 5), ("actor", 3))}
    x["director"] = x["actor"]
    arrays = {f"{kind}_x_indices": indices for kind, (indices, _) in x.items()}
    arrays |= {f"{kind}_x_shape": shape for kind, (_, shape) in x.items()}
    links = {"actor__acted_in__movie": [[0, 1, 2], [4, 1, 0]], "director__directed_in__movie": [[2], [3]]}
    arrays |= {name: np.array(ends, dtype=np.int32) for name, ends in links.items()}
    np.savez(folder / "imdb.npz", movie_genre=np.array([0, 1, -1, 2, 0], dtype=np.int8), **arrays)


def test_imdb(tmp_path):
    write_imdb(tmp_path / "hetero-small")
    task = imdb(search=[tmp_path])
    graph = task.splits["train"][0]
    nodes, edges = task.metadata
    assert nodes == ["movie", "actor", "director"] and len(edges) == 4 and task.full_graph
    assert graph["movie"].x.nonzero().tolist() == [[0, 1], [2, 0]] and task.num_features == 4
    assert graph["movie", "rev_acted_in", "actor"].edge_index.tolist() == [[4, 1, 0], [0, 1, 2]]
    masks = torch.stack([getattr(graph, f"{split}_mask") for split in ("train", "val", "test")])
    assert masks.sum(dim=0).tolist() == [1, 1, 0, 1, 1]
    with pytest.raises(FileNotFoundError, match="(?s)Put imdb.npz.*hetero-small"):
        imdb(search=[tmp_path / "nowhere"])


def test_typed_graph_has_its_counts():
    sizes, relations = [40, 7, 300], [(0, 2, 900), (2, 1, 500), (0, 0, 3)]
    label = torch.randint(4, (347,))
    plain = typed_graph(sizes, relations, (0.5, 0.0), 3, "cpu")
    matched = typed_graph(sizes, relations, (0.5, 0.0), 3, "cpu", label=label, homophily=1.0)
    assert plain.edge_type.bincount().tolist() == [900, 500, 3] and plain.num_nodes == 347
    for edges in (plain, matched):
        for relation, (source, target, _) in enumerate(relations):
            ends = edges.edge_index[:, edges.edge_type == relation]
            for side, kind in zip(ends, (source, target)):
                assert edges.type_ptr[kind] <= side.min() and side.max() < edges.type_ptr[kind + 1]
    # A power law has hubs; equal chances have none; matching inside labels moves no end to another node.
    first, second = (end[plain.edge_type == 0].bincount() for end in plain.edge_index)
    assert first.max() > 3 * first.float().mean() and second[47:].max() < 15
    assert torch.equal(
        *(edges.edge_index.sort(dim=1).values for edges in (plain, typed_graph(sizes, relations, (0.5, 0.0), 3, "cpu")))
    )

    def share(edges):
        source, target = edges.edge_index[:, :900]
        return float((label[source] == label[target]).float().mean())

    assert share(plain) < 0.35 and share(matched) > 0.6


def test_compaction_counts_pairs():
    edges = TypedEdges(torch.tensor([[0, 0, 1, 0], [1, 2, 2, 1]]), torch.tensor([0, 0, 0, 1]), torch.tensor([0, 3]), 2)
    assert edges.compaction() == (3 / 4, 3 / 4)
    both = edges.both_ways()
    assert both.edge_type.tolist() == [0, 0, 0, 1, 2, 2, 2, 3] and both.edge_index[:, 4:].tolist() == [
        [1, 2, 2, 1],
        [0, 0, 1, 0],
    ]
    graph = Graph.of(both.edge_index, 3, edge_type=both.edge_type, num_relations=4)
    assert both.compaction() == (ratio(graph, "source_relations"), ratio(graph, "target_relations"))


@pytest.mark.parametrize(("total", "count"), [(100, 7), (7, 7), (1_000_000, 535)])
def test_zipf_sizes(total, count):
    sizes = zipf_sizes(total, count)
    assert sum(sizes) == total and len(sizes) == count and min(sizes) >= 1
    assert sizes[0] == max(sizes)


# Nodes, edges with inverses where these are published, types, relations, and what is known of rho_s and rho_d.
COUNTS = {
    "AM": (881_680, 5_668_682, 7, 108, None),
    "BGS": (94_806, 672_884, 27, 122, None),
    "ogbn-mag": (1_939_743, 21_111_007, 4, 4, (0.154, 0.073)),
    "ogbl-wikikg2": (2_500_604, 16_109_182, 1, 535, (0.82, 0.79)),
    "ogbl-biokg": (93_773, 4_762_678, 5, 51, None),
}


@pytest.mark.parametrize("name", LIKE)
def test_generated_graphs_have_the_published_counts(name):
    nodes, edges, types, relations, rho = COUNTS[name]
    known = published(name)
    ways = 1 + known.inverses
    counted = (sum(known.types), ways * sum(count for *_, count in known.relations))
    assert counted == (nodes, edges) and (len(known.types), ways * len(known.relations)) == (types, relations)
    scale = 0.01
    graph = relational_graph(name, scale, 0, "cpu")
    assert graph.num_nodes == pytest.approx(scale * nodes, rel=0.01)
    assert graph.edge_index.size(1) == pytest.approx(scale * edges, rel=0.02)
    assert graph.num_relations == relations and int(graph.edge_type.max()) == relations - 1
    if rho is not None:
        assert graph.compaction() == pytest.approx(rho, rel=0.02)
    again, other = (relational_graph(name, 0.001, seed, "cpu").edge_index for seed in (0, 1))
    assert torch.equal(again, relational_graph(name, 0.001, 0, "cpu").edge_index) and not torch.equal(again, other)


def test_entities_like():
    task = entities_like("ogbn-mag", scale=0.003, device="cpu")
    (graph,) = task.splits["train"]
    assert task.num_features == 128 and task.num_classes == 349 and "rho_s 0.15" in task.synthetic
    assert graph.nodes.max() < round(0.003 * 736_389) and len(graph.nodes) == len(graph.y) == graph.train_mask.numel()
    masks = torch.stack([graph[f"{split}_mask"] for split in ("train", "val", "test")])
    # All papers have a class.
    assert masks.sum(dim=1).tolist() == [1889, 195, 125] and (masks.sum(dim=0) == 1).all()
    featureless = entities_like("BGS", scale=0.02, device="cpu")
    assert featureless.splits["train"][0].x is None and featureless.num_features == 1_895


def test_links_like():
    task = links_like("ogbl-biokg", scale=0.002, num_val=5_000, num_test=2_500, device="cpu")
    sizes = [task.splits[split][0].y.numel() for split in ("train", "val", "test")]
    assert sizes[1:] == [20, 10] and sum(sizes) == pytest.approx(2 * 0.002 * 4_762_678, rel=0.01)
    assert task.num_relations == 102 and task.splits["val"][0].num_edges == sizes[0]


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (entities_like, {"name": "ogbl-biokg"}, r"'name' needs one of 'AM', 'BGS', 'ogbn-mag' \(got 'ogbl-biokg'\)"),
        (links_like, {"name": "AM"}, r"'name' needs one of 'ogbl-wikikg2', 'ogbl-biokg' \(got 'AM'\)"),
        (entities_like, {"name": "AM", "scale": 2.0}, r"'scale' needs a value in \[0.0, 1.0\] \(got 2.0\)"),
        (entities_like, {"name": "AM", "homophily": 2.0}, r"'homophily' needs a value in \[0.0, 1.0\] \(got 2.0\)"),
        (links_like, {"name": "ogbl-biokg", "num_val": 0}, r"'num_val' needs a value >= 1 \(got 0\)"),
    ],
)
def test_wrong_arguments(make, wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)


def test_answers_of_all_splits_are_known():
    """A triple that is known from training does not count against an answer of the test."""
    triples = {"train": torch.tensor([[0, 0, 1]]), "val": torch.tensor([[0, 0, 2]]), "test": torch.tensor([[0, 0, 3]])}
    task = link_task("x", triples, 4, 1)
    keys, answers = task.splits["val"][0].known
    assert answers[keys == 0].tolist() == [1, 2, 3]
