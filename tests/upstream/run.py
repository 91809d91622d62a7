"""Run PyG's own tests twice, as they are and with the drop-ins in place of what they stand for, and compare.

    python tests/upstream/run.py FOLDER [--files FILE ...] [--device cuda] [--reference] [--accelerate]

FOLDER is the test folder of a PyG checkout, or a part of it. The classes of `DROP_INS` take the places of PyG's, and
so do the functions that `pyg_dfgnn.utils` and `pyg_dfgnn.nn.pool` have under a name of PyG's. The script prints how
many calls of each were fused. It exits with 1 if a test that passes with PyG's does not pass with ours, or, with
--reference or on a GPU, if something was never fused.

Tests call a layer once or twice on edges of their own, which are PyG's by default: the runs measure all edges at once.

With --accelerate PyG's classes stay, and each module that a test constructs goes through `pyg_dfgnn.accelerate` when it
is first called. The script prints how many graphs of each class that is compiled have programs, and why
others did not; with --reference the interpreter runs them.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

# Not nn/aggr/test_fused.py: FusedAggregation takes PyG's own classes only.
FILES = (
    "nn/conv/test_gat_conv.py",
    "nn/conv/test_gatv2_conv.py",
    "nn/conv/test_transformer_conv.py",
    "nn/conv/test_agnn_conv.py",
    "nn/conv/test_supergat_conv.py",
    "nn/conv/test_gcn_conv.py",
    "nn/conv/test_graph_conv.py",
    "nn/conv/test_sage_conv.py",
    "nn/conv/test_gin_conv.py",
    "nn/conv/test_res_gated_graph_conv.py",
    "nn/conv/test_gcn2_conv.py",
    "nn/conv/test_sg_conv.py",
    "nn/conv/test_ssg_conv.py",
    "nn/conv/test_tag_conv.py",
    "nn/conv/test_appnp.py",
    "nn/conv/test_cheb_conv.py",
    "nn/conv/test_lg_conv.py",
    "nn/conv/test_arma_conv.py",
    "nn/conv/test_cluster_gcn_conv.py",
    "nn/conv/test_pna_conv.py",
    "nn/conv/test_rgcn_conv.py",
    "nn/conv/test_rgat_conv.py",
    "nn/conv/test_hgt_conv.py",
    "nn/conv/test_heat_conv.py",
    "nn/conv/test_han_conv.py",
    "nn/conv/test_film_conv.py",
    "nn/conv/test_hetero_conv.py",
    "nn/conv/test_message_passing.py",
    "nn/conv/test_static_graph.py",
    "nn/aggr/test_basic.py",
    "nn/aggr/test_multi.py",
    "nn/aggr/test_quantile.py",
    "nn/aggr/test_scaler.py",
    "nn/dense/test_linear.py",
    "nn/pool/test_glob.py",
    "nn/models/test_basic_gnn.py",
    "nn/test_to_hetero_transformer.py",
    "nn/test_to_hetero_with_bases_transformer.py",
    "utils/test_softmax.py",
    "utils/test_scatter.py",
    "utils/test_segment.py",
    "explain",
)
ACCELERATED = ("nn/conv", "nn/models", "explain")
"""Files whose modules are accelerated where none are named."""
ROOMS = {"torch_geometric.utils": "pyg_dfgnn.utils", "torch_geometric.nn.pool": "pyg_dfgnn.nn.pool"}
"""Packages of PyG's and ours whose functions have the same names."""
DELEGATED = ("MedianAggregation", "QuantileAggregation")
"""Drop-ins that always run PyG's code, and say so."""


class Outcomes:
    """Pytest plugin that keeps the outcome of every test, and starts each from the same random numbers.

    Tests that were run before are left out. A test that provokes an assertion on the GPU fails, and ends the run: no
    later test of this process could use the GPU.
    """

    def __init__(self, before: Iterable[str]) -> None:
        self.outcome: dict[str, str] = {}
        self.is_lost = False
        self._before = set(before)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._before]

    def pytest_runtest_setup(self) -> None:
        torch.manual_seed(0)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcome[report.nodeid] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        import pytest

        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError:
            self.is_lost, self.outcome[nodeid] = True, "failed"
            pytest.exit(f"{nodeid} left the GPU with a failed assertion")


