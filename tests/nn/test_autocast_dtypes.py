"""Outputs of all drop-in convs have PyG's dtype under autocast."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.nn import DROP_INS
from tests.covering import over
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

NODES, EDGES, RELATIONS, TYPES = 20, 80, 3, 2
OF_EDGES = {"RGCNConv", "FastRGCNConv", "RGATConv", "FiLMConv"}
ARGUMENTS = {
    "AGNNConv": (),
    "LGConv": (),
    "APPNP": (2, 0.1),
    "GCN2Conv": (8, 0.3),
    "SSGConv": (8, 4, 0.3),
    "ChebConv": (8, 4, 3),
    "PNAConv": (8, 4, ["mean", "max"], ["identity"], torch.tensor([0, 3, 4])),
    "HEATConv": (8, 4, TYPES, RELATIONS, 2, 5, 2),
    **{name: (8, 4, RELATIONS) for name in OF_EDGES},
    **{name: (nn.Linear(8, 4),) for name in ("GINConv", "GINEConv")},
}
VARIANTS = {
    "SuperGATConv": {"attention_type": "SD"},
    "FiLMConv": {"aggr": "max"},
    "RGCNConv": {"num_bases": 2},
    "GATConv": {"concat": False, "heads": 2},
    "HEATConv": {"root_weight": False},
}
SKIPPED = {"HGTConv", "HANConv"}
"""Convs of dictionaries."""
NAMES = sorted(
    kind.__name__ for kind in DROP_INS if issubclass(kind, pyg.MessagePassing) and kind.__name__ not in SKIPPED
)


def outputs_of(conv, device, dtype):
    torch.manual_seed(0)
    name = type(conv).__name__
    x, edge_index, relation = (
        torch.randn(NODES, 8),
        torch.randint(NODES, (2, EDGES)),
        torch.randint(RELATIONS, (EDGES,)),
    )
    call = {
        "GCN2Conv": (x, x.clone(), edge_index),
        "GINEConv": (x, edge_index, torch.randn(EDGES, 8)),
        "HEATConv": (x, edge_index, torch.randint(TYPES, (NODES,)), relation, torch.randn(EDGES, 5)),
    }.get(name, (x, edge_index, relation) if name in OF_EDGES else (x, edge_index))
    with torch.autocast(device, dtype=dtype):
        return conv.to(device)(*(tensor.to(device) for tensor in call))


def dtypes(name, variant, options, dtype, device):
    """Dtypes of ours and of PyG's output."""
    arguments = copy.deepcopy(ARGUMENTS.get(name, (8, 4)))
    kwargs = {**(VARIANTS.get(name, {}) if variant else {}), **options}
    try:
        convs = [getattr(library, name)(*copy.deepcopy(arguments), **kwargs) for library in (ours, pyg)]
    except TypeError:
        pytest.skip("the conv has no bias of its own")
    with pyg_dfgnn.local_settings(fallback="silent"):
        return [outputs_of(conv.eval(), device, dtype).dtype for conv in convs]


@needs_compiler
@over(
    [("name", "variant")], name=NAMES, variant=(False, True), bias=(True, False), dtype=(torch.bfloat16, torch.float16)
)
def test_dtypes(name, variant, bias, dtype):
    with emulated_device():
        own, pygs = dtypes(name, variant, {} if bias else {"bias": False}, dtype, "cpu")
    assert own is pygs


@pytest.mark.cuda
@over(
    [("name", "variant")], name=NAMES, variant=(False, True), bias=(True, False), dtype=(torch.bfloat16, torch.float16)
)
def test_dtypes_on_a_gpu(name, variant, bias, dtype):
    own, pygs = dtypes(name, variant, {} if bias else {"bias": False}, dtype, "cuda")
    assert own is pygs
