"""Compare results of each drop-in bit by bit: run to run, call to call, in another batch, in threads, on other GPUs.

With `deterministic=True` and torch's deterministic algorithms, runs and threads that differ are a failure where kernels
take the call, and with `check_ids="now"` also calls on the same edges. All else is measured and not promised. On a CPU
the emulator runs the kernels, and the second run takes threads and blocks in random order.
"""

import hashlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

import pyg_dfgnn
from benchmarks.results import Table, device_name
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.nn import DROP_INS
from pyg_dfgnn.nn.registry import copied
from pyg_dfgnn.reference.zoo import EdgeList, sbm
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import EDGE_MLP, FEATURES, REFUSED, TRACED, WIDTH, Case, Inputs
from tests.proofs.outcomes import FAILED, PASSED, SKIPPED, TIME_IS_UP, Outcome, device_of, finish, options, path_of

EQUAL = "bit-equal"
CALLS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"deterministic": None, "check_ids": "later"},
    "deterministic": {"deterministic": True, "check_ids": "later"},
    "deterministic, ids now": {"deterministic": True, "check_ids": "now"},
}
PROMISED = {
    "default": (),
    "deterministic": ("run_to_run", "threads"),
    "deterministic, ids now": ("run_to_run", "threads", "call_to_call"),
}
"""Setting -> the columns that must be equal where kernels take the call."""

FAILS_IN_16_BITS = {
    **dict.fromkeys(("MedianAggregation", "QuantileAggregation"), "PyG's code counts rows in 16 bits, beyond the last"),
    "ClusterGCNConv": "PyG's code, which runs on few new edges, multiplies float32 by 16 bits",
}

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Row(Outcome):
    """What was found of an op in a dtype under a setting; `bits` is a digest of its results."""

    op: str = ""
    dtype: str = ""
    setting: str = ""
    run_to_run: str = ""
    call_to_call: str = ""
    batch: str = ""
    threads: str = ""
    device: str = ""
    bits: str = ""


# Layers ---------------------------------------------------------------------------------------------------------------


def _reduced(aggr: Any, inputs: Inputs) -> Any:
    x = inputs.draw("edge_x", inputs.graph.num_edges, FEATURES, positive=True)
    return aggr(x, inputs.edge_index[1], dim_size=inputs.graph.num_dst)


def _typed(layer: Any, inputs: Inputs) -> Any:
    x = inputs.x
    return layer(x, torch.arange(x.size(0), device=x.device) % 2)


def _aggregations() -> dict[str, Case]:
    own = {
        "MultiAggregation": partial(pyg.MultiAggregation, ["mean", "max", "std"]),
        "DegreeScalerAggregation": partial(
            pyg.DegreeScalerAggregation, ["mean", "max"], ["identity", "attenuation"], torch.tensor([1, 2, 3, 1])
        ),
        "QuantileAggregation": partial(pyg.QuantileAggregation, 0.3),
        "PowerMeanAggregation": partial(pyg.PowerMeanAggregation, 2.0),
    }
    names = [kind.__name__ for kind in DROP_INS if issubclass(kind, pyg.aggr.Aggregation)]
    return {name: Case(own.get(name, getattr(pyg, name)), _reduced) for name in names}


def cases() -> dict[str, Case]:
    """The drop-ins, and layers whose messages are compiled, by name."""
    known = {**TRACED, **EDGE_MLP, **REFUSED, **_aggregations()}
    # Without a norm over the batch.
    known["GENConv"] = Case(
        partial(pyg.GENConv, FEATURES, WIDTH, norm="layer", learn_t=True),
        lambda layer, inputs: layer(inputs.x, inputs.edge_index),
    )
    known["HeteroLinear"] = Case(partial(pyg.HeteroLinear, FEATURES, WIDTH, 2), _typed)
    known["HeteroDictLinear"] = Case(
        partial(pyg.HeteroDictLinear, FEATURES, WIDTH, ["a"]), lambda layer, inputs: layer({"a": inputs.x})["a"]
    )
    names = [kind.__name__ for kind in DROP_INS]
    return {name: known[name] for name in (*names, "GENConv", "CGConv", "PointTransformerConv")}


