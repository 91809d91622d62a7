"""PyG's HeteroConv with the sums of many relations in one gather, and one product for each type of targets."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.nn.conv.hetero_conv import group as group_of

from pyg_dfgnn.frontend.derived import EdgeDerived
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.gat_conv import GATConv
from pyg_dfgnn.nn.conv.graph_conv import GraphConv
from pyg_dfgnn.nn.conv.sage_conv import SAGEConv
from pyg_dfgnn.nn.dense.hetero_linear import LINEAR
from pyg_dfgnn.nn.gate import (
    finalize_dtype,
    has_hooks,
    is_plain_layer,
    kernel_reasons,
    lacks_kernels,
    module_reasons,
    promoted_dtype,
    statistics_of,
    storage_dtype,
)
from pyg_dfgnn.ops.attention.functional import add_attention
from pyg_dfgnn.ops.eager import is_eager
from pyg_dfgnn.ops.graph import unmeasured_graph
from pyg_dfgnn.ops.visits import MEASURED_NUMBERS
from pyg_dfgnn.settings import current

LEAST_RELATIONS = 5
"""Relations from which one gather costs the host less, as timed on a CPU."""
_MOST_NUMBERS = 1 << 26
"""Numbers of all sources from which a copy of them may take longer than what the host saves; with fewer,
relations together take less time than one by one on an H200, and attention less memory."""

Relation = tuple[str, str, str]
ConvOptions = tuple[Any, ...]
"""Facts in which relations that are computed together agree: the kind of conv, its options, and the widths."""
Nodes = Mapping[str, Tensor]
EdgesByRelation = Mapping[Relation, Tensor]
Convs = Mapping[Relation, Any]


class HeteroConv(conv.HeteroConv):
    r"""PyG's `HeteroConv`: same arguments, parameters, results and gradients.

    .. math::
        x'_i = \sum_r W_r \operatorname{aggr}_{j \in N_r(i)} x_j + V_r x_i
             = [a_{i1}, a_{i2}, \ldots, x_i] \, [W_1, W_2, \ldots, \textstyle\sum_r V_r]^T

    Five or more relations of `SAGEConv` or `GraphConv` with sums or means, whose results are added up, are one gather
    and one scatter for all of them, and one product for each type of targets; those of `GATConv` are one attention
    kernel, and one product for each type of nodes at either end. All others run one by one.
    """

    def forward(self, *args_dict: Any, **kwargs_dict: Any) -> dict[str, Tensor]:
        """PyG's forward; see `torch_geometric.nn.HeteroConv.forward`."""
        is_plain = self.aggr == "sum" and len(args_dict) == 2 and not kwargs_dict
        outputs, joined = together(self.convs, *args_dict) if is_plain else ([], set())
        if not outputs:
            alone: dict[str, Tensor] = super().forward(*args_dict, **kwargs_dict)
            return alone
        x_dict, edge_index_dict = args_dict
        rest = {relation: edges for relation, edges in edge_index_dict.items() if relation not in joined}
        outputs.append(super().forward(x_dict, rest))
        out_dict: dict[str, Tensor] = {}
        for relation in self.convs.keys():
            parts = [each[relation[-1]] for each in outputs if relation[-1] in each]
            if relation in edge_index_dict and relation[-1] not in out_dict:
                out_dict[relation[-1]] = group_of(parts, self.aggr)  # type: ignore[assignment]
        return out_dict


def together(
    convs: Convs, x_dict: Nodes, edge_index_dict: EdgesByRelation
) -> tuple[list[dict[str, Tensor]], set[Relation]]:
    """Compute relations together where that is faster, and add up what they give to a type.

    Returns:
        Features of each type, from each group of relations; and the relations of these groups.
    """
    groups = _groups(convs, x_dict, edge_index_dict)
    results = [
        (_attention if kind is GATConv else _sums)(convs, group, options, x_dict, edge_index_dict)
        for (kind, *options), group in groups.items()
    ]
    return results, {relation for group in groups.values() for relation in group}


def _groups(convs: Convs, x_dict: Nodes, edge_index_dict: EdgesByRelation) -> dict[ConvOptions, list[Relation]]:
    """Return the relations that are computed together."""
    if len(edge_index_dict) < LEAST_RELATIONS:
        return {}
    if torch.compiler.is_compiling() or not is_eager() or current().deterministic:
        return {}
    if not all(isinstance(name, str) for name in x_dict):
        # Features of relations go to their convs.
        return {}
    candidates = []
    for relation in convs.keys():
        edges, x, to = edge_index_dict.get(relation), x_dict.get(relation[0]), x_dict.get(relation[-1])
        if type(edges) is not Tensor or not _is_plain_matrix(x) or not _is_plain_matrix(to) or lacks_kernels(x):  # type: ignore[arg-type]
            continue
        if edges.dim() == 2 and edges.dtype is torch.int64:
            candidates.append((relation, edges, x, to))
    if len(candidates) < LEAST_RELATIONS or not _is_small(candidates):  # type: ignore[arg-type]
        return {}
    groups: dict[ConvOptions, list[Relation]] = {}
    for relation, _, x, to in candidates:
        options = _options(convs[relation], x, to)  # type: ignore[arg-type]
        if options is not None:
            groups.setdefault(options, []).append(relation)
    return {options: group for options, group in groups.items() if len(group) >= LEAST_RELATIONS}


