"""Gradients of GATv2's vector and AGNN's beta, whose terms cancel: as exact as PyG's in float32."""

from contextlib import nullcontext

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn.nn as ours
from pyg_dfgnn.reference.tolerances import BESIDE_PYG
from pyg_dfgnn.reference.zoo import edges, random, zoo
from pyg_dfgnn.settings import settings
from tests.emu import require_compiler
from tests.kernels.emulated import emulated_device

FEATURES, SEEDS = 6, 32
# With 32 draws of each, the ratio of two errors of one size stays within 2.
FLOOR = 1e-10
SQUARE = [case for case in zoo() if case.num_src == case.num_dst > 0]


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request, default_settings):
    settings(fallback="error")
    if request.param == "emulated":
        require_compiler()
    return "cpu" if request.param == "emulated" else "cuda"


def root_mean_square(errors):
    return float(torch.stack(errors).square().mean().sqrt())


def assert_as_exact(make, name, draw, count, device, bound=BESIDE_PYG):
    """Compare the error of a parameter's gradient with that of PyG's conv, over `count` draws of everything."""
    own_errors, pyg_errors = [], []
    for seed in range(count):
        torch.manual_seed(seed)
        convs = [make(ours).to(device), make(pyg).to(device), make(pyg).double().to(device)]
        for parameter in convs[0].parameters():
            parameter.data.normal_()
        for conv in convs[1:]:
            conv.load_state_dict(convs[0].state_dict())
        x, edge_index, weight = draw()
        grads = []
        for conv, dtype in zip(convs, (torch.float32, torch.float32, torch.float64), strict=True):
            features = tuple(t.to(device, dtype) for t in x) if isinstance(x, tuple) else x.to(device, dtype)
            with emulated_device() if device == "cpu" and conv is convs[0] else nullcontext():
                (conv(features, edge_index.to(device)) * weight.to(device, dtype)).sum().backward()
            grad = getattr(conv, name).grad
            grads.append(torch.zeros(1) if grad is None else grad.double().cpu().flatten())
        own_errors.append(grads[0] - grads[2])
        pyg_errors.append(grads[1] - grads[2])
    own, pygs = root_mean_square(own_errors), root_mean_square(pyg_errors)
    assert own <= bound * pygs + FLOOR, f"{own:.1e}, PyG's {pygs:.1e}"


def check_gatv2(case, device, bound=BESIDE_PYG, mean=0.0):
    """The heads of one conv are as many draws."""

    def make(library):
        return library.GATv2Conv((FEATURES, FEATURES), 4, heads=SEEDS, add_self_loops=False)

    def draw():
        x = torch.randn(case.num_src, FEATURES) + mean, torch.randn(case.num_dst, FEATURES) + mean
        return x, case.edge_index, torch.randn(case.num_dst, 4 * SEEDS)

    assert_as_exact(make, "att", draw, 1, device, bound)


def check_agnn(case, device, bound=BESIDE_PYG):
    def draw():
        return torch.randn(case.num_src, FEATURES), case.edge_index, torch.randn(case.num_src, FEATURES)

    assert_as_exact(lambda library: library.AGNNConv(add_self_loops=False), "beta", draw, SEEDS, device, bound)


@pytest.mark.parametrize("case", zoo(), ids=str)
def test_vector_of_gatv2(case, device):
    check_gatv2(case, device)


@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_beta_of_agnn(case, device):
    check_agnn(case, device)


def copies(count):
    """Rows of equal edges, whose terms cancel wholly."""
    return edges("copies", [(j, (j + 1) % 5) for j in range(5) for _ in range(count)], 5)


@pytest.mark.parametrize("check", [check_gatv2, check_agnn])
@pytest.mark.parametrize("count", [3, 7])
def test_rows_of_equal_edges(count, check, device):
    check(copies(count), device, bound=1e-3)


def test_large_terms_of_gatv2_that_cancel(device):
    """Features far from zero: most of each term is common to the edges of a row."""
    check_gatv2(random(12, 12, 36), device, bound=0.5, mean=3.0)
