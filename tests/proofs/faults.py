"""Run the tests of faults: no memory, no disk, no driver, processes that end in the middle."""

import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.proofs.outcomes import FAILED, PASSED, SKIPPED, Outcome, finish, options
from tests.proofs.reporter import Reporter

TESTS = Path(__file__).parents[1]
MARK = "mark.fault("
NEEDS = {"training": "hydra"}
"""Folder of tests -> the module without which they cannot be collected."""


def files() -> list[Path]:
    """The files that have tests of faults."""
    return sorted(path for path in TESTS.rglob("test_*.py") if MARK in path.read_text())


def by_fault(rows: Iterable[Outcome]) -> list[Outcome]:
    """Put the tests of a fault in one row: failed if one has failed, skipped if all were, passed otherwise."""
    groups: dict[str, list[Outcome]] = {}
    for row in rows:
        groups.setdefault(row.name, []).append(row)
    merged = []
    for name, group in groups.items():
        found = {row.outcome for row in group}
        outcome = FAILED if FAILED in found else PASSED if PASSED in found else SKIPPED
        reasons = dict.fromkeys(row.reason for row in group if row.reason and row.outcome != PASSED)
        reason = "; ".join(reasons)
        if reasons and outcome == PASSED:
            reason = f"{sum(row.outcome == SKIPPED for row in group)} of {len(group)} skipped: {reason}"
        merged.append(Outcome(name, outcome, reason, f"{sum(float(row.seconds or 0) for row in group):.1f}"))
    return merged


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments, __doc__, 540.0)
    started = time.perf_counter()
    reporter, chosen, rows = Reporter(started + given.limit_seconds), [], []
    for path in files():
        module = NEEDS.get(path.relative_to(TESTS).parts[0])
        if module is None or find_spec(module) is not None:
            chosen.append(str(path))
        else:
            rows.append(Outcome(str(path.relative_to(TESTS.parent)), SKIPPED, f"{module} is not installed"))
    pytest.main(["-q", "-p", "no:cacheprovider", "-m", "fault", "--tb=short", *chosen], plugins=[reporter])
    return finish("faults", by_fault([*reporter.rows.values(), *rows]), given.out, started)
