"""The table of a proof: what was tried, what came of it, and why it was skipped or failed."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from benchmarks.results import Table, file_stem, markdown, source_digest

FOLDER = Path("results/proofs")
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
OUTCOMES = (PASSED, SKIPPED, FAILED)
TIME_IS_UP = "the time limit was reached"


@dataclass(frozen=True)
class Outcome:
    """One row of the table; `outcome` is one of `OUTCOMES`."""

    name: str
    outcome: str
    reason: str = ""
    seconds: str = ""


def device_of() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def path_of(proof: str, folder: Path) -> Path:
    """The CSV file of a proof on this machine."""
    return folder / f"{proof}-{file_stem(device_of())}.csv"


def options(arguments: list[str] | None, doc: str, seconds: float, *more: tuple[str, dict]) -> argparse.Namespace:
    """Read the options that all proofs have, and more of one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-seconds", type=float, default=seconds, help=f"stop then; {seconds:g} by default")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder of the CSV file; {FOLDER} by default")
    for name, keywords in more:
        parser.add_argument(name, **keywords)
    return parser.parse_args(arguments)


def finish(proof: str, rows: Sequence[Outcome], folder: Path, started: float, hidden: Sequence[str] = ()) -> int:
    """Write the table, and print it without the hidden columns.

    Returns:
        The exit status: 1 with a failure, 2 where time ran out before all was tried, 0 otherwise.
    """
    path = path_of(proof, folder)
    rows = [replace(row, reason=" ".join(row.reason.replace("|", "/").split())[:400]) for row in rows]
    names = [field.name for field in fields(rows[0] if rows else Outcome)]
    path.unlink(missing_ok=True)
    Table(path, [*names, "digest"]).append([{**asdict(row), "digest": source_digest()} for row in rows])
    shown = [name for name in names if name not in hidden]
    print(markdown(shown, ([getattr(row, name) for name in shown] for row in rows)))
    counts = Counter(row.outcome for row in rows)
    total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    print(f"\n{proof}: {total}, {time.perf_counter() - started:.0f} s, in {path}")
    if counts[FAILED] or not rows:
        return 1
    if any(TIME_IS_UP in row.reason for row in rows):
        print(f"{TIME_IS_UP}: not all was tried", file=sys.stderr)
        return 2
    return 0
