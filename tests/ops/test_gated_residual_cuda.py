"""The end of a layer of HGT on a GPU, where kernels compute its products."""

import pytest
import torch

from tests.ops.test_gated_residual import check

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "features", "channels"), [(0, 4, 4), (1, 3, 5), (3000, 64, 64), (100_000, 64, 64)])
def test_it_equals_torch_one_by_one_on_a_gpu(rows, features, channels, dtype):
    check(rows, features, channels, dtype, "cuda")
