"""Models that PyG's `to_hetero` makes of a layer."""

from typing import Any

import torch
from torch_geometric.nn import to_hetero

import pyg_dfgnn
from pyg_dfgnn.reference.zoo import random
from tests.conformance.layers import Conv, Given, NotApplicable, Results, assert_right, op_of, said
from tests.nn.message_cases import loss_of

NODES = {"a": 8, "b": 6}
BETWEEN = [("a", "to", "b"), ("a", "by", "a"), ("b", "of", "a")]
WITHIN = [("a", "to", "a"), ("a", "by", "a"), ("b", "of", "b")]
"""Relations of layers that take one set of nodes alone."""


class _Taken(Exception):
    """The arguments of a call."""


class Net(torch.nn.Module):
    """A model of one layer, whose call takes features, edges and, for each edge, a number or several."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.conv = layer

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(x, edge_index)


class NetOfEdges(Net):
    def forward(self, x: Any, edge_index: Any, edge_value: Any) -> Any:
        return self.conv(x, edge_index, edge_value)


def value_of_edges(conv: Conv) -> str:
    """Return what a call of the layer takes beside features and edges: "edge_weight", "edge_attr", "edge_type" or "".

    Raises:
        NotApplicable: It takes something else.
    """
    graph = random(5, 5, 9)
    given = Given(graph, torch.float32, "cpu", torch.float32, None, False)

    def take(*args: Any, **kwargs: Any) -> Any:
        raise _Taken(args, kwargs)

    try:
        conv.case.call(take, given)
        raise NotApplicable("its call takes no edges")
    except _Taken as taken:
        args, kwargs = taken.args
    names = {"edge_weight", "edge_attr"} & {*given.leaves}
    is_plain = given.uses_edges and not kwargs and not isinstance(args[0], dict)
    if not is_plain or len(args) > 3 or {*given.leaves} - names - {"x", "x_dst"}:
        raise NotApplicable("its call takes more than features, edges and values of edges")
    if len(args) == 3 and not names and args[2].dtype.is_floating_point:
        raise NotApplicable("its call takes more than features, edges and values of edges")
    return (*names, "edge_type")[0] if len(args) == 3 else ""


def results(model: torch.nn.Module, value: str, relations: list[Any], dtype: torch.dtype, device: str) -> Results:
    """Return the outputs of each type of nodes, and all gradients."""
    x, edge_index, values, leaves = {}, {}, {}, {}
    for k, (name, size) in enumerate(NODES.items()):
        given = Given(random(size, size, 1, seed=k), dtype, device, torch.float32, None, False)
        leaves[f"x {name}"] = x[name] = given.x
    for k, relation in enumerate(relations):
        graph = random(NODES[relation[0]], NODES[relation[2]], 12 + 5 * k, seed=k)
        given = Given(graph, dtype, device, torch.float32, None, False)
        edge_index[relation] = given.edge_index
        if value:
            values[relation] = getattr(given, value)
            if value != "edge_type":
                leaves[f"{value} {k}"] = values[relation]
    out = model(x, edge_index, *([values] if value else []))
    leaves |= dict(model.named_parameters())
    grads = torch.autograd.grad(loss_of(list(out.values())), list(leaves.values()), allow_unused=True)
    found = {f"out {name}": rows.detach() for name, rows in out.items()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[f"grad {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def check_to_hetero(conv: Conv) -> None:
    """Relations of a layer, between types of nodes, or within them where PyG's layer takes one set of nodes."""
    value, why = value_of_edges(conv), None
    net = NetOfEdges if value else Net
    for relations in (BETWEEN, WITHIN):

        def model(dtype: torch.dtype, relations: list[Any] = relations) -> torch.nn.Module:
            made = to_hetero(net(conv.layer().cpu()), (list(NODES), relations))
            torch.manual_seed(5)
            for parameter in made.parameters():
                torch.nn.init.normal_(parameter, std=0.5)
            return made.to(conv.device, dtype)

        try:
            expected = results(model(torch.float64), value, relations, torch.float64, conv.device)
            pygs = results(model(torch.float32), value, relations, torch.float32, conv.device)
        except Exception as error:
            why = error
            continue
        own = pyg_dfgnn.accelerate(model(torch.float32))
        with conv.seen(own):
            actual = results(own, value, relations, torch.float32, conv.device)
        assert_right(actual, expected, pygs, torch.float32, op_of(type(conv.layer())))
        return
    raise NotApplicable(f"PyG's own layer raises {said(why)}") from why
