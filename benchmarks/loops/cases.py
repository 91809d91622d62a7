"""The loops as data: batches, model, how it is called, and which tensors are new in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import degree

from benchmarks.loops import data, layers
from benchmarks.loops.data import MAG, MAG_NODES, TABLES, TABLES_NODES, HostBatches

NOT_CAPTURED = "each step has new edges that are no batch of small graphs, or a layer waits for the device"


@dataclass(frozen=True)
class LoopCase:
    """One row of the bench.

    Attributes:
        loop, model, size: Its name.
        source: Makes the batches, which cases share.
        make: (first batch) -> the model, of PyG's layers.
        forward: (model, batch) -> output.
        loss: (output, batch) -> the loss.
        fresh: Names of the tensors that are new in each step; None: all.
        capture: "graphs": batches of small graphs; "whole": one batch, refilled; "" : not captured.
        trains: Whether a step has an optimizer.
    """

    loop: str
    model: str
    size: str
    source: Callable[[], HostBatches]
    make: Callable[[Any], nn.Module]
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Tensor]
    fresh: tuple[str, ...] | None = None
    capture: str = ""
    trains: bool = True


def _mlp(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))


def _pna(inputs: int, outputs: int, counts: Tensor, **options: Any) -> nn.Module:
    aggregators, scalers = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    return pyg.PNAConv(inputs, outputs, aggregators, scalers, counts, **options)


def _in_degrees(batch: Any) -> Tensor:
    return degree(degree(batch.edge_index[1].cpu(), batch.num_nodes).long()).long()


def _weighted_square(out: Tensor, batch: Any) -> Tensor:
    return ((out - batch.y).square() * batch.weight).sum() / batch.weight.sum()


def _classes(out: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(out, batch.y)


def _numbers(out: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(out, batch.target)


def _reads(*names: str) -> Callable[[nn.Module, Any], Tensor]:
    """Return a call of a model with these attributes of a batch."""
    return lambda model, batch: model(*(getattr(batch, name) for name in names))  # type: ignore[no-any-return]


_call = _reads("x", "edge_index")


GRAPH_LEVEL: dict[str, tuple[Callable[[int, Any], nn.Module], bool]] = {
    # (width, batch) -> conv, and whether it takes edge features.
    "gin": (lambda w, _: pyg.GINConv(_mlp(w, w)), False),
    "gine": (lambda w, _: pyg.GINEConv(_mlp(w, w)), True),
    "gcn": (lambda w, _: pyg.GCNConv(w, w), False),
    "sage": (lambda w, _: pyg.SAGEConv(w, w), False),
    "gat": (lambda w, _: pyg.GATConv(w, w // 4, heads=4), False),
    "gatv2": (lambda w, _: pyg.GATv2Conv(w, w // 4, heads=4, edge_dim=w), True),
    "transformer": (lambda w, _: pyg.TransformerConv(w, w // 4, heads=4, edge_dim=w), True),
    "pna": (lambda w, batch: _pna(w, w, _in_degrees(batch), edge_dim=w, towers=4), True),
    "gatedgcn": (lambda w, _: layers.GatedGCN(w, w), True),
    "gps": (lambda w, _: pyg.GPSConv(w, pyg.GINEConv(_mlp(w, w)), heads=4), True),
}


def _graph_level(loop: str, prefix: str, source: Callable[[], HostBatches], width: int) -> Iterator[LoopCase]:
    for name, (conv, takes_edges) in GRAPH_LEVEL.items():

        def make(batch: Any, conv: Any = conv, takes_edges: bool = takes_edges) -> nn.Module:
            return layers.GraphLevel(batch, [conv(width, batch) for _ in range(4)], width, takes_edges)

        size = f"{prefix}-h{width}"
        # The dense attention of GPS asks the device for the largest graph.
        capture = "" if name == "gps" else "graphs"
        call = _reads("x", "edge_index", "edge_attr", "batch", "num_graphs")
        yield LoopCase(loop, name, size, source, make, call, _weighted_square, capture=capture)


def _molecules(small: bool) -> Iterator[LoopCase]:
    for batch in (8,) if small else (128, 1024):
        for width in (16,) if small else (64, 300):
            yield from _graph_level("molecules", f"sol-b{batch}", partial(data.molecules, batch), width)
    batch = 8 if small else 128
    yield from _graph_level("molecules", f"qm9-b{batch}", partial(data.qm9, batch), 16 if small else 64)


def _superpixels(small: bool) -> Iterator[LoopCase]:
    batch, nodes = (4, 12) if small else (128, 75)
    yield from _graph_level("superpixels", f"b{batch}", partial(data.superpixels, batch, nodes), 16 if small else 64)


def _call_blocks(model: nn.Module, batch: Any) -> Tensor:
    edges = [batch.edge_index_1, batch.edge_index_0]
    return model(batch.x, edges, [batch.rows_1, batch.rows_0])  # type: ignore[no-any-return]


def _call_hetero(model: nn.Module, batch: Any) -> Tensor:
    (labels,) = batch.y_dict.values()
    return model(batch.x_dict, batch.edge_index_dict, labels.size(0))  # type: ignore[no-any-return]


def _hetero_classes(out: Tensor, batch: Any) -> Tensor:
    (labels,) = batch.y_dict.values()
    return F.cross_entropy(out, labels)


def _call_typed(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.x, batch.edge_index, batch.edge_type, batch.y.size(0))  # type: ignore[no-any-return]


def _to_hetero(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a conv for each relation of the tables, in a model that PyG generates."""
    generated: nn.Module = pyg.to_hetero(layers.OfOneType(make()), (list(TABLES_NODES), list(TABLES)))
    return generated


