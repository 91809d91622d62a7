"""What a user may decide for all kernels at once: schedule, determinism, and how a fallback is reported."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

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
        check_ids: When ids of new edges are checked. With `"later"` nothing waits for the device: kernels leave out
            edges with an id out of range, `IdRangeError` is raised at the next call of a layer, and a small graph is
            measured, for better schedules and compiled messages, once its edges come again. With `"now"` the first call
            with new edges waits for the device, checks the ids and measures the graph.
        compile_messages: Whether layers that :func:`pyg_dfgnn.accelerate` has marked run compiled messages; False
            leaves them to PyG. The environment variable `PYG_DFGNN_COMPILE_MESSAGES=0` makes False the default.
        linear: Whose products linear layers have. With `"torch"` they stay as they are. With `"kernels"`
            :func:`pyg_dfgnn.accelerate` makes drop-ins of them, which give large products in float32 to kernels.
    """

    schedule: str = "auto"
    deterministic: bool | None = None
    fallback: str = "log"
    check_ids: str = "later"
    compile_messages: bool = os.environ.get("PYG_DFGNN_COMPILE_MESSAGES", "1") != "0"
    linear: str = "torch"

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("deterministic", self.deterministic, (None, True, False))
        check_choice("fallback", self.fallback, FALLBACKS)
        check_choice("check_ids", self.check_ids, ("later", "now"))
        check_choice("compile_messages", self.compile_messages, (True, False))
        check_choice("linear", self.linear, ("torch", "kernels"))


class _Call(NamedTuple):
    """A change that may still turn out to be for a block: only its thread sees it for as long as the object lives.

    Attributes:
        made: The object that the call has made.
        changes: What it changes.
        thread: The fields of :class:`_Override` in the thread that made the call.
    """

    made: weakref.ref[settings]
    changes: dict[str, Any]
    thread: dict[str, Any]

    @property
    def is_for_all(self) -> bool:
        """Whether nobody can enter the object any more."""
        return self.made() is None


_lock = threading.Lock()
# What all threads see: the base, in which calls for all have ended up, with the calls for all since then.
_global = Settings()
_base = Settings()
_calls: list[_Call] = []
_is_stale = False


class _Override(threading.local):
    # Runs in every new thread, which starts without an override. Unlike a ContextVar, torch.compile can trace it.
    def __init__(self) -> None:
        # What the thread sees: the settings of its innermost block, without a block those of `kept`.
        self.settings: Settings | None = None
        # What all threads see with the calls of this one, while there are any that may still be for a block.
        self.kept: Settings | None = None
        # What the blocks around it had: settings, and what was around these.
        self.outer: tuple[Settings | None, Any] | None = None


_override = _Override()


def current() -> Settings:
    """Return the settings in force in this thread."""
    return _override.settings or _global


class settings:
    """Change settings: for the whole process when called, for one thread and one block in a `with` statement.

    A setting that is not named keeps its value. While somebody keeps the object and has not entered it, as a notebook
    keeps the result of a cell, the change is for the thread that made it, and for the whole process once the object is
    gone. A function compiled by `torch.compile` keeps the settings of the block that it was traced under; a change for
    the whole process recompiles it.

    Args:
        schedule: See :class:`Settings`.
        deterministic: See :class:`Settings`.
        fallback: See :class:`Settings`.
        check_ids: See :class:`Settings`.
        compile_messages: See :class:`Settings`.
        linear: See :class:`Settings`.

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
        replace(_global, **changes)  # refuses wrong values
        self._changes = changes
        with _changing():
            _calls.append(_Call(weakref.ref(self, _note_death), changes, vars(_override)))
            _apply()

    def __enter__(self) -> Settings:
        with _changing():
            # A call that is entered was for a block: the change for its thread is taken back.
            entered = [call for call in _calls if call.made() is self]
            _calls[:] = [call for call in _calls if call.made() is not self]
            _apply(entered)
            inside = replace(current(), **self._changes)
            _override.outer = _override.settings, _override.outer
            _override.settings = inside
        return inside

    def __exit__(self, *exc: object) -> None:
        with _changing():
            # Another thread may end the block, as a generator that is thrown away.
            if _override.outer is not None:
                before, _override.outer = _override.outer
                _override.settings = _override.kept if _override.outer is None else before


class quiet:
    """A block whose fallbacks nobody is told of; torch.compile can trace it, as it cannot `settings`."""

    def __enter__(self) -> None:
        _override.outer = _override.settings, _override.outer
        _override.settings = replace(current(), fallback="silent")

    def __exit__(self, *exc: object) -> None:
        before, _override.outer = _override.outer  # type: ignore[misc]
        _override.settings = _override.kept if _override.outer is None else before


@contextmanager
def _changing() -> Iterator[None]:
    """A block that one thread at a time is in; who leaves it applies what the calls that died meanwhile have left."""
    with _lock:
        yield
    _apply_stale()


def _note_death(_: Any) -> None:
    """Make the change of an object that nobody can enter any more one for all."""
    global _is_stale
    _is_stale = True
    _apply_stale()


def _apply_stale() -> None:
    # Runs whenever the garbage collector does, perhaps where this thread holds the lock: it must not wait for that.
    global _is_stale
    while _is_stale and _lock.acquire(blocking=False):
        try:
            _is_stale = False
            _apply()
        finally:
            _lock.release()


def _apply(entered: Sequence[_Call] = ()) -> None:
    """Make `_calls` the settings of the process and of the threads that made them, also of those just entered."""
    global _global, _base
    threads = [call.thread for call in (*_calls, *entered)]
    while _calls and _calls[0].is_for_all:
        _base = replace(_base, **_calls.pop(0).changes)
    _global = _seen_by(None)
    for thread in threads:
        has_own = any(call.thread is thread and not call.is_for_all for call in _calls)
        thread["kept"] = _seen_by(thread) if has_own else None
        if thread["outer"] is None:
            thread["settings"] = thread["kept"]


def _seen_by(thread: dict[str, Any] | None) -> Settings:
    """Return the base with the calls for all and those of a thread, in the order in which they were made."""
    seen = _base
    for call in _calls:
        if call.is_for_all or call.thread is thread:
            seen = replace(seen, **call.changes)
    return seen
