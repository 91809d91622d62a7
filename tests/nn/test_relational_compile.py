"""Relational layers under torch.compile: programs through the one operator, whole, for graphs of any size."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.nn import gate
from pyg_dfgnn.ops import function as op_function
from pyg_dfgnn.ops.function import ops
from pyg_dfgnn.ops.relational.traced import KIND
from pyg_dfgnn.reference.tolerances import elementwise
from tests.covering import extended
from tests.ir.cases import GRAPHS
from tests.nn.convs import both
from tests.nn.relational import METADATA, WIDTHS, hetero, results_of

NUM_RELATIONS = GRAPHS["relations-12"].num_relations
LAYERS = {
    "rgcn": ("RGCNConv", (6, 4, NUM_RELATIONS), {}),
    "rgcn bases": ("RGCNConv", (6, 4, NUM_RELATIONS), {"num_bases": 2}),
    "rgcn max": ("RGCNConv", (6, 4, NUM_RELATIONS), {"aggr": "max", "num_blocks": 2}),
    "fast rgcn": ("FastRGCNConv", (6, 4, NUM_RELATIONS), {"flow": "target_to_source"}),
    "rgat": ("RGATConv", (6, 4, NUM_RELATIONS), {"heads": 2, "negative_slope": 0.3}),
    "film": ("FiLMConv", (6, 4, NUM_RELATIONS), {"act": torch.nn.LeakyReLU(0.1)}),
    "film of one relation": ("FiLMConv", (6, 4, 1), {}),
    "hgt": ("HGTConv", (WIDTHS, 8, METADATA), {"heads": 2}),
    "heat": ("HEATConv", (6, 4, 3, NUM_RELATIONS, 2, 3, 2), {"heads": 2}),
    "typed": ("HeteroLinear", (6, 4, 5), {}),
}


def arguments(key, more=0):
    """Arguments of a call in float64 on a graph with so many nodes and edges more."""
    if key == "hgt":
        x_dict, edges = hetero()
        for x in x_dict:
            x_dict[x] = torch.cat([x_dict[x], x_dict[x][:more]])
        return x_dict, {name: torch.cat([edge, edge[:, :more]], dim=1) for name, edge in edges.items()}
    case = GRAPHS["relations-12"]
    x = torch.randn(case.num_src + more, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if key == "typed":
        return x, torch.arange(x.size(0)) % 4
    edge_index, edge_type = (torch.cat([t, t[..., :more]], dim=-1) for t in (case.edge_index, case.edge_type))
    if key == "film of one relation":
        return x, edge_index
    if key == "heat":
        return x, edge_index, torch.arange(x.size(0)) % 3, edge_type, torch.ones(edge_type.numel(), 3).double()
    return x, edge_index, edge_type


def compiled(module):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize(
    "key",
    extended(
        ("rgcn", "fast rgcn", "rgat", "film", "hgt", "heat", "typed"),
        ("rgcn bases", "rgcn max", "film of one relation"),
    ),
)
def test_once_for_all_sizes(key, runs):
    """The interpreter behind the operator equals PyG's layer in float64, in outputs and all gradients."""
    name, args, kwargs = LAYERS[key]
    layer, oracle = both(name, *args, **kwargs)
    function = compiled(layer)
    with pyg_dfgnn.local_settings(fallback="error"):
        for more in (0, 3):
            call = arguments(key, more)
            actual, expected = results_of(function, *call), results_of(oracle, *call)
            actual = {n.replace("d__orig_mod.", "d_"): t for n, t in actual.items()}
            assert actual.keys() == expected.keys()
            for n, want in expected.items():
                torch.testing.assert_close(
                    actual[n], want, **elementwise("float64/programs"), msg=lambda text, n=n: f"{n}: {text}"
                )
    assert counters["stats"]["unique_graphs"] == 1
    # For each graph both directions of each program, of which HEAT has three.
    assert len(runs) == 4 * {"heat": 3}.get(key, 1)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("key", extended(["rgat"], ["hgt"]))
def test_opcheck(key, runs):
    name, args, kwargs = LAYERS[key]
    layer, _ = both(name, *args, **kwargs)
    results_of(compiled(layer), *arguments(key))
    forward, backward = list(runs)
    for call in (forward, backward):
        opcheck(torch.ops.pyg_dfgnn.run.default, tree_map_only(torch.Tensor, torch.Tensor.detach, call))


