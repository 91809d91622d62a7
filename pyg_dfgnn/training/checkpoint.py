"""Save a run between two epochs and resume it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

# These parts of the config must agree between a checkpoint and the run that resumes it, except the places of the data.
_FIXED = ("model", "data", "optimizer", "scheduler", "seed")
_FREE = ("data.task.search", "data.task.cache")
_SHOWN = 5
"""Largest number of differences that an error names."""


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of torch's generators on the CPU and on the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the result of :func:`rng_state`; the generator of a GPU is restored if the state was saved on one."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a reader sees the old or the new file, never a partial one.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        # Other files of the run need the room.
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from error


def load(path: str | Path, config: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint to resume from.

    Args:
        path: Run folder, or `checkpoints/last.pt` in it.
        config: Resolved config of the resuming run.

    Returns:
        The state, on the CPU.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: The file is something else, or belongs to another model, data set, optimizer, scheduler or seed.
    """
    path = Path(path)
    file = path / "checkpoints" / "last.pt" if path.is_dir() else path
    needed = "'resume' needs a run folder or its checkpoints/last.pt"
    if not file.is_file():
        raise FileNotFoundError(f"{needed} (got {path})")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # For a damaged file, torch raises KeyError, EOFError and other errors of pickle and zipfile.
    except Exception as error:
        raise ValueError(f"{needed} (got {file}, which is no checkpoint or is damaged)") from error
    for name in ("optimizer", "config"):
        if not isinstance(state, dict) or name not in state:
            raise ValueError(f"{needed} (got {file}, which lacks '{name}')")
    saved, current = _fixed(state["config"]), _fixed(config)
    different = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if different:
        reasons = [
            f"'{name}' needs {saved.get(name)!r} as in the checkpoint (got {current.get(name)!r})" for name in different
        ]
        advice, words = [], file.resolve().parent.parent / ".hydra" / "overrides.yaml"
        # Many overrides hide that another data set or model was named.
        if len(different) <= _SHOWN or not words.is_file():
            advice.append(shlex.join(_override(name, saved, current) for name in different))
        if words.is_file():
            given = [word for word in map(str, OmegaConf.load(words)) if not word.startswith("resume=")]
            advice.append(f"the words of that run: {shlex.join(given) or 'none'}")
        if len(different) > _SHOWN:
            reasons[_SHOWN:] = [f"and {len(different) - _SHOWN} more"]
        raise ValueError(f"cannot resume from {file}: {'; '.join(reasons)}. Go on with {', or with '.join(advice)}")
    return state


def _fixed(config: dict[str, Any]) -> dict[str, Any]:
    leaves = {name: value for key in _FIXED for name, value in _flat(config.get(key), key).items()}
    return {name: value for name, value in leaves.items() if name not in _FREE}


def _override(name: str, saved: dict[str, Any], current: dict[str, Any]) -> str:
    """Return the command line override that sets a value to that of the checkpoint."""
    if name not in saved:
        return f"~{name}"
    value = saved[name] if isinstance(saved[name], str) else json.dumps(saved[name])
    return f"{'' if name in current else '+'}{name}={value}"


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for part, inner in value.items() for key, leaf in _flat(inner, f"{name}.{part}").items()}