class PartInputs(Inputs):
    """Inputs of one graph of a batch: the rows that it has of the inputs of the whole batch.

    Args:
        whole: The batch.
        part: Its graph by number; None for all of them.
        edge_index: The edges of the whole batch on the device.
        dtype: Of the features.
    """

    def __init__(self, whole: EdgeList, part: int | None, edge_index: Tensor, dtype: torch.dtype) -> None:
        self.whole, self.nodes, self.edges = whole, slice(0, whole.num_src), slice(0, whole.num_edges)
        graph = whole
        if part is not None:
            first, end = whole.ptr[part : part + 2].tolist()
            of_part = ((whole.edge_index[1] >= first) & (whole.edge_index[1] < end)).nonzero().view(-1)
            self.nodes, self.edges = slice(first, end), slice(int(of_part[0]), int(of_part[-1]) + 1)
            graph = EdgeList("part", whole.edge_index[:, self.edges] - first, end - first, end - first)
            edge_index = edge_index[:, self.edges] - first
        super().__init__(graph, dtype, edge_index.device.type)
        self.edge_index = edge_index

    def draw(self, name: str, *shape: int, positive: bool = False) -> Tensor:
        is_edge = name.startswith("edge")
        rows = self.whole.num_edges if is_edge else self.whole.num_src
        drawn = torch.randn(rows, *shape[1:], dtype=torch.float64, generator=self._generator)
        drawn = (drawn.abs() + 0.1 if positive else drawn)[self.edges if is_edge else self.nodes]
        self.leaves[name] = drawn.to(self.device, self.dtype).requires_grad_()
        return self.leaves[name]

    @property
    def edge_type(self) -> Tensor:
        return torch.arange(self.whole.num_edges, device=self.device)[self.edges] % 2


