"""Settings common to the tests of the operators."""

import os
from contextlib import contextmanager, nullcontext

import pytest
import torch._functorch.config
from filelock import FileLock
from torch._inductor import config

from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.runtime.compiler import precompile
from pyg_dfgnn.settings import settings
from tests.emu import require_compiler
from tests.kernels.emulated import emulated_device
from tests.ops.problems import SCORES


@pytest.fixture(autouse=True)
def no_compile_cache():
    """What an earlier state of the sources left on disk: the key holds an operator's name, not the shapes it gives."""
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(autouse=True)
def general_schedule(default_settings):
    """Tests that count launches or compare bits mean this schedule; those of other schedules ask for theirs."""
    settings(schedule="row_split")


@pytest.fixture
def fused():
    """CPU tensors take the fused path; the names of the kernels launched so far."""
    require_compiler()
    with emulated_device() as launched:
        yield launched


@pytest.fixture(params=["reference", "fused"])
def path(request):
    """Both ways of an operator on the CPU; the value lists the launches, None for the reference."""
    if request.param == "fused":
        require_compiler()
    with emulated_device() if request.param == "fused" else nullcontext() as launched:
        yield launched


@pytest.fixture(params=SCORES)
def score(request):
    """Each score."""
    return request.param


@pytest.fixture(scope="module")
def compile_once(request, tmp_path_factory):
    """A context whose launches are recorded instead of made, and whose kernels are compiled in parallel at its end.

    Once for all test processes: the others find them on disk.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    done = shared / f"{request.module.__name__}.compiled"

    @contextmanager
    def recorded():
        specs = {}
        with launcher.override(lambda spec, *launched: specs.setdefault(spec)):
            yield
        with FileLock(f"{done}.lock"):
            if not done.exists():
                precompile(specs, workers=min(16, os.cpu_count() or 1))
                done.touch()

    return recorded
