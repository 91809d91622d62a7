"""Proofs by one command each; they run on a CPU as far as they can, and on a GPU.

python -m tests.proofs faults        what happens without memory, disk or driver, and to processes that end
python -m tests.proofs sanitizer     NVIDIA's compute-sanitizer over calls of each family of kernels
python -m tests.proofs determinism   which results are equal bit by bit, per layer and dtype
python -m tests.proofs soak          minutes of new graphs: memory, handles, threads and throughput stay flat

Each prints a table, writes it to results/proofs/ and exits with 1 after a failure, with 2 where time ran out.
"""

import sys
from importlib import import_module

PROOFS = ("faults", "sanitizer", "determinism", "soak")


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if not arguments or arguments[0] not in PROOFS:
        given = f" (got {arguments[0]!r})" if arguments else ""
        print(f"{__doc__}\nthe proof needs one of {', '.join(PROOFS)}{given}", file=sys.stderr)
        return 2
    return import_module(f"tests.proofs.{arguments[0]}").main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