def _sums(
    convs: Convs, group: Sequence[Relation], options: Sequence[Any], x_dict: Nodes, edge_index_dict: EdgesByRelation
) -> dict[str, Tensor]:
    """Return what relations of sums or means give to each type."""
    _, averages, width = options
    sources = list(dict.fromkeys(relation[0] for relation in group))
    firsts = dict(zip(sources, accumulate((x_dict[name].size(0) for name in sources), initial=0)))
    targets = _Places([relation[-1] for relation in group], x_dict)
    places = [(firsts[relation[0]], 1, *targets[k]) for k, relation in enumerate(group)]
    (edges,) = _ends_of(_edges, group, places, x_dict, edge_index_dict)
    row, col = edges
    x = torch.cat([x_dict[name] for name in sources]) if len(sources) > 1 else x_dict[sources[0]]
    # Sums and counts of 16 bits would end at a few hundred.
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = x.new_zeros(targets.count, width, dtype=wide).index_add_(0, col, x.index_select(0, row).to(wide))
    if averages:
        one = x.new_ones(1, dtype=wide).expand(col.size(0))
        edges_of = x.new_zeros(targets.count, dtype=wide).index_add_(0, col, one)
        sums /= edges_of.clamp_(min=1).view(-1, 1)
    sums = sums.to(x.dtype)
    outs = {}
    for name, rows in targets.split(sums).items():
        layers = [_layers(convs[group[k]]) for k in targets.members[name]]
        weight, inputs = torch.cat([neighbours.weight for neighbours, _ in layers], dim=1), rows.flatten(1)
        bias = _total([layer.bias for both in layers for layer in both if layer is not None and layer.bias is not None])
        root = _total([root.weight for _, root in layers if root is not None])
        if root is not None:
            # Side by side with the sums the features would be copied.
            outs[name] = torch.addmm(F.linear(x_dict[name], root, bias), inputs, weight.t())
        else:
            outs[name] = F.linear(inputs, weight, bias)
    return outs


def _attention(
    convs: Convs, group: Sequence[Relation], options: Sequence[Any], x_dict: Nodes, edge_index_dict: EdgesByRelation
) -> dict[str, Tensor]:
    """Return what relations of attention give to each type: a relation's sources are rows of their own.

    Of its targets those with edges are: most nodes of a sample have none.
    """
    layers = [convs[relation] for relation in group]
    first, (heads, channels, _, slope, dropout, _) = layers[0], options
    sources, targets = (_Places([relation[end] for relation in group], x_dict) for end in (0, -1))
    nodes = [x_dict[name].size(0) for name in targets.members]
    firsts = dict(zip(targets.members, accumulate(nodes, initial=0)))
    places = [(*sources[k], *targets[k], firsts[relation[-1]], 1) for k, relation in enumerate(group)]
    most = sum(min(x_dict[relation[-1]].size(0), edge_index_dict[relation].size(1)) for relation in group)
    sizes = most, targets.count, sum(nodes)
    edges, place, node = _ends_of(_compact_edges, group, places, x_dict, edge_index_dict, *sizes)
    values, by_source, by_target = [], [], []
    for name, members in sources.members.items():
        weight = torch.cat([_projections(layers[k])[0].weight for k in members])
        values.append(F.linear(x_dict[name], weight).view(-1, heads, channels))
        by_source.append(_terms(x_dict[name], weight, [layers[k].att_src for k in members]))
    for name, members in targets.members.items():
        weight = torch.cat([_projections(layers[k])[1].weight for k in members])
        by_target.append(_terms(x_dict[name], weight, [layers[k].att_dst for k in members]))
    graph: Graph | None = unmeasured_graph(id(first), edges, sources.count, most, False, False)
    if graph is None:
        graph = Graph.resolve(edges, sources.count, most, False, False)
    value = torch.cat(values)
    out = add_attention(
        graph,
        value,
        torch.cat(by_source),
        torch.cat(by_target).index_select(0, place),
        negative_slope=slope,
        dropout_p=dropout,
        concat=first.concat,
    )
    out = finalize_dtype(out, promoted_dtype(value.dtype, first.att_src.dtype, value.is_cuda), not first.concat)
    total = out.new_zeros(sum(nodes), out.size(1)).index_add_(0, node, out)
    outs = {}
    for name, rows in zip(targets.members, total.split(nodes), strict=True):
        bias = _total([layers[k].bias for k in targets.members[name] if layers[k].bias is not None])
        outs[name] = rows if bias is None else rows + bias
    return outs


