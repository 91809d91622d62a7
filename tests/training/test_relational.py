"""Training on graphs with relations: entities, films and links, their ranks, and what does not fit them."""

import json
from functools import partial

import pytest
import torch
import torch_geometric.nn
import torch_geometric.typing
from omegaconf import OmegaConf

from pyg_dfgnn.datasets.relational import link_task
from pyg_dfgnn.distributed import Group
from pyg_dfgnn.models import HGT, RGAT, RGCN, DistMult
from pyg_dfgnn.training import trainer as trainer_module
from pyg_dfgnn.training.loaders import query_batches
from pyg_dfgnn.training.metrics import RankScore
from pyg_dfgnn.training.run import train
from pyg_dfgnn.training.step import Objective
from tests.capture.test_step import HostRecorder
from tests.configs.train import train_config
from tests.datasets.test_relational import write_aifb

CPU = torch.device("cpu")
QUICK = ["backend=pyg", "device=cpu", "trainer.progress=false"]


def run(tmp_path, *overrides):
    cfg = train_config(*QUICK, f"paths.run={tmp_path / 'run'}", *overrides)
    OmegaConf.update(cfg, "paths.data", [str(tmp_path)])
    OmegaConf.update(cfg, "paths.cache", str(tmp_path / "cache"))
    return train(cfg), json.loads((tmp_path / "run" / "metrics.json").read_text())


