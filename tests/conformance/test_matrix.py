"""Each conv of PyG, with ours in its place, under each condition: results are PyG's.

`--grid=full` runs every cell, and `--conformance results/conformance.csv` writes what came of each.
"""

import pytest

import pyg_dfgnn
from tests.conformance.conditions import CONDITIONS
from tests.conformance.layers import CASES, Conv, NotApplicable
from tests.conformance.rows import CELL, PATH
from tests.covering import over
from tests.emu import require_compiler


def run(name, condition, device, record_property):
    """Run a cell; what it shows goes to the row of it."""
    pyg_dfgnn.settings(fallback="log", deterministic=True)
    conv = Conv(name, device)
    record_property(CELL, (name, condition, device))
    try:
        CONDITIONS[condition](conv)
    except NotApplicable as why:
        pytest.skip(str(why))
    if conv.path != "kernels":
        record_property(PATH, f"{conv.path}: {'; '.join(conv.why) or 'its code runs as it is'}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("plain_torch")
@over(name=tuple(CASES), condition=tuple(CONDITIONS))
def test_matrix(name, condition, record_property):
    require_compiler()
    run(name, condition, "cpu", record_property)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("plain_torch")
@over(name=tuple(CASES), condition=tuple(CONDITIONS))
def test_matrix_on_a_gpu(name, condition, record_property):
    run(name, condition, "cuda", record_property)
