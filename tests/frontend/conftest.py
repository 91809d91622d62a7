"""Graphs that are captured, and programs run by the interpreter."""

import sys
import warnings

import pytest
import torch

from pyg_dfgnn import frontend
from pyg_dfgnn.nn import messages
from tests.frontend.forms import scatter_package


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The package `torch_scatter`, or its stand-in, as if it had been imported."""
    monkeypatch.setitem(sys.modules, "torch_scatter", scatter_package)


@pytest.fixture(autouse=True)
def captured():
    """What became of each graph that is captured in a test; programs run by the interpreter."""
    found = []
    messages.clear()
    torch._dynamo.reset()
    frontend.watchers.append(found.append)
    with messages.interpreted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found
    frontend.watchers.remove(found.append)
