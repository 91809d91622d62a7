"""What timings are remembered by, and how they are kept."""

import json
import os
from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.dispatch import gpu, store
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.core import BACKWARD, FORWARD
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.paths import kernel_cache_dir
from pyg_dfgnn.reference.zoo import hub, random
from pyg_dfgnn.settings import current
from tests.dispatch.test_core import PROBLEM, graph_of

SECONDS = {"forward": {"row_split": 1e-3, "block_mma": 2e-3}}


def key_of(problem=PROBLEM, graph=None, directions=FORWARD):
    graph = graph_of(random(64, 64, 512, seed=1)) if graph is None else graph
    return store.key_of(
        FAMILY, problem, graph, directions, dispatch.options(FAMILY, problem, graph, directions, current())
    )


def files(folder):
    return sorted(folder.glob("pyg_dfgnn-autotune-*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"score": "add"},
        {"heads": 4},
        {"channels": 32},
        {"dtype": torch.float16},
        {"edge": True},
        {"dropout": True},
        {"tf32": True},
    ],
    ids=str,
)
def test_the_problem_is_part_of_the_key(changes):
    assert key_of(replace(PROBLEM, **changes)) != key_of()


def test_so_are_direction_device_and_sources(monkeypatch):
    keys = {key_of(), key_of(directions=BACKWARD)}
    monkeypatch.setattr(store, "_sources", lambda *_: "other")
    keys.add(key_of())
    monkeypatch.setitem(gpu.known, PROBLEM.device, replace(gpu.H200, name="another"))
    keys.add(key_of())
    assert len(keys) == 4


def test_similar_graphs_share_a_key():
    similar = [key_of(graph=graph_of(random(1000, 1000, 11000 + 100 * seed, seed=seed))) for seed in range(8)]
    # Some number may lie next to a bound.
    assert len(set(similar)) <= 2
    assert key_of(graph=graph_of(random(1000, 1000, 32000))) != similar[0]
    # The same sizes, another spread of degrees.
    num_edges = 2999
    star = torch.stack([torch.arange(num_edges) % 3000, torch.zeros(num_edges, dtype=torch.int64)])
    ring = torch.stack([torch.arange(num_edges), torch.arange(num_edges) + 1])
    assert key_of(graph=Graph.of(star, 3000)) != key_of(graph=Graph.of(ring, 3000))


def test_the_other_side_matters_in_backward_alone():
    edges = torch.stack([torch.zeros(999, dtype=torch.int64), torch.arange(1, 1000)])
    spread = torch.stack([torch.arange(999), torch.arange(1, 1000)])
    graphs = [Graph.of(each, 1000) for each in (edges, spread)]
    first, second = (key_of(graph=graph) for graph in graphs)
    assert first == second
    first, second = (key_of(graph=graph, directions=BACKWARD) for graph in graphs)
    assert first != second
    assert key_of(graph=graphs[0]) == key_of(graph=graph_of_same(edges))


def graph_of_same(edges):
    return Graph.of(edges.clone(), 1000)


@pytest.mark.parametrize("case", [hub(300), random(5, 3, 0)], ids=str)
def test_every_graph_has_a_key(case):
    assert json.loads(key_of(graph=graph_of(case)))["gpu"] == "NVIDIA H200"


def test_kept_on_disk(no_timings):
    key = key_of()
    assert store.recall(key) is None and store.recall(None) is None
    store.remember(key, SECONDS)
    assert store.recall(key) == SECONDS
    (path,) = files(no_timings)
    assert list(no_timings.iterdir()) == [path] and json.loads(path.read_text())["seconds"] == SECONDS
    store.forget()
    assert store.recall(key) == SECONDS
    store.remember(key, {"forward": {"row_split": 5.0}})
    store.forget()
    assert store.recall(key) == {"forward": {"row_split": 5.0}}


@pytest.mark.fault("a timing on disk is damaged")
@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "null", '{"key": 1}', '{"seconds": {}}', "\x00\xff", '{"key": KEY, "seconds": {"forward": 3}}'],
)
def test_a_corrupt_file_counts_as_none(no_timings, text):
    key = key_of()
    store.remember(key, SECONDS)
    (path,) = files(no_timings)
    path.write_bytes(text.replace("KEY", key).encode("latin-1"))
    store.forget()
    assert store.recall(key) is None
    store.remember(key, SECONDS)
    store.forget()
    assert store.recall(key) == SECONDS


def test_a_file_of_another_key_counts_as_none(no_timings):
    store.remember(key_of(), SECONDS)
    (path,) = files(no_timings)
    other = key_of(replace(PROBLEM, heads=1))
    path.rename(store._path(other))
    assert store.recall(other) is None


@pytest.mark.fault("the folder of timings cannot be written")
def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "folder"))
    store.remember(key_of(), SECONDS)
    assert store.recall(key_of()) == SECONDS and "this process only" in caplog.text
    store.forget()
    assert store.recall(key_of()) is None


def test_beside_the_compiled_kernels(monkeypatch, tmp_path):
    assert kernel_cache_dir() == tmp_path
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_cache_dir() == tmp_path / ".cupy" / "kernel_cache"


@pytest.mark.fault("the user has no home")
def test_a_user_without_a_home(monkeypatch, tmp_path):
    """As in a container that runs under a number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    store.remember(key_of(), SECONDS)
    store.forget()
    assert store.recall(key_of()) == SECONDS


def test_no_key_while_a_new_graph_is_captured(monkeypatch):
    graph = graph_of(random(64, 64, 512, seed=1))
    seen = key_of(graph=graph)
    monkeypatch.setattr(graph, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert key_of(graph=graph) == seen
    other = graph_of(random(64, 64, 512, seed=2))
    monkeypatch.setattr(other, "device", torch.device("cuda"))
    monkeypatch.setattr(other, "_reset_streams", lambda: None)
    assert key_of(graph=other) is None