class Calls:
    """Counts the calls of each drop-in, and those that PyG's own code did not take."""

    def __init__(self) -> None:
        self.count: dict[str, list[int]] = {}
        self._running: list[list[Any]] = []

    def counted(self, name: str, ours: Callable[..., Any], upstream: Callable[..., Any] | None = None) -> Any:
        """Return a function that counts the calls of `ours`; calls of a function within itself go to `upstream`."""
        count = self.count.setdefault(name, [0, 0])

        @wraps(ours)
        def call(*args, **kwargs):
            if torch.compiler.is_compiling():
                return ours(*args, **kwargs)
            if upstream is not None and any(running is ours for running, _ in self._running):
                return upstream(*args, **kwargs)
            self._running.append([ours, True])
            try:
                result = ours(*args, **kwargs)
            finally:
                _, fused = self._running.pop()
            count[0] += fused
            count[1] += 1
            return result

        return call

    def reporting(self, report: Callable[..., None]) -> Callable[..., None]:
        """Return a function that notes that the innermost call falls back, and reports it."""

        def fall_back(*args, **kwargs):
            if self._running:
                self._running[-1][1] = False
            report(*args, **kwargs)

        return fall_back


def put(places: dict[Any, Any], modules: Iterable[str]) -> None:
    """Put other objects wherever one of the modules, but the one that defines it, refers to an object of `places`."""
    # By the key: some packages put objects without a name into sys.modules.
    for module_name in modules:
        for name, value in list(vars(sys.modules[module_name]).items()):
            if callable(value) and value.__hash__ and value in places and value.__module__ != module_name:
                setattr(sys.modules[module_name], name, places[value])


def modules_of(package: str) -> list[str]:
    """Return the names of the imported modules of a package."""
    return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]


def functions() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, PyG's function and ours for each function that has a drop-in."""
    for pygs, ours in ROOMS.items():
        try:
            room = import_module(ours)
        except ModuleNotFoundError as error:
            if error.name != ours:
                raise
            continue
        upstream = import_module(pygs)
        for name in getattr(room, "__all__", ()):
            if callable(getattr(upstream, name, None)) and not isinstance(getattr(room, name), type):
                yield name, getattr(upstream, name), getattr(room, name)


def swap(reference: bool) -> dict[str, list[int]]:
    """Put our classes and functions in the places of PyG's; with `reference`, CPU tensors take the fused branch.

    Returns:
        By name, the numbers of fused and of all calls, which go on being counted.
    """
    from pyg_dfgnn import fallback
    from pyg_dfgnn.nn import DROP_INS, segment

    calls, classes = Calls(), {}
    # PyG's own modules keep PyG's functions, as they would with a user's imports, and TorchScript compiles them.
    put({pygs: calls.counted(name, ours, pygs) for name, pygs, ours in functions()}, ["torch_geometric.nn", *ROOMS])
    for upstream, drop_in in DROP_INS.items():
        classes[upstream] = drop_in
        drop_in.forward = calls.counted(drop_in.__name__, drop_in.forward)
        for base in drop_in.__mro__:
            if reference and "_reasons_against" in vars(base):
                base._reasons_against = staticmethod(reference_reasons)
    put(classes, modules_of("torch_geometric"))
    # Only in front of the ops: these still take a CPU for a device without kernels, and so their references.
    for name in [*modules_of("pyg_dfgnn.nn"), *modules_of("pyg_dfgnn.utils")] if reference else []:
        if hasattr(sys.modules[name], "fused_device_types"):
            sys.modules[name].fused_device_types = {"cpu", "cuda"}
    if reference:
        segment.FAMILY = replace(segment.FAMILY, unsupported=lambda problem: [])
    report = fallback.report_fallback
    fallback.report_fallback = calls.reporting(report)
    put({report: fallback.report_fallback}, modules_of("pyg_dfgnn"))
    return calls.count


