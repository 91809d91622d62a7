"""How products of linear layers are divided: within a device's limits, every row once, on one capability."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import gemm as rule
from pyg_dfgnn.dispatch import gpu

CPU = torch.device("cpu")


@pytest.mark.parametrize("layers", range(1, rule.MAX_LAYERS + 1))
def test_what_thread_blocks_hold_fits(layers):
    for features in rule._WIDTHS:
        for channels in (68, 100, 128, 132, 256, 500, 512):
            forward, backward = (
                rule.strips_of(backward, layers, 1 << 20, features, channels, CPU) for backward in (False, True)
            )
            assert forward is not None
            assert backward is not None or layers * channels > 128 * rule.MAX_LAYERS - 64 * layers
            for strips in filter(None, (forward, backward)):
                assert strips.fits and strips.shared_bytes < gpu.H200.shared_bytes
                assert strips.blocks(1 << 20, CPU) <= gpu.H200.multiprocessors
        for rows, channels in ((1 << 13, 128), (1 << 20, 60), (1 << 20, 516)):
            assert rule.strips_of(False, layers, rows, features, channels, CPU) is None
    assert rule.strips_of(False, rule.MAX_LAYERS + 1, 1 << 20, 128, 128, CPU) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_kernels_are_for_one_capability(capability, monkeypatch):
    assert rule.strips_of(False, 1, 1 << 20, 128, 128, CPU) is not None
    monkeypatch.setitem(gpu.known, CPU, replace(gpu.H200, capability=capability))
    assert rule.strips_of(False, 1, 1 << 20, 128, 128, CPU) is None


@pytest.mark.parametrize("rows", [1, 31, 64, 65, 2708, 19717, 120_000, 490_000, 10_000_000])
@pytest.mark.parametrize("layers, features, channels", [(1, 4, 4), (3, 128, 128), (4, 512, 512)])
def test_splits_cover_every_row_once(rows, layers, features, channels):
    splits, rows_per_split = rule.WeightGrad(layers, features, channels).splits(rows, CPU)
    assert rows_per_split % rule._SECTION_ROWS == 0 and rows_per_split * (splits - 1) < rows <= rows_per_split * splits
    partial = 4 * splits * layers * channels * (features + 1)
    assert partial <= rule._PARTIAL_BYTES
    assert rows_per_split <= rule._SPLIT_ROWS or 2 * partial > rule._PARTIAL_BYTES
