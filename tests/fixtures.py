"""Common to all tests: fixed seeds, default settings, poisoned fresh buffers, a reason for each skipped GPU test."""

import functools
import gc
import logging
import sys

import pytest
import torch
import torch_geometric.typing
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards, trace_rules
from torch_geometric import template

from pyg_dfgnn.reference.zoo import EdgeList, zoo
from pyg_dfgnn.settings import Settings


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU (torch.cuda.is_available() is False)")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    """Keep modules and tests out of each search for garbage, and the loggers of torch out of what each test sets up.

    Pytest adds its handlers to every logger that does not propagate, six times per test, and torch has dozens of those.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    spare_the_host()
    gc.collect()
    gc.freeze()


def spare_the_host():
    """Leave out what PyTorch and PyG do again for each graph or class, and what no result depends on."""
    # Dynamo empties the caches of the CPU and times the guards of each graph, for its statistics.
    guards.profile_guard_manager = lambda *_: 0.0
    # A capture makes many objects that live as long as it does.
    dynamo_config.run_gc_after_compile = False
    gc.set_threshold(50_000, 20, 100)
    # PyG compiles the same two templates for each class of layers.
    template.FileSystemLoader = functools.cache(template.FileSystemLoader)
    template.Environment = functools.cache(template.Environment)


@pytest.fixture(autouse=True)
def fixed_seed():
    """Every test draws the same random numbers."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # torch.manual_seed would note where it was called, for each kind of device that is not there.
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def default_settings(request, monkeypatch):
    """Settings end with each test. Graphs are measured at once, unless the file of the test has other `SETTINGS`."""
    module = sys.modules["pyg_dfgnn.settings"]
    defaults = getattr(request.module, "SETTINGS", Settings(check_ids="now"))
    monkeypatch.setattr(module, "_global", defaults)
    for name in ("settings", "outer"):
        monkeypatch.setattr(module._blocks, name, None)


@pytest.fixture
def plain_torch(monkeypatch):
    """PyG's plain torch path is the one to equal: torch_scatter gives a gradient to one of several ties."""
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SCATTER", False)


@pytest.fixture
def tf32(request):
    """Whether the test is one in which factors may be rounded to TF32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if request.param else "ieee"
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


def list_torch_functions():
    """Let Dynamo list torch's functions before `poison` replaces some.

    It lists them at its first use and again after each `init_process_group`; a list made while a test runs holds the
    replacements of that test.
    """
    if torch.empty_like not in trace_rules.get_torch_obj_rule_map():
        trace_rules.clear_lru_cache()
        trace_rules.get_torch_obj_rule_map()


@pytest.fixture(autouse=True)
def poison(request, monkeypatch):
    """Fill what pyg_dfgnn.ops allocates with NaN: a kernel that forgets one row cannot pass by luck."""
    if request.config.getoption("--no-poison"):
        return
    list_torch_functions()

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            fresh = allocate(*args, **kwargs)
            if torch.compiler.is_compiling():
                return fresh
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("pyg_dfgnn.ops") and fresh.is_floating_point():
                fresh.fill_(float("nan"))
            return fresh

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture(params=zoo(), ids=str)
def case(request) -> EdgeList:
    """Each graph of the zoo."""
    return request.param
