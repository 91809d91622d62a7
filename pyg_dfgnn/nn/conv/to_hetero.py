"""Models that PyG's `to_hetero` makes: the convs of a layer, one for each relation, are called together."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.nn.conv.hetero_conv import LEAST_RELATIONS, Relation, together


class RelationDict(torch.nn.ModuleDict):
    """The convs of a layer by relation, which are called together where that is faster, else one by one."""

    def forward(
        self, relations: Sequence[Relation], x_dict: dict[str, Any], edge_indices: Sequence[Any]
    ) -> dict[str, Tensor]:
        """Return the sum of what the relations give to each type of nodes.

        Args:
            relations: Types of the sources and of the targets, and between them the name of the conv.
            x_dict: Features [N, F] by type.
            edge_indices: Edges [2, E] of each relation.
        """
        edge_index_dict = dict(zip(relations, edge_indices, strict=True))
        results, joined = together({relation: self[relation[1]] for relation in relations}, x_dict, edge_index_dict)
        for relation, edge_index in edge_index_dict.items():
            if relation not in joined:
                source, name, target = relation
                x = x_dict[source] if source == target else (x_dict[source], x_dict[target])
                results.append({target: self[name](x, edge_index)})
        out: dict[str, Tensor] = {}
        for result in results:
            for name, rows in result.items():
                out[name] = out[name] + rows if name in out else rows
        return out


def join_relations(model: GraphModule) -> int:
    """Let a graph call the convs of each layer together, in place, and return the number of such layers.

    A layer stays as it is unless its relations are enough, are called one after the other with features and edges
    alone, and are added up for each type of targets.
    """
    calls: dict[str, list[Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_module" and "." in node.target:
            calls.setdefault(node.target.rpartition(".")[0], []).append(node)
    count = 0
    for name, nodes in calls.items():
        layer = model.get_submodule(name)
        if type(layer) is not torch.nn.ModuleDict or not all(isinstance(c, MessagePassing) for c in layer.values()):
            continue
        totals = _totals(nodes) if _are_relations(nodes) else None
        if totals is None:
            continue
        relations = tuple(
            (_ends(node)[0].name, str(node.target).rpartition(".")[2], _ends(node)[1].name) for node in nodes
        )
        x_dict = {end.name: end for node in nodes for end in _ends(node)}
        with model.graph.inserting_after(nodes[-1]):
            out = model.graph.call_module(name, (relations, x_dict, tuple(node.args[1] for node in nodes)))
        for target, (total, additions) in totals.items():
            with model.graph.inserting_after(out):
                total.replace_all_uses_with(model.graph.call_function(operator.getitem, (out, target)))
            for node in reversed(additions):
                model.graph.erase_node(node)
        for node in nodes:
            model.graph.erase_node(node)
        layer.__class__ = RelationDict
        count += 1
    if count:
        model.recompile()
    return count


def split_relations(model: GraphModule) -> None:
    """Undo :func:`join_relations`, in place."""
    joined = [
        node
        for node in model.graph.nodes
        if node.op == "call_module" and isinstance(model.get_submodule(node.target), RelationDict)
    ]
    for out in joined:
        relations, x_dict, edge_indices = out.args
        totals: dict[str, Node] = {}
        with model.graph.inserting_before(out):
            for (source, name, target), edge_index in zip(relations, edge_indices, strict=True):
                x = x_dict[source] if source == target else (x_dict[source], x_dict[target])
                result = model.graph.call_module(f"{out.target}.{name}", (x, edge_index))
                other = totals.get(target)
                totals[target] = result if other is None else model.graph.call_function(torch.add, (other, result))
        for node in list(out.users):
            node.replace_all_uses_with(totals[node.args[1]])
            model.graph.erase_node(node)
        model.graph.erase_node(out)
        model.get_submodule(out.target).__class__ = torch.nn.ModuleDict
    if joined:
        model.recompile()


def _ends(call: Node) -> tuple[Any, Any]:
    """Return the features of the sources and of the targets of a relation."""
    x: Any = call.args[0]
    return x if isinstance(x, tuple) else (x, x)


def _are_relations(nodes: Sequence[Node]) -> bool:
    """Return whether calls of convs follow each other and take features and edges alone."""
    if len(nodes) < LEAST_RELATIONS or len({node.target for node in nodes}) < len(nodes):
        return False
    if any(node.kwargs or len(node.args) != 2 or not isinstance(node.args[1], Node) for node in nodes):
        return False
    ends = [_ends(node) for node in nodes]
    is_apart = not any(end in nodes for both in ends for end in both)
    follow = all(first.next is second for first, second in zip(nodes, nodes[1:]))
    return follow and is_apart and all(len(both) == 2 and all(isinstance(x, Node) for x in both) for both in ends)


def _totals(nodes: Sequence[Node]) -> dict[str, tuple[Node, list[Node]]] | None:
    """Return the sum of the results for each type of targets, and its additions; None if something else reads one."""
    results: dict[str, list[Any]] = {}
    for node in nodes:
        results.setdefault(_ends(node)[1].name, []).append(node)
    totals = {}
    for target, terms in results.items():
        additions: list[Any] = []
        while len(terms) > 1:
            addition = next(iter(terms[0].users), None)
            if addition is None or addition.op != "call_function" or addition.target is not torch.add:
                return None
            if addition.kwargs or len(set(addition.args)) != 2:
                return None
            if not all(arg in terms and list(arg.users) == [addition] for arg in addition.args):
                return None
            terms = [*(term for term in terms if term not in addition.args), addition]
            additions.append(addition)
        totals[target] = terms[0], additions
    return totals