def _sampled(small: bool) -> Iterator[LoopCase]:
    seeds, fans, width = (16, (5, 3), 16) if small else (1024, (25, 10), 256)
    size, place = f"s{seeds}-h{width}", (seeds, fans, small)
    blocks = partial(data.sampled, *place)
    yield LoopCase(
        *("sampled", "sage", size, blocks),
        lambda _: layers.Blocks([pyg.SAGEConv(100, width), pyg.SAGEConv(width, 47)]),
        _call_blocks,
        _classes,
    )
    yield LoopCase(
        *("sampled", "gat", size, blocks),
        lambda _: layers.Blocks([pyg.GATConv(100, width // 4, heads=4), pyg.GATConv(width, 47, heads=1)]),
        _call_blocks,
        _classes,
    )
    width = 16 if small else 64
    size = f"s{seeds}-h{width}"
    yield LoopCase(
        *("sampled", "rgcn", size, partial(data.sampled_mag_typed, *place)),
        lambda _: layers.Typed([pyg.RGCNConv(128, width, len(MAG)), pyg.RGCNConv(width, 349, len(MAG))]),
        _call_typed,
        _classes,
    )
    hetero, kinds = partial(data.sampled_mag, *place), list(MAG_NODES)

    def convs(make: Callable[[], nn.Module], kinds: Sequence[str] = kinds) -> Callable[[Any], nn.Module]:
        return lambda batch: layers.Hetero(kinds, [make() for _ in range(2)], width, *batch.y_dict)

    def each(relations: Sequence[data.Relation], make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: pyg.HeteroConv({relation: make() for relation in relations})

    def attention() -> nn.Module:
        return pyg.GATConv((width, width), width // 4, heads=4, add_self_loops=False)

    hgt = convs(lambda: pyg.HGTConv(width, width, (kinds, list(MAG)), heads=4))
    yield LoopCase("sampled", "hgt", size, hetero, hgt, _call_hetero, _hetero_classes)
    tables = partial(data.sampled_tables, seeds // 2, *place[1:])
    for name, layer in (("sage", lambda: pyg.SAGEConv((width, width), width)), ("gat", attention)):
        mag = convs(each(MAG, layer))
        yield LoopCase("sampled", f"hetero_{name}", size, hetero, mag, _call_hetero, _hetero_classes)
        of_tables = convs(each(TABLES, layer), list(TABLES_NODES))
        yield LoopCase("sampled", f"tables_{name}", size, tables, of_tables, _call_hetero, _hetero_classes)
        generated = convs(partial(_to_hetero, layer), list(TABLES_NODES))
        yield LoopCase("sampled", f"to_hetero_{name}", size, tables, generated, _call_hetero, _hetero_classes)


TWO_LAYERS: dict[str, Callable[[int, int, Any], nn.Module]] = {
    # (inputs, outputs, batch) -> conv.
    "gcn": lambda i, o, _: pyg.GCNConv(i, o),
    "sage": lambda i, o, _: pyg.SAGEConv(i, o),
    "sage_max": lambda i, o, _: pyg.SAGEConv(i, o, aggr="max"),
    "gin": lambda i, o, _: pyg.GINConv(_mlp(i, o)),
    "graphconv": lambda i, o, _: pyg.GraphConv(i, o),
    "gat": lambda i, o, _: pyg.GATConv(i, o, heads=4, concat=False),
    "transformer": lambda i, o, _: pyg.TransformerConv(i, o, heads=4, concat=False),
    "gen": lambda i, o, _: pyg.GENConv(i, o),
    "gatv2": lambda i, o, _: pyg.GATv2Conv(i, o, heads=4, concat=False),
    "resgated": lambda i, o, _: pyg.ResGatedGraphConv(i, o),
    "tag": lambda i, o, _: pyg.TAGConv(i, o),
    "pna": lambda i, o, batch: _pna(i, o, _in_degrees(batch)),
}


def _small(small: bool) -> Iterator[LoopCase]:
    nodes, edges, width = (30, 90, 8) if small else (2708, 10880, 64)
    for name, conv in TWO_LAYERS.items():

        def make(batch: Any, conv: Any = conv) -> nn.Module:
            return layers.NodeLevel(conv(width, width, batch), conv(width, 7, batch))

        source = partial(data.graphs, nodes, edges, width, 1)
        yield LoopCase("small", name, "cora", source, make, _call, _classes, fresh=(), capture="whole")


LARGE = {"arxiv": (169_343, 1_166_243, 128, 1.0), "reddit": (50_000, 20_000_000, 64, 1.5)}
"""Nodes, edges and width of large graphs, and the power that skews their degrees."""


def _large(small: bool) -> Iterator[LoopCase]:
    for size, (nodes, edges, width, power) in LARGE.items():
        nodes, edges, width = (30, 90, 8) if small else (nodes, edges, width)
        source = partial(data.graphs, nodes, edges, width, 1, 1, 0, power)
        for name in ("gcn", "sage", "gat"):

            def make(batch: Any, conv: Any = TWO_LAYERS[name], width: int = width) -> nn.Module:
                return layers.NodeLevel(conv(width, width, batch), conv(width, 7, batch))

            yield LoopCase("large", name, size, source, make, _call, _classes, fresh=(), capture="whole")


def _temporal(small: bool) -> Iterator[LoopCase]:
    shape, width = ((20, 60, 2, 3), 8) if small else ((207, 1722, 32, 12), 64)
    for name, conv in (("gcn", pyg.GCNConv), ("diffusion", layers.Diffusion)):

        def make(_: Any, conv: Any = conv) -> nn.Module:
            return layers.Recurrent(conv(2 + width, 2 * width), conv(2 + width, width), width)

        options: dict[str, Any] = {"fresh": ("x", "target"), "capture": "whole"}
        source = partial(data.series, *shape)
        call, size = _reads("x", "edge_index", "edge_weight"), f"b{shape[2]}-t{shape[3]}"
        yield LoopCase("temporal", name, size, source, make, call, _numbers, **options)


def _call_clouds(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.x, batch.y.size(0))  # type: ignore[no-any-return]


def _dynamic(small: bool) -> Iterator[LoopCase]:
    count, points, k = (2, 16, 4) if small else (32, 1024, 20)
    source, size = partial(data.clouds, count, points), f"{count}x{points}-k{k}"

    def edge(_: Any) -> nn.Module:
        return layers.Clouds([pyg.EdgeConv(_mlp(6, 64)), pyg.EdgeConv(_mlp(128, 128))], 128, k, False)

    def transformer(_: Any) -> nn.Module:
        convs: list[nn.Module] = [pyg.PointTransformerConv(3, 32), pyg.PointTransformerConv(32, 64)]
        return layers.Clouds(convs, 64, k, True)

    yield LoopCase("dynamic", "edgeconv", size, source, edge, _call_clouds, _classes)
    yield LoopCase("dynamic", "point_transformer", size, source, transformer, _call_clouds, _classes)


def _relations(small: bool) -> Iterator[LoopCase]:
    nodes, edges, width = (30, 90, 8) if small else (50_000, 600_000, 64)

    def make(_: Any) -> nn.Module:
        return layers.NodeLevel(layers.RelationsByHand(width, 8), layers.RelationsByHand(width, 8))

    source = partial(data.graphs, nodes, edges, width, 2, 8)
    call = _reads("x", "edge_index", "edge_type")
    yield LoopCase("relations", "rgcn_by_hand", f"e{edges}", source, make, call, _numbers)


OWN: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    # (width) -> layer, and whether it takes edge features.
    "gatedgcn": (lambda w: layers.GatedGCN(w, data.EDGE), True),
    "edge_gate": (lambda w: layers.EdgeGate(w, data.EDGE), True),
    "sigmoid_heads": (layers.SigmoidHeads, False),
    "signed": (layers.Signed, False),
    "temperature": (layers.Temperature, False),
    "gaussians": (lambda w: layers.Gaussians(w, data.EDGE), True),
    "film": (layers.Modulated, False),
    "max_difference": (layers.Differences, False),
}


def _own(small: bool) -> Iterator[LoopCase]:
    nodes, edges, width = (30, 90, 8) if small else (10_000, 60_000, 64)
    for name, (layer, takes_edges) in OWN.items():

        def make(_: Any, layer: Any = layer, takes_edges: bool = takes_edges) -> nn.Module:
            second = layers.GatedGCN(width, width) if layer is OWN["gatedgcn"][0] else layer(width)
            return layers.NodeLevel(layer(width), second)

        call = _reads("x", "edge_index", "edge_attr") if takes_edges else _call
        for size, pool, fresh in (("new", data.POOL, None), ("same", 1, ())):
            source = partial(data.graphs, nodes, edges, width, pool)
            capture = "" if fresh is None else "whole"
            yield LoopCase("own", name, size, source, make, call, _numbers, fresh, capture)


def _call_layer(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.x.detach().requires_grad_(), batch.edge_index)  # type: ignore[no-any-return]


def _mlp_norm(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(*_mlp(inputs, width), nn.LayerNorm(width))  # type: ignore[misc]


EDGE_NETWORKS: dict[str, tuple[Callable[[int, int], nn.Module], int]] = {
    # (width, width of edges) -> layer, and the width.
    "edgeconv_max": (lambda w, _: layers.Adapted(pyg.EdgeConv(_mlp(2 * w, w)), 0, 1), 64),
    "edgeconv_add": (lambda w, _: layers.Adapted(pyg.EdgeConv(_mlp(2 * w, w), aggr="add"), 0, 1), 64),
    "egnn": (lambda w, _: layers.Equivariant(_mlp(2 * w + 1, w), _mlp(2 * w, w)), 64),
    "cfconv": (lambda w, e: layers.Filtered(_mlp(e, w), nn.Linear(w, w)), 64),
    "meshgraphnet": (lambda w, e: layers.MeshBlock(_mlp_norm(2 * w + e, w), _mlp_norm(2 * w, w), e == w), 128),
    "gates": (lambda w, _: layers.Gates(_mlp(2 * w, w), _mlp(2 * w, w)), 64),
    "nnconv": (lambda w, e: layers.Adapted(pyg.NNConv(w, w, _mlp(e, w * w), aggr="mean"), 0, 1, 3), 16),
}


def _edge_networks(small: bool) -> Iterator[LoopCase]:
    for name, (layer, width) in EDGE_NETWORKS.items():
        count, nodes, width = (2, 12, 8) if small else (1024, 71, width)
        edge_width = width if name == "meshgraphnet" else 16

        def make(_: Any, layer: Any = layer, sizes: tuple[int, int] = (width, edge_width)) -> nn.Module:
            return layers.OnMeshes([layer(*sizes) for _ in range(2)])

        source = partial(data.meshes, count, nodes, width, edge_width)
        call = _reads("x", "edge_index", "pos", "edge_attr")
        yield LoopCase("edge_networks", name, f"h{width}", source, make, call, _numbers, (), "whole")


def _call_forces(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    positions = batch.pos.detach().requires_grad_()
    energies = model(batch.x, positions, batch.edge_index, batch.batch, batch.num_graphs)
    (slopes,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
    return energies, -slopes


def _energies_and_forces(out: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    # The geometries are relaxed: forces are to be zero. What fills a captured batch weighs nothing.
    energies, forces = out
    of_atoms = batch.weight[batch.batch]
    total = (forces.square().sum(dim=1) * of_atoms).sum() / (3 * of_atoms.sum())
    return _weighted_square(energies, batch) + total


def _forces(small: bool) -> Iterator[LoopCase]:
    batch, width = (4, 8) if small else (128, 64)
    blocks: dict[str, Callable[[], nn.Module]] = {
        "schnet": lambda: layers.FilterBlock(width, layers.BASIS),
        "painn": lambda: layers.VectorBlock(width, layers.BASIS),
    }
    for name, block in blocks.items():

        def make(_: Any, block: Any = block) -> nn.Module:
            return layers.Energies([block() for _ in range(3)], width)

        source = partial(data.qm9, batch, True)
        size, call, loss = f"qm9-b{batch}-h{width}", _call_forces, _energies_and_forces
        yield LoopCase("forces", name, size, source, make, call, loss, capture="graphs")


HOST: dict[str, Callable[[int], nn.Module]] = {
    **{
        name: lambda w, conv=TWO_LAYERS[name]: conv(w, w, None)  # type: ignore[misc]
        for name in ("gcn", "sage", "sage_max", "gin", "graphconv", "gat", "transformer", "gen")
    },
    "le": lambda w: pyg.LEConv(w, w),
    "linear": lambda w: layers.Adapted(nn.Linear(w, w), 0),
}


def _host(small: bool) -> Iterator[LoopCase]:
    nodes, edges, width = (30, 90, 8) if small else (2708, 10880, 64)
    for name, layer in HOST.items():
        for size, fresh in (("known", ()), ("new", ("edge_index",))):
            if name != "linear" or size == "known":
                source = partial(data.graphs, nodes, edges, width, 1)
                yield LoopCase(
                    *("host", name, size, source, lambda _, layer=layer: layer(width), _call_layer, _numbers, fresh),  # type: ignore[misc]
                    trains=False,
                )


LOOPS: dict[str, Callable[[bool], Iterator[LoopCase]]] = {
    "molecules": _molecules,
    "superpixels": _superpixels,
    "sampled": _sampled,
    "small": _small,
    "large": _large,
    "temporal": _temporal,
    "dynamic": _dynamic,
    "relations": _relations,
    "own": _own,
    "edge_networks": _edge_networks,
    "forces": _forces,
    "host": _host,
}
