"""Drop-in for PyG's FiLMConv on a relational program."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.relations import one_relation
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.nn.conv.relational import FEW_RELATIONS, EdgeRows, RelationalConv
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import edges_lack_kernels, has_hooks, methods_of, statistics_of
from pyg_dfgnn.nn.projection import is_plain_linear
from pyg_dfgnn.ops.relational import RowSet
from pyg_dfgnn.ops.visits import run_left

ACTIVATIONS: dict[Any, Callable[[Any], tuple[Any, ...] | None]] = {
    type(None): lambda act: (None,),
    nn.ReLU: lambda act: ("relu",),
    nn.LeakyReLU: lambda act: ("leaky_relu", float(act.negative_slope)),
    nn.ELU: lambda act: ("elu",) if act.alpha == 1 else None,
    nn.GELU: lambda act: ("gelu",) if act.approximate == "none" else None,
    nn.SiLU: lambda act: ("silu",),
    nn.Sigmoid: lambda act: ("sigmoid",),
    nn.Tanh: lambda act: ("tanh",),
}
"""Class of an activation -> the pointwise function that stands for it, and its attributes."""


def activation_of(act: Any) -> tuple[Any, ...] | None:
    """Return the pointwise function that stands for an activation, and its attributes; None where none does."""
    if type(act) not in ACTIVATIONS or (act is not None and has_hooks(act)):
        return None
    return ACTIVATIONS[type(act)](act)


class FiLMConv(RelationalConv, conv.FiLMConv):
    """PyG's `FiLMConv` as one program in place of a loop over relations: same arguments, parameters and results.

    `x'_i = act(gamma_i W x_i + beta_i) + sum_r aggr_{j in N_r(i)} act(gamma_{r,i} W_r x_j + beta_{r,i})`

    Source: Brockschmidt, "GNN-FiLM: Graph Neural Networks with Feature-wise Linear Modulation", 2020.
    """

    propagate_type = {"x": Tensor, "beta": Tensor, "gamma": Tensor}
    _upstream_methods = methods_of(conv.FiLMConv)
    _node_dim = -2
    _loop_width = "out_channels"
    _fused_statistics = frozenset({"sum", "mean", "max"})

    def _numbers_per_edge(self) -> int:
        # PyG's loop gathers and modulates what a source sends.
        return 2 * self.out_channels  # type: ignore[no-any-return]

    def _width_of_pairs(self) -> int:
        return max(2 * self.out_channels, self.lins[0].in_channels)  # type: ignore[no-any-return]

    def _are_few(self, *args: Any) -> bool:
        return self.num_relations <= FEW_RELATIONS and super()._are_few(*args)

    def _call(self, x: Tensor | PairTensor, edge_index: Adj | Graph, edge_type: OptTensor = None) -> ConvCall:
        nodes = (x, x) if isinstance(x, Tensor) else tuple(x)
        reasons = [] if activation_of(self.act) is not None else [f"the activation {self.act}"]
        if not edges_lack_kernels(edge_index) and not all(map(is_plain_linear, (*self.lins, *self.films))):
            reasons.append("lins or films are other layers than PyG's, or have no weight before the first call")
        nodes = nodes if self.flow == "source_to_target" else nodes[::-1]
        return self._check_support(
            nodes, edge_index, edge_type, self.lins[0].weight, reasons, typed=self._count_relations() > 1
        )

    def _program(
        self, call: ConvCall, graph: EdgeRows, x: Tensor | PairTensor, *_: Any
    ) -> tuple[Layer, dict[str, Tensor]]:
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        layers = [(lin.weight, film.weight, film.bias) for lin, film in zip(self.lins, self.films, strict=True)]
        weight, modulation, bias = (torch.stack(parts) for parts in zip(*layers, strict=True))
        beta, gamma = modulation.transpose(1, 2).split(self.out_channels, dim=2)
        beta_bias, gamma_bias = bias.split(self.out_channels, dim=1)
        inputs = {"x": x_src, "xd": x_dst, "weight": weight.transpose(1, 2), "gamma": gamma, "gamma_bias": gamma_bias}
        inputs |= {"beta": beta, "beta_bias": beta_bias}
        (aggr,) = statistics_of(self.aggr_module)
        act = activation_of(self.act)
        assert act is not None
        numbers = [self._static_number(self.act, "act.negative_slope")] if len(act) > 1 else []
        return ("film", aggr, act[0], *numbers), inputs

    def _graph(self, call: ConvCall) -> EdgeRows:
        if self._count_relations() > 1:
            return super()._graph(call)
        sizes = call.num_src, call.num_dst
        if torch.compiler.is_compiling():
            return RowSet("relation", (call.edge_index,), sizes, self.flow != "source_to_target")
        is_graph = isinstance(call.edge_index, Graph)
        return one_relation(call.edge_index if is_graph else Graph.of(call.edge_index, *sizes, flow=self.flow))

    def forward(self, x: Tensor | PairTensor, edge_index: Adj | Graph, edge_type: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.FiLMConv.forward`."""
        if self._is_one_of_few(edge_index):
            return run_left(super().forward, x, edge_index, edge_type)  # type: ignore[no-any-return]
        call = self._call(x, edge_index, edge_type)
        if call.reasons:
            result: Tensor = self._fall_back(call, x, self._types_for_pyg(call, edge_type))
            return result
        graph = self._graph(call)
        out = self._run(call, graph, *self._program(call, graph, x))["out"]
        own = self._own(x if isinstance(x, Tensor) else x[1], call.problem[0])
        # PyG's code sums messages in their dtype, also under autocast on a GPU.
        return (out + own).to(call.problem[0])

    def _own(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what a node is to itself; in float32 where PyG's code, in 16 bits, rounds what the activation takes.

        A rounded number next to a kink lies on the wrong side of it, and its gradient is another one.
        """
        layers = self.film_skip, self.lin_skip
        if dtype.itemsize == 2 and all(map(is_plain_linear, layers)):
            with torch.autocast(x.device.type, enabled=False):
                film, mapped = (
                    linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())
                    for layer in layers
                )
        else:
            film, mapped = (layer(x) for layer in layers)
        beta, gamma = film.split(self.out_channels, dim=-1)
        out: Tensor = gamma * mapped + beta
        return out if self.act is None else self.act(out)
