"""Tasks on images as graphs of superpixels, from the published files or by the published recipe from pixels.

Source: Dwivedi et al., Benchmarking Graph Neural Networks, JMLR 2023, section 4.2.2 (MNIST and CIFAR10); Dwivedi et
al., Long Range Graph Benchmark, NeurIPS 2022, section 4.1 (PascalVOC-SP and COCO-SP). Superpixels: Achanta et al., SLIC
Superpixels, TPAMI 2012, as scikit-image has it; its release decides how many a picture falls into.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import GNNBenchmarkDataset, LRGBDataset

from pyg_dfgnn.datasets.files import CACHE, SEARCH, Folders, RawFiles, cached
from pyg_dfgnn.datasets.task import SPLITS, Task, progress
from pyg_dfgnn.errors import check_choice, check_integer, need_extra

SOURCES = ("auto", "published", "pixels")

Images = dict[str, list[tuple[np.ndarray, int]]]
"""Images with labels, by split."""


@dataclass(frozen=True)
class _Segmentation:
    """Arguments of :func:`segments`."""

    most: int
    first: int
    compactness: float


_IMAGES = {"MNIST": _Segmentation(75, 95, 0.25), "CIFAR10": _Segmentation(150, 200, 10.0)}
_PHOTOGRAPHS = {"PascalVOC-SP": 21, "COCO-SP": 81}


def image_superpixels(
    name: str,
    *,
    source: str = "auto",
    num_graphs: int | None = None,
    search: Folders = SEARCH,
    cache: str | Path = CACHE,
    download: bool = True,
    seed: int = 0,
) -> Task:
    """Classify MNIST or CIFAR10 images as graphs of superpixels.

    A node is a superpixel with its mean colour and centre, `x [N, 3]` or `[N, 5]`; each has edges to the 8 superpixels
    nearest in position and colour, `edge_attr [E, 1]` being the weight
    `exp(-(d_position / sigma_position)^2 - (d_colour / sigma_colour)^2)`.

    Args:
        name: "MNIST" or "CIFAR10".
        source: "published" graphs are read from `gnn_benchmark/<name>/raw/<name>_v2.pt` or downloaded; from "pixels",
            the recipe makes graphs of `mnist/MNIST/raw/t10k-*.gz` or `cifar10/*.tar.gz`; "auto" takes the first of
            published files, pixels and download that is available.
        num_graphs: Number of graphs made from pixels, in the shares of the splits; None: of all images.
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied, downloaded and generated files.
        download: Whether missing files may be downloaded.
        seed: Seed of split and node order of graphs made from pixels.

    Returns:
        The task at graph level, 10 classes; `synthetic` says whether graphs were made from pixels, and from which.

    Raises:
        ValueError: `name` or `source` is unknown, `num_graphs` is below 3, or published files cannot be read.
        FileNotFoundError: The raw files are missing; the message says where to put them.
        ModuleNotFoundError: scipy or scikit-image is missing.
    """
    check_choice("name", name, tuple(_IMAGES))
    if num_graphs is not None:
        check_integer("num_graphs", num_graphs, 3)
    published = RawFiles(
        f"{name} superpixels",
        (f"{name}_v2.pt",),
        (f"gnn_benchmark/{name}/raw", f"{name}/raw"),
        search,
        f"data={name.lower()}_superpixels_like is generated instead.",
    )
    pixels = _pixel_files(name, search)
    root = Path(cache).expanduser() / "gnn_benchmark"
    raw = root / name / "raw"
    if not _from_pixels(source, published, raw, pixels):

        def read() -> dict[str, list[Data]]:
            return {split: list(GNNBenchmarkDataset(str(root), name, split)) for split in SPLITS}

        graphs = published.load(raw, download, read)
        splits = {split: [_published_image(graph) for graph in graphs[split]] for split in SPLITS}
        synthetic = None
    else:
        folder = _folder(pixels)
        read_images = _mnist if name == "MNIST" else _cifar10

        def make() -> dict[str, list[Data]]:
            chosen = _choose(read_images(folder, seed), num_graphs)
            rng = np.random.default_rng(seed)
            return _each_image(name, chosen, lambda image, y: image_graph(image, y, _IMAGES[name], rng))

        parameters = {"bytes": pixels.sizes(folder), "num_graphs": num_graphs, "seed": seed, "recipe": 1}
        splits = cached(cache, f"{name.lower()}_superpixels", parameters, make)
        synthetic = f"graphs by the published recipe, from {sum(map(len, splits.values())):,} images"
    num_features = splits["train"][0].num_features
    return Task(f"{name} superpixels", splits, num_features, 10, level="graph", synthetic=synthetic)


def photograph_superpixels(
    name: str,
    *,
    source: str = "auto",
    search: Folders = SEARCH,
    cache: str | Path = CACHE,
    download: bool = True,
    seed: int = 0,
) -> Task:
    """Classify the superpixels of photographs by what they show.

    A node has mean, standard deviation, maximum and minimum of its colours and its centre, `x [N, 14]`; edges link
    superpixels that touch, both ways, `edge_attr [E, 2]` being the mean Sobel gradient on their border and its length.

    Args:
        name: "PascalVOC-SP" or "COCO-SP".
        source: "published" graphs are read from `lrgb/<name>/raw/{train,val,test}.pickle` or downloaded; from "pixels",
            the recipe makes graphs of the 40 photographs of `bsds500/bsds500_subset.tar.gz`, which have no labels, so
            that the classes are equal shares of the superpixels by mean luminance; "auto" takes the first of published
            files, photographs and download that is available.
        search: Folders to search for the raw files, in this order.
        cache: Folder for copied, downloaded and generated files.
        download: Whether missing files may be downloaded.
        seed: Seed of the node order of graphs made from photographs.

    Returns:
        The task at node level, 21 or 81 classes, scored by macro F1.

    Raises:
        ValueError: `name` or `source` is unknown, or published files cannot be read.
        FileNotFoundError: The raw files are missing; the message says where to put them.
        ModuleNotFoundError: scipy or scikit-image is missing.
    """
    check_choice("name", name, tuple(_PHOTOGRAPHS))
    stem, num_classes = name.lower(), _PHOTOGRAPHS[name]
    files = [f"{split}.pickle" for split in SPLITS]
    like = f"data={stem.replace('-', '_')}_like is generated instead."
    published = RawFiles(name, files, (f"lrgb/{stem}/raw", f"{stem}/raw"), search, like)
    pixels = _pixel_files("photographs", search)
    root = Path(cache).expanduser() / "lrgb"
    raw = root / stem / "raw"
    if not _from_pixels(source, published, raw, pixels):

        def read() -> dict[str, list[Data]]:
            return {split: list(LRGBDataset(str(root), stem, split)) for split in SPLITS}

        splits, synthetic = published.load(raw, download, read), None
    else:
        folder = _folder(pixels)

        def make() -> dict[str, list[Data]]:
            rng = np.random.default_rng(seed)
            graphs = _each_image(name, _photographs(folder), lambda image, _: photograph_graph(image, rng))
            return _label_by_luminance(graphs, num_classes)

        parameters = {"bytes": pixels.sizes(folder), "num_classes": num_classes, "seed": seed, "recipe": 1}
        splits = cached(cache, stem.replace("-", "_"), parameters, make)
        synthetic = "graphs by the published recipe from 40 other photographs; classes: bins of the mean luminance"
    num_features = splits["train"][0].num_features
    return Task(name, splits, num_features, num_classes, metric="macro_f1", loss_weights=True, synthetic=synthetic)


def segments(image: np.ndarray, most: int, first: int, compactness: float) -> np.ndarray:
    """Return the superpixel of each pixel `[H, W]`, numbered from 0.

    Args:
        image: Grey `[H, W]` or colour `[H, W, 3]`, in 0..1.
        most: Largest number of superpixels.
        first: Number of superpixels that SLIC is first asked for; the number falls until SLIC returns at most `most`.
        compactness: Weight of the position against the colour.
    """
    from skimage.segmentation import slic
    from skimage.util import regular_grid

    channel_axis = 2 if image.ndim == 3 else None
    previous = None
    for wished in range(first, 0, -1):
        # SLIC starts from a regular grid, and each number with the same grid gives the same superpixels.
        grid = regular_grid((1, *image.shape[:2]), wished)
        if grid == previous:
            continue
        previous = grid
        labels = slic(image, wished, compactness, channel_axis=channel_axis, start_label=0)
        names, segment = np.unique(labels, return_inverse=True)
        if len(names) <= most:
            return segment.reshape(image.shape[:2])
    raise ValueError(f"'most' needs more superpixels for this image (got {most})")


def neighbour_graph(position: np.ndarray, colour: np.ndarray, count: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return edges `[2, E]` from each node to the `count` nodes with the largest weights, and the weights `[E]`.

    The weights are `A_ij = exp(-(|p_i - p_j| / s_i)^2 - (|f_i - f_j| / t_i)^2)`, averaged with `A_ji`, where `s_i` and
    `t_i` are the mean distances to the `count` nearest nodes. With up to `count + 1` nodes the graph is complete.

    Args:
        position: Positions `[N, 2]`.
        colour: Colours `[N, C]`.
        count: Out-degree of each node.
    """
    num_nodes = len(position)
    exponent = np.zeros((num_nodes, num_nodes))
    for values in (position, colour):
        distance = np.sqrt(((values[:, None] - values) ** 2).sum(axis=-1))
        width = 1.0
        if count + 1 < num_nodes:
            width = np.partition(distance, count)[:, : count + 1].sum(axis=1, keepdims=True) / count
        exponent += (distance / (width + 1e-8)) ** 2
    weight = np.exp(-exponent)
    weight = (weight + weight.T) / 2
    np.fill_diagonal(weight, -1.0)
    count = min(count, num_nodes - 1)
    target = np.sort(np.argpartition(-weight, count - 1)[:, :count]) if count else np.zeros((num_nodes, 0), dtype=int)
    source = np.repeat(np.arange(num_nodes), count)
    target = target.reshape(-1)
    return np.stack([source, target]), weight[source, target]


