"""Drop-in for PyG's HGTConv on a relational program."""

from collections.abc import Mapping
from functools import lru_cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, one_hot
from torch_geometric.nn import conv
from torch_geometric.nn.parameter_dict import ParameterDict
from torch_geometric.typing import EdgeType, NodeType

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import Domain, R, S
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.ir.passes import RowCounts, rounded
from pyg_dfgnn.nn.conv.hetero import JointConv
from pyg_dfgnn.nn.conv.relational import EdgeRows
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.dense.hetero_linear import HETERO_DICT_LINEAR, HETERO_LINEAR, LINEAR, MANY_TYPES
from pyg_dfgnn.nn.gate import has_hooks, is_plain_layer, methods_of
from pyg_dfgnn.nn.relational_program import traffic_elements
from pyg_dfgnn.ops.eager import is_eager
from pyg_dfgnn.ops.gated_residual import gated_residual
from pyg_dfgnn.ops.relational import index_space_of

# What the layer moves around its program, by whether there is a backward pass too: of each node, in multiples of the
# channels, and of each relation, in multiples of its matrix.
_AROUND_FEATURES, _AROUND_PROJECTED = {False: (2, 15), True: (5, 45)}, {False: (10, 0), True: (24, 0)}


@lru_cache(256)
def _features_move_less(sizes: RowCounts, size: int, has_backward: bool, has_gradient: bool) -> bool:
    """Return whether features in place of keys, queries and values move fewer numbers.

    Args:
        sizes: Rows of each domain.
        size: Channels.
        has_backward: Whether parameters need gradients.
        has_gradient: Whether features do.
    """
    rows, row, matrix, number = dict(sizes), (1, size), (1, size, size), (1,)
    projected = {"k": row, "q": row, "v": row, "key": matrix, "value": matrix, "scale": number}
    maps = {"query": matrix, "query_bias": row, "target": row, "offset": number, "value": matrix, "value_bias": row}
    features = {"x": row, "xd": row}
    wrt = (*maps, *(features if has_gradient else ())) if has_backward else ()
    costs = []
    for layer, shapes, gradients, around in (
        ("hgt_features", {**features, **maps}, wrt, _AROUND_FEATURES),
        ("hgt_attention", projected, tuple(projected) if has_backward else (), _AROUND_PROJECTED),
    ):
        of_nodes, of_relations = around[has_backward]
        outside = of_nodes * size * rows[S] + of_relations * size**2 * rows[R]
        costs.append(outside + traffic_elements((layer,), shapes, rows, gradients))
    return costs[0] < costs[1]


def _is_products(layer: Any) -> bool:
    """Return whether calling a `HeteroDictLinear` is a product and a bias for each type, and nothing else."""
    return (
        type(layer) in HETERO_DICT_LINEAR
        and "forward" not in layer.__dict__
        and not has_hooks(layer)
        and all(is_plain_layer(linear, LINEAR) and linear.bias is not None for linear in layer.lins.values())
    )


