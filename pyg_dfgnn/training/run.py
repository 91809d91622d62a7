"""One training run, from a composed config to its metric."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch_geometric
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
from pyg_dfgnn import fallback
from pyg_dfgnn.capture.step import check_optimizer
from pyg_dfgnn.datasets import LaplacianEncoding, Task
from pyg_dfgnn.distributed import Group
from pyg_dfgnn.errors import check_choice, check_integer
from pyg_dfgnn.graph.reorder import METHODS
from pyg_dfgnn.nn import DROP_INS
from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.settings import Settings, current
from pyg_dfgnn.training import checkpoint
from pyg_dfgnn.training.loggers import loggers
from pyg_dfgnn.training.report import environment, plot_curves, write_metrics
from pyg_dfgnn.training.trainer import Options, Trainer, step_scheduler
from pyg_dfgnn.transforms import Reorder

log = logging.getLogger(__name__)

GROUPS = {
    "data": ("task", "reorder"),
    "backend": ("convs", "settings"),
    "paths": ("data", "cache", "run"),
}
"""Options of the groups whose options no class or function names."""
ROOT = ("model", "data", "optimizer", "scheduler", "trainer", "backend", "paths", "seed", "device", "resume", "returns")
RETURNS = ("val_loss", "val_accuracy", "val_error", "test_loss", "test_accuracy", "test_error")
MAX_SEED = 2**64 - 1
"""Largest seed that torch takes."""
KINDS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "mean accuracy per class",
    "roc_auc": "area under the ROC curve",
    "macro_f1": "mean F1 score of the classes",
    "mrr": "filtered mean reciprocal rank",
    "mae": "mean absolute error",
}


def train(cfg: DictConfig, group: Group | None = None) -> float:
    """Train, test the best epoch, and leave metrics, curves and checkpoints in the run folder.

    Args:
        cfg: Config composed from `configs/train.yaml`.
        group: Processes that train together; None: those that torchrun or submitit has started.

    Returns:
        The metric that `cfg.returns` names, by default the test accuracy or, of values, the test error.

    Raises:
        TypeError: A value of the config has the wrong type.
        ValueError: A value of the config is wrong or does not fit another one.
        FileNotFoundError: The data set or the checkpoint to resume from is missing.
    """
    # The environment may name one of the usual folders, or none.
    cfg.paths.data = list(dict.fromkeys(cfg.paths.data))
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    options, reorder = _checked(config)
    folder = run_folder(config["paths"]["run"])
    config["paths"]["run"] = str(folder)
    device = choose_device(config["device"])
    # Hydra would wrap an error of the call and escape its line breaks, so that it only makes a partial here.
    make = partial(instantiate(cfg.model, _partial_=True), convs=import_convs(config["backend"]["convs"]))
    # Wrong arguments are refused before the data are made.
    with torch.device("meta"), _arguments("model", config["model"]):
        make(1, 1)
    group = group or Group.of_environment(device)
    device = group.device
    optimizer = _try_arguments(cfg, device)
    if options.cuda_graph:
        check_optimizer(optimizer)
    with _arguments("trainer", config["trainer"]):
        options.check_place(device, group)
    if not group.is_main:
        logging.getLogger("pyg_dfgnn").setLevel(logging.WARNING)
    resumed = checkpoint.load(config["resume"], config) if config["resume"] else None
    log.info("%s", in_short(config))
    if group.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
        (folder / "environment.json").write_text(json.dumps(environment(device), indent=2) + "\n")
    with pyg_dfgnn.local_settings(**config["backend"]["settings"]):
        torch.manual_seed(config["seed"])
        task = _made_task(cfg, config, group)
        returns = config["returns"] or f"test_{task.quantity}"
        if not returns.endswith(("loss", task.quantity)):
            raise ValueError(f"'returns' needs null, or a loss or {task.quantity} of {task.name} (got {returns!r})")
        model = _made_model(config, make, task).to(device)
        if getattr(model, "pe_size", 0):
            task = task.map(LaplacianEncoding(model.pe_size))
        if reorder is not None:
            task = _reordered(task, reorder)
        optimizer = make_optimizer(cfg.optimizer, model, device)
        scheduler = make_scheduler(cfg.scheduler, optimizer)
        with _arguments("trainer", config["trainer"]):
            own = model, task, optimizer, scheduler, device, folder, config, options
            trainer = Trainer(*own, seed=config["seed"], group=group)
        if resumed is not None:
            trainer.load_state(resumed)
            rest = ": nothing is left to train" if trainer.is_done else ""
            log.info("resumed after epoch %d of %d%s", trainer.epoch, options.epochs, rest)
        _fit(trainer)
        best_epoch = trainer.load_best()
        results = {**trainer.evaluate("val"), **trainer.evaluate("test")}
    if group.is_main:
        _report(trainer, results, best_epoch)
    return results[returns]


def _checked(config: Mapping[str, Any]) -> tuple[Options, Reorder | None]:
    """Return the options of the trainer and the order of nodes, once all values that need nothing else are checked."""
    _check_names("config", config, ROOT)
    for group, names in GROUPS.items():
        _check_names(group, config[group], names)
    check_choice("returns", config["returns"], (None, *RETURNS))
    check_integer("seed", config["seed"], 0, MAX_SEED)
    method = config["data"]["reorder"]
    check_choice("data.reorder", method, (None, *METHODS))
    reorder = None if method is None else Reorder(method)
    with _options("trainer", config["trainer"], Options):
        options = Options(**config["trainer"])
    with _options("backend.settings", config["backend"]["settings"], Settings):
        replace(current(), **config["backend"]["settings"])
    return options, reorder


def _made_task(cfg: DictConfig, config: Mapping[str, Any], group: Group) -> Task:
    """Make the task of a config; the first process of a machine downloads and converts alone."""
    with group.first_alone():
        make = instantiate(cfg.data.task, _partial_=True)
        with _arguments("data.task", config["data"]["task"]):
            task: Task = make()
    return task


def _made_model(config: Mapping[str, Any], make: partial[Any], task: Task) -> Any:
    """Make the model of a config for a task, with drop-ins in place of the layers that it makes of PyG's classes."""
    with _arguments("model", config["model"]):
        model = make_model(make, task)
    if config["backend"]["convs"] == "pyg_dfgnn.nn" and any(map(_is_plain, model.modules())):
        pyg_dfgnn.accelerate(model)
    return model


