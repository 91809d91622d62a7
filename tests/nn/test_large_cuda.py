"""Layers on more elements than an int32 counts, against PyG in float64 on the rows that edges reach."""

import gc

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn.nn as ours
from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.settings import local_settings

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

NUM_NODES, CHANNELS = (1 << 24) + 1000, 128
LAYERS = {
    "sage": ("SAGEConv", (CHANNELS, CHANNELS), {}),
    "sage_max": ("SAGEConv", (CHANNELS, CHANNELS), {"aggr": "max"}),
    "gat": ("GATConv", (CHANNELS, CHANNELS // 2), {"heads": 2}),
}


@pytest.mark.parametrize("key", LAYERS)
def test_rows_behind_element_2_to_the_31(key):
    assert NUM_NODES * CHANNELS > 1 << 31
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    name, args, kwargs = LAYERS[key]
    torch.manual_seed(0)
    layer = getattr(ours, name)(*args, **kwargs).to("cuda", torch.bfloat16)
    exact = getattr(pyg, name)(*args, **kwargs).to("cuda", torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.empty(NUM_NODES, CHANNELS, device="cuda", dtype=torch.bfloat16).normal_()
    # Sources and targets at both ends, and sources in between.
    ends = torch.cat([torch.arange(256), torch.arange(NUM_NODES - 256, NUM_NODES)]).cuda()
    target = ends[torch.randint(512, (4096,), device="cuda")]
    source = torch.cat([ends, torch.randint(NUM_NODES, (4096 - 512,), device="cuda")])
    with torch.no_grad(), local_settings(fallback="error"):
        out = layer(x, torch.stack([source, target]))
    assert out.shape == (NUM_NODES, CHANNELS) and out.numel() > 1 << 31

    nodes, index = torch.cat([source, target]).unique(return_inverse=True)
    local_source, local_target = index.view(2, -1)
    with torch.no_grad():
        want = exact(x[nodes].double(), torch.stack([local_source, local_target]))
    rows = local_target.unique()
    assert_all_close(
        {"out": (out[nodes[rows]], want[rows])}, torch.bfloat16, "segment" if "sage" in key else "attention"
    )
    del x, out
    gc.collect()
    torch.cuda.empty_cache()
