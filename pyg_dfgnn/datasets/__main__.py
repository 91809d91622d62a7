"""Published sizes beside what is loaded: `python -m pyg_dfgnn.datasets describe [data configs] [task.key=value]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate

from pyg_dfgnn.datasets.published import DATA, TABLE_1, Entry, Size, deviations, size_of
from pyg_dfgnn.datasets.task import Task
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.paths import configs_dir

_COUNTS = ("graphs", "nodes", "edges", "mean_degree", "max_degree", "features", "classes")
HEADER = ("data", "stands for", *(what.replace("_", " ") for what in _COUNTS), "off by (allowed)", "made up")


def load(name: str, overrides: Sequence[str] = ()) -> Task:
    """The task of a `data=` config, with overrides such as `task.scale=0.1`.

    Raises:
        ValueError: There is no such config.
    """
    check_choice("data", name, sorted(path.stem for path in (configs_dir() / "data").glob("*.yaml")))
    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        cfg = compose("train", [f"data={name}", *(f"data.{override}" for override in overrides)])
    return instantiate(cfg.data.task, _partial_=True)()


def describe(names: Sequence[str] = (), overrides: Sequence[str] = ()) -> str:
    """A table of the data sets of Table 1, or of those named; counts as "published / loaded".

    Large ones are loaded only when they are named. What is not here says so in the last column.
    """
    rows: list[tuple[str, ...]] = [HEADER]
    for name in names or TABLE_1:
        entry, loaded = DATA.get(name), None
        if names or not TABLE_1[name].large:
            try:
                task = load(name, overrides)
                loaded, remark = size_of(task), task.synthetic or "nothing"
            except (FileNotFoundError, ModuleNotFoundError) as error:
                remark = "not loaded: " + str(error).split(". ")[0]
        else:
            remark = f"not loaded: large, name it: describe {name}"
        rows.append(_row(name, entry, loaded, remark))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _row(name: str, entry: Entry | None, loaded: Size | None, remark: str) -> tuple[str, ...]:
    sides = entry.size if entry else None, loaded
    cells = [" / ".join("-" if side is None else _count(side, what) for side in sides) for what in _COUNTS]
    off = []
    if entry and loaded:
        for what, (deviation, allowed) in deviations(loaded, entry).items():
            verdict = "" if abs(deviation) <= allowed else "OFF "
            off.append(f"{verdict}{what.replace('_', ' ')} {100 * deviation:+.1f} % ({100 * allowed:g} %)")
    return name, entry.name if entry else "-", *cells, ", ".join(off) or "-", remark


def _count(size: Size, what: str) -> str:
    value = getattr(size, what)
    if value is None:
        return "-"
    return f"{value:,.1f}" if what == "mean_degree" or value != int(value) else f"{int(value):,}"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(prog="python -m pyg_dfgnn.datasets", description=__doc__)
    parser.add_argument("command", choices=["describe"])
    parser.add_argument("arguments", nargs="*", help="data configs, and task.key=value for all of them")
    arguments = parser.parse_args().arguments
    names = [argument for argument in arguments if "=" not in argument]
    try:
        print(describe(names, [argument for argument in arguments if "=" in argument]))
    except (ValueError, HydraException) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
