"""Several processes on one machine, talking through gloo."""

import pytest

from tests import processes


@pytest.fixture
def launch():
    """Runs a function of a test module in several processes."""
    return processes.launch
