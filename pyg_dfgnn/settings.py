"""Settings of a user for all kernels at once: schedule, determinism, and how a fallback is reported."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.profiling import begin, end

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
        deterministic: True refuses schedules whose results may differ between runs, and leaves no few edges to PyG,
            False allows them, None follows `torch.are_deterministic_algorithms_enabled()`.
        fallback: What happens where no fused kernel can run, or where the schedule that was asked for cannot and
            `"row_split"` takes its place: `"log"` reports each reason once, `"error"` raises `UnsupportedError`,
            `"silent"` reports nothing. With `"error"`, tensors on a CPU raise an error only where there is a GPU.
        check_ids: When ids of new edges are checked. With `"later"` nothing waits for the device: kernels leave out
            edges with an id out of range, `IdRangeError` is raised at the next call of a layer, and a small graph is
            measured, for better schedules and compiled messages, once its edges come again. With `"now"` the first call
            with new edges waits for the device, checks the ids and measures the graph.
        compile_messages: Whether layers that :func:`pyg_dfgnn.accelerate` has marked run compiled messages; False
            leaves them to PyG. The environment variable `PYG_DFGNN_COMPILE_MESSAGES=0` makes False the default.
        edge_chunks: Whether compiled messages that make rows of edges, such as networks on `[x_i, x_j, e]`, run some
            targets at a time on large graphs, and not all edges at once: in a fraction of the memory, and in
            more time.
        linear: Whose products linear layers have. With `"torch"` they stay as they are. With `"kernels"`
            :func:`pyg_dfgnn.accelerate` makes drop-ins of them, which give large products in float32 to kernels.
        profile: Whether layers and programs are ranges in torch's profiler, and in NVTX where there is a GPU, and calls
            of layers are counted for :func:`pyg_dfgnn.stats`. Holds for the whole process while it is on there or in a
            block of any thread; calls do nothing for it while it is off.

    Attributes:
        leaves_new: Whether new edges stay unmeasured.
        leaves_few: Whether PyG's code takes few edges, whose results may differ between runs.
    """

    schedule: str = "auto"
    deterministic: bool | None = None
    fallback: str = "log"
    check_ids: str = "later"
    compile_messages: bool = os.environ.get("PYG_DFGNN_COMPILE_MESSAGES", "1") != "0"
    linear: str = "torch"
    edge_chunks: bool = False
    # Kernels are chosen alike with and without.
    profile: bool = field(default=False, compare=False)
    # Attributes, since each layer asks for them in each call.
    leaves_new: bool = field(init=False, compare=False, repr=False)
    leaves_few: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("deterministic", self.deterministic, (None, True, False))
        check_choice("fallback", self.fallback, FALLBACKS)
        check_choice("check_ids", self.check_ids, ("later", "now"))
        check_choice("compile_messages", self.compile_messages, (True, False))
        check_choice("linear", self.linear, ("torch", "kernels"))
        check_choice("edge_chunks", self.edge_chunks, (True, False))
        check_choice("profile", self.profile, (True, False))
        new = self.schedule == "auto" and self.check_ids == "later"
        object.__setattr__(self, "leaves_new", new)
        object.__setattr__(self, "leaves_few", new and not self.deterministic)


_lock = threading.Lock()
# What all threads see outside of blocks.
_global = Settings()


class _Blocks(threading.local):
    # Runs in every new thread, which starts outside of any block. Unlike a ContextVar, torch.compile can trace it.
    def __init__(self) -> None:
        # The settings of the innermost block; None without.
        self.settings: Settings | None = None
        # What the blocks around it had: settings, and what was around these.
        self.outer: tuple[Settings | None, Any] | None = None


_blocks = _Blocks()


def current() -> Settings:
    """Return the settings in force in this thread."""
    return _blocks.settings or _global


def settings(**changes: Any) -> None:
    """Change settings for the whole process; a setting that is not named keeps its value.

    Threads inside a block of :class:`local_settings` see the change after it. Functions compiled by `torch.compile` are
    compiled anew.

    Args:
        changes: Fields of :class:`Settings`.

    Raises:
        ValueError: No such setting, or a value that is not among its choices.

    Example:
        >>> settings(fallback="error")
    """
    global _global
    _check_names(changes)
    with _lock:
        before, _global = _global, replace(_global, **changes)
        if _global.profile and not before.profile:
            begin()
        elif before.profile and not _global.profile:
            end()


def _check_names(changes: Mapping[str, Any]) -> None:
    for name in changes:
        check_choice("settings", name, [each.name for each in fields(Settings) if each.init])


class local_settings:
    """Change settings for one thread and one `with` block; a setting that is not named keeps its value.

    A function compiled by `torch.compile` keeps the settings of the block that it was traced under.

    Args:
        changes: Fields of :class:`Settings`.

    Raises:
        ValueError: No such setting, or a value that is not among its choices.

    Example:
        >>> with local_settings(schedule="row_split"):
        ...     out = model(x, edge_index)
    """

    def __init__(self, **changes: Any) -> None:
        _check_names(changes)
        replace(_global, **changes)  # refuses wrong values
        self._changes = changes

    def __enter__(self) -> Settings:
        inside = replace(current(), **self._changes)
        _enter(inside)
        if self._changes.get("profile"):
            begin()
        return inside

    def __exit__(self, *exc: object) -> None:
        if self._changes.get("profile"):
            end()
        # Another thread may end the block, as a generator that is thrown away.
        if _blocks.outer is not None:
            _leave()


def _enter(inside: Settings) -> None:
    _blocks.outer = _blocks.settings, _blocks.outer
    _blocks.settings = inside


def _leave() -> None:
    _blocks.settings, _blocks.outer = _blocks.outer  # type: ignore[misc]
