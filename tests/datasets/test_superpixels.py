"""Graphs of superpixels against slow definitions of the recipe; published files where they lie; real pixels."""

import gzip
import io
import pickle
import shutil
import sys
import tarfile

import numpy as np
import pytest
import torch
from torch_geometric.utils import is_undirected

from pyg_dfgnn.datasets import image_superpixels, photograph_superpixels, superpixels
from pyg_dfgnn.datasets.files import SEARCH
from pyg_dfgnn.datasets.superpixels import image_graph, neighbour_graph, photograph_graph, segments
from tests.datasets.sizes import DATA

segmentation = pytest.importorskip("skimage.segmentation")


def picture(height, width, channels=3, seed=0):
    """Blurred noise in 0..1."""
    rng = np.random.default_rng(seed)
    noise = rng.random((height // 4 + 2, width // 4 + 2, channels))
    smooth = noise.repeat(4, axis=0).repeat(4, axis=1)[:height, :width]
    return (0.8 * smooth + 0.2 * rng.random((height, width, channels))).astype(np.float32)


def write_mnist(root, count=40):
    folder = root / "mnist" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images = (255 * np.stack([picture(28, 28, 1, seed)[:, :, 0] for seed in range(count)])).astype(np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for part, header, values in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
        (folder / f"t10k-{part}-ubyte.gz").write_bytes(gzip.compress(bytes(header) + values.tobytes()))


def write_tar(file, paths, shape):
    from PIL import Image

    file.parent.mkdir(parents=True)
    with tarfile.open(file, "w:gz") as archive:
        for seed, path in enumerate(paths):
            stream = io.BytesIO()
            Image.fromarray((255 * picture(*shape, seed=seed)).astype(np.uint8)).save(stream, "JPEG")
            member = tarfile.TarInfo(path)
            member.size = len(stream.getvalue())
            archive.addfile(member, io.BytesIO(stream.getvalue()))


@pytest.mark.parametrize("channels", [1, 3], ids=["grey", "colour"])
def test_segments_are_those_of_asking_for_one_less_each_time(channels):
    image = picture(24, 30, channels)
    image = image[:, :, 0] if channels == 1 else image
    axis = None if channels == 1 else 2
    found = segments(image, most=20, first=45, compactness=0.5)
    for wished in range(45, 0, -1):
        expected = segmentation.slic(image, wished, 0.5, channel_axis=axis, start_label=0)
        if len(np.unique(expected)) <= 20:
            break
    assert wished < 45 and np.array_equal(found, np.unique(expected, return_inverse=True)[1].reshape(24, 30))


def test_an_image_that_never_falls_into_few_segments_is_refused():
    with pytest.raises(ValueError, match=r"'most' needs more superpixels .* \(got 0\)"):
        segments(picture(12, 12), most=0, first=3, compactness=1.0)


def test_neighbour_graph_by_definition():
    rng = np.random.default_rng(0)
    position, colour = rng.random((14, 2)), rng.random((14, 3))
    edge_index, weight = neighbour_graph(position, colour)

    def affinity(i, j):
        exponent = 0.0
        for values in (position, colour):
            distances = [np.linalg.norm(values[i] - other) for other in values]
            exponent += (distances[j] / (sum(sorted(distances)[:9]) / 8)) ** 2
        return np.exp(-exponent)

    full = {(i, j): (affinity(i, j) + affinity(j, i)) / 2 for i in range(14) for j in range(14) if i != j}
    expected = {pair for i in range(14) for pair in sorted((pair for pair in full if pair[0] == i), key=full.get)[-8:]}
    found = dict(zip(map(tuple, edge_index.T.tolist()), weight))
    assert set(found) == expected and len(found) == edge_index.shape[1] == 14 * 8
    for pair, value in found.items():
        assert value == pytest.approx(full[pair], rel=1e-6)


@pytest.mark.parametrize("num_nodes", [1, 2, 9])
def test_few_nodes_make_a_complete_graph(num_nodes):
    rng = np.random.default_rng(0)
    edge_index, weight = neighbour_graph(rng.random((num_nodes, 2)), rng.random((num_nodes, 1)))
    pairs = {(i, j) for i in range(num_nodes) for j in range(num_nodes) if i != j}
    assert set(map(tuple, edge_index.T.tolist())) == pairs and len(weight) == len(pairs)


def test_image_graph():
    image, how = picture(28, 28), superpixels._IMAGES["CIFAR10"]
    graph = image_graph(image, 4, how, np.random.default_rng(0))
    segment = segments(image, how.most, how.first, how.compactness)
    expected = [
        [*image[segment == s].mean(axis=0), *(np.argwhere(segment == s).mean(axis=0) / 28)]
        for s in range(segment.max() + 1)
    ]
    found, expected = sorted(graph.x.tolist()), sorted(expected)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert graph.x.tolist() != found and graph.y.tolist() == [4]
    assert (graph.edge_index[0].bincount() == 8).all() and graph.edge_attr.shape == (graph.num_edges, 1)


def test_photograph_graph(monkeypatch):
    image = picture(60, 80)
    segment = segments(image, 30, 40, 30.0)
    monkeypatch.setattr(superpixels, "segments", lambda *_: segment)
    monkeypatch.setattr(superpixels, "_shuffled", lambda segment, rng: segment)
    graph = photograph_graph(image, np.random.default_rng(0))
    for s in range(segment.max() + 1):
        pixels = image[segment == s]
        parts = [part(axis=0) for part in (pixels.mean, pixels.std, pixels.max, pixels.min)]
        expected = [*np.concatenate(parts), *(np.argwhere(segment == s).mean(axis=0) / 80)]
        np.testing.assert_allclose(graph.x[s], expected, atol=1e-4)
    touching = set()
    for row, column in ((0, 1), (1, 0), (1, 1), (1, -1)):
        here = segment[: 60 - row, max(0, -column) : 80 - max(0, column)]
        there = segment[row:, max(0, column) : 80 + min(0, column)]
        touching |= set(zip(here.flat, there.flat)) | set(zip(there.flat, here.flat))
    touching = {(u, v) for u, v in touching if u != v}
    assert set(map(tuple, graph.edge_index.t().tolist())) == touching and graph.num_edges == len(touching)
    assert is_undirected(graph.edge_index, graph.edge_attr) and (graph.edge_attr[:, 1] >= 1).all()


def test_mnist_from_pixels(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    options = {"search": [tmp_path], "cache": tmp_path / "cache", "download": False}
    task = image_superpixels("MNIST", **options)
    assert [len(graphs) for graphs in task.splits.values()] == [32, 4, 4]
    assert (task.level, task.metric, task.num_features, task.num_classes) == ("graph", "accuracy", 3, 10)
    assert task.synthetic == "graphs by the published recipe, from 40 images"
    y = torch.cat([graph.y for graphs in task.splits.values() for graph in graphs])
    assert (y.bincount() == 4).all()

    few = image_superpixels("MNIST", **options, num_graphs=10)
    assert [len(graphs) for graphs in few.splits.values()] == [8, 1, 1]
    assert torch.equal(few.splits["train"][0].x, task.splits["train"][0].x)
    other = image_superpixels("MNIST", **options, seed=1)
    assert [int(graph.y) for graph in other.splits["train"]] != [int(graph.y) for graph in task.splits["train"]]

    monkeypatch.setattr(superpixels, "segments", None)
    again = image_superpixels("MNIST", **options)
    for first, second in zip(task.splits["train"], again.splits["train"], strict=True):
        assert torch.equal(first.edge_index, second.edge_index) and torch.equal(first.x, second.x)


def test_cifar10_from_pixels(tmp_path):
    names = ("cat", "airplane")
    paths = [
        f"{part}/{name}/{i}.jpg" for part, count in (("train", 8), ("test", 2)) for name in names for i in range(count)
    ]
    write_tar(tmp_path / "cifar10" / "cifar10_jpg_subset.tar.gz", paths, (32, 32))
    task = image_superpixels("CIFAR10", search=[tmp_path], cache=tmp_path / "cache", source="pixels")
    assert [len(graphs) for graphs in task.splits.values()] == [14, 2, 4]
    assert sorted(int(graph.y) for graph in task.splits["test"]) == [0, 0, 1, 1]
    assert task.num_features == 5


@pytest.mark.parametrize(("name", "num_classes"), [("PascalVOC-SP", 21), ("COCO-SP", 81)])
def test_photographs(tmp_path, name, num_classes):
    paths = [f"images/{part}/{i}.jpg" for part, count in (("train", 2), ("val", 1), ("test", 1)) for i in range(count)]
    write_tar(tmp_path / "bsds500" / "bsds500_subset.tar.gz", paths, (120, 160))
    task = photograph_superpixels(name, search=[tmp_path], cache=tmp_path / "cache", download=False)
    assert [len(graphs) for graphs in task.splits.values()] == [2, 1, 1]
    assert (task.level, task.metric, task.num_features, task.num_classes) == ("node", "macro_f1", 14, num_classes)
    assert "other photographs" in task.synthetic
    y = torch.cat([graph.y for graphs in task.splits.values() for graph in graphs])
    counts = y.bincount(minlength=num_classes)
    assert len(counts) == num_classes and int(counts.max() - counts.min()) <= 2


def test_published_mnist_comes_first(tmp_path):
    write_mnist(tmp_path)
    folder = tmp_path / "gnn_benchmark" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    edge_index = torch.tensor([[0, 1], [1, 0]])
    graph = dict(
        x=torch.rand(2, 1), pos=torch.rand(2, 2), edge_index=edge_index, edge_attr=torch.rand(2), y=torch.tensor([3])
    )
    torch.save([[graph, graph], [graph], [graph]], folder / "MNIST_v2.pt")
    options = {"search": [tmp_path], "cache": tmp_path / "cache", "download": False}
    task = image_superpixels("MNIST", **options)
    assert task.synthetic is None and [len(graphs) for graphs in task.splits.values()] == [2, 1, 1]
    first = task.splits["train"][0]
    assert torch.equal(first.x, torch.cat([graph["x"], graph["pos"]], dim=1))
    assert first.edge_attr.shape == (2, 1) and first.y.tolist() == [3] and task.num_features == 3
    # What was copied or downloaded before comes before pixels too.
    shutil.rmtree(folder)
    assert image_superpixels("MNIST", **options).synthetic is None
    assert image_superpixels("MNIST", **options, source="pixels", num_graphs=3).synthetic


def test_published_voc(tmp_path):
    folder = tmp_path / "lrgb" / "pascalvoc-sp" / "raw"
    folder.mkdir(parents=True)
    graph = torch.rand(2, 14), torch.rand(2, 2), torch.tensor([[0, 1], [1, 0]]), [20, 0]
    for split in ("train", "val", "test"):
        (folder / f"{split}.pickle").write_bytes(pickle.dumps([graph, graph]))
    options = {"search": [tmp_path], "cache": tmp_path / "cache", "download": False}
    task = photograph_superpixels("PascalVOC-SP", **options)
    assert task.synthetic is None and [len(graphs) for graphs in task.splits.values()] == [2, 2, 2]
    assert torch.equal(task.splits["train"][0].x, graph[0]) and task.splits["train"][0].y.tolist() == [20, 0]
    shutil.rmtree(folder)
    write_tar(tmp_path / "bsds500" / "bsds500_subset.tar.gz", ["images/train/0.jpg"], (120, 160))
    assert photograph_superpixels("PascalVOC-SP", **options).synthetic is None


@pytest.mark.parametrize(("make", "name"), [(image_superpixels, "CIFAR10"), (photograph_superpixels, "COCO-SP")])
def test_missing_files_are_named(tmp_path, make, name):
    options = {"search": [tmp_path], "cache": tmp_path / "cache", "download": False}
    stem = {"CIFAR10": "cifar10_superpixels", "COCO-SP": "coco_sp"}[name]
    with pytest.raises(FileNotFoundError, match=f"(?s)raw files of {name}.*PYG_DFGNN_DATA.*data={stem}_like is"):
        make(name, **options)
    with pytest.raises(FileNotFoundError, match="raw files of the "):
        make(name, **options, source="pixels")


@pytest.mark.parametrize(("make", "name"), [(image_superpixels, "MNIST"), (photograph_superpixels, "COCO-SP")])
def test_superpixels_need_scipy(tmp_path, monkeypatch, make, name):
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    with pytest.raises(ModuleNotFoundError, match=r'superpixels need scipy: pip install "\.\[data\]"'):
        make(name, source="pixels", search=[tmp_path], cache=tmp_path, download=False)


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (image_superpixels, {"name": "mnist"}, r"'name' needs one of 'MNIST', 'CIFAR10' \(got 'mnist'\)"),
        (image_superpixels, {"name": "MNIST", "source": "web"}, r"'source' needs one of .* \(got 'web'\)"),
        (image_superpixels, {"name": "MNIST", "num_graphs": 2}, r"'num_graphs' needs a value >= 3 \(got 2\)"),
        (photograph_superpixels, {"name": "VOC"}, r"'name' needs one of 'PascalVOC-SP', 'COCO-SP' \(got 'VOC'\)"),
    ],
    ids=["name", "source", "num_graphs", "photographs"],
)
def test_wrong_arguments(tmp_path, make, wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong, search=[tmp_path], cache=tmp_path)


@pytest.mark.parametrize("config", ["mnist_superpixels", "cifar10_superpixels"])
def test_real_pixels(tmp_path, config):
    entry, name = DATA[config], config.split("_")[0].upper()
    try:
        task = image_superpixels(name, source="pixels", num_graphs=80, search=SEARCH, cache=tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    sizes = torch.tensor([graph.num_nodes for graphs in task.splits.values() for graph in graphs])
    how = superpixels._IMAGES[name]
    assert sizes.max() <= how.most
    assert sizes.double().mean().item() == pytest.approx(entry.size.nodes, rel=entry.tolerance[0])


def test_real_photographs():
    try:
        folder = superpixels._pixel_files("photographs", SEARCH).need()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    images = superpixels._photographs(folder)
    assert [len(pairs) for pairs in images.values()] == [24, 8, 8]
    graphs = [photograph_graph(image, np.random.default_rng(0)) for image, _ in images["test"]]
    nodes, edges = sum(graph.num_nodes for graph in graphs), sum(graph.num_edges for graph in graphs)
    # Eight photographs; all forty lie within 3 % of the nodes and 5 % of the edges.
    assert all(450 <= graph.num_nodes <= 500 for graph in graphs)
    assert nodes / 8 == pytest.approx(479.40, rel=0.03) and edges / nodes == pytest.approx(2710.48 / 479.40, rel=0.1)
