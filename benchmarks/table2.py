"""Table 2 of the DF-GNN paper: what a training step takes, phase by phase, with each backend.

python -m benchmarks.table2                                     the graph transformer on the seven data sets
python -m benchmarks.table2 -m model=gat_stack,agnn_stack       the other layers
python -m benchmarks.table2 datasets=[cora] backends=[pyg,auto] any value of benchmarks/configs/table2.yaml
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from benchmarks import CONFIGS, isolated, results
from benchmarks.results import OUT_OF_MEMORY, Progress, Row, Table, latest, source_digest
from benchmarks.table2_steps import PHASES, STEP_BY_STEP, SUMMED, Backend, Reference, TaskBatches, measure
from benchmarks.training import training_config
from pyg_dfgnn.datasets import Task
from pyg_dfgnn.errors import check_range
from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.training.run import make_model

FIELDS = [
    *"model setting dataset task synthetic graphs nodes edges backend status".split(),
    *(f"{phase}_{part}" for phase in (*PHASES, "sum", "step") for part in ("ms", "iqr_ms")),
    *"once n reference_sum_ms wall_ms first_step_s peak_mb reference loss_difference gradient_difference".split(),
    *(*STEP_BY_STEP, "bound"),
    *"gpu torch cuda pyg cupy commit digest time".split(),
]
CELL = ("model", "dataset", "backend")
"""Columns that name a cell."""
MEASURED_ROOMS = (*results.MEASURED_ROOMS, "nn", "models", "training")
"""Rooms whose text decides what a step of ours takes."""

PRINTED = ("transfer", *SUMMED, "sum", "optimizer")
"""Phases in the table, in milliseconds."""
BASELINE = "pyg"

OmegaConf.register_new_resolver("training_configs", configs_dir, replace=True)

Message = dict[str, Any] | None
"""The row of a cell; None: a sign of life."""


@dataclass(frozen=True)
class Cell:
    """One backend on one data set, a choice of `data`; the task is instantiated to the data set."""

    dataset: str
    backend: Backend
    task: dict[str, Any]


class Options(SimpleNamespace):
    """The keys of `benchmarks/configs/table2.yaml`, explained there; `model_name` is the choice of `model`."""

    @staticmethod
    def of(config: Mapping[str, Any], model_name: str) -> Options:
        """Return the options of a resolved config; raise a ValueError where a value is out of range."""
        pace, device = SimpleNamespace(**config["pace"]), results.device_of(config["device"])
        for name in ("batch_size", "num_batches"):
            check_range(name, config[name], 1)
        check_range("warm_up", pace.warm_up, 1)
        check_range("steps", pace.steps, pace.warm_up + 1)
        check_range("rounds", pace.rounds, 1)
        folder = Path(config["folder"] or results.default_folder("table2", device))
        return Options(**{**config, "model_name": model_name, "pace": pace, "device": device, "folder": folder})

    @property
    def setting(self) -> str:
        """Digest of all that a time depends on beside the data set and the backend: rows of another are not its own."""
        # How often turns are taken makes a time steadier, not another one.
        pace = {name: value for name, value in vars(self.pace).items() if name != "rounds"}
        of_all = self.model, self.optimizer, self.batch_size, self.num_batches, self.arguments, pace
        return hashlib.sha256(json.dumps(of_all, sort_keys=True, default=str).encode()).hexdigest()[:8]

    def provenance(self) -> dict[str, Any]:
        """Return the model, setting, environment and source digest of the rows of a cell."""
        named = {"model": self.model_name, "setting": self.setting}
        return {**named, **results.environment(self.device), "digest": source_digest(MEASURED_ROOMS)}

    def cells(self) -> list[Cell]:
        """Data set by data set."""
        return [self._cell(dataset, name) for dataset in self.datasets for name in self.backends]

    def _cell(self, dataset: str, backend: str) -> Cell:
        convs = self.convs.get(backend)
        chosen = [f"backend={backend}"] if convs is None else ["backend=pyg", f"backend.convs={convs}"]
        cfg = training_config([f"data={dataset}", *chosen, "paths.run=unused"])
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
        task, trainer = config["data"]["task"], config["trainer"]
        if trainer["loader"] is not None:
            arguments = {**self.arguments, "num_train": self.batch_size * self.num_batches}
            task.update({name: value for name, value in arguments.items() if name in task})
        options = {**config["backend"], "compile": trainer["compile"], "cuda_graph": trainer["cuda_graph"]}
        return Cell(dataset, Backend(backend, **options), task)


def work(options: Options, cells: Sequence[Cell]) -> Iterator[Message]:
    """One row per cell of a data set, and a sign of life before what takes long.

    The first cell that is measured becomes the reference that the others are compared with.
    """
    torch.set_float32_matmul_precision("highest")
    source: TaskBatches | None = None
    reference: Reference | None = None
    for cell in cells:
        yield None
        try:
            if source is None:
                source = TaskBatches.of(_task(options, cell), options.batch_size, pinned=options.device.type == "cuda")
        except (FileNotFoundError, ImportError, ValueError) as error:
            yield {**cell_columns(options, cell), "status": f"not run: {error}"}
            continue
        yield None
        base = {**cell_columns(options, cell), **source_columns(source)}
        try:
            columns, own = measure(cell.backend, options, source, reference)
            yield {**base, **columns}
            reference = reference or own
        except Exception as error:
            # A compiler raises anything, and the other cells go on.
            yield {**base, "status": results.reason(error)}


def _task(options: Options, cell: Cell) -> Task:
    """Return the data set of a cell with what the model reads of it."""
    task = instantiate(cell.task, _partial_=True)()
    with torch.device("meta"):
        make = partial(instantiate(options.model, _partial_=True), convs=importlib.import_module(cell.backend.convs))
        return task.read_by(make_model(make, task))  # type: ignore[no-any-return]


def cell_columns(options: Options, cell: Cell) -> dict[str, Any]:
    """The columns that name a cell, and what it was measured with."""
    names = {"dataset": cell.dataset, "backend": cell.backend.name, "bound": options.pace.bound, "time": results.now()}
    return {**names, **options.provenance()}


def source_columns(source: TaskBatches) -> dict[str, Any]:
    """Return the columns that describe a data set: its task, and the average sizes of its batches."""
    batches, task = source.batches, source.task
    columns = {"task": task.name, "synthetic": task.synthetic or "", "graphs": 1, "once": task.full_graph}
    for name in ("nodes", "edges") if task.full_graph else ("graphs", "nodes", "edges"):
        columns[name] = round(sum(getattr(batch, f"num_{name}") for batch in batches) / len(batches))
    return columns


def run(options: Options) -> int:
    """Measure what the results of a model lack and print its table; return 1 for a wrong result, 2 if stopped early."""
    table = Table(options.folder / f"{options.model_name}-{results.file_stem(options.device)}.csv", FIELDS)
    finished = options.summary or _fill(options, table)
    rows = latest([row for row in table.rows() if row["setting"] == options.setting], CELL)
    if rows:
        print(times_table(rows))
    if any(row["status"].startswith("WRONG") for row in rows):
        return 1
    return 0 if finished else 2


def missing(cells: Sequence[Cell], rows: Sequence[Mapping[str, Any]], now_: Mapping[str, Any]) -> list[Cell]:
    """The cells without a row of this provenance; that of ours includes the sources.

    Any cell on a data set needs the first one again.
    """
    same = ("setting", "gpu", "torch")
    done = {
        (row["dataset"], row["backend"], row["digest"])
        for row in rows
        if all(row[name] == now_[name] for name in same) and not row["status"].startswith(("failed", "no result"))
    }
    names = {(dataset, backend) for dataset, backend, _ in done}

    def is_done(cell: Cell) -> bool:
        key = cell.dataset, cell.backend.name
        return (*key, now_["digest"]) in done if cell.backend.is_ours else key in names

    wanted = {cell.dataset for cell in cells if not is_done(cell)}
    first = {cell.dataset: cell for cell in reversed(cells)}
    return [cell for cell in cells if not is_done(cell) or (cell.dataset in wanted and cell is first[cell.dataset])]


def _fill(options: Options, table: Table) -> bool:
    """Whether all cells have been measured."""
    todo = missing(options.cells(), table.rows(), options.provenance())
    progress = Progress(options.total_limit_s)
    for dataset in dict.fromkeys(cell.dataset for cell in todo):
        cells = [cell for cell in todo if cell.dataset == dataset]
        first = cells[0]
        while cells:
            has_reference = False
            for row in _rows(options, tuple(cells)):
                table.append([row])
                cell = cells.pop(0)
                has_reference |= cell is first and row["status"] == "ok"
                times = f"sum {row['sum_ms']} ms, step {row['wall_ms']} ms" if row["status"] == "ok" else row["status"]
                progress.print(f"{cell.dataset} {cell.backend.name}: {times}")
                if progress.is_over():
                    return cell is todo[-1]
            if cells and has_reference:
                # A fresh process goes on, which lacks the reference.
                cells.insert(0, first)
    return True


def _rows(options: Options, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Rows of the cells of a data set in their order; ends early where a fresh process has to go on."""
    if options.limit_s is None:
        yield from (row for row in work(options, cells) if row is not None)
        return
    done = 0
    try:
        for row in isolated.results(work, (options, cells), options.limit_s):
            done += 1
            yield row
            # What failed may have left the device unusable, and what ran out of memory may still hold some.
            if row["status"].startswith(("failed", OUT_OF_MEMORY)):
                return
    except isolated.EndedError as ended:
        yield {**cell_columns(options, cells[done]), "status": str(ended)}