def _reordered(task: Task, reorder: Reorder) -> Task:
    """Return a task whose graphs are reordered, and log what that gives."""
    if task.num_relations or task.metadata:
        need = "null: labels name nodes of a graph with relations"
        raise ValueError(f"'data.reorder' needs {need} (got {reorder.method!r})")
    task = task.map(reorder)
    log.info("%s%s", "" if task.full_graph else "last graph: ", reorder.report)
    return task


def _fit(trainer: Trainer) -> None:
    """Train, and say how to go on where that is interrupted."""
    model, device, group, options = trainer.model, trainer.device, trainer.group, trainer.options
    place = f"{device}" if group.size == 1 else f"{group.size} processes"
    log.info("%s on %s: %d parameters", trainer.task.name, place, sum(p.numel() for p in model.parameters()))
    if device.type == "cpu" and trainer.config["backend"]["convs"] == "pyg_dfgnn.nn":
        # Each run of a sweep reports this once, before its epochs.
        fallback.logged.discard(("", fallback.ON_CPU))
        fallback.report_fallback(type(model).__name__, [fallback.NO_DEVICE])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # One of several processes logs.
    asked = (options.tensorboard, options.wandb) if group.is_main else (False, None)
    try:
        with loggers(*asked, trainer.folder, trainer.config) as log_row:
            trainer.fit(log_row)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            log.info("interrupted after epoch %d; go on with\n%s", trainer.epoch, resume_command(trainer.folder))
        _plot(trainer)
        raise


def _report(trainer: Trainer, results: Mapping[str, float], best_epoch: int) -> None:
    """Write the files of a run that has ended, and log its test result."""
    task, device, config = trainer.task, trainer.device, trainer.config
    summary = {
        **results,
        "best_epoch": best_epoch,
        "diverged_epoch": trainer.diverged_epoch,
        "epochs": trainer.epoch,
        "train_time_s": sum(row["time_s"] for row in trainer.history),
        "prepare_time_s": trainer.prepare_s,
        # Since training began, data and graph included.
        "peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
        "task": task.name,
        "model": type(trainer.model).__name__,
        "convs": config["backend"]["convs"],
        "seed": config["seed"],
        "processes": trainer.group.size,
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "metric": task.metric,
        **({"unit": task.unit, "shift": task.shift, "scale": task.scale} if task.is_of_values else {}),
        "synthetic": task.synthetic,
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "pyg_dfgnn": pyg_dfgnn.__version__,
    }
    result = (
        f"{results['test_error']:.4g} {task.unit}" if task.is_of_values else f"{100 * results['test_accuracy']:.2f} %"
    )
    log.info("test %s: %s (best epoch %d)", KINDS[task.metric], result, best_epoch)
    if trainer.diverged_epoch is not None:
        log.warning("the loss has diverged in epoch %d; a lower optimizer.lr may help", trainer.diverged_epoch)
    metrics_json, metrics_csv = write_metrics(trainer.folder, summary, trainer.history)
    log.info("metrics: %s, %s", metrics_json, metrics_csv)
    _plot(trainer)


