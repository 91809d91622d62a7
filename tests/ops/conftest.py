"""Tests of torch.compile must not see what an earlier state of the sources left on disk."""

import pytest
from torch._inductor import config


@pytest.fixture(autouse=True)
def no_compile_cache():
    """Inductor's key holds the name of an operator, not the shapes that it gives."""
    with config.patch(force_disable_caches=True):
        yield
