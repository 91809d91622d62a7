"""How products by type are divided: within a device's limits, and in as many items as keep it busy."""

import pytest
import torch

from pyg_dfgnn.dispatch import segment_gemm
from pyg_dfgnn.dispatch.gpu import H200
from pyg_dfgnn.dispatch.segment_gemm import SegmentGemmProblem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def problem(product="linear", features=64, channels=64, heads=1, fold="none", dtype=torch.float32, device="cuda"):
    return SegmentGemmProblem(product, features, channels, heads, fold, dtype, torch.device(device))


@pytest.mark.parametrize("product", segment_gemm.PRODUCTS)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 70), (64, 8), (64, 64), (256, 256), (1000, 33), (4096, 4096)], ids=str)
def test_plans_fit_a_multiprocessor(product, sizes):
    for dtype in DTYPES:
        folds = segment_gemm.FOLDS if product == "outer" else ("none", "columns")
        for heads, fold in ((1, "none"), *((8, fold) for fold in folds)):
            posed = problem(product, *sizes, heads, fold, dtype)
            assert not segment_gemm.unsupported_reasons(posed)
            for num_rows, num_types in ((1, 1), (26_000, 90), (161_881, 474), (3_600_000, 4), (2_000_000_000, 4)):
                plan = segment_gemm.plan_of(posed, num_rows, num_types)
                # The lists of rows and the turns of sums take up to 4 KiB more.
                assert plan.constants["MIN_BLOCKS"] * plan.block[0] <= 2048
                assert plan.shared_bytes + (4 << 10) <= H200.shared_bytes
                assert plan.length <= segment_gemm.LINEAR_ROWS or product == "outer"
                (spec,) = segment_gemm.specs_of(posed, plan)
                assert spec.source


def test_narrow_maps_have_narrow_tiles():
    """Logit maps from 64 features to 8 channels multiply no columns that are not there, nor do their gradients."""
    for product in ("linear", "outer"):
        plan = segment_gemm.plan_of(problem(product, 64, 8), 161_881, 474)
        assert plan.constants["TILE_N"] == 8 and plan.groups == 1


def test_heads_that_share_rows_are_one_product():
    """Eight heads of one channel fill a tile, and their rows are read once."""
    for product in ("linear", "outer"):
        plan = segment_gemm.plan_of(problem(product, 64, 1, 8, "columns"), 161_881, 474)
        assert plan.constants["TILE_N"] == 8 and plan.groups == 1


def test_partial_sums_have_bounded_memory():
    for num_rows in (10_000, 3_600_000, 500_000_000):
        plan = segment_gemm.plan_of(problem("outer", 512, 512), num_rows, 4)
        assert num_rows // plan.length * 512 * 512 * 4 <= 128 << 20


def test_many_types_are_one_item_each():
    """Then the sums need no second launch."""
    assert segment_gemm.plan_of(problem("outer"), 161_881, 474).length >= 161_881 / 474


def test_reasons():
    reasons = segment_gemm.unsupported_reasons
    assert reasons(problem(dtype=torch.float64)) == ["torch.float64 has no fused kernel (float32, float16, bfloat16)"]
    assert reasons(problem(features=0)) == ["a weight without numbers, which no kernel multiplies"]
    assert "the kernels run on CUDA devices" in reasons(problem(device="cpu"))[0]


@pytest.mark.parametrize("tf32", [False, True], indirect=True)
def test_precision_follows_torch(tf32):
    for rounded in (False, True):
        posed = SegmentGemmProblem("linear", 64, 64, 1, "none", torch.float32, torch.device("cuda"), rounded)
        assert posed.split == (not rounded)