@pytest.mark.usefixtures("fused_on_cpu")
def test_attention_weights_and_their_gradient(runs):
    layer, oracle = both("RGATConv", 6, 4, NUM_RELATIONS, heads=2)
    call = (*arguments("rgat"), None, None, True)
    actual, expected = results_of(compiled(layer), *call), results_of(oracle, *call)
    assert runs
    torch.testing.assert_close(list(actual.values()), list(expected.values()), **elementwise("float64/programs"))


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("number", extended([torch.tensor], [np.int64]))
@pytest.mark.parametrize("key", extended(["rgat"], ["rgcn", "fast rgcn", "film", "heat"]))
def test_numbers_of_any_integer_type(key, number, runs):
    name, args, kwargs = LAYERS[key]
    at = 3 if key == "heat" else 2
    heads = {"heads": number(2)} if "heads" in kwargs else {}
    layer, oracle = both(name, *args[:at], number(args[at]), *args[at + 1 :], **{**kwargs, **heads})
    call = arguments(key)
    expected = results_of(oracle, *call)
    with pyg_dfgnn.local_settings(fallback="error"):
        for function in (layer, compiled(layer)):
            actual = results_of(function, *call)
            torch.testing.assert_close(
                list(actual.values()), list(expected.values()), **elementwise("float64/programs")
            )
    assert runs


@pytest.mark.usefixtures("fused_on_cpu")
def test_another_number_of_the_module_compiles_anew():
    layer, oracle = both("RGATConv", 6, 4, NUM_RELATIONS)
    function, call = compiled(layer), arguments("rgat")
    for slope in (0.2, 0.7):
        layer.negative_slope = oracle.negative_slope = slope
        torch.testing.assert_close(function(*call), oracle(*call), **elementwise("float64/programs"))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.usefixtures("fused_on_cpu")
def test_another_op_compiles_nothing_anew(monkeypatch):
    layer, _ = both("RGCNConv", 6, 4, NUM_RELATIONS)
    monkeypatch.setattr(gate, "_singles", {})
    monkeypatch.setattr(op_function, "ops", dict(ops))
    function, call = compiled(layer), arguments("rgcn")
    expected = function(*call)
    gate._singles[ours.RGATConv] = ("sum",)
    op_function.ops["another"] = ops[KIND]
    assert torch.equal(function(*call), expected) and counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("fused_on_cpu")
def test_dropout():
    """What is dropped is drawn outside of the operator, and the same in both directions."""
    layer, _ = both("RGATConv", 6, 4, NUM_RELATIONS, heads=2, dropout=0.5)
    results = []
    for function in (layer, compiled(layer)):
        torch.manual_seed(5)
        results.append(list(results_of(function, *arguments("rgat")).values()))
    torch.testing.assert_close(*results, **elementwise("float64/programs"))


REFUSED = {
    "FastRGCNConv": ("fast rgcn", "node indices for x while compiling"),
    "HANConv": ("hgt", "the numbers of targets of each relation while compiling"),
}


@pytest.mark.usefixtures("fused_on_cpu", "forget_logged")
@pytest.mark.parametrize("name", extended(["FastRGCNConv"], ["HANConv"]))
def test_pygs_path(name, caplog, runs):
    key, reason = REFUSED[name]
    x, *edges = arguments(key)
    x = x if isinstance(x, dict) else torch.arange(x.size(0))
    sizes = (len(x), 4, NUM_RELATIONS) if name == "FastRGCNConv" else (WIDTHS, 8, METADATA)
    layer, oracle = both(name, *sizes)
    torch.testing.assert_close(compiled(layer)(x, *edges), oracle(x, *edges), **elementwise("float64/programs"))
    assert reason in caplog.text and not runs


@pytest.mark.usefixtures("fused_on_cpu")
def test_the_operator_refuses_relations_out_of_range():
    """Values are not known while torch.compile traces."""
    x, edge_index, edge_type = arguments("rgcn")
    with pytest.raises(ValueError, match=r"'edge_type' needs values in \[0, num_relations=12\)"):
        compiled(ours.RGCNConv(6, 4, NUM_RELATIONS).double())(x, edge_index, edge_type + 7)
