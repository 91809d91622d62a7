"""The loops as data: batches, model, how it is called, and which tensors are new in each step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from benchmarks.loops import data, layers
from benchmarks.loops.data import MAG, MAG_NODES, TABLES, HostBatches
from pyg_dfgnn.models import ContinuousFilterNet

NOT_CAPTURED = "each step has new edges that are no batch of small graphs, or a layer waits for the device"


@dataclass(frozen=True)
class LoopCase:
    """One row of the bench, named by loop, model and size; `make` takes the first batch, and cases share batches.

    Attributes:
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


def mlp(inputs: int, width: int) -> nn.Module:
    """Return two linear maps with a SiLU between them, whose results have a width."""
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))


def _pna(inputs: int, outputs: int, counts: Tensor, **options: Any) -> nn.Module:
    aggregators, scalers = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    return pyg.PNAConv(inputs, outputs, aggregators, scalers, counts, **options)


def _in_degrees(batch: Any) -> Tensor:
    return batch.edge_index[1].cpu().bincount(minlength=batch.num_nodes).bincount()  # type: ignore[no-any-return]


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
    "gin": (lambda w, _: pyg.GINConv(mlp(w, w)), False),
    "gine": (lambda w, _: pyg.GINEConv(mlp(w, w)), True),
    "gcn": (lambda w, _: pyg.GCNConv(w, w), False),
    "sage": (lambda w, _: pyg.SAGEConv(w, w), False),
    "gat": (lambda w, _: pyg.GATConv(w, w // 4, heads=4), False),
    "gatv2": (lambda w, _: pyg.GATv2Conv(w, w // 4, heads=4, edge_dim=w), True),
    "transformer": (lambda w, _: pyg.TransformerConv(w, w // 4, heads=4, edge_dim=w), True),
    "pna": (lambda w, batch: _pna(w, w, _in_degrees(batch), edge_dim=w, towers=4), True),
    "gatedgcn": (lambda w, _: layers.GatedGCN(w, w), True),
    "gps": (lambda w, _: pyg.GPSConv(w, pyg.GINEConv(mlp(w, w)), heads=4), True),
}


def _graph_level(loop: str, prefix: str, source: Callable[[], HostBatches], width: int) -> Iterator[LoopCase]:
    call = _reads("x", "edge_index", "edge_attr", "batch", "num_graphs")

    def make(name: str, batch: Any) -> nn.Module:
        conv, takes_edges = GRAPH_LEVEL[name]
        return layers.GraphLevel(batch, [conv(width, batch) for _ in range(4)], width, takes_edges)

    for name in GRAPH_LEVEL:
        # The dense attention of GPS asks the device for the largest graph.
        capture, model = "" if name == "gps" else "graphs", partial(make, name)
        yield LoopCase(loop, name, f"{prefix}-h{width}", source, model, call, _weighted_square, capture=capture)


def _molecules(small: bool) -> Iterator[LoopCase]:
    for batch in (8,) if small else (128, 1024):
        for width in (16,) if small else (64, 300):
            yield from _graph_level("molecules", f"sol-b{batch}", partial(data.molecules, batch), width)
    batch = 8 if small else 128
    yield from _graph_level("molecules", f"qm9-b{batch}", partial(data.qm9, batch), 16 if small else 64)
    # What `train.py data=qm9` trains.
    batch, width = (8, 16) if small else (256, 128)
    source, size = partial(data.qm9, batch, "lengths"), f"qm9-b{batch}-h{width}"

    def make(batch: Any) -> nn.Module:
        return ContinuousFilterNet(batch.x.size(1), 1, hidden_channels=width)

    def call(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch.x, batch.edge_index, batch.batch, batch.num_graphs, edge_attr=batch.edge_attr)
        return out.view(-1)  # type: ignore[no-any-return]

    yield LoopCase("molecules", "filters", size, source, make, call, _weighted_square, capture="graphs")


def _superpixels(small: bool) -> Iterator[LoopCase]:
    batch, nodes = (4, 12) if small else (128, 75)
    yield from _graph_level("superpixels", f"b{batch}", partial(data.superpixels, batch, nodes), 16 if small else 64)


def _kinds(relations: Sequence[data.Relation]) -> list[str]:
    return list(dict.fromkeys(relation[0] for relation in relations))


def _hetero_convs(relations: Sequence[data.Relation], layer: Callable[[], nn.Module]) -> nn.Module:
    return pyg.HeteroConv({relation: layer() for relation in relations})


def _generated_convs(relations: Sequence[data.Relation], layer: Callable[[], nn.Module]) -> nn.Module:
    """Return a conv for each relation, in a model that PyG generates."""
    return pyg.to_hetero(layers.OfOneType(layer()), (_kinds(relations), list(relations)))  # type: ignore[no-any-return]


def _sampled(small: bool) -> Iterator[LoopCase]:
    seeds, fans, wide, width = (16, (5, 3), 16, 16) if small else (1024, (25, 10), 256, 64)
    blocks, size = partial(data.sampled, seeds, fans, small), f"s{seeds}-h{wide}"
    call = _reads("x", "edge_index_1", "rows_1", "edge_index_0", "rows_0")
    models: dict[str, Callable[[Any], nn.Module]] = {
        "sage": lambda _: layers.Blocks([pyg.SAGEConv(100, wide), pyg.SAGEConv(wide, 47)]),
        "gat": lambda _: layers.Blocks([pyg.GATConv(100, wide // 4, heads=4), pyg.GATConv(wide, 47, heads=1)]),
        "rgcn": lambda _: layers.Typed([pyg.RGCNConv(128, width, len(MAG)), pyg.RGCNConv(width, 349, len(MAG))]),
    }
    for name in ("sage", "gat"):
        yield LoopCase("sampled", name, size, blocks, models[name], call, _classes)

    typed, size = partial(data.sampled_mag_typed, seeds, fans, small), f"s{seeds}-h{width}"
    call = _reads("x", "edge_index", "edge_type", "num_seeds")
    yield LoopCase("sampled", "rgcn", size, typed, models["rgcn"], call, _classes)

    mag = partial(data.sampled_mag, seeds, fans, small), MAG
    tables = partial(data.sampled_tables, seeds // 2, fans, small), TABLES

    def case(name: str, place: tuple[Any, Sequence[data.Relation]], conv: Callable[[], nn.Module]) -> LoopCase:
        source, relations = place
        call = _reads("x_dict", "edge_index_dict", "num_seeds")

        def make(_: Any) -> nn.Module:
            return layers.Hetero(_kinds(relations), width, relations[0][2], [conv(), conv()])

        return LoopCase("sampled", name, size, source, make, call, _classes)

    yield case("hgt", mag, lambda: pyg.HGTConv(width, width, (list(MAG_NODES), list(MAG)), heads=4))
    attention = partial(pyg.GATConv, (width, width), width // 4, heads=4, add_self_loops=False)
    for name, layer in (("sage", partial(pyg.SAGEConv, (width, width), width)), ("gat", attention)):
        yield case(f"hetero_{name}", mag, partial(_hetero_convs, MAG, layer))
        yield case(f"tables_{name}", tables, partial(_hetero_convs, TABLES, layer))
        yield case(f"to_hetero_{name}", tables, partial(_generated_convs, TABLES, layer))


TWO_LAYERS: dict[str, Callable[[int, int, Any], nn.Module]] = {
    # (inputs, outputs, batch) -> conv.
    "gcn": lambda i, o, _: pyg.GCNConv(i, o),
    "sage": lambda i, o, _: pyg.SAGEConv(i, o),
    "sage_max": lambda i, o, _: pyg.SAGEConv(i, o, aggr="max"),
    "gin": lambda i, o, _: pyg.GINConv(mlp(i, o)),
    "graphconv": lambda i, o, _: pyg.GraphConv(i, o),
    "gat": lambda i, o, _: pyg.GATConv(i, o, heads=4, concat=False),
    "transformer": lambda i, o, _: pyg.TransformerConv(i, o, heads=4, concat=False),
    "gen": lambda i, o, _: pyg.GENConv(i, o),
    "gatv2": lambda i, o, _: pyg.GATv2Conv(i, o, heads=4, concat=False),
    "resgated": lambda i, o, _: pyg.ResGatedGraphConv(i, o),
    "tag": lambda i, o, _: pyg.TAGConv(i, o),
    "pna": lambda i, o, batch: _pna(i, o, _in_degrees(batch)),
}


def _classifier(name: str, width: int, batch: Any) -> nn.Module:
    conv = TWO_LAYERS[name]
    return layers.NodeLevel([conv(width, width, batch), conv(width, 7, batch)])


def _small(small: bool) -> Iterator[LoopCase]:
    nodes, edges, width = (30, 90, 8) if small else (2708, 10880, 64)
    source = partial(data.graphs, nodes, edges, width, 1)
    for name in TWO_LAYERS:
        make = partial(_classifier, name, width)
        yield LoopCase("small", name, "cora", source, make, _call, _classes, fresh=(), capture="whole")


LARGE = {"arxiv": (169_343, 1_166_243, 128, 1.0), "reddit": (50_000, 20_000_000, 64, 1.5)}
"""Nodes, edges and width of large graphs, and the power that skews their degrees."""


def _large(small: bool) -> Iterator[LoopCase]:
    for size, (nodes, edges, width, power) in LARGE.items():
        nodes, edges, width = (30, 90, 8) if small else (nodes, edges, width)
        source = partial(data.graphs, nodes, edges, width, 1, power=power)
        for name in ("gcn", "sage", "gat"):
            make = partial(_classifier, name, width)
            yield LoopCase("large", name, size, source, make, _call, _classes, fresh=(), capture="whole")


def _temporal(small: bool) -> Iterator[LoopCase]:
    shape, width = ((20, 60, 2, 3), 8) if small else ((207, 1722, 32, 12), 64)
    source, size = partial(data.series, *shape), f"b{shape[2]}-t{shape[3]}"
    call, fresh = _reads("x", "edge_index", "edge_weight"), ("x", "target")

    def make(conv: Callable[[int, int], nn.Module], _: Any) -> nn.Module:
        return layers.Recurrent(width, [conv(2 + width, 2 * width), conv(2 + width, width)])

    for name, conv in (("gcn", pyg.GCNConv), ("diffusion", layers.Diffusion)):
        yield LoopCase("temporal", name, size, source, partial(make, conv), call, _numbers, fresh, "whole")


def _dynamic(small: bool) -> Iterator[LoopCase]:
    count, points, k = (2, 16, 4) if small else (32, 1024, 20)
    transformer = pyg.PointTransformerConv
    source, size, call = partial(data.clouds, count, points), f"{count}x{points}-k{k}", _reads("x", "num_clouds")
    models: dict[str, Callable[[Any], nn.Module]] = {
        "edgeconv": lambda _: layers.Clouds(128, k, [pyg.EdgeConv(mlp(6, 64)), pyg.EdgeConv(mlp(128, 128))]),
        "point_transformer": lambda _: layers.Clouds(64, k, [transformer(3, 32), transformer(32, 64)]),
    }
    for name, make in models.items():
        yield LoopCase("dynamic", name, size, source, make, call, _classes)


def _relations(small: bool) -> Iterator[LoopCase]:
    nodes, edges, width = (30, 90, 8) if small else (50_000, 600_000, 64)
    source, call = partial(data.graphs, nodes, edges, width, 2, 8), _reads("x", "edge_index", "edge_type")

    def make(_: Any) -> nn.Module:
        return layers.NodeLevel([layers.RelationsByHand(width, 8) for _ in range(2)])

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

    def make(name: str, _: Any) -> nn.Module:
        layer = OWN[name][0]
        # The first layer of GatedGCN makes features of edges as wide as those of nodes.
        return layers.NodeLevel([layer(width), layers.GatedGCN(width, width) if name == "gatedgcn" else layer(width)])

    for name, (_, takes_edges) in OWN.items():
        call = _reads("x", "edge_index", "edge_attr") if takes_edges else _call
        for size, pool, fresh, capture in (("new", data.POOL, None, ""), ("same", 1, (), "whole")):
            source = partial(data.graphs, nodes, edges, width, pool)
            yield LoopCase("own", name, size, source, partial(make, name), call, _numbers, fresh, capture)


def _call_layer(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.x.detach().requires_grad_(), batch.edge_index)  # type: ignore[no-any-return]


def _mlp_norm(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(*mlp(inputs, width), nn.LayerNorm(width))  # type: ignore[misc]


EDGE_NETWORKS: dict[str, tuple[Callable[[int, int], nn.Module], int]] = {
    # (width, width of edges) -> layer, and the width.
    "edgeconv_max": (lambda w, _: layers.Adapted(pyg.EdgeConv(mlp(2 * w, w)), 0, 1), 64),
    "edgeconv_add": (lambda w, _: layers.Adapted(pyg.EdgeConv(mlp(2 * w, w), aggr="add"), 0, 1), 64),
    "egnn": (lambda w, _: layers.Equivariant(mlp(2 * w + 1, w), mlp(2 * w, w)), 64),
    "cfconv": (lambda w, e: layers.Filtered(mlp(e, w), nn.Linear(w, w)), 64),
    "meshgraphnet": (lambda w, e: layers.MeshBlock(_mlp_norm(2 * w + e, w), _mlp_norm(2 * w, w), e == w), 128),
    "gates": (lambda w, _: layers.Gates(mlp(2 * w, w), mlp(2 * w, w)), 64),
    "nnconv": (lambda w, e: layers.Adapted(pyg.NNConv(w, w, mlp(e, w * w), aggr="mean"), 0, 1, 3), 16),
}


def _edge_networks(small: bool) -> Iterator[LoopCase]:
    call = _reads("x", "edge_index", "pos", "edge_attr")

    def make(layer: Callable[[int, int], nn.Module], width: int, edge_width: int, _: Any) -> nn.Module:
        return layers.OnMeshes([layer(width, edge_width) for _ in range(2)])

    for name, (layer, width) in EDGE_NETWORKS.items():
        count, nodes, width = (2, 12, 8) if small else (1024, 71, width)
        edge_width = width if name == "meshgraphnet" else 16
        source, model = partial(data.meshes, count, nodes, width, edge_width), partial(make, layer, width, edge_width)
        yield LoopCase("edge_networks", name, f"h{width}", source, model, call, _numbers, (), "whole")


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


BLOCKS: dict[str, Callable[[int], nn.Module]] = {"schnet": layers.FilterBlock, "painn": layers.VectorBlock}


def _forces(small: bool) -> Iterator[LoopCase]:
    batch, width = (4, 8) if small else (128, 64)
    source, size = partial(data.qm9, batch, "positions"), f"qm9-b{batch}-h{width}"

    def make(block: Callable[[int], nn.Module], _: Any) -> nn.Module:
        return layers.Energies(width, [block(width) for _ in range(3)])

    for name, block in BLOCKS.items():
        model = partial(make, block)
        yield LoopCase("forces", name, size, source, model, _call_forces, _energies_and_forces, capture="graphs")


HOST = {
    **{name: TWO_LAYERS[name] for name in ("gcn", "sage", "sage_max", "gin", "graphconv", "gat", "transformer", "gen")},
    "le": lambda i, o, _: pyg.LEConv(i, o),
    "linear": lambda i, o, _: layers.Adapted(nn.Linear(i, o), 0),
}
"""Single layers, as in :data:`TWO_LAYERS`."""


def _host(small: bool) -> Iterator[LoopCase]:
    every = {"": (30, 90, 8)} if small else {"": (2708, 10880, 64), "-e200k": (20_000, 200_000, 128)}
    for (suffix, (nodes, edges, width)), (name, layer) in product(every.items(), HOST.items()):
        source, make = partial(data.graphs, nodes, edges, width, 1), partial(layer, width, width)
        for size, fresh in (("known", ()), ("new", ("edge_index",))):
            if name != "linear" or size == "known":
                yield LoopCase("host", name, size + suffix, source, make, _call_layer, _numbers, fresh, trains=False)


_LOOPS = (
    *(_molecules, _superpixels, _sampled, _small, _large, _temporal),
    *(_dynamic, _relations, _own, _edge_networks, _forces, _host),
)
LOOPS: dict[str, Callable[[bool], Iterator[LoopCase]]] = {loop.__name__[1:]: loop for loop in _LOOPS}
