"""Measures what ``results/`` lacks for the present sources on the GPU at hand, one command after the other.

python -m benchmarks.measure              all of it
python -m benchmarks.measure --list       the commands
python -m benchmarks.measure fig9 check   some of it

Every command asks its own CSV which rows are there with the present digest, so the same line goes on where it was
stopped. Rows of baselines stay. Exit code: 0 all is done; 1 a command failed or its results are wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import CONFIGS

TABLE_2_MODELS = ("transformer_stack", "gat_stack", "agnn_stack")
CONV_STACKS = tuple(f"{name}_stack" for name in ("gcn", "sage", "sage_max", "gin", "resgated", "pna"))
BACKENDS = "backends=[pyg,pyg_compile,auto,auto_graph]"
ON_BENCH_GRAPHS = (
    "datasets=[pattern,mnist_superpixels_like,cora,proteins_like,reddit_like,products_like]",
    BACKENDS,
    # The large graphs are made first.
    "limit_s=500",
)
WITH_EDGE_FEATURES = "datasets=[mnist_superpixels_like,cifar10_superpixels_like,pascalvoc_sp_like,coco_sp_like]"
STOPPED_EARLY = 2
"""Exit code of a command that ran out of time and goes on when it is called again."""


def commands() -> dict[str, list[str]]:
    """Name -> words after ``python``, what the host limits first."""
    named = {}
    for model in TABLE_2_MODELS:
        named[f"table2-{model}"] = ["-m", "benchmarks.table2", f"model={model}"]
    for model in CONV_STACKS:
        named[f"table2-{model}"] = ["-m", "benchmarks.table2", f"model={model}", *ON_BENCH_GRAPHS]
    named["table2-gine_stack"] = ["-m", "benchmarks.table2", "model=gine_stack", WITH_EDGE_FEATURES, BACKENDS]
    for path in sorted((CONFIGS / "experiment").glob("*.yaml")):
        named[path.stem] = ["-m", "benchmarks", f"experiment={path.stem}"]
    named["check"] = ["-m", "benchmarks.check", "--schedules", "row_split", "smem", "block_mma"]
    named["documents"] = ["-m", "benchmarks.published"]
    return named


def main(arguments: Sequence[str] | None = None) -> int:
    named = commands()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *named], metavar="NAME", help=", ".join(named))
    parser.add_argument("--list", action="store_true", help="only name the commands")
    options = parser.parse_args(arguments)
    failed = []
    for name in options.names or named:
        words = [sys.executable, *named[name]]
        print(f"{name}: {' '.join(words[1:])}", flush=True)
        code = STOPPED_EARLY
        while code == STOPPED_EARLY and not options.list:
            code = subprocess.run(words).returncode
        if code and not options.list:
            failed.append(f"{name} (exit code {code})")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
