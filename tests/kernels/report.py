"""Prints registers, shared memory, stack and spills of each entry: python -m tests.kernels.report --path forward."""

import argparse

from tests import covering
from tests.kernels.nvrtc import archs_of, compile_cubin
from tests.kernels.specs import all_specs, label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", nargs="+", help="those that a module is for, unless named")
    parser.add_argument("--path", default="", help="only sources whose path contains this")
    parser.add_argument("--name", default="", help="only modules whose name contains this, e.g. gatv2-H8")
    options = parser.parse_args()
    covering.grid = "full"
    print(f"{'arch':6} {'entry':36} {'registers':>9} {'shared':>7} {'stack':>6} {'spills':>6}  module")
    for spec in dict.fromkeys(all_specs()):
        if options.path not in spec.path or options.name not in label(spec):
            continue
        for arch in options.arch or archs_of(spec):
            compiled = compile_cubin(spec.source, arch)
            for u in compiled.usage:
                numbers = f"{u.registers:9} {u.shared_bytes:7} {u.stack_bytes:6} {u.spill_bytes:6}"
                print(f"{arch:6} {u.entry:36} {numbers}  {label(spec)}")
            for warning in compiled.warnings:
                print(f"{arch:6} {warning}  {label(spec)}")


if __name__ == "__main__":
    main()
