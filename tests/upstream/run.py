"""Run PyG's own tests twice, as they are and with the drop-ins in place of its convs, and compare.

    python tests/upstream/run.py PYG_CHECKOUT/test [--files FILE ...] [--device cuda] [--reference]

Prints how many calls of each drop-in were fused. Exits with 1 if a test that passes with PyG's classes does not pass
with ours, or if a drop-in had no fused call where it could: with --reference or --device cuda.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = (
    "nn/conv/test_gat_conv.py",
    "nn/conv/test_gatv2_conv.py",
    "nn/conv/test_transformer_conv.py",
    "nn/conv/test_agnn_conv.py",
    "nn/conv/test_hetero_conv.py",
    "nn/conv/test_message_passing.py",
    "nn/conv/test_static_graph.py",
    "nn/models/test_basic_gnn.py",
    "nn/test_to_hetero_transformer.py",
    "nn/test_to_hetero_with_bases_transformer.py",
    "explain",
)
CONVS = ("GATConv", "GATv2Conv", "TransformerConv", "AGNNConv")


class Outcomes:
    """Pytest plugin that keeps the outcome of every test."""

    def __init__(self) -> None:
        self.outcome: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcome[report.nodeid] = report.outcome


def swap_classes() -> None:
    """Put the drop-ins wherever a module of PyG refers to one of its convs by name."""
    from torch_geometric.nn import MessagePassing

    from pyg_dfgnn.nn import DROP_INS

    convs = {upstream: drop_in for upstream, drop_in in DROP_INS.items() if issubclass(upstream, MessagePassing)}

    # By the key: some packages put objects without a name into sys.modules.
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("torch_geometric"):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in convs and value.__module__ != module_name:
                setattr(module, name, convs[value])


def count_calls(reference: bool) -> dict[str, list[int]]:
    """Count the fused and all calls of each drop-in; with `reference`, the gate lets CPU tensors pass."""
    import torch

    from pyg_dfgnn.nn import gate
    from pyg_dfgnn.nn.conv.attention import AttentionConv

    if reference:
        gate.fused_device_types = {"cpu", "cuda"}
        AttentionConv._reasons_against = staticmethod(lambda problem: ())
    ask, calls = gate.FusedConv._gate, {}

    def counting(self, *args, **kwargs):
        call = ask(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            count = calls.setdefault(type(self).__name__, [0, 0])
            count[0] += not call.reasons
            count[1] += 1
        return call

    gate.FusedConv._gate = counting
    return calls


def worker(options: argparse.Namespace) -> None:
    """Run pytest in this process and write the outcomes."""
    import pytest
    import torch

    calls = {}
    if options.worker == "ours":
        swap_classes()
        calls = count_calls(options.reference)
    if options.device:
        torch.set_default_device(options.device)
    outcomes = Outcomes()
    files = [path for path in options.files if Path(path).exists()]
    pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore", *files], plugins=[outcomes])
    Path(options.result).write_text(json.dumps({"outcome": outcomes.outcome, "calls": calls}))


def run(which: str, options: argparse.Namespace, folder: Path) -> dict:
    """Run the tests in a process of their own: PyG generates code into its classes, which would leak otherwise."""
    result, log = folder / f"{which}.json", folder / f"{which}.log"
    command = [sys.executable, __file__, str(options.tests), "--worker", which, "--result", str(result)]
    command += ["--files", *options.files]
    command += ["--device", options.device] if options.device else []
    command += ["--reference"] if options.reference else []
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as stream:
        subprocess.run(
            command, cwd=options.tests, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False
        )
    if not result.exists():
        raise SystemExit(f"the run with {which} did not finish:\n{log.read_text()[-4000:]}")
    return {**json.loads(result.read_text()), "log": log.read_text()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="the test folder of a PyG checkout")
    parser.add_argument(
        "--files", nargs="+", default=list(FILES), help="files below it; those that do not exist are skipped"
    )
    parser.add_argument("--device", help="torch's default device in the tests")
    parser.add_argument("--reference", action="store_true", help="run fused branch on the CPU, on the reference ops")
    parser.add_argument("--worker", choices=["pyg", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        expected, actual = run("pyg", options, Path(folder)), run("ours", options, Path(folder))
    passed = [test for test, outcome in expected["outcome"].items() if outcome == "passed"]
    broken = [test for test in passed if actual["outcome"].get(test) != "passed"]
    tests = len(expected["outcome"])
    print(f"{len(passed)} of {tests} tests pass with PyG's classes, {len(broken)} of them fail with ours")
    idle = []
    for name in CONVS:
        fused, calls = actual["calls"].get(name, (0, 0))
        print(f"{name}: {fused} of {calls} calls were fused")
        idle += [] if fused else [name]
    if broken:
        print("\n".join(broken), actual["log"], sep="\n")
    if idle and (options.reference or options.device):
        print(f"no call of {', '.join(idle)} was fused, so these results say nothing of the fused forward")
        return 1
    return 1 if broken or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