def results_of(layer: torch.nn.Module, case: Case, inputs: PartInputs) -> Results:
    """Return outputs and gradients of a call; the gradient of an output is the same for a part and the whole."""
    torch.manual_seed(4)
    out = case.call(layer, inputs)
    outs = [each for each in (out if isinstance(out, (list, tuple)) else [out]) if each is not None]
    generator, grads = torch.Generator().manual_seed(6), []
    for each in outs:
        drawn = torch.randn(inputs.whole.num_dst, *each.shape[1:], dtype=torch.float64, generator=generator)
        grads.append(drawn[inputs.nodes].to(each.device, each.dtype))
    leaves = inputs.leaves | {f"parameter {name}": leaf for name, leaf in layer.named_parameters()}
    found = torch.autograd.grad(outs, list(leaves.values()), grads, allow_unused=True)
    named = {f"d {name}": grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
    return {**{f"out{k}": each.detach() for k, each in enumerate(outs)}, **named}


# Comparisons ----------------------------------------------------------------------------------------------------------


def compared(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Say whether results are equal bit by bit, else by how much of the largest output or gradient they differ."""
    parts = []
    for is_output in (True, False):
        names = [name for name in first if name.startswith("out") is is_output]
        pairs = [(first[name].cpu().contiguous(), other[name].cpu().contiguous()) for name in names]
        pairs = [(a, b) for a, b in pairs if a.numel()]
        if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            continue
        scale = max(float(b.double().abs().max()) for _, b in pairs)
        # A NaN is the largest.
        difference = torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max()
        parts.append(float(difference) / scale if scale else float(difference))
    return f"differs by {torch.tensor(parts).max():.0e}" if parts else EQUAL


def bits_of(results: Mapping[str, Tensor]) -> str:
    """Twelve hex digits over the bits of results."""
    digest = hashlib.sha256()
    for name in sorted(results):
        digest.update(name.encode() + results[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


@contextmanager
def _on(device: torch.device, setting: str, order: str = "forward") -> Iterator[None]:
    """Run kernels on a GPU or in the emulator, and what torch does beside them as the setting asks.

    The emulator always asks for torch's deterministic algorithms.
    """
    if device.type == "cpu":
        with emulated_device(order, seed=1):
            yield
        return
    torch.use_deterministic_algorithms(bool(SETTINGS[setting]["deterministic"]), warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def made(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    """A layer with parameters that are the same in every process."""
    torch.manual_seed(3)
    layer: torch.nn.Module = pyg_dfgnn.accelerate(case.make()).to(device_of(), dtype)
    return layer


def sequence(
    case: Case, layer: torch.nn.Module, whole: EdgeList, dtype: torch.dtype, part: int | None = None, calls: int = CALLS
) -> list[Results]:
    """Results of several calls of a copy of a layer on one edge_index that is new."""
    layer, edge_index = copied(layer), whole.edge_index.clone().to(device_of())
    return [results_of(layer, case, PartInputs(whole, part, edge_index, dtype)) for _ in range(calls)]


def in_threads(call: Callable[[], list[Results]]) -> list[list[Results]]:
    """Results of a function in two threads at once, each with a stream of its own on a GPU."""
    results: list[list[Results]] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if device_of().type == "cuda" else nullcontext():
            found = call()
            if device_of().type == "cuda":
                torch.cuda.current_stream().synchronize()
            results.append(found)

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(results) < 2:
        raise RuntimeError("a thread has failed")
    return results


def worst(cells: list[str]) -> str:
    """The first cell that is not equal."""
    return next((cell for cell in cells if cell != EQUAL), EQUAL)


def compare(op: str, dtype: str, setting: str, whole: EdgeList) -> Row:
    """Make the row of an op."""
    started, device, case = time.perf_counter(), device_of(), cases()[op]
    names = {"name": f"{op} {dtype} {setting}", "op": op, "dtype": dtype, "setting": setting}
    if op in FAILS_IN_16_BITS and dtype != "float32":
        return Row(outcome=SKIPPED, reason=FAILS_IN_16_BITS[op], **names)
    reason = ""
    try:
        with _on(device, setting):
            run = partial(sequence, case, made(case, DTYPES[dtype]), whole, DTYPES[dtype])
            pyg_dfgnn.settings(**SETTINGS[setting], fallback="error")
            try:
                run(calls=1)
            except UnsupportedError as error:
                reason = f"PyG's code: {'; '.join(error.reasons)}"
            pyg_dfgnn.settings(fallback="silent")
            first = run()
            middle = whole.ptr.numel() // 2
            of_part = PartInputs(whole, middle, whole.edge_index, torch.float32)
            alone = {name: each for name, each in run(part=middle)[-1].items() if not name.startswith("d parameter")}
            rows = {"edge": of_part.edges, "node": of_part.nodes}
            cut = {name: first[-1][name][rows["edge" if name.startswith("d edge") else "node"]] for name in alone}
            threads = in_threads(run)
        with _on(device, setting, "random"):
            again = run()
    except Exception as error:
        return Row(outcome=FAILED, reason=f"{type(error).__name__}: {error}", **names)
    found = {
        "run_to_run": worst([compared(*pair) for pair in zip(first, again, strict=True)]),
        "call_to_call": worst([compared(first[0], other) for other in first[1:]]),
        "batch": compared(alone, cut),
        "threads": worst([compared(*pair) for other in threads for pair in zip(first, other, strict=True)]),
    }
    broken = [name for name in PROMISED[setting] if not reason and found[name] != EQUAL]
    outcome = FAILED if broken else PASSED
    reason = f"{', '.join(broken)} must be bit-equal" if broken else reason
    seconds = f"{time.perf_counter() - started:.1f}"
    return Row(outcome=outcome, reason=reason, seconds=seconds, bits=bits_of(first[-1]), **names, **found)


def _compare(task: tuple[str, str, Sequence[str], EdgeList]) -> list[Row]:
    op, dtype, settings, whole = task
    return [compare(op, dtype, setting, whole) for setting in settings]


def _log_nothing() -> None:
    logging.getLogger("pyg_dfgnn").addHandler(logging.NullHandler())


def beside(row: Row, folder: Path, own: Path) -> str:
    """Compare the bits of a row with those that were found on other GPUs."""
    cells = []
    for path in sorted(folder.glob("determinism-nvidia-*.csv")):
        for other in Table.read(path) if path != own else []:
            if (other["op"], other["dtype"], other["setting"]) == (row.op, row.dtype, row.setting) and other["bits"]:
                name = path.stem.removeprefix("determinism-")
                cells.append(f"{EQUAL if other['bits'] == row.bits else 'differs'} ({name})")
    return "; ".join(cells) or "not run"


def main(arguments: list[str] | None = None) -> int:
    is_cuda = device_of().type == "cuda"
    # The emulator asks for deterministic algorithms by itself.
    settings = [name for name in SETTINGS if is_cuda or name != "default"]
    given = options(
        arguments,
        __doc__,
        540.0,
        ("--ops", {"nargs": "+", "default": [*cases()], "metavar": "OP", "help": "all drop-ins by default"}),
        (
            "--dtypes",
            {"nargs": "+", "default": [*DTYPES] if is_cuda else ["float32", "bfloat16"], "choices": [*DTYPES]},
        ),
        ("--workers", {"type": int, "default": max(1, min(8, (os.cpu_count() or 2) // 2)), "help": "processes"}),
    )
    # For cuBLAS, as torch asks for it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    started = time.perf_counter()
    whole = sbm(512, 40) if is_cuda else sbm(6, 20)
    # The settings of an op share its kernels, so one process compiles them.
    tasks = [(op, dtype, settings, whole) for dtype in given.dtypes for op in given.ops]
    rows: dict[str, Row] = {}
    with multiprocessing.get_context("spawn").Pool(given.workers, _log_nothing) as pool:
        found = pool.imap_unordered(_compare, tasks)
        with suppress(multiprocessing.TimeoutError):
            for _ in tasks:
                left = given.limit_seconds - (time.perf_counter() - started)
                rows |= {row.name: row for row in found.next(timeout=max(0.1, left))}
        pool.terminate()
    own, table = path_of("determinism", given.out), []
    for op, dtype, setting in ((op, dtype, setting) for op, dtype, _, _ in tasks for setting in settings):
        row = rows.get(f"{op} {dtype} {setting}")
        if row is None:
            row = Row(f"{op} {dtype} {setting}", SKIPPED, TIME_IS_UP, op=op, dtype=dtype, setting=setting)
        elif row.bits:
            row = Row(**{**vars(row), "device": beside(row, own.parent, own)})
        table.append(row)
    print(f"on {device_name(device_of())}, batch {whole.name}")
    return finish("determinism", table, given.out, started, hidden=("op", "dtype", "setting", "bits"))
