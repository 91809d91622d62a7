"""The soak: a short one passes, and leaks of each kind are found."""

import csv
import os

import pytest
import torch

from tests.emu import require_compiler
from tests.proofs import soak
from tests.proofs.outcomes import FAILED, PASSED
from tests.proofs.soak import BOUNDS, Batches, judge, trend


def samples(**slopes):
    """An hour of samples in which quantities change by so much per second."""
    level = {"allocated_mb": 500.0, "reserved_mb": 900.0, "used_mb": 2000.0, "rss_mb": 3000.0, "handles": 80.0}
    level |= {"threads": 40.0, "steps_per_s": 50.0}
    times = [10.0 * number for number in range(1, 361)]
    fixed = {"steps": 1.0, "width": 16.0}
    return [fixed | {"seconds": t, **{k: v + slopes.get(k, 0.0) * t for k, v in level.items()}} for t in times]


def outcomes(found):
    return {row.name.partition(" ")[0]: row.outcome for row in found}


def test_flat_samples_pass_whatever_a_few_of_them_are():
    flat = samples()
    for number in (200, 250, 359):
        flat[number]["rss_mb"] += 500.0
    assert outcomes(judge(flat)) == dict.fromkeys(BOUNDS, PASSED)


@pytest.mark.parametrize("name", BOUNDS)
def test_each_quantity_has_a_bound(name):
    least, part = BOUNDS[name]
    bound = max(least, part * samples()[0][name])
    slope = bound / 1790.0 * (-1 if name == "steps_per_s" else 1)
    found = outcomes(judge(samples(**{name: 1.2 * slope})))
    assert [each for each, outcome in found.items() if outcome == FAILED] == [name]
    # The other way is no failure.
    assert FAILED not in outcomes(judge(samples(**{name: -1.2 * slope}))).values()
    assert FAILED not in outcomes(judge(samples(**{name: 0.5 * slope}))).values()


def test_trend_is_that_of_most_samples():
    times = [float(number) for number in range(20)]
    assert trend(times, [3.0 * t for t in times[:-1]] + [1e9], [16] * 20) == pytest.approx(57.0)


def test_widths_are_judged_one_by_one():
    kept = samples()[:24]
    for number, each in enumerate(kept):
        # The last half begins with the fast width and ends with the slow one.
        is_wide = number // 3 % 2 == 1
        each.update(width=32.0 if is_wide else 16.0, steps_per_s=25.0 if is_wide else 35.0)
    assert outcomes(judge(kept)) == dict.fromkeys(BOUNDS, PASSED)
    for each in kept:
        each["steps_per_s"] -= 0.1 * each["seconds"]
    assert outcomes(judge(kept))["steps_per_s"] == FAILED


WORDS = ["--every", "0.05", "--churn", "2"]


@pytest.fixture
def on_cpu():
    """A machine on which a short soak is emulated."""
    require_compiler()
    if torch.cuda.is_available():
        pytest.skip("runs for minutes by its command on a GPU")


def test_seconds_in_which_all_is_compiled_anew(on_cpu, tmp_path, capsys, monkeypatch):
    renewed, renew = [], Batches.renew
    monkeypatch.setattr(Batches, "renew", lambda self: renewed.append(None) or renew(self))
    assert soak.main(["--out", str(tmp_path), "--limit-seconds", "5", *WORDS]) == 0
    # Before the steps, for each width, and then by the churn.
    assert len(renewed) > 1 + len(soak.WIDTHS)
    (path,) = tmp_path.glob("soak-samples-*.csv")
    with path.open() as stream:
        rows = [*csv.DictReader(stream)]
    assert len(rows) >= 12 and float(rows[-1]["steps"]) > float(rows[0]["steps"]) > 0 and float(rows[0]["rss_mb"]) > 50
    shown = capsys.readouterr().out
    assert all(f"| {name} is flat | passed |" in shown for name in ("rss_mb", "handles", "threads"))


class Leaking(Batches):
    """Opens a file in each step."""

    opened = []

    def __call__(self):
        self.opened.append(os.open(os.devnull, os.O_RDONLY))
        super().__call__()


def test_files_that_stay_open_are_found(on_cpu, tmp_path, capsys):
    status = soak.main(["--out", str(tmp_path), "--limit-seconds", "2", *WORDS], Leaking)
    for number in Leaking.opened:
        os.close(number)
    assert status == 1
    assert "| handles is flat | failed |" in capsys.readouterr().out
