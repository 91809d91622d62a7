"""What a user may decide for all kernels at once: schedule, determinism, and how a fallback is reported."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, fields, replace
from typing import Any

from pyg_dfgnn.errors import check_choice

RULES = ("auto", "autotune", "paper")
SCHEDULES = (
    *RULES,
    *("row_split", "smem", "block_mma", "smmf", "pmf", "cusparse", "cusparse_alg3"),
    # What lanes share: features, or edges too. Of attention, forward passes of smmf without its optimisations.
    *("feature_parallel", "neighbour_parallel"),
    *("feature_parallel+scores", "feature_parallel+scores+softmax"),
)
FALLBACKS = ("log", "error", "silent")


@dataclass(frozen=True)
class Settings:
    """The settings in force; read them with :func:`current`.

    Args:
        schedule: What each pass of a layer runs. `"auto"` takes the candidate with the lowest estimated time,
            `"autotune"` the fastest one in a timing of all candidates that is made once per kind of graph and kept on
            disk, so that later runs choose alike; `"paper"` follows the rule of DF-GNN. Any other name asks for the
            schedule of that name. Two schedules round differently.
        deterministic: True refuses schedules whose results may differ between runs, False allows them, None follows
            `torch.are_deterministic_algorithms_enabled()`.
        fallback: What happens where no fused kernel can run, or where the schedule that was asked for cannot and
            `"row_split"` takes its place: `"log"` reports each reason once, `"error"` raises `UnsupportedError`,
            `"silent"` reports nothing. With `"error"`, tensors on a CPU raise an error only where there is a GPU.
        compile_messages: Whether layers that :func:`pyg_dfgnn.accelerate` has marked run compiled messages; False
            leaves them to PyG. The environment variable `PYG_DFGNN_COMPILE_MESSAGES=0` makes False the default.
    """

    schedule: str = "auto"
    deterministic: bool | None = None
    fallback: str = "log"
    compile_messages: bool = os.environ.get("PYG_DFGNN_COMPILE_MESSAGES", "1") != "0"

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("deterministic", self.deterministic, (None, True, False))
        check_choice("fallback", self.fallback, FALLBACKS)
        check_choice("compile_messages", self.compile_messages, (True, False))


_lock = threading.Lock()
# What all threads see: the base with the changes of calls that may still turn out to be for a block.
_global = Settings()
_base = Settings()
_calls: list[tuple[weakref.ref[settings], dict[str, Any]]] = []


class _Override(threading.local):
    # Runs in every new thread, which starts without an override. Unlike a ContextVar, torch.compile can trace it.
    def __init__(self) -> None:
        self.settings: Settings | None = None
        # What the blocks around it had: settings, and what was around these.
        self.outer: tuple[Settings | None, Any] | None = None


_override = _Override()


def current() -> Settings:
    """Return the settings in force in this thread."""
    return _override.settings or _global


class settings:
    """Change settings: for the whole process when called, for one thread and one block in a `with` statement.

    A setting that is not named keeps its value. A function compiled by `torch.compile` keeps the settings of the block
    that it was traced under; a change for the whole process recompiles it.

    Args:
        schedule: See :class:`Settings`.
        deterministic: See :class:`Settings`.
        fallback: See :class:`Settings`.
        compile_messages: See :class:`Settings`.

    Raises:
        ValueError: A value is not among the choices.

    Example:
        >>> settings(fallback="error")
        >>> with settings(schedule="row_split"):
        ...     out = model(x, edge_index)
    """

    def __init__(self, **changes: Any) -> None:
        for name in changes:
            check_choice("settings", name, [field.name for field in fields(Settings)])
        with _lock:
            replace(_global, **changes)  # refuses wrong values
            self._changes = changes
            _calls.append((weakref.ref(self), changes))
            _apply()

    def __enter__(self) -> Settings:
        # A call that is entered was for a block: the change for the process is taken back.
        with _lock:
            _calls[:] = [call for call in _calls if call[0]() is not self]
            _apply()
        inside = replace(current(), **self._changes)
        _override.outer = _override.settings, _override.outer
        _override.settings = inside
        return inside

    def __exit__(self, *exc: object) -> None:
        # Another thread may end the block, as a generator that is thrown away.
        if _override.outer is not None:
            _override.settings, _override.outer = _override.outer


class quiet:
    """A block whose fallbacks nobody is told of; torch.compile can trace it, as it cannot `settings`."""

    def __enter__(self) -> None:
        self._before = _override.settings
        _override.settings = replace(current(), fallback="silent")

    def __exit__(self, *exc: object) -> None:
        _override.settings = self._before


def _apply() -> None:
    """Make `_calls` the settings of the process; those that nobody can enter any more become the base."""
    global _global, _base
    while _calls and _calls[0][0]() is None:
        _base = replace(_base, **_calls.pop(0)[1])
    _global = _base
    for _, changes in _calls:
        _global = replace(_global, **changes)
