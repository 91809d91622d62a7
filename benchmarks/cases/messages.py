"""Layers whose messages are compiled, as data: PyG's without a drop-in, PyG's as users restate them, and users' own.

Every case is one layer as wide as its input. The layer in float64 is the reference; no row is left out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn.conv as pyg
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from benchmarks.case import (
    Call,
    Family,
    FeaturesCase,
    Forward,
    Fused,
    Implementation,
    TorchCompiled,
)
from pyg_dfgnn import nn as ours
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import accelerate
from pyg_dfgnn.reference.oracle import Errors, Inputs
from pyg_dfgnn.reference.tolerances import BACKWARD, largest_errors, tolerance
from pyg_dfgnn.reference.zoo import EdgeList
from pyg_dfgnn.settings import local_settings

HEADS, EDGE = 8, 8
SEED = 0


class NodeGatedGCN(MessagePassing):
    """Sums with gates per channel of both ends, normalised by the sum of the gates."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, query=self.a(x), key=self.b(x), value=self.c(x))
        total, gates = out.chunk(2, dim=-1)
        return total / (gates + 1e-6)

    def message(self, query_i: Tensor, key_j: Tensor, value_j: Tensor) -> Tensor:
        gate = torch.sigmoid(query_i + key_j)
        return torch.cat([gate * value_j, gate], dim=-1)


class EdgeGate(MessagePassing):
    """Sources times a gate of both ends and the edge."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="mean")
        self.gate = nn.Linear(2 * width + EDGE, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge=edge)  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, edge: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(torch.cat([x_i, x_j, edge], dim=-1))) * x_j


class Temperature(MessagePassing):
    """Attention of one number per edge with a learnt temperature."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.log_t, self.att = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.randn(1, width) / width**0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None) -> Tensor:
        score = (self.att * F.silu(x_i + x_j)).sum(dim=-1) * self.log_t.exp()
        return x_j * softmax(score, index, ptr, size_i).view(-1, 1)


class Modulated(MessagePassing):
    """Sources modulated by their target, then activated."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.lin, self.film = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        gamma, beta = self.film(x).chunk(2, dim=-1)
        return self.propagate(edge_index, x=self.lin(x), gamma=gamma, beta=beta)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, gamma_i: Tensor, beta_i: Tensor) -> Tensor:
        return F.gelu(gamma_i * x_j + beta_i)


class Differences(MessagePassing):
    """The largest, smallest and mean difference of the ends."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr=["max", "min", "mean"])
        self.lin = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x))  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i).abs()


@dataclass(frozen=True)
class MessageLayer:
    """One layer of the family.

    Attributes:
        title: Its name in tables and figures.
        make: (width) -> the layer.
        edge: What it takes of each edge: "" nothing, "weight" a number, "attr" `EDGE` numbers.
        hand: (width) -> our drop-in with the same parameters; None where there is none.
    """

    title: str
    make: Callable[[int], nn.Module]
    edge: str = ""
    hand: Callable[[int], nn.Module] | None = None