def image_graph(image: np.ndarray, y: int, how: _Segmentation, rng: np.random.Generator) -> Data:
    """Return the graph of one image in 0..1 with its nodes in random order."""
    segment = _shuffled(segments(image, how.most, how.first, how.compactness), rng)
    pixels = image.reshape(*image.shape[:2], -1)
    colour, position = _means(segment, pixels), _centres(segment)
    edge_index, weight = neighbour_graph(position, colour)
    return Data(
        x=torch.from_numpy(np.concatenate([colour, position], axis=1)).float(),
        edge_index=torch.from_numpy(edge_index),
        edge_attr=torch.from_numpy(weight[:, None]).float(),
        y=torch.tensor([y]),
    )


def photograph_graph(image: np.ndarray, rng: np.random.Generator) -> Data:
    """Return the region boundary graph of one photograph `[H, W, 3]` in 0..1, nodes in random order, no labels."""
    from skimage.color import rgb2gray
    from skimage.filters import sobel
    from skimage.graph import rag_boundary

    segment = _shuffled(segments(image, 500, 550, 30.0), rng)
    mean = _means(segment, image)
    deviation = np.sqrt(np.maximum(_means(segment, image**2) - mean**2, 0))
    order = np.argsort(segment, axis=None, kind="stable")
    first = np.searchsorted(segment.reshape(-1)[order], np.arange(len(mean)))
    sorted_pixels = image.reshape(-1, 3)[order]
    highest, lowest = np.maximum.reduceat(sorted_pixels, first), np.minimum.reduceat(sorted_pixels, first)
    x = np.concatenate([mean, deviation, highest, lowest, _centres(segment)], axis=1)

    borders = sorted(rag_boundary(segment, sobel(rgb2gray(image))).edges(data=True))
    pairs = torch.tensor([(u, v) for u, v, _ in borders]).t()
    edge_attr = torch.tensor([(border["weight"], border["count"]) for _, _, border in borders])
    return Data(
        x=torch.from_numpy(x).float(),
        edge_index=torch.cat([pairs, pairs.flip(0)], dim=1),
        edge_attr=torch.cat([edge_attr, edge_attr]),
    )


