"""Runs of several processes are runs of one."""

import csv

import pytest
import torch
from torch_geometric import typing
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

from pyg_dfgnn.distributed import Group
from pyg_dfgnn.training import loaders
from pyg_dfgnn.training.run import train
from tests.configs.train import train_config
from tests.datasets.test_planetoid import write_raw
from tests.datasets.test_relational import write_imdb

# Batches of 4, 4 and 1 graphs: in the last one a process goes without.
PATTERN = [
    "data=pattern_small",
    "data.task.num_train=9",
    "data.task.num_val=5",
    "data.task.num_test=3",
    "+data.task.num_communities=2",
    "data.task.max_size=6",
    "trainer.loader.batch_size=4",
]
# Not Adam, which makes whole steps of gradients that are zero but for rounding.
SGD = ["optimizer._target_=torch.optim.SGD", "optimizer.lr=0.05", "+optimizer.momentum=0.9"]
COMMON = [*SGD, "backend=auto", "device=cpu", "trainer.epochs=3", "scheduler=constant", "trainer.progress=false"]


def run(folder, *overrides, group=None):
    return train(train_config(*COMMON, *overrides, f"paths.run={folder}"), group)


def history(folder):
    with open(folder / "metrics.csv") as stream:
        return [{key: float(value) for key, value in row.items() if key != "time_s"} for row in csv.DictReader(stream)]


def assert_same_run(left, right):
    assert len(history(left)) == len(history(right)) == 3
    for first, second in zip(history(left), history(right)):
        assert first == pytest.approx(second, rel=1e-4)
    first, second = (torch.load(each / "checkpoints" / "last.pt", weights_only=True)["model"] for each in (left, right))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-5, msg=name)


def train_all(folder, raw):
    """The same runs in this group and, by process 0, in one of its own."""
    group = Group.of_environment("cpu")
    citation = ["data=cora", f"paths.data=[{raw}]", f"paths.cache={raw / 'cache'}"]
    runs = {
        "gt": [*PATTERN, "model=gt_small"],
        "gat": [*PATTERN, "model=gat", "model.dropout=0", "trainer.resident=true"],
        # Batch norm of few atoms makes much of rounding.
        "values": [
            "data=solubility",
            "model=gcn",
            "data.task.source=generated",
            "data.task.num_graphs=40",
            "model.dropout=0",
        ]
        + ["trainer.loader.batch_size=4", "model.layers=2", "model.hidden_channels=8"],
        "whole": [*citation, "model=gat", "model.dropout=0", "trainer.checkpoint_every=1"],
        "whole-gcn": [*citation, "model=gcn", "model.dropout=0"],
        "types": ["data=imdb", f"paths.data=[{raw}]", "model.hidden_channels=8", "model.dropout=0"],
    }
    for name, overrides in runs.items():
        metric = run(folder / f"{name}-{group.size}" if group.is_main else folder / f"{group.rank}", *overrides)
        assert group.counts(round(1e9 * metric)) == [round(1e9 * metric)] * group.size
        if group.is_main:
            alone = run(folder / f"{name}-1", *overrides, group=Group())
            assert alone == pytest.approx(metric, abs=1e-6)
            assert_same_run(folder / f"{name}-1", folder / f"{name}-{group.size}")
        else:
            assert not (folder / f"{group.rank}").exists()
        group.barrier()


def resume_all(folder):
    group = Group.of_environment("cpu")

    def own(name):
        return folder / name if group.is_main else folder / f"{group.rank}"

    # Two epochs alone, the third by all.
    model = [*PATTERN, "model=gt_small"]
    if group.is_main:
        run(folder / "whole", *model, group=Group())
        run(folder / "half", *model, "trainer.epochs=2", group=Group())
    group.barrier()
    run(own("rest"), *model, f"resume={folder / 'half'}")
    if group.is_main:
        assert_same_run(folder / "whole", folder / "rest")
    # With dropout: what is drawn depends on seed, epoch and process only.
    model = [*PATTERN, "model=gat"]
    for name, more in (("d", []), ("d-half", ["trainer.epochs=2"]), ("d-rest", [f"resume={folder / 'd-half'}"])):
        run(own(name), *model, *more)
        group.barrier()
    if group.is_main:
        assert history(folder / "d") == history(folder / "d-rest")


def test_runs_equal_one_process(launch, tmp_path):
    write_raw(tmp_path / "Cora" / "raw")
    write_imdb(tmp_path / "hetero-small")
    launch(2, train_all, tmp_path, tmp_path)


def test_resume_with_another_number_of_processes(launch, tmp_path):
    launch(2, resume_all, tmp_path)


class AllNeighbors(BaseSampler):
    """Two hops of all in-neighbours, in plain torch."""

    def __init__(self, graph):
        self.edge_index, self.num_nodes = graph.edge_index, graph.num_nodes

    def sample_from_nodes(self, index):
        reached, edges = index.node, torch.zeros(self.edge_index.size(1), dtype=torch.bool)
        for _ in range(2):
            edges |= torch.isin(self.edge_index[1], reached)
            reached = torch.cat([reached, self.edge_index[0, edges]])
        rest = reached.unique()
        node = torch.cat([index.node, rest[~torch.isin(rest, index.node)]])
        place = torch.zeros(self.num_nodes, dtype=torch.long)
        place[node] = torch.arange(len(node))
        ids = edges.nonzero().view(-1)
        row, col = place[self.edge_index[:, ids]]
        return SamplerOutput(node, row, col, ids, metadata=(index.input_id, None))

    def sample_from_edges(self, index, neg_sampling=None):
        raise NotImplementedError


def all_neighbors(graph, num_neighbors, **options):
    assert num_neighbors == [-1, -1]
    return NodeLoader(graph, AllNeighbors(graph), **options)


def train_sampled(folder, raw):
    """Without dropping neighbours the shares of a batch make up the batch."""
    loaders.NeighborLoader, typing.WITH_PYG_LIB = all_neighbors, True
    group = Group.of_environment("cpu")
    overrides = ["data=cora", f"paths.data=[{raw}]", f"paths.cache={raw / 'cache'}", "model=gat", "model.dropout=0"]
    # Batches of all but one training node, and of that one.
    overrides += ["+trainer.sampler.num_neighbors=[-1,-1]", "+trainer.sampler.batch_size=5"]
    run(folder / f"{group.rank}", *overrides)
    if group.is_main:
        run(folder / "alone", *overrides, group=Group())
        assert_same_run(folder / "alone", folder / "0")


def test_sampled_batches_equal_one_process(launch, tmp_path):
    write_raw(tmp_path / "Cora" / "raw")
    launch(2, train_sampled, tmp_path / "runs", tmp_path)