def _restated(name: str, *, edge: str = "", heads: int = 0, **options: Any) -> MessageLayer:
    """PyG's layer as a class of the user's own, which no drop-in stands in for."""

    def make(namespace: Any, width: int) -> nn.Module:
        of_heads = {"heads": heads} if heads else {}
        args = (width, width // heads if heads else width)
        return getattr(namespace, name)(*args, **of_heads, **options)  # type: ignore[no-any-return]

    own = type(f"My{name}", (getattr(pyg, name),), {"__module__": __name__})
    return MessageLayer(f"my {name}", partial(make, type("Own", (), {name: own})), edge, partial(make, ours))


def _gin(kind: type[nn.Module], width: int) -> nn.Module:
    return kind(nn.Linear(width, width))


LAYERS = {
    "cg": MessageLayer("CGConv", lambda f: pyg.CGConv(f, dim=EDGE), "attr"),
    "eg": MessageLayer("EGConv", lambda f: pyg.EGConv(f, f, ["sum", "mean", "max"])),
    "fa": MessageLayer("FAConv", lambda f: pyg.FAConv(f)),
    "feast": MessageLayer("FeaStConv", lambda f: pyg.FeaStConv(f, f, heads=4)),
    "gated_graph": MessageLayer("GatedGraphConv", lambda f: pyg.GatedGraphConv(f, 1), "weight"),
    "gen": MessageLayer("GENConv", lambda f: pyg.GENConv(f, f)),
    "general": MessageLayer("GeneralConv", lambda f: pyg.GeneralConv(f, f, EDGE, attention=True), "attr"),
    "gmm": MessageLayer("GMMConv", lambda f: pyg.GMMConv(f, f, dim=EDGE, kernel_size=2), "attr"),
    "le": MessageLayer("LEConv", lambda f: pyg.LEConv(f, f), "weight"),
    "mf": MessageLayer("MFConv", lambda f: pyg.MFConv(f, f, max_degree=4)),
    "mix_hop": MessageLayer("MixHopConv", lambda f: pyg.MixHopConv(f, f), "weight"),
    "simple": MessageLayer("SimpleConv", lambda f: pyg.SimpleConv("mean"), "weight"),
    "gated_gcn": MessageLayer("GatedGCN", NodeGatedGCN),
    "edge_gate": MessageLayer("edge gate", EdgeGate, "attr"),
    "temperature": MessageLayer("softmax with temperature", Temperature),
    "modulated": MessageLayer("modulated sum", Modulated),
    "differences": MessageLayer("differences", Differences),
    "my_arma": _restated("ARMAConv", edge="weight", num_layers=2),
    "my_cluster_gcn": _restated("ClusterGCNConv"),
    "my_gat": _restated("GATConv", heads=HEADS, add_self_loops=False),
    "my_gatv2": _restated("GATv2Conv", heads=HEADS, add_self_loops=False),
    "my_gcn": _restated("GCNConv", edge="weight", normalize=False),
    "my_gin": MessageLayer(
        "my GINConv",
        partial(_gin, type("MyGINConv", (pyg.GINConv,), {"__module__": __name__})),
        hand=partial(_gin, ours.GINConv),
    ),
    "my_gine": MessageLayer(
        "my GINEConv",
        lambda f: type("MyGINEConv", (pyg.GINEConv,), {})(nn.Linear(f, f), edge_dim=EDGE),
        "attr",
        lambda f: ours.GINEConv(nn.Linear(f, f), edge_dim=EDGE),
    ),
    "my_res_gated": _restated("ResGatedGraphConv"),
    "my_ssg": _restated("SSGConv", edge="weight", alpha=0.1, K=2),
    "my_transformer": _restated("TransformerConv", heads=HEADS),
}


@dataclass(frozen=True)
class MessageCase(FeaturesCase):
    """One layer as wide as its input."""

    titles = {name: layer.title for name, layer in LAYERS.items()}
    family = "relational"

    @staticmethod
    def dims(size: str) -> dict[str, int]:
        dims = FeaturesCase.dims(size)
        if dims["channels"] % HEADS:
            raise ValueError(f"'sizes' needs a list of multiples of {HEADS}, such as [64,128] (got {size!r})")
        return dims

    @property
    def spec(self) -> MessageLayer:
        """Entry of the layer in :data:`LAYERS`."""
        return LAYERS[self.op]

    def module(self, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The layer, with the same parameters each time."""
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            return self.spec.make(self.channels).to(device, dtype)

    def roles(self, graph: EdgeList) -> dict[str, str]:
        edge = {"edge": "edge"} if self.spec.edge else {}
        return {
            "x": "src",
            **edge,
            **{name: "param" for name, _ in self.module(torch.device("cpu")).named_parameters()},
        }

    def shape(self, name: str, graph: EdgeList) -> tuple[int, ...]:
        if name == "x":
            return graph.num_src, self.channels
        if name == "edge":
            return (graph.num_edges, *((EDGE,) if self.spec.edge == "attr" else ()))
        return tuple(self.module(torch.device("cpu")).get_parameter(name).shape)

    def make_inputs(self, graph: EdgeList) -> Inputs:
        """Normal features, positive weights of edges, and the layer's own parameters."""
        generator = torch.Generator(device=graph.device).manual_seed(SEED)
        inputs = {"x": torch.randn(self.shape("x", graph), generator=generator, device=graph.device)}
        if self.spec.edge:
            drawn = torch.rand(self.shape("edge", graph), generator=generator, device=graph.device)
            inputs["edge"] = drawn.add_(0.1)
        parameters = self.module(graph.device).named_parameters()
        return inputs | {name: parameter.detach().clone() for name, parameter in parameters}

    def make_grad_out(self, graph: EdgeList, inputs: Inputs) -> Tensor:
        generator = torch.Generator(device=graph.device).manual_seed(1)
        width = self.width * (3 if self.op == "mix_hop" else 1)
        return torch.randn(graph.num_dst, width, generator=generator, device=graph.device)

    def call(self, module: nn.Module, edge_index: Tensor, inputs: Inputs) -> Tensor:
        """The output of a layer that takes its parameters from the inputs."""
        names = dict(module.named_parameters())
        args = self.arguments(edge_index, inputs["x"], inputs.get("edge"))
        out: Tensor = functional_call(module, {name: inputs[name] for name in names}, args)
        return out

    def arguments(self, edge_index: Tensor, x: Tensor, edge: Tensor | None) -> tuple[Tensor, ...]:
        """Return the arguments of a call of the layer."""
        # FAConv takes the features of the first layer beside those of the last.
        args = (x, x, edge_index) if self.op == "fa" else (x, edge_index)
        return args if edge is None else (*args, edge)

    def fused(self, graph: Graph, inputs: Inputs) -> Tensor:
        module = accelerate(self.module(inputs["x"].device, inputs["x"].dtype))
        return self.call(module, graph.edge_index, inputs)

    def plain(self, edge_index: Tensor, num_dst: int, inputs: Inputs, keep: Tensor | None) -> Tensor:
        return self.call(self.module(inputs["x"].device, inputs["x"].dtype), edge_index, inputs)

    def reference(
        self, graph: EdgeList, inputs: Inputs, grad_out: Tensor, keep: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return output and gradients in float64, all rows at once: layers norm their edges by degrees of both ends."""
        leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
        out = self.plain(graph.edge_index, graph.num_dst, leaves, keep)
        gradients = torch.autograd.grad(out, list(leaves.values()), grad_out.double(), materialize_grads=True)
        return {"out": out.detach(), **{f"grad_{name}": grad for name, grad in zip(leaves, gradients)}}

    def errors(
        self, graph: EdgeList, actual: dict[str, Tensor], expected: dict[str, Tensor], grad_out: Tensor
    ) -> Errors:
        """The largest error of each tensor; of gradients beside the largest of them all, since some cancel."""
        return Errors(largest_errors(actual, expected), {})

    def bound(self, dtype: str) -> float:
        largest = tolerance(dtype, BACKWARD, self.family).largest
        assert largest is not None
        return largest


class Compiled(Fused):
    """The layer with its messages compiled by this package; what kernels do not take has no time."""

    dtypes = ("float32", "bfloat16", "float16")

    def prepare(self, case: MessageCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        module = self.layer(case, inputs["x"])
        fallback = "error" if graph.device.type == "cuda" else "silent"

        def forward() -> Tensor:
            with local_settings(fallback=fallback):
                return case.call(module, graph.edge_index, inputs)

        return forward

    def layer(self, case: MessageCase, x: Tensor) -> nn.Module:
        """The layer on the device and in the dtype of the features."""
        with local_settings(fallback="silent"):
            return accelerate(case.module(x.device, x.dtype))


class HandWritten(Compiled):
    """Our drop-in for the same layer, on hand-written kernels."""

    name = "drop_in"
    title = "our drop-in"

    def reasons(self, case: MessageCase, graph: EdgeList) -> list[str]:  # type: ignore[override]
        return [] if case.spec.hand else [f"there is no drop-in for {case.layer}"]

    def layer(self, case: MessageCase, x: Tensor) -> nn.Module:
        assert case.spec.hand is not None
        return case.spec.hand(case.channels).to(x.device, x.dtype)


class PyGMessages(Implementation):
    """The layer as it is written, with a tensor per edge for each step of its messages."""

    name = "pyg"
    title = "PyG"
    dtypes = ("float32", "bfloat16")

    def call(self, case: MessageCase, graph: EdgeList, inputs: Inputs) -> Call:  # type: ignore[override]
        return partial(case.call, case.module(inputs["x"].device, inputs["x"].dtype), graph.edge_index)


class CompiledPyGMessages(TorchCompiled, PyGMessages):
    """``torch.compile`` of the layer as it is written."""


IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    kind.name: kind for kind in (Compiled, HandWritten, PyGMessages, CompiledPyGMessages)
}


MESSAGES = Family(tuple(LAYERS), MessageCase.of, IMPLEMENTATIONS, beside=PyGMessages.name)