def reference_reasons(problem: Any) -> tuple[str, ...]:
    """What stands in the way of the reference path: references are no operators that `torch.compile` could take."""
    return ("torch.compile traces the call, as it does on any CPU",) if torch.compiler.is_compiling() else ()


def accelerate_modules() -> dict[str, list[Any]]:
    """Accelerate every module at its first call.

    Returns:
        By class that is compiled, the numbers of graphs with programs and of all, and how often each reason stood in
        the way, which go on being counted.
    """
    import pyg_dfgnn
    from pyg_dfgnn import frontend

    calls: dict[str, list[Any]] = {}
    known: dict[int, weakref.ref[torch.nn.Module]] = {}
    call = torch.nn.Module.__call__

    def watch(graph: Any) -> None:
        count = calls.setdefault(graph.name, [0, 0, Counter()])
        count[0] += bool(graph.regions)
        count[1] += 1
        count[2].update(graph.reasons)

    def accelerated(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_known = id(self) in known and known[id(self)]() is self
        # A trace that TorchScript makes is compared with another, in which classes must be the same.
        transformed = (
            torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(self, torch.jit.ScriptModule)
        )
        if not is_known and not transformed:
            known.update((id(module), weakref.ref(module)) for module in self.modules())
            with pyg_dfgnn.local_settings(fallback="silent"):
                pyg_dfgnn.accelerate(self)
        return call(self, *args, **kwargs)

    frontend.watchers.append(watch)
    torch.nn.Module.__call__ = accelerated
    return calls


def let_parameters_follow(device: str) -> None:
    """Put every parameter of a module on the device: layers of PyG's call `torch.Tensor(size)`, which is on the CPU."""
    register = torch.nn.Module.register_parameter

    def on_device(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        is_elsewhere = param is not None and param.device.type != torch.device(device).type
        if is_elsewhere and not torch.nn.parameter.is_lazy(param):
            torch.utils.swap_tensors(param, torch.nn.Parameter(param.detach().to(device), param.requires_grad))
        register(self, name, param)

    torch.nn.Module.register_parameter = on_device  # type: ignore[method-assign]


def worker(options: argparse.Namespace) -> None:
    """Run pytest in this process and write the outcomes."""
    import pytest
    import torch_geometric.nn  # noqa: F401

    import pyg_dfgnn

    pyg_dfgnn.settings(check_ids="now")
    calls: dict[str, list[Any]] = {}
    running = contextlib.nullcontext()
    if options.worker == "ours" and options.accelerate:
        from pyg_dfgnn.nn import messages

        calls = accelerate_modules()
        running = messages.interpreted() if options.reference else running
    elif options.worker == "ours":
        calls = swap(options.reference)
    if options.device:
        torch.set_default_device(options.device)
        let_parameters_follow(options.device)
    result = Path(options.result)
    outcomes = Outcomes(json.loads(result.read_text())["outcome"] if result.exists() else ())
    settings = ["-c", os.devnull, "--rootdir", ".", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore"]
    # A file that needs what is not installed fails alone.
    settings.append("--continue-on-collection-errors")
    with running:
        pytest.main([*settings, *options.files], plugins=[outcomes])
    found = {"outcome": outcomes.outcome, "calls": calls, "is_lost": outcomes.is_lost}
    if result.exists():
        found = joined(json.loads(result.read_text()), found)
    result.write_text(json.dumps(found))
    if outcomes.is_lost:
        # Tensors cannot be freed any more.
        sys.stdout.flush()
        os._exit(0)


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The results of two processes that ran different tests."""
    calls = before["calls"] | now["calls"]
    for name in before["calls"].keys() & now["calls"].keys():
        pairs = zip(before["calls"][name], now["calls"][name], strict=True)
        calls[name] = [Counter(a) + Counter(b) if isinstance(a, dict) else a + b for a, b in pairs]
    return {"outcome": before["outcome"] | now["outcome"], "calls": calls, "is_lost": now["is_lost"]}


def run(which: str, options: argparse.Namespace, folder: Path) -> dict:
    """Run the tests in processes of their own: PyG generates code into its classes, which would leak otherwise.

    A test that loses the GPU ends its process; the next process goes on after it.
    """
    result, log = folder / f"{which}.json", folder / f"{which}.log"
    command = [sys.executable, __file__, str(options.tests), "--worker", which, "--result", str(result)]
    command += ["--files", *options.files]
    command += ["--device", options.device] if options.device else []
    command += [f"--{flag}" for flag in ("reference", "accelerate") if getattr(options, flag)]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    is_lost = True
    with log.open("w") as stream:
        while is_lost:
            ended = subprocess.run(
                command, cwd=options.tests, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False
            )
            if ended.returncode or not result.exists():
                text = log.read_text()
                # A process that dies writes where it stood.
                fatal = text.find("Fatal Python error")
                text = text[-4000:] if fatal < 0 else text[max(fatal - 1000, 0) : fatal + 4000]
                raise SystemExit(f"the run with {which} did not finish:\n{text}")
            is_lost = json.loads(result.read_text())["is_lost"]
    return {**json.loads(result.read_text()), "log": log.read_text()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="the test folder of a PyG checkout")
    parser.add_argument("--files", nargs="+", help="files below it instead of all that concern a drop-in")
    parser.add_argument("--device", help="torch's default device in the tests; cuda where there is a GPU")
    parser.add_argument("--reference", action="store_true", help="run the fused branch on a CPU, on the reference ops")
    parser.add_argument("--accelerate", action="store_true", help="accelerate each module in place of swapping classes")
    parser.add_argument("--worker", choices=["pyg", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options)
        return 0
    if options.device is None and not options.reference and torch.cuda.is_available():
        options.device = "cuda"
    options.tests = options.tests.resolve()
    asked = options.files or (ACCELERATED if options.accelerate else FILES)
    options.files = [path for path in asked if (options.tests / path).exists()]
    if missing := [path for path in asked if path not in options.files]:
        print(f"{options.tests} lacks {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        expected, actual = run("pyg", options, Path(folder)), run("ours", options, Path(folder))
    passed = [test for test, outcome in expected["outcome"].items() if outcome == "passed"]
    broken = [test for test in passed if actual["outcome"].get(test) != "passed"]
    tests = len(expected["outcome"])
    print(f"{len(passed)} of {tests} tests pass with PyG's classes, {len(broken)} of them fail with ours")
    if broken:
        print("\n".join(broken), actual["log"], sep="\n")
    never = (report_compiled if options.accelerate else partial(report_fused, asked))(actual["calls"])
    if never and (options.reference or options.device):
        print(f"no call of {', '.join(never)} was fused, so these results say nothing of the fused forward")
        return 1
    return 1 if broken or not passed else 0


def report_compiled(calls: dict[str, list[Any]]) -> list[str]:
    """Print the graphs of each class that is compiled; return that there was none with a program, if so."""
    for name, (compiled, total, reasons) in sorted(calls.items()):
        why = "; ".join(f"{count} times: {reason}" for reason, count in Counter(reasons).most_common(3))
        print(f"{name}: {compiled} of {total} graphs have programs{f' ({why})' if why else ''}")
    return [] if any(compiled for compiled, *_ in calls.values()) else ["any compiled class"]


def report_fused(asked: Iterable[str], calls: dict[str, list[int]]) -> list[str]:
    """Print the fused calls of each drop-in; return those that were never fused."""
    idle = []
    for name, (fused, total) in sorted(calls.items()):
        print(f"{name}: {fused} of {total} calls were fused")
        # Some files need not call everything.
        if not fused and (total or asked is FILES) and name not in DELEGATED:
            idle.append(name)
    return idle


if __name__ == "__main__":
    sys.exit(main())
