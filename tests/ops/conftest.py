"""Settings common to the tests of the operators."""

import pytest
import torch._functorch.config
from torch._inductor import config

from pyg_dfgnn.settings import settings
from tests.emu.loader import compiler
from tests.kernels.emulated import emulated_device


@pytest.fixture(autouse=True)
def no_compile_cache():
    """What an earlier state of the sources left on disk: the key holds an operator's name, not the shapes it gives."""
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(autouse=True)
def general_schedule(default_settings):
    """Tests that count launches or compare bits mean this schedule; those of other schedules ask for theirs."""
    settings(schedule="rows")


@pytest.fixture
def fused():
    """CPU tensors take the fused path; the names of the kernels launched so far."""
    if compiler() is None:
        pytest.skip("needs a host compiler (g++)")
    with emulated_device() as launched:
        yield launched