def write_groups(root, persons=60):
    """Persons of two groups, each of whom knows others of the own group and works on its projects."""
    generator = torch.Generator().manual_seed(0)
    lines, tables = [], {"trainingSet.tsv": [], "testSet.tsv": []}
    for person in range(persons):
        group = person % 2
        for kind, count in (("knows", persons // 2), ("on", 4)):
            for other in torch.randint(count, (3,), generator=generator).tolist():
                name = f"p/{2 * other + group}" if kind == "knows" else f"project/{group}/{other}"
                lines.append(f"<p/{person}> <{kind}> <{name}> .")
        tables["testSet.tsv" if person % 3 == 0 else "trainingSet.tsv"].append(f"p/{person}\t{person}.0\tg/{group}")
    write_aifb(root, "\n".join(lines) + "\n")
    for name, rows in tables.items():
        text = "\n".join(["person\tid\tlabel_affiliation", *rows]) + "\n"
        (root / "entities" / "aifb" / "raw" / name).write_text(text)


@pytest.mark.parametrize("experiment", ["rgcn_aifb", "rgat_aifb"])
def test_entities_are_learnt(tmp_path, experiment):
    write_groups(tmp_path)
    accuracy, summary = run(tmp_path, f"experiment={experiment}", "trainer.epochs=30", "data.task.download=false")
    assert accuracy > 0.9 and summary["best_epoch"] == summary["epochs"] == 30
    assert summary["task"] == "AIFB" and summary["metric"] == "accuracy" and summary["synthetic"] is None


# Each of 12 nodes has a successor, by one relation, and is its own partner's partner, by the other.
RING = [(node, 0, (node + 1) % 12) for node in range(12)] + [(node, 1, node ^ 1) for node in range(12)]


def ring_task():
    triples = torch.tensor(RING)
    return link_task("Ring", {"train": triples, "val": triples[::5], "test": triples[::7]}, 12, 2)


def ring(**options):
    """As a config names it."""
    return ring_task()


def brute_force_mrr(model, task, split):
    (graph,) = task.splits[split]
    true = {(n, r, t) for s, r, t in RING for n, r, t in ((s, r, t), (t, r + 2, s))}
    ranks = []
    scores = model(None, graph.edge_index, queries=graph.queries, edge_type=graph.edge_type)
    for (node, relation), answer, row in zip(graph.queries.tolist(), graph.y.tolist(), scores.tolist()):
        others = [row[t] for t in range(12) if t != answer and (node, relation, t) not in true]
        ranks.append(1 + sum(o > row[answer] for o in others) + sum(o == row[answer] for o in others) / 2)
    return sum(1 / rank for rank in ranks) / len(ranks)


def test_links_are_learnt_and_ranked(tmp_path):
    options = ["data=fb15k237", "data.task={_target_: tests.training.test_relational.ring}", "model.num_bases=null"]
    options += ["model.hidden_channels=16", "model.dropout=0", "trainer.epochs=60", "optimizer.lr=0.02"]
    mrr, summary = run(tmp_path, *options, "trainer.loader.batch_size=20")
    assert mrr > 0.9 and summary["metric"] == "mrr"
    model = DistMult(
        12, 12, torch_geometric.nn, num_relations=4, hidden_channels=16, embedding=True, dropout=0.0, layers=1
    )
    model.load_state_dict(torch.load(tmp_path / "run" / "checkpoints" / "best.pt", weights_only=False)["model"])
    assert mrr == pytest.approx(brute_force_mrr(model.eval(), ring_task(), "test"))


@pytest.mark.parametrize("encoder", ["rgcn", "rgat"])
def test_known_answers_do_not_count(encoder):
    task = ring_task()
    model = DistMult(12, 12, torch_geometric.nn, num_relations=4, encoder=encoder, hidden_channels=8, embedding=True)
    model.eval()
    batches = query_batches(task, CPU, {"batch_size": 4}, torch.Generator().manual_seed(0))
    score, objective = RankScore(CPU), Objective(CPU)
    for batch in batches["val"]:
        logits = objective.forward(model, batch)
        known = logits.isneginf()
        assert not known.gather(1, batch.y[:, None]).any()
        score.add(objective.loss(logits, batch), logits, batch.y)
    assert score.gather(Group()).metric == pytest.approx(brute_force_mrr(model, task, "val"))
    # Training meets each query once, in a random order, and all nodes count.
    training = list(batches["train"])
    assert sorted(row for batch in training for row in batch.queries.tolist()) == sorted(
        task.splits["train"][0].queries.tolist()
    )
    assert not objective.forward(model, training[0]).isinf().any() and len(training) == len(batches["train"]) == 12
    assert training[0].edge_index is training[1].edge_index is batch.edge_index


def test_ranks():
    score = RankScore(CPU)
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 0.0], [0.0, float("nan"), 2.0]])
    score.add(torch.tensor(2.0), scores, torch.tensor([2, 0, 1]))
    score.add(torch.tensor(1.0), scores[:1], torch.tensor([0]))
    # Ranks 2, 1.5 (two equal scores), 3 (no number), then 1.
    assert score.metric == pytest.approx((1 / 2 + 1 / 1.5 + 1 / 3 + 1) / 4)
    assert score.loss == pytest.approx((3 * 2.0 + 1.0) / 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=gcn"], r"'model' needs one that takes num_relations for AIFB \(got GCN\)"),
        (["model=hgt"], r"'model' needs one that takes num_relations for AIFB \(got HGT\)"),
        (["data.reorder=degree"], r"'data.reorder' needs null: labels name nodes .* \(got 'degree'\)"),
        (
            ["trainer.sampler={num_neighbors: [2], batch_size: 4}"],
            r"'trainer.sampler' needs null: the edges of the task have rel",
        ),
        (["model.conv=GCNConv"], r"'model.conv' needs one of 'RGCNConv', 'FastRGCNConv' \(got 'GCNConv'\)"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_what_does_not_fit_relations_is_refused(tmp_path, monkeypatch, overrides, message):
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", True)
    write_aifb(tmp_path)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, "data=aifb", "data.task.download=false", *overrides)


def test_links_are_not_captured(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "Recorder", HostRecorder)
    options = ["data=fb15k237", "data.task={_target_: tests.training.test_relational.ring}", "trainer.cuda_graph=true"]
    with pytest.raises(
        ValueError, match="'trainer.cuda_graph' needs false: each batch of a task of links has other queries"
    ):
        run(tmp_path, *options)


def test_models_of_one_relation_need_edges_of_one(tmp_path):
    with pytest.raises(ValueError, match=r"'model' needs one that takes no num_relations for .* \(got RGCN\)"):
        run(
            tmp_path,
            "data=pattern_small",
            "data.task.num_train=2",
            "data.task.num_val=2",
            "data.task.num_test=2",
            "model=rgcn",
        )


def graph_of_one_type():
    edge_index = torch.randint(6, (2, 20))
    return {("node", "to", "node"): edge_index}, edge_index, torch.randint(3, (20,))


@pytest.mark.parametrize("heads", [1, 2])
def test_models_give_logits_of_some_nodes(heads):
    edges, edge_index, edge_type = graph_of_one_type()
    nodes, x = torch.tensor([4, 1]), torch.randn(6, 5, dtype=torch.float64)
    hgt = HGT(5, 3, torch_geometric.nn, hidden_channels=8, heads=heads).double().eval()
    # Some processors sum a product of fewer rows in another order.
    equal = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-13)
    equal(hgt({"node": x}, edges, nodes), hgt({"node": x}, edges)[nodes])
    for model, features in (
        (RGCN(6, 3, torch_geometric.nn, num_relations=3, num_bases=2), None),
        (RGCN(5, 3, torch_geometric.nn, num_relations=3, conv="FastRGCNConv", norm="layer", readout=True), x),
        (RGAT(6, 3, torch_geometric.nn, num_relations=3, heads=heads, embedding=True), None),
    ):
        model.double().eval()
        logits = model(features, edge_index, edge_type=edge_type)
        assert logits.shape == (6, 3)
        equal(model(features, edge_index, edge_type=edge_type, nodes=nodes), logits[nodes])


def test_distmult_needs_queries():
    model = DistMult(6, 6, torch_geometric.nn, num_relations=3, embedding=True)
    _, edge_index, edge_type = graph_of_one_type()
    with pytest.raises(ValueError, match=r"'queries' needs shape \[Q, 2\] \(got None\)"):
        model(None, edge_index, edge_type=edge_type)
    with pytest.raises(ValueError, match=r"'encoder' needs one of 'rgcn', 'rgat' \(got 'gcn'\)"):
        DistMult(6, 6, torch_geometric.nn, encoder="gcn")