def _terms(x: Tensor, weight: Tensor, attention: Sequence[Tensor]) -> Tensor:
    """Return the terms of logits at one end, [N * relations, H], by one product: no projected rows are kept for them.

    Args:
        x: Features [N, F].
        weight: Projections of the relations below each other, [relations * H * C, F].
        attention: Vector of each relation, [1, H, C].
    """
    heads, channels = attention[0].shape[1:]
    factors = torch.cat(list(attention)).view(-1, channels, 1)
    return F.linear(x, (weight.view(-1, channels, x.size(1)) * factors).sum(1)).view(-1, heads)


class _Places:
    """Rows for each relation and node of a type at one end, those of a node behind each other.

    Args:
        names: Type of each relation.
        x_dict: Features, whose numbers of rows are those of the nodes.

    Attributes:
        members: Type -> its relations, by number.
        count: Number of rows.
    """

    def __init__(self, names: Sequence[str], x_dict: Nodes) -> None:
        self.members: dict[str, list[int]] = {}
        for k, name in enumerate(names):
            self.members.setdefault(name, []).append(k)
        self.names = names
        self.sizes = [x_dict[name].size(0) * len(members) for name, members in self.members.items()]
        self.begins = dict(zip(self.members, accumulate(self.sizes, initial=0)))
        self.count = sum(self.sizes)

    def __getitem__(self, k: int) -> tuple[int, int]:
        """Return the row of the first node for a relation, and how many rows the next node is away."""
        members = self.members[self.names[k]]
        return self.begins[self.names[k]] + members.index(k), len(members)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the rows of each type, [N, relations, ...]."""
        parts = zip(self.members.items(), rows.split(self.sizes), strict=True)
        return {name: part.view(-1, len(members), *part.shape[1:]) for (name, members), part in parts}


def _total(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of tensors; None of none."""
    return None if not tensors else torch.stack(list(tensors)).sum(0) if len(tensors) > 1 else tensors[0]


