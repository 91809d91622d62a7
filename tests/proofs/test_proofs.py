"""The commands of the proofs: what they count, what makes them fail, and what they find when a fault is planted."""

import csv

import pytest

from tests.proofs import __main__ as command
from tests.proofs import faults, outcomes
from tests.proofs.outcomes import FAILED, PASSED, SKIPPED, TIME_IS_UP, Outcome
from tests.proofs.reporter import Reporter


def test_commands_are_listed(capsys):
    assert command.main([]) == command.main(["everything"]) == 2
    listed = capsys.readouterr().err
    assert all(f"tests.proofs {name} " in listed for name in command.PROOFS)
    assert "needs one of faults, sanitizer, determinism, soak (got 'everything')" in listed
    assert command.main(["--help"]) == 0 and "tests.proofs soak" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rows, status",
    [
        ([Outcome("a", PASSED), Outcome("b", SKIPPED, "needs a GPU")], 0),
        ([Outcome("a", PASSED), Outcome("b", FAILED, "x | y")], 1),
        ([Outcome("a", PASSED), Outcome("b", SKIPPED, f"1 of 2: {TIME_IS_UP}")], 2),
        ([], 1),
    ],
)
def test_table_and_exit_status(rows, status, tmp_path, capsys):
    assert outcomes.finish("proof", rows, tmp_path, 0.0) == status
    (path,) = tmp_path.iterdir()
    with path.open() as stream:
        written = [*csv.DictReader(stream)]
    assert [(row["name"], row["outcome"]) for row in written] == [(row.name, row.outcome) for row in rows]
    assert "x / y" in capsys.readouterr().out or status != 1 or not rows


def test_tests_of_a_fault_are_one_row():
    rows = [Outcome("a", PASSED, "", "1"), Outcome("a", SKIPPED, "no GPU", "2"), Outcome("b", SKIPPED, "no GPU")]
    first, second = faults.by_fault(rows)
    assert (first.outcome, first.reason, first.seconds) == (PASSED, "1 of 2 skipped: no GPU", "3.0")
    assert (second.outcome, second.reason) == (SKIPPED, "no GPU")
    assert faults.by_fault([*rows, Outcome("a", FAILED, "it broke")])[0].outcome == FAILED


PLANTED = """
import pytest

@pytest.mark.fault("one that is handled")
def test_one():
    pass

@pytest.mark.fault("one that is not")
@pytest.mark.parametrize("number", [1, 2])
def test_two(number):
    assert number == 1

def test_three():
    raise ValueError
"""


def test_reporter_sees_failures_and_time(tmp_path):
    path = tmp_path / "test_planted.py"
    path.write_text(PLANTED)
    words = ["-q", "-p", "no:cacheprovider", "-m", "fault", "-W", "ignore", str(path)]
    for end, found in ((float("inf"), [PASSED, FAILED]), (0.0, [SKIPPED, SKIPPED])):
        reporter = Reporter(end)
        pytest.main(words, plugins=[reporter])
        rows = faults.by_fault(reporter.rows.values())
        assert [row.outcome for row in rows] == found
        assert TIME_IS_UP in rows[1].reason if end == 0.0 else "assert 2 == 1" in rows[1].reason