def _from_pixels(source: str, published: RawFiles, raw: Path, pixels: RawFiles) -> bool:
    """Return whether graphs are made from pixels; `raw` may hold published files that were copied or downloaded."""
    check_choice("source", source, SOURCES)
    have_published = published.find() is not None or published.are_in(raw)
    return source == "pixels" or (source == "auto" and not have_published and pixels.find() is not None)


def _folder(pixels: RawFiles) -> Path:
    """Return the folder of the images after a check that the packages of superpixels are installed."""
    for module in ("scipy.ndimage", "skimage.segmentation"):
        need_extra(module, "superpixels", "data")
    return pixels.need()


def _published_image(graph: Data) -> Data:
    return Data(
        x=torch.cat([graph.x, graph.pos], dim=1).float(),
        edge_index=graph.edge_index,
        edge_attr=graph.edge_attr.view(-1, 1).float(),
        y=graph.y.view(1),
    )


def _each_image(name: str, images: Images, make: Callable[[np.ndarray, int], Data]) -> dict[str, list[Data]]:
    total = sum(map(len, images.values()))
    with progress(f"{name} superpixels", total, "image") as bar:

        def graph(image: np.ndarray, y: int) -> Data:
            bar.update()
            return make(image, y)

        return {split: [graph(*pair) for pair in pairs] for split, pairs in images.items()}