def faster(rows: Sequence[Row], column: str) -> dict[tuple[str, str], float]:
    """(data set, backend) -> how many times faster than PyG; by sums that were taken in turns where they were."""
    timed = {(row["dataset"], row["backend"]): row for row in rows if row["status"] == "ok"}
    factors = {}
    for (dataset, backend), row in timed.items():
        in_turns = row["reference_sum_ms"] if column == "sum_ms" and row["reference"] == BASELINE else ""
        if in_turns:
            factors[dataset, backend] = float(in_turns) / float(row[column])
        elif (dataset, BASELINE) in timed:
            factors[dataset, backend] = float(timed[dataset, BASELINE][column]) / float(row[column])
    return factors


def times_table(rows: Sequence[Row]) -> str:
    """Milliseconds per step, one line per data set and backend, `once` for what is done once with one whole graph.

    `sum` is preprocess, forward (with the loss) and backward; `step` is the wall time of one step among many.
    """
    by_sum, by_step = faster(rows, "sum_ms"), faster(rows, "wall_ms")
    header = ["data", "backend", *PRINTED, "step", "peak, GB", "sum, times faster", "step, times faster"]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    lines = []
    for row in sorted(rows, key=lambda row: datasets.index(row["dataset"])):
        key = row["dataset"], row["backend"]
        if row["status"] != "ok":
            lines.append([*key, row["status"], *[""] * (len(header) - 3)])
            continue
        ms = {phase: f"{float(row[f'{phase}_ms'] or 'nan'):.3g}" for phase in PRINTED}
        if str(row["once"]) == "True":
            ms |= {phase: f"{ms[phase]} once" for phase in PRINTED[:2]}
        peak_gb = f"{float(row['peak_mb']) / 1e3:.2f}" if row["peak_mb"] else ""
        factors = (f"{by[key]:.2f}x" if key in by else "" for by in (by_sum, by_step))
        lines.append([*key, *ms.values(), f"{float(row['wall_ms']):.3g}", peak_gb, *factors])
    return results.markdown(header, lines)


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="table2")
def main(config: DictConfig) -> None:
    """Measure as configured."""
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    codes.append(run(Options.of(values, HydraConfig.get().runtime.choices["model"])))


codes: list[int] = []

if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    main()
    sys.exit(max(codes, default=0))
