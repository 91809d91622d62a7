"""Random layers on random graphs give PyG's outputs and gradients, whatever the options, edges, dtypes and sizes.

`--grid=full` draws many cases; one that fails prints the command that repeats it, by `--case`.
"""

import json
import shlex

import pytest

import pyg_dfgnn
from tests.emu import require_compiler

pytest.importorskip("hypothesis", reason="needs hypothesis (pip install hypothesis)")

from hypothesis import HealthCheck, Phase, given, reject, settings  # noqa: E402

from tests import covering  # noqa: E402
from tests.conformance.layers import NotApplicable  # noqa: E402
from tests.conformance.random_cases import cases, check, command  # noqa: E402

KERNEL_DTYPES = ("float32", "bfloat16", "float16")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("plain_torch")]


def draw_and_check(path, dtypes, most_cases, device="cpu", most_copies=1, phases=(Phase.generate, Phase.shrink)):
    """Check so many drawn cases; one that fails is made small, and the error has the command that repeats it."""

    @settings(
        max_examples=most_cases,
        derandomize=covering.grid != "full",
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )
    @given(cases(path, dtypes, most_copies))
    def run(case):
        try:
            check(case, device)
        except NotApplicable:
            reject()
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\nrepeat it: {command(case)}") from error

    run()


@pytest.fixture
def run(request):
    """Checks the case of the command line, if it is one of the path, or cases of the covering or of the full grid."""
    pyg_dfgnn.settings(fallback="silent", deterministic=True)
    given_case = request.config.getoption("case")

    def run(path, dtypes, few, many, device="cpu", most_copies=1):
        if given_case is None:
            draw_and_check(path, dtypes, many if covering.grid == "full" else few, device, most_copies)
        elif json.loads(given_case)["path"] == path:
            check(json.loads(given_case), device)
        else:
            pytest.skip("the case is of another path")

    return run


def test_on_the_reference_path(run, fused_on_cpu):
    run("reference", ("float64",), 60, 3000)


def test_on_emulated_kernels(run):
    require_compiler()
    run("emulator", KERNEL_DTYPES, 12, 500)


@pytest.mark.cuda
def test_on_a_gpu(run):
    run("cuda", KERNEL_DTYPES, 200, 5000, "cuda", most_copies=400)


def test_a_failure_prints_the_command_that_repeats_it(monkeypatch):
    accelerate = pyg_dfgnn.accelerate

    def wrong(layer):
        for parameter in layer.parameters():
            parameter.data.add_(0.01)
        return accelerate(layer)

    pyg_dfgnn.settings(fallback="silent")
    monkeypatch.setattr(pyg_dfgnn, "accelerate", wrong)
    with pytest.raises(AssertionError, match="repeat it") as failure:
        draw_and_check("reference", ("float64",), 20, phases=[Phase.generate])
    *words, case = shlex.split(str(failure.value).split("repeat it: ")[1].splitlines()[0])
    assert words == "python -m pytest tests/conformance/test_random.py --case".split()
    with pytest.raises(AssertionError, match="Excess"):
        check(json.loads(case), "cpu")
    monkeypatch.setattr(pyg_dfgnn, "accelerate", accelerate)
    check(json.loads(case), "cpu")
