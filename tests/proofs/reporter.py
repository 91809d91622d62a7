"""A plugin of pytest that makes rows of a table."""

import time

import pytest

from tests.proofs.outcomes import FAILED, PASSED, SKIPPED, TIME_IS_UP, Outcome


def reason_of(report: pytest.TestReport) -> str:
    """Return why a test was skipped or has failed; nothing where it has passed."""
    if report.skipped:
        return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "xfail"
    if report.passed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    return f"{report.nodeid}: {lines[0] if crash else lines[-1]}"


class Reporter:
    """Rows of the tests that pytest runs; those left when time is up are skipped."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.rows: dict[str, Outcome] = {}
        self._names: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            marker = item.get_closest_marker("fault")
            self._names[item.nodeid] = item.name if marker is None else marker.args[0]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.perf_counter() > self.end:
            pytest.skip(TIME_IS_UP)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        before = self.rows.get(report.nodeid)
        if before is not None and before.outcome == FAILED:
            return
        reason = reason_of(report)
        outcome = PASSED if report.passed else SKIPPED if report.skipped else FAILED
        name = self._names.get(report.nodeid, report.nodeid)
        self.rows[report.nodeid] = Outcome(name, outcome, reason, f"{report.duration:.1f}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            self.rows[report.nodeid] = Outcome(report.nodeid, FAILED, lines[-1])
