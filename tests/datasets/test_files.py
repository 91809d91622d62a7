"""Made graphs are kept whole and told apart by their parameters; raw files are found, copied or asked for."""

import errno
import pickle
import runpy
import shutil

import pytest
import torch
from torch_geometric.data import Data

from pyg_dfgnn.datasets import files
from pyg_dfgnn.datasets.files import RawFiles, cached


def make_splits(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def graph(num_nodes, num_edges):
        edge_index = torch.randint(max(num_nodes, 1), (2, num_edges), generator=generator)
        x = torch.rand(num_nodes, 3, generator=generator)
        return Data(
            x=x,
            edge_index=edge_index,
            edge_attr=torch.rand(num_edges, 2, generator=generator),
            y=torch.tensor([num_nodes]),
        )

    return {"train": [graph(5, 9), graph(1, 0), graph(3, 4)], "test": [graph(2, 2)]}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for split in left:
        assert len(left[split]) == len(right[split])
        for first, second in zip(left[split], right[split]):
            assert first.keys() == second.keys()
            for key in first.keys():
                assert torch.equal(first[key], second[key]), key


def test_made_once_and_read_back_the_same(tmp_path):
    splits, calls = make_splits(), []

    def make():
        calls.append(1)
        return make_splits()

    first, second = (cached(tmp_path, "graphs", {"seed": 0, "noise": 0.5}, make) for _ in range(2))
    assert len(calls) == 1
    assert_same(first, splits)
    assert_same(second, splits)
    cached(tmp_path, "graphs", {"seed": 1, "noise": 0.5}, make)
    cached(None, "graphs", {"seed": 0, "noise": 0.5}, make)
    assert len(calls) == 3 and len(list((tmp_path / "made").glob("*.pt"))) == 2


def test_what_was_read_can_be_changed_without_changing_the_file(tmp_path):
    for _ in range(2):
        graph = cached(tmp_path, "graphs", {}, make_splits)["train"][0]
        assert not (graph.x == 7).any()
        graph.x.fill_(7)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"h\x01."])
def test_a_damaged_file_is_named_and_made_anew(tmp_path, caplog, damage):
    cached(tmp_path, "graphs", {}, make_splits)
    (file,) = (tmp_path / "made").glob("*.pt")
    file.write_bytes(damage(file.read_bytes()))
    assert_same(cached(tmp_path, "graphs", {}, make_splits), make_splits())
    assert f"{file} is damaged" in caplog.text and "made anew" in caplog.text
    assert_same(cached(tmp_path, "graphs", {}, lambda: 1 / 0), make_splits())


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def save(_, path):
        path.write_bytes(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(files.torch, "save", save)
    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "graphs", {}, make_splits)
    assert list((tmp_path / "made").glob("*.pt")) == []
    monkeypatch.undo()
    assert_same(cached(tmp_path, "graphs", {}, make_splits), make_splits())


def test_raw_files_are_taken_from_the_first_whole_folder(tmp_path):
    for place, names in (("a/set/raw", ("one",)), ("b/raw", ("one", "two")), ("c/set/raw", ("one", "two"))):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(f"{place} {name}")
    raw_files = RawFiles("Set", ("one", "two"), ("set/raw", "raw"), [tmp_path / part for part in "abc"])
    assert raw_files.need() == tmp_path / "b" / "raw"
    assert raw_files.sizes(tmp_path / "b" / "raw") == [9, 9]
    raw = tmp_path / "cache"
    assert raw_files.load(raw, False, lambda: (raw / "two").read_text()) == "b/raw two"
    assert sorted(path.name for path in raw.iterdir()) == ["one", "two"]


def test_environment_names_folders_for_calls_from_python(monkeypatch):
    for name, folder in (("DATA", "mine"), ("CACHE", "kept")):
        monkeypatch.setenv(f"PYG_DFGNN_{name}", folder)
    module = runpy.run_path(files.__file__)
    assert module["SEARCH"] == ("mine", "data", "../shared/data") and module["CACHE"] == "kept"


def test_missing_raw_files_are_named(tmp_path):
    (tmp_path / "set" / "raw").mkdir(parents=True)
    (tmp_path / "set" / "raw" / "one").touch()
    raw_files = RawFiles("Set", ("one", "two"), ("set/raw",), [tmp_path, tmp_path], "data=set_like is generated.")
    with pytest.raises(FileNotFoundError) as caught:
        raw_files.load(tmp_path / "cache", False, lambda: None)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the raw files of Set were not found. Put one, two into one of"
    assert lines[1:2] == [f"  {tmp_path / 'set' / 'raw'} (lacks two)"]
    assert "set/raw in the environment variable PYG_DFGNN_DATA" in lines[2] and lines[3:] == [raw_files.hint]

    def fail():
        raise OSError("no network")

    with pytest.raises(FileNotFoundError, match=r"(?s)Put one, two.*The download failed: OSError: no network$"):
        raw_files.load(tmp_path / "cache", True, fail)


def raw_of(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "one").write_text(text)
    return RawFiles("Set", ("one",), ("set/raw",), [folder.parents[1]])


def test_changed_raw_files_take_the_place_of_copies(tmp_path):
    raw, made = tmp_path / "cache" / "raw", tmp_path / "cache" / "processed" / "data"

    def make():
        # As PyG's classes do.
        if not made.is_file():
            made.parent.mkdir(exist_ok=True)
            made.write_text((raw / "one").read_text() + str(len(calls)))
        return made.read_text()

    calls = []
    for text, expected in (("old", "old0"), ("old", "old0"), ("new", "new2"), ("whole", "whole3")):
        assert raw_of(tmp_path / "local" / "set" / "raw", text).load(raw, False, make) == expected
        calls.append(text)


def test_damaged_raw_files_are_named(tmp_path):
    local, raw = tmp_path / "local" / "set" / "raw", tmp_path / "cache" / "set" / "raw"

    def make():
        return pickle.loads((raw / "one").read_bytes())

    damaged = f"{local}, copied to {raw.parent}, may be damaged; replace or remove them: UnpicklingError"
    with pytest.raises(ValueError, match=damaged):
        raw_of(local, "junk").load(raw, True, make)
    shutil.rmtree(local)
    with pytest.raises(ValueError, match=f"the files of Set in {raw.parent} may be damaged"):
        RawFiles("Set", ("one",), ("set/raw",), [tmp_path / "local"]).load(raw, True, make)
    local.mkdir()
    (local / "one").write_bytes(pickle.dumps("whole"))
    assert RawFiles("Set", ("one",), ("set/raw",), [tmp_path / "local"]).load(raw, True, make) == "whole"


@pytest.mark.fault("the disk is full as a data set is made")
def test_errors_of_the_system_are_not_those_of_a_download(tmp_path):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    raw_files = raw_of(tmp_path / "local" / "set" / "raw", "text")
    with pytest.raises(OSError, match="No space left on device") as caught:
        raw_files.load(tmp_path / "cache" / "raw", True, full)
    assert not isinstance(caught.value, FileNotFoundError)


def test_download_is_checked(tmp_path):
    with pytest.raises(TypeError, match=r"'download' needs True or False \(got str 'maybe'\)"):
        raw_of(tmp_path / "set" / "raw", "text").load(tmp_path / "cache", "maybe", lambda: None)