def in_short(config: Mapping[str, Any]) -> str:
    """Return a config with a line for each group, without `_target_` and what is not set."""
    values = {name: value for name, value in config.items() if not isinstance(value, dict)}
    groups = {"run": values} | {name: value for name, value in config.items() if isinstance(value, dict)}
    return "\n".join(f"{name}: {', '.join(_words(group))}" for name, group in groups.items())


def _words(group: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in group.items():
        if isinstance(value, dict):
            yield from _words(value, f"{prefix}{name}.")
        elif name == "_target_":
            kind = str(value).rpartition(".")[2]
            yield f"{prefix[:-1]}={kind}" if prefix else kind
        elif value is not None:
            yield f"{prefix}{name}={value}"


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a layer of messages that has no kernels yet."""
    return isinstance(module, MessagePassing) and type(module) not in DROP_INS.values()


def _plot(trainer: Trainer) -> None:
    """Draw the curves of a run, the last of its files, whose failure costs nothing else."""
    if not trainer.group.is_main or trainer.best is None:
        return
    unit = f", error in {trainer.task.unit}" if trainer.task.is_of_values else ""
    title = f"{type(trainer.model).__name__} on {trainer.task.name}{unit}"
    try:
        curves = plot_curves(trainer.folder / "curves.png", title, trainer.history, trainer.best["epoch"])
        log.info("plots: %s", curves)
    except Exception as error:
        log.warning("plots: none, all other files are complete (%r)", error)


def make_model(make: partial[Any], task: Task) -> Any:
    """Make a model for a task.

    Args:
        make: Class of the model with all but its widths; one that takes `degrees` gets :meth:`Task.degrees`, one that
            takes `num_relations` or `metadata` gets that of the task, one that takes `edge_channels` the task's number
            of edge features.
        task: What it is to learn.

    Raises:
        ValueError: The model knows no relations and the task has them, or the other way round; it needs edge features
            and the task has none.
    """
    asked = inspect.signature(make.func).parameters
    relations = {"num_relations": task.num_relations, "metadata": task.metadata}
    arguments: dict[str, Any] = {name: value for name, value in relations.items() if name in asked and value}
    if "degrees" in asked:
        arguments["degrees"] = task.degrees()
    has_features = task.num_edge_features > 0
    if "edge_channels" in asked and has_features:
        arguments["edge_channels"] = task.num_edge_features
    model = make(task.num_features, task.num_classes, **arguments)
    for name, value in relations.items():
        if (name in asked) != bool(value):
            need = f"one that takes {name}" if value else f"one that takes no {name}"
            raise ValueError(f"'model' needs {need} for {task.name} (got {type(model).__name__})")
    if "edge_channels" in asked and not has_features:
        need = "one that takes no edge features"
        raise ValueError(f"'model' needs {need} for {task.name} (got {type(model).__name__})")
    if current().linear == "kernels":
        pyg_dfgnn.accelerate(model, only=(nn.Linear, torch_geometric.nn.Linear))
    return model


def make_optimizer(config: DictConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """Make the optimizer that a config names, on a GPU with its fused kernel if it has one.

    Args:
        config: `_target_` and arguments; `fused` and `foreach` overrule the choice made here.
        model: Model whose parameters are trained.
        device: Device of the parameters.

    Raises:
        TypeError: An argument is unknown or has the wrong type.
        ValueError: An argument has a wrong value.
    """
    make = instantiate(config, _partial_=True)
    is_open = "fused" in inspect.signature(make.func).parameters and not {"fused", "foreach"} & config.keys()
    fused = {"fused": True} if is_open and device.type == "cuda" else {}
    with _arguments("optimizer", config):
        return make(model.parameters(), **fused)


def make_scheduler(config: DictConfig, optimizer: Optimizer) -> Any:
    """Make the learning rate scheduler that a config names.

    Args:
        config: `_target_` and arguments.
        optimizer: Optimizer whose learning rates it sets.

    Raises:
        TypeError: An argument is unknown or has the wrong type.
        ValueError: An argument has a wrong value.
    """
    make = instantiate(config, _partial_=True)
    with _arguments("scheduler", config):
        return make(optimizer)


def _try_arguments(cfg: DictConfig, device: torch.device) -> Optimizer:
    """Refuse wrong arguments of optimizer and scheduler, some of which a scheduler only reads in its steps."""
    optimizer = make_optimizer(cfg.optimizer, nn.Linear(1, 1, device=device), device)
    scheduler = make_scheduler(cfg.scheduler, optimizer)
    with _arguments("scheduler", cfg.scheduler), warnings.catch_warnings():
        # The scheduler would warn that the optimizer has made no step.
        warnings.simplefilter("ignore")
        step_scheduler(scheduler, 1.0)
    return optimizer


@contextmanager
def _arguments(group: str, config: Mapping[Any, Any]) -> Iterator[None]:
    """A block whose errors name an argument with its group of the config, or else the group with its arguments.

    Errors that are not about arguments of this group pass as they are.
    """
    try:
        yield
    except (TypeError, ValueError, ArithmeticError) as error:
        text = str(error)
        if (named := re.match(r"'(\w+)", text)) and named[1] in config:
            raise type(error)(f"'{group}.{text[1:]}") from error
        is_call = isinstance(error, TypeError) and "argument" in text
        if named or "_target_" not in config or not (is_call or group in ("optimizer", "scheduler", "model")):
            raise
        arguments = {key: value for key, value in config.items() if key != "_target_"}
        kind = config["_target_"].rpartition(".")[2]
        raised = TypeError if isinstance(error, TypeError) else ValueError
        raise raised(f"'{group}' needs arguments that {kind} takes (got {arguments}): {error}") from error


@contextmanager
def _options(group: str, config: Mapping[str, Any], kind: Any) -> Iterator[None]:
    """A block that makes a dataclass of a group of the config: unknown options are refused, errors name the group."""
    _check_names(group, config, [field.name for field in fields(kind) if field.init])
    with _arguments(group, config):
        yield


def _check_names(group: str, config: Mapping[str, Any], names: Sequence[str]) -> None:
    if unknown := [name for name in config if name not in names]:
        raise ValueError(f"'{group}' needs options among {', '.join(names)} (got {', '.join(unknown)})")


def run_folder(name: str | None) -> Path:
    """Return the folder of a run's files: the named one, else that of the Hydra job, else a new one in `outputs`."""
    if name is not None:
        return Path(name)
    if HydraConfig.initialized():
        return Path(HydraConfig.get().runtime.output_dir)
    return Path("outputs", datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f"))


def import_convs(name: str) -> ModuleType:
    """Import the module that a config names for its convolutions.

    Raises:
        ValueError: There is no such module.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"'backend.convs' needs a module, such as torch_geometric.nn (got {name!r})") from error


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run in a folder, or only its arguments if a launcher started the run."""
    resume = f"resume={folder.resolve()}"
    if not HydraConfig.initialized():
        return resume
    launched = {"WORLD_SIZE", "SUBMITIT_EXECUTOR"} & os.environ.keys()
    program = [] if launched else sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    job = HydraConfig.get()
    folders = {source.provider: source.path for source in job.runtime.config_sources}
    flags = [("config-dir", folders.get("command-line"), None), ("config-path", folders["main"], str(configs_dir()))]
    flags.append(("config-name", job.job.config_name, "train"))
    words = [f"--{flag}={value}" for flag, value, usual in flags if value != usual]
    words += [word for word in job.overrides.hydra if not word.startswith("hydra.mode=")]
    words += [word for word in job.overrides.task if not word.startswith("resume=")]
    return shlex.join([*program, *words, resume])


def choose_device(name: str) -> torch.device:
    """Return the device that a config names: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".

    Raises:
        ValueError: The name is no device, or names a GPU that is absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"'device' needs auto, cpu, cuda or cuda:<index> (got {name!r})")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"'device' needs a GPU that is there: {torch.cuda.device_count()} found (got {name!r})")
    return device
