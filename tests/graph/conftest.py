"""Graph tests start and end with an empty cache."""

import pytest

from pyg_dfgnn.graph import Graph


@pytest.fixture(autouse=True)
def empty_cache():
    Graph.clear_cache()
    yield
    Graph.clear_cache()
