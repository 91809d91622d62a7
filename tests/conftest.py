"""The options of the tests; their fixtures are in `tests/fixtures.py`."""

from pathlib import Path

from tests import covering


def pytest_addoption(parser):
    parser.addoption("--no-poison", action="store_true", help="leave the fresh buffers of pyg_dfgnn.ops as they come")
    parser.addoption(
        "--grid", choices=covering.GRIDS, default="covering", help="how many cases of each grid are tested"
    )
    parser.addoption("--case", metavar="JSON", help="repeat one random case, as the test that failed has printed it")
    parser.addoption("--conformance", type=Path, metavar="CSV", help="write what came of the matrix of conformance")


def pytest_configure(config):
    covering.grid = config.getoption("grid")
    # A process that only hands tests to others needs neither torch nor fixtures.
    hands_out = bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("tests.fixtures")
    if config.getoption("conformance") and not hasattr(config, "workerinput"):
        from tests.conformance.rows import Rows

        config.pluginmanager.register(Rows(config.getoption("conformance")))
