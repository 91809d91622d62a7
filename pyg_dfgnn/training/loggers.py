"""Metrics of epochs for TensorBoard and Weights & Biases, by their own loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyg_dfgnn.errors import need_extra

LogRow = Callable[[Mapping[str, float]], None]
"""Logs the metrics of an epoch, which have its number."""


def check_loggers(tensorboard: bool, wandb: str | None) -> None:
    """Check that the packages of the loggers are installed.

    Raises:
        ModuleNotFoundError: One is missing.
    """
    for is_asked, name in ((tensorboard, "tensorboard"), (wandb is not None, "wandb")):
        if is_asked:
            need_extra(name, f"runs with trainer.{name}", "loggers")


@contextmanager
def loggers(tensorboard: bool, wandb: str | None, folder: Path, config: dict[str, Any]) -> Iterator[LogRow]:
    """Log the metrics of each epoch of a run in the block.

    Args:
        tensorboard: Whether TensorBoard's event files are written to `tensorboard` in the folder of the run.
        wandb: Project of Weights & Biases that the run is sent to; None sends nothing.
        folder: Folder of the run.
        config: Config of the run.
    """
    with ExitStack() as stack:
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            writer = stack.enter_context(SummaryWriter(str(folder / "tensorboard")))  # type: ignore[no-untyped-call]
        if wandb is not None:
            import wandb as wandb_module

            run = stack.enter_context(
                wandb_module.init(project=wandb, name=folder.name, dir=str(folder), config=config)
            )

        def log_row(row: Mapping[str, float]) -> None:
            epoch = int(row["epoch"])
            metrics = {name: value for name, value in row.items() if name != "epoch"}
            if tensorboard:
                for name, value in metrics.items():
                    writer.add_scalar(name, value, epoch)  # type: ignore[no-untyped-call]
            if wandb is not None:
                run.log(metrics, step=epoch)

        yield log_row
