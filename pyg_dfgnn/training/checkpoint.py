"""Saving a run between two epochs and taking it up again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

# What must agree between a checkpoint and the run that takes it up; where the data lie may differ.
_FIXED = ("model", "data", "optimizer", "scheduler", "seed")
_FREE = ("data.task.search", "data.task.cache")


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of torch's generators on the CPU and on the device in use."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`rng_state` returned, as far as it was saved on a device of this kind."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; a reader sees the old or the new file, never a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load(path: str | Path, config: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint to resume from.

    Args:
        path: The file, or the run folder that holds `checkpoints/last.pt`.
        config: The resolved config of the run that takes it up.

    Returns:
        The state, on the CPU.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: The checkpoint belongs to another model, data set, optimizer, scheduler or seed.
    """
    path = Path(path)
    file = path / "checkpoints" / "last.pt" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"'resume' needs a checkpoint or a run folder with checkpoints/last.pt (got {path})")
    state = torch.load(file, map_location="cpu", weights_only=True)
    saved, given = ({key: _flat(source.get(key), key) for key in _FIXED} for source in (state["config"], config))
    differences = [
        f"'{name}' needs {saved[key].get(name)!r} as in the checkpoint (got {given[key].get(name)!r})"
        for key in _FIXED
        for name in sorted(saved[key].keys() | given[key].keys())
        if name not in _FREE and saved[key].get(name) != given[key].get(name)
    ]
    if differences:
        raise ValueError(f"cannot resume from {file}: " + "; ".join(differences))
    return state


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for part, inner in value.items() for key, leaf in _flat(inner, f"{name}.{part}").items()}