@lru_cache(16)
def _selection(numbers: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return the matrix [numbers, size] whose product with rows selects those of these numbers."""
    with torch.inference_mode(False):
        return one_hot(torch.tensor(numbers, device=device), size)


@lru_cache(16)
def _attributes(edge_types: tuple[EdgeType, ...]) -> list[str]:
    """Return the names under which PyG's `ParameterDict` keeps the parameters of edge types."""
    return [ParameterDict.to_internal_key("__".join(edge_type)) for edge_type in edge_types]


class HGTConv(JointConv, conv.HGTConv):
    """PyG's `HGTConv` on one graph of all types: same arguments, parameters, results and gradients.

    `x'_i = a W_out gelu(sum_j softmax_j(mu_r <q_i, k_j A_r> / sqrt(C)) v_j M_r) + (1 - a) x_i`

    Edge types may come in any order; PyG's class assumes the order of the metadata.

    Source: Hu et al., "Heterogeneous Graph Transformer", 2020.
    """

    propagate_type = {"k": Tensor, "q": Tensor, "v": Tensor, "edge_attr": Tensor}
    _upstream_methods = methods_of(conv.HGTConv)
    _few_relations = 4

    def _width_of_pairs(self) -> int:
        # A key and a value.
        return 2 * self.out_channels  # type: ignore[no-any-return]

    def _is_short(self, edge_index_dict: dict[EdgeType, Any]) -> bool:
        return super()._is_short(edge_index_dict) and list(edge_index_dict) == list(self.edge_types)

    def _call(self, x_dict: dict[NodeType, Tensor], edge_index_dict: dict[EdgeType, Any]) -> ConvCall:
        plain = all(is_plain_layer(layer, HETERO_LINEAR) for layer in (self.k_rel, self.v_rel))
        reasons = [] if plain else ["k_rel or v_rel is another layer than PyG's"]
        types = list(self.kqv_lin.lins)
        return self._ask_joint(x_dict, edge_index_dict, types, self.edge_types, self.k_rel.weight, reasons)

    def _program(
        self, call: ConvCall, graph: EdgeRows, x_dict: dict[NodeType, Tensor], *_: Any
    ) -> tuple[Layer, dict[str, Tensor]]:
        heads, channels, names = self.heads, self.out_channels // self.heads, call.edge_index.sizes
        key, value = (
            layer.weight.view(heads, -1, channels, channels).transpose(0, 1) for layer in (self.k_rel, self.v_rel)
        )
        scale = torch.cat(self._priors())
        if isinstance(graph, Graph) and self._folds(x_dict, index_space_of(graph).sizes):
            x = torch.cat([x_dict[name] for name in names]).unsqueeze(1)
            with torch.autocast(x.device.type, enabled=False):
                return ("hgt_features",), {"x": x, "xd": x, **self._folded(key, value, scale)}
        kqv = self.kqv_lin(x_dict)
        projected = [kqv[name].split(self.out_channels, dim=1) for name in names]
        k, q, v = (torch.cat(rows).view(-1, heads, channels) for rows in zip(*projected, strict=True))
        return ("hgt_attention",), {"k": k, "q": q, "v": v, "key": key, "value": value, "scale": scale}

    def _priors(self) -> list[Tensor]:
        """Return the scales of the relations [1, H]."""
        if torch.compiler.is_compiling():
            return [self.p_rel["__".join(edge_type)] for edge_type in self.edge_types]
        # Read from where modules keep them: PyG's dict, on torch's, takes longer for each.
        own = self.p_rel.__dict__["_parameters"]
        return [own[key] if key in own else getattr(self.p_rel, key) for key in _attributes(tuple(self.edge_types))]

    def _folds(self, x_dict: dict[NodeType, Tensor], sizes: Mapping[Domain, int]) -> bool:
        """Whether the maps of node types are multiplied with those of relations, each of which has one type at an end.

        Features then take the place of keys, queries and values, which moves fewer rows where targets have few
        relations. Of several heads, each would have a row as wide as the features for every pair.
        """
        layer, size, has_backward = self.kqv_lin, self.out_channels, torch.is_grad_enabled()
        has_gradient = any(x.requires_grad for x in x_dict.values())
        return (
            self.heads == 1
            and all(x.size(1) == size for x in x_dict.values())
            and _is_products(layer)
            and all(lin.weight.shape == (3 * size, size) for lin in layer.lins.values())
            and _features_move_less(rounded(sizes), size, has_backward, has_backward and has_gradient)
        )

    def _folded(self, key: Tensor, value: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the parameters of the program on features, from those on keys and values [R, 1, C, C]."""
        size, types = self.out_channels, list(self.kqv_lin.lins)
        layers = self.kqv_lin.lins.values()
        # Affine maps of features as linear ones of features and a 1: [T, 3, C, C + 1].
        weight, bias = (torch.stack([getattr(layer, part) for layer in layers]) for part in ("weight", "bias"))
        maps = torch.cat([weight, bias.unsqueeze(2)], dim=2).view(len(types), 3, size, size + 1)
        sources, targets = (
            _selection(tuple(types.index(edge_type[end]) for edge_type in self.edge_types), len(types), maps.device)
            for end in (0, -1)
        )
        # Not by index: the gradients of a type's maps are summed in a fixed order.
        k, v = (torch.tensordot(sources.to(maps.dtype), maps[:, part], 1) for part in (0, 2))
        q = torch.tensordot(targets.to(maps.dtype), maps[:, 1], 1)
        logits = q.mT @ (key[:, 0].mT * (scale / sqrt(size)).unsqueeze(2)) @ k
        messages = v.mT @ value[:, 0]
        return {
            "query": logits[:, None, :size, :size],
            "query_bias": logits[:, None, size, :size],
            "target": logits[:, None, :size, size],
            "offset": logits[:, size, size, None],
            "value": messages[:, None, :size],
            "value_bias": messages[:, None, size],
        }

    def forward(
        self, x_dict: dict[NodeType, Tensor], edge_index_dict: dict[EdgeType, Any]
    ) -> dict[NodeType, Tensor | None]:
        """PyG's forward, also on dicts of `Graph`; see `torch_geometric.nn.HGTConv.forward`."""
        call = self._call(x_dict, edge_index_dict)
        if call.reasons:
            results: dict[NodeType, Tensor | None] = self._fall_back(call, x_dict)
            return results
        graph = self._graph(call)
        out = self._run(call, graph, *self._program(call, graph, x_dict))["out"]
        sizes = call.edge_index.sizes
        received = {
            name: rows
            for name, rows in zip(sizes, out.split(list(sizes.values())), strict=True)
            if name in self.dst_node_types
        }
        if self._ends_in_one(received, x_dict):
            lins = self.out_lin.lins
            return {
                name: gated_residual(rows, lins[name].weight, lins[name].bias, self.skip[name], x_dict[name])
                for name, rows in received.items()
            }
        mapped = self.out_lin({name: gelu(rows) for name, rows in received.items()})
        for name in received:
            x, out = x_dict[name], mapped[name]
            if out.size(-1) == x.size(-1):
                share = self.skip[name].sigmoid()
                out = share * out + (1 - share) * x
            received[name] = out
        return dict(received)

    def _ends_in_one(self, received: Mapping[NodeType, Tensor], x_dict: Mapping[NodeType, Tensor]) -> bool:
        """Whether what follows the program is one function for each node type, which saves less for backward."""
        if not is_eager() or len(received) >= MANY_TYPES or not _is_products(self.out_lin):
            return False
        return all(
            x_dict[name].size(1) == rows.size(1)
            and rows.dtype == x_dict[name].dtype == self.out_lin.lins[name].weight.dtype
            and not torch.is_autocast_enabled(rows.device.type)
            for name, rows in received.items()
        )
