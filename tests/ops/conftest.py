"""Tests of torch.compile must not see what an earlier state of the sources left on disk."""

import pytest
import torch._functorch.config
from torch._inductor import config


@pytest.fixture(autouse=True)
def no_compile_cache():
    """Inductor's key holds the name of an operator, not the shapes that it gives."""
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
