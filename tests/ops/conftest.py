"""Settings common to the tests of the operators."""

import pytest
import torch._functorch.config
from torch._inductor import config

from pyg_dfgnn.settings import settings


@pytest.fixture(autouse=True)
def no_compile_cache():
    """What an earlier state of the sources left on disk: the key holds an operator's name, not the shapes it gives."""
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(autouse=True)
def general_schedule(default_settings):
    """Tests that count launches or compare bits mean this schedule; those of other schedules ask for theirs."""
    settings(schedule="rows")
