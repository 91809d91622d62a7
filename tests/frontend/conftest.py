"""Graphs that are captured, and programs run by the interpreter."""

import warnings

import pytest
import torch

from pyg_dfgnn import frontend
from pyg_dfgnn.nn import messages


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