def _is_plain_matrix(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.dim() == 2 and x.layout is torch.strided


def _layers(layer: Any) -> tuple[Any, Any]:
    """Return the linear layers of a conv, for its neighbours and for the node itself."""
    if isinstance(layer, SAGEConv):
        return layer.lin_l, layer.lin_r if layer.root_weight else None
    return layer.lin_rel, layer.lin_root


def _projections(layer: Any) -> tuple[Any, Any]:
    """Return the linear layers of an attention for its sources and for its targets."""
    lin = layer._modules.get("lin")
    return (lin, lin) if lin is not None else (layer.lin_src, layer.lin_dst)


def _options(layer: Any, x: Tensor, to: Tensor) -> ConvOptions | None:
    """Return what relations must agree about to be computed together; None for a conv that is not."""
    kind = type(layer)
    if kind not in (SAGEConv, GraphConv, GATConv) or has_hooks(layer) or "forward" in layer.__dict__:
        return None
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float32:
        return None
    if module_reasons(layer, False) or layer.flow != "source_to_target" or x.device != to.device:
        return None
    if kind is GATConv:
        return _attention_options(layer, x, to)
    if kind is SAGEConv and (layer.project or layer.normalize):
        return None
    statistics, layers = statistics_of(layer._modules["aggr_module"]), [each for each in _layers(layer) if each]
    if statistics not in (("sum",), ("mean",)) or not _fit(layers, (x, to) if len(layers) > 1 else (x,)):
        return None
    return SAGEConv, layers[0].weight.size(0), statistics == ("mean",), x.size(1)


def _attention_options(layer: Any, x: Tensor, to: Tensor) -> ConvOptions | None:
    both = _projections(layer)
    if layer.add_self_loops or layer.lin_edge is not None or layer.res is not None or not _fit(both, (x, to)):
        return None
    # Terms of logits are in the dtype of the features here.
    if both[0].bias is not None or x.dtype is not torch.float32 or torch.is_autocast_enabled(x.device.type):
        return None
    dropout = float(layer.dropout) if layer.training else 0.0
    field = *layer._problem_fields(), storage_dtype(x), x.device, False, dropout > 0
    if kernel_reasons(GATConv, *field):
        return None
    options = layer.heads, layer.out_channels, layer.concat, float(layer.negative_slope), dropout
    return GATConv, *options, layer.heads * layer.out_channels


def _fit(layers: Sequence[Any], inputs: Sequence[Tensor]) -> bool:
    """Return whether linear layers are plain and take these inputs, in one dtype."""
    if not all(is_plain_layer(layer, LINEAR) for layer in layers):
        return False
    dtypes = {each.dtype for each in (*inputs, *(layer.weight for layer in layers))}
    return len(dtypes) == 1 and all(layer.weight.size(1) == x.size(1) for layer, x in zip(layers, inputs))


def _is_small(candidates: Sequence[tuple[Relation, Tensor, Tensor, Tensor]]) -> bool:
    """Return whether the host, and not the device, limits relations that run one by one."""
    sources = edges = 0
    for _, edge_index, x, _ in candidates:
        sources += x.numel()
        edges += edge_index.size(1) * x.size(1)
    return sources < _MOST_NUMBERS and edges < MEASURED_NUMBERS


def _ends_of(
    compute: EdgeDerived,
    group: Sequence[Relation],
    places: Sequence[tuple[int, ...]],
    x_dict: Nodes,
    edge_index_dict: EdgesByRelation,
    *sizes: int,
) -> Sequence[Tensor]:
    """Return the edges of relations behind each other; see :func:`_joined` and :func:`_compacted`."""
    numbers = [
        (*place, x_dict[relation[0]].size(0), x_dict[relation[-1]].size(0)) for relation, place in zip(group, places)
    ]
    return compute(*(edge_index_dict[relation] for relation in group), *chain(*numbers), *sizes)


def _placed(edges: Sequence[Tensor], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the ids of relations behind each other, [2, E], and the numbers of each edge's relation, [numbers, E].

    An id out of range becomes -1: it must not be a row of another relation.
    """
    device, sizes, width = edges[0].device, [each.size(1) for each in edges], len(numbers) // len(edges)
    table = torch.tensor([*(numbers[k::width] for k in range(width)), sizes], dtype=torch.int64)
    # From pinned memory the host waits for no copy.
    table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
    of_edges = table[:-1].repeat_interleave(table[-1], dim=1, output_size=sum(sizes))
    ids = torch.cat(list(edges), dim=1)
    return torch.where((ids >= 0) & (ids < of_edges[-2:]), ids, -1), of_edges


def _rows(ids: Tensor, first: Tensor, step: Tensor) -> Tensor:
    """Return the rows of ids: of the first one, and steps from one to the next; -1 stays."""
    return torch.where(ids < 0, -1, torch.addcmul(first, ids, step))


def _joined(*args: Any) -> Sequence[Tensor]:
    """Return the edges of relations behind each other, as rows that each relation has at either end.

    Args:
        args: The edges of each relation; then for each the row of its first source, how many rows the next is away, the
            same of targets, and the numbers of sources and of targets.
    """
    edges = [arg for arg in args if isinstance(arg, Tensor)]
    ids, numbers = _placed(edges, args[len(edges) :])
    return [_rows(ids, numbers[0:4:2], numbers[1:4:2])]


def _compacted(*args: Any) -> Sequence[Tensor]:
    """Return the edges of relations with a row for each target of a relation that has edges.

    Args:
        args: As :func:`_joined`, with two rows and steps of targets, of a place for each relation and node, and of a
            node; then the most rows there can be, and the numbers of places and of nodes.

    Returns:
        The edges [2, E], and the place and the node of each row.
    """
    edges, (most, num_places, num_nodes) = [arg for arg in args if isinstance(arg, Tensor)], args[-3:]
    ids, numbers = _placed(edges, args[len(edges) : -3])
    source, (place, node) = _rows(ids[0], numbers[0], numbers[1]), _rows(ids[1], numbers[2:6:2], numbers[3:6:2])
    is_bad = place < 0
    # A bad edge writes behind the last place, and behind the last row.
    slot = torch.where(is_bad, num_places, place)
    rank = slot.new_zeros(num_places + 1).index_fill_(0, slot, 1).cumsum(0) - 1
    row = torch.where(is_bad, most, rank[slot])
    # Rows that are left over add zeros to nodes, to each as few as possible.
    node_of = (
        torch.arange(most + 1, device=row.device).remainder_(max(num_nodes, 1)).scatter_(0, row, node.clamp(min=0))
    )
    place_of = row.new_zeros(most + 1).scatter_(0, row, place.clamp(min=0))
    return [torch.stack([source, torch.where(is_bad, -1, row)]), place_of[:-1], node_of[:-1]]


_edges, _compact_edges = EdgeDerived(_joined), EdgeDerived(_compacted)
"""They keep what is made of edges that stay, for all layers of a model."""