def _label_by_luminance(splits: dict[str, list[Data]], num_classes: int) -> dict[str, list[Data]]:
    luminance = {split: [graph.x[:, :3].mean(dim=1) for graph in graphs] for split, graphs in splits.items()}
    values = torch.cat([value for split in luminance.values() for value in split])
    bounds = values.quantile(torch.arange(1, num_classes) / num_classes)
    for split, graphs in splits.items():
        for graph, value in zip(graphs, luminance[split]):
            graph.y = torch.bucketize(value, bounds)
    return splits


def _shuffled(segment: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(segment.max() + 1)[segment]


def _means(segment: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the means of values `[H, W, C]` over each superpixel, `[S, C]`."""
    flat = segment.reshape(-1)
    size = np.bincount(flat)
    return np.stack([np.bincount(flat, channel.reshape(-1)) / size for channel in np.moveaxis(values, 2, 0)], axis=1)


def _centres(segment: np.ndarray) -> np.ndarray:
    """Return row and column of the centre of each superpixel, `[S, 2]`, in units of the longer side of the image."""
    grid = np.stack(np.meshgrid(*map(np.arange, segment.shape), indexing="ij"), axis=2)
    return _means(segment, grid) / max(segment.shape)


def _choose(images: Images, num_graphs: int | None) -> Images:
    share = 1.0 if num_graphs is None else num_graphs / sum(map(len, images.values()))
    return {split: pairs[: max(1, round(share * len(pairs)))] for split, pairs in images.items()}


_PIXELS = {
    "MNIST": (
        "the MNIST test images",
        ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
        ("mnist/MNIST/raw", "MNIST/raw"),
    ),
    "CIFAR10": ("the CIFAR10 images", ("cifar10_jpg_subset.tar.gz",), ("cifar10",)),
    "photographs": ("the photographs", ("bsds500_subset.tar.gz",), ("bsds500",)),
}
"""Description, files and places of the pixels."""


def _pixel_files(name: str, search: Folders) -> RawFiles:
    return RawFiles(*_PIXELS[name], search)


def _mnist(folder: Path, seed: int) -> Images:
    """Return a random split of the test images into 8,000 / 1,000 / 1,000."""
    images, labels = (
        np.frombuffer(gzip.decompress((folder / f"t10k-{part}-ubyte.gz").read_bytes()), np.uint8, offset=offset)
        for part, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    order = np.random.default_rng(seed).permutation(len(labels))
    scaled = (images.reshape(-1, 28, 28) / 255).astype(np.float32)
    bounds = [len(order) * 8 // 10, len(order) * 9 // 10]
    return {split: [(scaled[i], int(labels[i])) for i in part] for split, part in zip(SPLITS, np.split(order, bounds))}


def _cifar10(folder: Path, seed: int) -> Images:
    """Return 7,000 / 1,000 training images for training and validation, and all test images, in random order."""
    parts: dict[str, list[tuple[np.ndarray, str]]] = {"train": [], "test": []}
    for path, image in _tar_images(folder / "cifar10_jpg_subset.tar.gz"):
        parts[path.parts[-3]].append((image, path.parts[-2]))
    names = sorted({name for _, name in parts["train"]})
    rng = np.random.default_rng(seed)
    train, test = (
        [(images[i][0], names.index(images[i][1])) for i in rng.permutation(len(images))] for images in parts.values()
    )
    bound = len(train) * 7 // 8
    return {"train": train[:bound], "val": train[bound:], "test": test}


def _photographs(folder: Path) -> Images:
    images: Images = {split: [] for split in SPLITS}
    for path, image in _tar_images(folder / "bsds500_subset.tar.gz"):
        images[path.parts[-2]].append((image, -1))
    return images


def _tar_images(file: Path) -> Iterable[tuple[Path, np.ndarray]]:
    """Yield path and picture `[H, W, 3]` in 0..1 of each image of an archive, ordered by path."""
    from PIL import Image

    with tarfile.open(file) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if member.name.endswith(".jpg"):
                stream = archive.extractfile(member)
                if stream is None:
                    raise ValueError(f"'{member.name}' of {file} needs to be a regular file")
                yield Path(member.name), (np.asarray(Image.open(stream)) / 255).astype(np.float32)
