"""Every class of `torch_geometric.nn.conv` as a small layer with a call on a graph, for tests of compiled messages."""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch_geometric
import torch_geometric.nn.conv as pyg
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.nn import MessagePassing

from pyg_dfgnn import frontend
from pyg_dfgnn.frontend import Captured
from pyg_dfgnn.ir import Program
from pyg_dfgnn.nn import messages
from pyg_dfgnn.nn.registry import MARK
from pyg_dfgnn.reference.zoo import EdgeList

FEATURES, WIDTH, EDGE = 6, 4, 3


class Inputs:
    """Random inputs of a graph, each a leaf that takes a gradient; the same for the same graph."""

    def __init__(self, graph: EdgeList, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
        self.dtype, self.device = dtype, device
        self.graph, self.edge_index, self.leaves = graph, graph.edge_index.to(device), dict[str, Tensor]()
        self._generator = torch.Generator().manual_seed(5)

    def draw(self, name: str, *shape: int, positive: bool = False) -> Tensor:
        drawn = torch.randn(*shape, dtype=torch.float64, generator=self._generator)
        drawn = (drawn.abs() + 0.1 if positive else drawn).to(self.device, self.dtype)
        self.leaves[name] = drawn.requires_grad_()
        return self.leaves[name]

    @property
    def x(self) -> Tensor:
        return self.draw("x", self.graph.num_src, FEATURES)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self.x, self.draw("x_dst", self.graph.num_dst, FEATURES)

    @property
    def back(self) -> Any:
        """The edges the other way round."""
        return self.edge_index.flip(0)

    @property
    def edge_attr(self) -> Tensor:
        return self.draw("edge_attr", self.graph.num_edges, EDGE)

    @property
    def edge_weight(self) -> Tensor:
        return self.draw("edge_weight", self.graph.num_edges, positive=True)

    @property
    def pos(self) -> Tensor:
        return self.draw("pos", self.graph.num_src, 3)

    @property
    def node_type(self) -> Tensor:
        return torch.arange(self.graph.num_src, device=self.device) % 2

    @property
    def edge_type(self) -> Tensor:
        return torch.arange(self.graph.num_edges, device=self.device) % 2


@dataclass(frozen=True)
class Case:
    """A layer and a call of it.

    Attributes:
        make: Builds the layer.
        call: (layer, inputs) -> outputs.
        expected: "traced", or what the reason says for which its messages are refused.
    """

    make: Callable[[], torch.nn.Module]
    call: Callable[[Any, Inputs], Any]
    expected: str = "traced"


def _x(conv: Any, i: Inputs) -> Any:
    return conv(i.x, i.edge_index)


def _weighted(conv: Any, i: Inputs) -> Any:
    return conv(i.x, i.edge_index, i.edge_weight)


def _attributed(conv: Any, i: Inputs) -> Any:
    return conv(i.x, i.edge_index, i.edge_attr)


def _typed(conv: Any, i: Inputs) -> Any:
    return conv(i.x, i.edge_index, i.edge_type)


def _first(conv: Any, i: Inputs) -> Any:
    return conv(i.x, i.edge_index)[0]


def _mlp(*widths: int) -> Sequential:
    return Sequential(Linear(widths[0], widths[1]), ReLU(), Linear(widths[1], widths[-1]))


def _neighbours(x: Tensor, y: Tensor, _: Any, __: Any, k: int, *___: Any) -> Tensor:
    """The `k` nearest of `x` to each of `y`, which PyG leaves to an extra of it."""
    rows = torch.arange(y.size(0), device=y.device).repeat_interleave(k)
    return torch.stack([rows, torch.cdist(y, x).topk(k, largest=False).indices.view(-1)])


def _near(call: Callable[[Any, Inputs], Any]) -> Callable[[Any, Inputs], Any]:
    def called(conv: Any, i: Inputs) -> Any:
        with patch.object(torch.ops.pyg, "knn", _neighbours, create=True):
            return call(conv, i)

    return called


def _make_gravnet() -> torch.nn.Module:
    with patch.object(torch_geometric.typing, "WITH_KNN", True):
        return pyg.GravNetConv(FEATURES, WIDTH, 3, 5, 2)


def _make_dynamic() -> torch.nn.Module:
    with patch.object(torch_geometric.typing, "WITH_KNN", True):
        return pyg.DynamicEdgeConv(_mlp(2 * FEATURES, 5, WIDTH), 2)


def _mesh(conv: Any, i: Inputs) -> Any:
    edges = torch.arange(16, device=i.device)
    return conv(i.draw("x", 4, FEATURES), torch.stack([edges % 4, edges // 4]))


def _hypergraph(conv: Any, i: Inputs) -> Any:
    edges, attributes = i.graph.num_dst, i.draw("hyperedge", i.graph.num_dst, FEATURES)
    return conv(i.x, i.edge_index, hyperedge_attr=attributes, num_edges=edges)


def _hetero(conv: Any, i: Inputs) -> Any:
    nodes = dict(zip(("a", "b"), i.pair, strict=True))
    edges = {("a", "to", "b"): i.edge_index, ("b", "back", "a"): i.back}
    return list(conv(nodes, edges).values())


_METADATA = (["a", "b"], [("a", "to", "b"), ("b", "back", "a")])
_DEGREES = torch.tensor([1, 2, 3, 1])
_SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]

TRACED: dict[str, Case] = {
    "SimpleConv": Case(partial(pyg.SimpleConv, aggr=["sum", "mean", "max"]), _weighted),
    "GCNConv": Case(partial(pyg.GCNConv, FEATURES, WIDTH), _weighted),
    "ChebConv": Case(partial(pyg.ChebConv, FEATURES, WIDTH, K=3), _x),
    "SAGEConv": Case(
        partial(pyg.SAGEConv, (FEATURES, FEATURES), WIDTH, aggr="max"), lambda c, i: c(i.pair, i.edge_index)
    ),
    "GraphConv": Case(partial(pyg.GraphConv, FEATURES, WIDTH), _weighted),
    "GravNetConv": Case(_make_gravnet, _near(lambda c, i: c(i.x))),
    "GatedGraphConv": Case(partial(pyg.GatedGraphConv, FEATURES, 2), _weighted),
    "TAGConv": Case(partial(pyg.TAGConv, FEATURES, WIDTH), _weighted),
    "GINConv": Case(lambda: pyg.GINConv(_mlp(FEATURES, 5, WIDTH), train_eps=True), _x),
    "ARMAConv": Case(partial(pyg.ARMAConv, FEATURES, WIDTH, num_stacks=2), _weighted),
    "SGConv": Case(partial(pyg.SGConv, FEATURES, WIDTH, K=2), _weighted),
    "SSGConv": Case(partial(pyg.SSGConv, FEATURES, WIDTH, alpha=0.1, K=2), _weighted),
    "APPNP": Case(partial(pyg.APPNP, 3, 0.2), _weighted),
    "MFConv": Case(partial(pyg.MFConv, FEATURES, WIDTH, max_degree=2), _x),
    "RGCNConv": Case(partial(pyg.RGCNConv, FEATURES, WIDTH, 2), _typed),
    "SignedConv": Case(partial(pyg.SignedConv, FEATURES, WIDTH, True), lambda c, i: c(i.x, i.edge_index, i.back)),
    "ClusterGCNConv": Case(partial(pyg.ClusterGCNConv, FEATURES, WIDTH), _x),
    "GCN2Conv": Case(
        partial(pyg.GCN2Conv, FEATURES, 0.3),
        lambda c, i: c(i.x, i.draw("x_0", i.graph.num_src, FEATURES), i.edge_index),
    ),
    "PANConv": Case(partial(pyg.PANConv, FEATURES, WIDTH, 2), _first, "edge_index is a SparseTensor"),
    "WLConvContinuous": Case(pyg.WLConvContinuous, _weighted),
    "PDNConv": Case(partial(pyg.PDNConv, FEATURES, WIDTH, EDGE, 5), _attributed),
    "LGConv": Case(pyg.LGConv, _weighted),
    "MixHopConv": Case(partial(pyg.MixHopConv, FEATURES, WIDTH), _weighted),
    "GATConv": Case(partial(pyg.GATConv, FEATURES, WIDTH, heads=2, edge_dim=EDGE), _attributed),
    "GATv2Conv": Case(partial(pyg.GATv2Conv, FEATURES, WIDTH, heads=2, edge_dim=EDGE), _attributed),
    "TransformerConv": Case(partial(pyg.TransformerConv, FEATURES, WIDTH, heads=2, edge_dim=EDGE), _attributed),
    "AGNNConv": Case(pyg.AGNNConv, _x),
    "PointTransformerConv": Case(
        partial(pyg.PointTransformerConv, FEATURES, WIDTH), lambda c, i: c(i.x, i.pos, i.edge_index)
    ),
    "GENConv": Case(partial(pyg.GENConv, FEATURES, WIDTH, edge_dim=EDGE, learn_t=True), _attributed),
    "SuperGATConv": Case(partial(pyg.SuperGATConv, FEATURES, WIDTH, heads=2), _x),
    "GeneralConv": Case(partial(pyg.GeneralConv, FEATURES, WIDTH, EDGE, heads=2, attention=True), _attributed),
    "HGTConv": Case(partial(pyg.HGTConv, FEATURES, WIDTH, _METADATA, heads=2), _hetero),
    "HANConv": Case(partial(pyg.HANConv, FEATURES, WIDTH, _METADATA, heads=2), _hetero),
    "ResGatedGraphConv": Case(partial(pyg.ResGatedGraphConv, FEATURES, WIDTH, edge_dim=EDGE), _attributed),
    "GINEConv": Case(lambda: pyg.GINEConv(_mlp(FEATURES, 5, WIDTH), edge_dim=EDGE), _attributed),
    "GMMConv": Case(
        partial(pyg.GMMConv, FEATURES, WIDTH, dim=EDGE, kernel_size=2, separate_gaussians=True), _attributed
    ),
    "CGConv": Case(partial(pyg.CGConv, FEATURES, dim=EDGE), _attributed),
    "FeaStConv": Case(partial(pyg.FeaStConv, FEATURES, WIDTH, heads=3), _x),
    "HypergraphConv": Case(partial(pyg.HypergraphConv, FEATURES, WIDTH, use_attention=True, heads=2), _hypergraph),
    "LEConv": Case(partial(pyg.LEConv, FEATURES, WIDTH), _weighted),
    "PNAConv": Case(
        partial(pyg.PNAConv, FEATURES, WIDTH, ["mean", "min", "max", "std", "var", "sum"], _SCALERS, _DEGREES, EDGE, 2),
        _attributed,
    ),
    "FiLMConv": Case(partial(pyg.FiLMConv, FEATURES, WIDTH, 2), _typed),
    "FAConv": Case(
        partial(pyg.FAConv, FEATURES), lambda c, i: c(i.x, i.draw("x_0", i.graph.num_src, FEATURES), i.edge_index)
    ),
    "EGConv": Case(partial(pyg.EGConv, FEATURES, 8, ["sum", "mean", "max", "std", "symnorm"], num_heads=4), _x),
    "FastRGCNConv": Case(partial(pyg.FastRGCNConv, FEATURES, WIDTH, 2), _typed),
    "RGATConv": Case(partial(pyg.RGATConv, FEATURES, WIDTH, 2, num_bases=2, heads=2), _typed),
}
"""The 46 classes whose messages are sums over edges, and that need no product of what only edges have."""

EDGE_MLP: dict[str, Case] = {
    "PointNetConv": Case(
        lambda: pyg.PointNetConv(_mlp(FEATURES + 3, 5, WIDTH)), lambda c, i: c(i.x, i.pos, i.edge_index)
    ),
    "EdgeConv": Case(lambda: pyg.EdgeConv(_mlp(2 * FEATURES, 5, WIDTH)), _x),
    "DynamicEdgeConv": Case(_make_dynamic, _near(lambda c, i: c(i.x))),
    "PointGNNConv": Case(
        lambda: pyg.PointGNNConv(_mlp(FEATURES, 5, 3), _mlp(FEATURES + 3, 5, WIDTH), _mlp(WIDTH, 5, FEATURES)),
        lambda c, i: c(i.x, i.pos, i.edge_index),
    ),
    "NNConv": Case(lambda: pyg.NNConv(FEATURES, WIDTH, _mlp(EDGE, 5, FEATURES * WIDTH)), _attributed),
    "HEATConv": Case(
        partial(pyg.HEATConv, FEATURES, WIDTH, 2, 2, 3, EDGE, 3, heads=2),
        lambda c, i: c(i.x, i.edge_index, i.node_type, i.edge_type, i.edge_attr),
    ),
}
"""Classes with a product per edge: they trace, and no kernel has to take them yet."""

REFUSED: dict[str, Case] = {
    "PPFConv": Case(
        lambda: pyg.PPFConv(_mlp(FEATURES + 4, 5, WIDTH)),
        lambda c, i: c(i.x, i.pos, i.draw("normal", i.graph.num_src, 3), i.edge_index),
        "`cross` has no meaning in a program",
    ),
    "DNAConv": Case(
        partial(pyg.DNAConv, FEATURES),
        lambda c, i: c(i.draw("x", i.graph.num_src, 2, FEATURES), i.edge_index),
        "places of the numbers that it takes",
    ),
    "MeshCNNConv": Case(partial(pyg.MeshCNNConv, FEATURES, WIDTH), _mesh, "a step other than 1"),
}
"""Classes whose messages are refused, with what the reason says."""


def assert_results(actual: dict[str, Tensor], expected: dict[str, Tensor], **options: Any) -> None:
    """Every result is the expected one of its name, by the options of `torch.testing.assert_close`."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(actual[name], want, **options, msg=f"{name}: {{}}".format)


class Graphs(list[Captured]):
    """What became of the graphs that were captured, of classes of which none was captured before."""

    @property
    def names(self) -> list[str]:
        """The classes of the layers with programs."""
        return list(dict.fromkeys(graph.name for graph in self if graph.regions))

    @property
    def programs(self) -> list[Program]:
        """The programs of their regions."""
        return [region.program for graph in self for region in graph.regions]

    @property
    def is_fused(self) -> bool:
        """Whether all their gathers and reductions are in programs, which the last calls have run."""
        return bool(self.programs) and not self.left and all(graph.counts[0] == graph.counts[1] for graph in self)

    @property
    def left(self) -> list[str]:
        """Why torch's operators have run regions in their last calls."""
        return [reason for graph in self for region in graph.regions for reason in region.reasons]

    @property
    def reasons(self) -> list[str]:
        """Why no program has run what is on edges."""
        return [*(reason for graph in self for reason in graph.reasons), *self.left]


@contextmanager
def watched():
    """Yield what becomes of the graphs that are captured inside, where nothing that was captured before is known."""
    graphs = Graphs()
    messages.clear()
    torch._dynamo.reset()
    frontend.watchers.append(graphs.append)
    try:
        yield graphs
    finally:
        frontend.watchers.remove(graphs.append)


def twins(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a layer in float64 and a copy of it whose messages are compiled."""
    torch.manual_seed(3)
    layer = make().double()
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.5)
    marked = copy.deepcopy(layer)
    for module in marked.modules():
        if isinstance(module, MessagePassing):
            module.__dict__[MARK] = messages.Mark(type(module))
    return layer, marked


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors that a call returns."""
    return [o for o in (out if isinstance(out, (list, tuple)) else [out]) if o is not None]


def outputs_of(call: Callable[..., Any], case: Case, inputs: Inputs) -> list[Tensor]:
    """Return the outputs of a call; what it draws is the same in each."""
    torch.manual_seed(4)
    return tensors_of(case.call(call, inputs))


def weights_of(outs: list[Tensor]) -> list[Tensor]:
    """Return a random number for each number of the outputs, the same ones in each call."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(o.shape, dtype=torch.float64, generator=generator).to(o.device) for o in outs]


def loss_of(outs: list[Tensor], weights: list[Tensor] | None = None) -> Tensor:
    """Return the sum of the outputs, each number times its weight."""
    weights = weights_of(outs) if weights is None else weights
    return sum((o * weight).sum() for o, weight in zip(outs, weights, strict=True))  # type: ignore[return-value]


def outputs_and_gradients(
    layer: torch.nn.Module, case: Case, graph: EdgeList, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> dict[str, Tensor]:
    """Return the outputs of a call and the gradients of its inputs and of the layer's parameters by name."""
    inputs = Inputs(graph, dtype, device)
    outs = outputs_of(layer, case, inputs)
    leaves = inputs.leaves | dict(layer.named_parameters())
    gradients = torch.autograd.grad(loss_of(outs), list(leaves.values()), allow_unused=True)
    named = {
        f"d_{name}": torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), gradients)
    }
    return {**{f"out{k}": o for k, o in enumerate(outs)}, **named}
