"""Watches of the values that a captured step relies on, read before each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyg_dfgnn.errors import StaleError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.derived import version_of


class Watch:
    """Values that a replay cannot follow when they change.

    Args:
        names: The user's name of each value.
        need: What each needs, as the error says it.
        read: Returns the values as they are now.
        alive: Objects whose identity is among the values, or that the capture reads.
    """

    def __init__(self, names: list[str], need: str, read: Callable[[], list[Any]], alive: Any = None) -> None:
        self.names, self.need, self.read, self.alive = names, need, read, alive
        self.values = read()

    def check(self) -> None:
        """Compare the values with those of the capture.

        Raises:
            StaleError: One has changed.
        """
        values = self.read()
        if values != self.values:
            pairs = zip_longest(self.names, self.values, values, fillvalue="")
            name, before, now = next((name, a, b) for name, a, b in pairs if a != b)
            got = f" (got {now!r}, captured with {before!r})" if isinstance(now, (bool, float, tuple)) else ""
            raise StaleError(f"'{name}' needs {self.need}{got}; capture_step makes a step for what is there now")


_requires_grad = attrgetter("requires_grad")
TENSOR = "the tensor that was captured, whose values may be changed in place"


def model_watches(model: nn.Module) -> list[Watch]:
    """Return watches of the modes, layers, parameters and buffers of a model, and of autocast around it."""
    modules = dict(model.named_modules())
    owns = [module.__dict__ for module in modules.values()]
    children = [own["_modules"] for own in owns if own["_modules"]]
    tables = [table for own in owns for table in (own["_parameters"], own["_buffers"]) if table]

    def named(kinds: tuple[str, ...]) -> list[str]:
        pairs = [(name, own[kind].items()) for name, own in zip(modules, owns) for kind in kinds]
        keys = [(name, key) for name, items in pairs for key, value in items if value is not None]
        return [".".join(filter(None, ("model", *path))) for path in keys]

    def tensors() -> list[Any]:
        present = [t for table in tables for t in table.values() if t is not None]
        return [*map(Tensor.data_ptr, present), *map(_requires_grad, present)]

    def autocast() -> list[Any]:
        # The states of all devices differ from one another only where the user has set them apart.
        return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]

    modes = [".".join(filter(None, ("model", name, "training"))) for name in modules]
    return [
        Watch(modes, "its mode at the capture", lambda: [own["training"] for own in owns]),
        Watch(
            named(("_modules",)),
            "the layer that was captured",
            lambda: [id(layer) for layer in chain.from_iterable(map(dict.values, children)) if layer is not None],
            [list(table.values()) for table in children],
        ),
        Watch(2 * named(("_parameters", "_buffers")), f"{TENSOR}, and its requires_grad", tensors),
        Watch(["torch.autocast"] * 2, "its state at the capture", autocast),
    ]


def data_watches(data: Any, layer_edges: Sequence[Tensor] = ()) -> list[Watch]:
    """Return watches of the attributes of a Data or HeteroData; edges and groups must not even be edited.

    Args:
        data: The data.
        layer_edges: Edges that layers have made others of, and these, which the capture reads.
    """
    entries, edges = [], []
    for store in data.stores:
        prefix = "data" if store._key is None else f"data[{store._key!r}]"
        for key, value in store.items():
            name = f"{prefix}.{key}"
            entries.append((name, store._mapping, key))
            is_edge = hasattr(store, "is_edge_attr") and store.is_edge_attr(key)
            # An adjacency matrix is no attribute of edges, but holds them; groups of a reduction are a graph too.
            if isinstance(value, Tensor) and (is_edge or value.layout is not torch.strided or Graph.cached_of(value)):
                edges.append((name, value))

    def read() -> list[Any]:
        return [_place(mapping.get(key)) for _, mapping, key in entries]

    # Whatever was sorted or computed from the edges at the capture is not computed again.
    edited = "the edges that were captured, with groups and all that belongs to them (it was edited)"
    values = [mapping.get(key) for _, mapping, key in entries]
    # Kernels of the capture read the graphs, whatever becomes of the cache.
    graphs = [
        graph for value in (*values, *layer_edges) if isinstance(value, Tensor) for graph in Graph.cached_of(value)
    ]
    return [
        Watch([name for name, *_ in entries], TENSOR, read, (values, layer_edges, graphs)),
        Watch([name for name, _ in edges], edited, lambda: [str(version_of(tensor)) for _, tensor in edges]),
        Watch(
            ["edges of a layer"] * len(layer_edges), edited, lambda: [str(version_of(tensor)) for tensor in layer_edges]
        ),
    ]


def _place(value: Any) -> Any:
    is_plain = type(value) is Tensor and value.layout is torch.strided
    return [id(value), value.data_ptr(), value.shape] if is_plain else id(value)


def optimizer_watches(optimizer: Optimizer) -> list[Watch]:
    """Return watches of the state and the options of an optimizer; learning rates that are numbers may change."""
    options = [name for name in optimizer.defaults if name != "lr"]
    groups = optimizer.param_groups

    def values() -> list[Any]:
        return [group.get(name) for group in groups for name in options]

    def identities() -> list[Any]:
        # A learning rate on the device is read where it is.
        rates = [id(group["lr"]) if is_on_device(group["lr"]) else 0 for group in groups]
        parameters = [id(parameter) for group in groups for parameter in group["params"]]
        return [id(optimizer.state), id(optimizer.param_groups), *rates, *parameters]

    prefixes = [f"optimizer.param_groups[{position}]" for position in range(len(groups))]
    names = ["optimizer.state", "optimizer.param_groups", *(f"{prefix}.lr" for prefix in prefixes)]
    names += [f"{prefix}.params" for prefix, group in zip(prefixes, groups) for _ in group["params"]]
    numbers = [f"{prefix}.{name}" for prefix in prefixes for name in options]
    alive = [optimizer.state, groups, [list(group.values()) for group in groups]]
    return [
        Watch(names, "the object that was captured", identities, alive),
        Watch(numbers, "its value at the capture", values),
    ]


def is_on_device(rate: Any) -> bool:
    """Return whether a learning rate is a tensor on a GPU, which a replay reads where it is."""
    return isinstance(rate, Tensor) and rate.is_cuda
