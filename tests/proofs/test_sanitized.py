"""Calls that together launch each family of kernels, small enough for tools that slow a GPU down.

Other tests compare results; here each is a number. On a CPU the emulator launches them, between guard pages.
"""

from contextlib import nullcontext

import pytest
import torch

import pyg_dfgnn
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.zoo import ZOO, hub, sbm
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device, small_gemm
from tests.nn.message_cases import EDGE_MLP, TRACED, outputs_and_gradients
from tests.ops.problems import DENSE, Problem

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = {**TRACED, **EDGE_MLP}
# Attention, sums and statistics, relations, and messages that are compiled.
LAYERS = (
    *("GATConv", "TransformerConv", "SuperGATConv", "GCNConv", "SAGEConv", "GINEConv", "PNAConv"),
    *("RGCNConv", "RGATConv", "HGTConv", "FiLMConv", "HEATConv", "GENConv", "CGConv", "PointTransformerConv"),
)
# Schedule, score, graph, dtype, edge features and dropout.
ATTENTION = [
    ("row_split", "gatv2", DENSE, torch.bfloat16, True),
    ("row_split", "dot", hub(700), torch.float32, False),
    ("row_split", "cosine", DENSE, torch.float32, False),
    ("smem", "dot", sbm(), torch.float32, False),
    ("smem", "add", sbm(), torch.bfloat16, False),
    ("block_mma", "dot", sbm(), torch.bfloat16, False),
    ("block_mma", "cosine", sbm(), torch.float16, False),
]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("cpu", marks=needs_compiler)])
def device(request):
    """A GPU, or a CPU on which kernels are emulated."""
    with nullcontext() if request.param == "cuda" else emulated_device():
        yield request.param


def assert_finite(results):
    assert results and all(bool(tensor.isfinite().all()) for tensor in results.values())


@pytest.mark.parametrize("schedule, score, case, dtype, full", ATTENTION, ids=lambda value: str(value))
def test_attention(device, schedule, score, case, dtype, full):
    more = {"edge": True, "dropout_p": 0.5} if full else {}
    problem = Problem(score, case, 2, 32, dtype=dtype, device=device, **more)
    with local_settings(schedule=schedule, fallback="error"):
        assert_finite(problem.run(seed=1))


@pytest.mark.parametrize("name", LAYERS)
def test_layer(device, name):
    """On new edges, which are not measured, and on edges that are."""
    case = CASES[name]
    torch.manual_seed(0)
    layer = pyg_dfgnn.accelerate(case.make()).to(device)
    for check_ids in ("later", "now"):
        with local_settings(check_ids=check_ids, deterministic=True, fallback="error"):
            assert_finite(outputs_and_gradients(layer, case, ZOO["hub"](), torch.float32, device))


def test_products(device):
    rows = 9000 if device == "cuda" else 70
    x = torch.randn(rows, 64, device=device, requires_grad=True)
    weight = torch.randn(64 if device == "cuda" else 48, 64, device=device, requires_grad=True)
    with nullcontext() if device == "cuda" else small_gemm():
        (out,) = gemm.project(x, [weight], ())
        assert_finite(dict(enumerate((out, *torch.autograd.grad(out.sum(), (x, weight))))))
