"""Store of the timings of candidates: remembered in the process, and on disk beside the compiled kernels."""

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from pyg_dfgnn.dispatch.gpu import gpu_of
from pyg_dfgnn.graph import Adjacency, Graph
from pyg_dfgnn.paths import kernel_cache_dir

Seconds = dict[str, dict[str, float]]
"""Time of each pass by each schedule, by direction."""

_logger = logging.getLogger("pyg_dfgnn")
_remembered: dict[str, Seconds] = {}


def _sources(family: Any, problem: Any, directions: Sequence[str], offers: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of the texts that a timing is about: the modules of every option that can run."""
    digest = hashlib.sha256()
    for direction, each in zip(directions, offers, strict=True):
        for name, option in each.items():
            if not option.reasons:
                for spec in family.by_name[name].specs(problem, direction, option.plan):
                    digest.update(spec.source.encode())
    return digest.hexdigest()[:16]


def _octave(value: float) -> int:
    """The power of two next to a value: graphs that differ by less share a timing."""
    return round(math.log2(value)) if value > 0 else -1


def _spread(side: Adjacency) -> list[float]:
    """Mean octave of the degree histogram over rows and over edges, in halves: more would tell batches apart."""
    octaves = torch.frexp(side.rowptr.diff().float()).exponent.long()
    rows = dict(enumerate(torch.bincount(octaves).tolist()))
    edges = {octave: 2**octave * count for octave, count in rows.items() if octave}
    return [round(2 * sum(o * n for o, n in each.items()) / max(1, sum(each.values()))) / 2 for each in (rows, edges)]


def _degrees(graph: Graph, directions: Sequence[str]) -> list[list[float]] | None:
    """Degrees of the sides that are traversed, kept with the graph; one host sync each, None where none is allowed."""
    kept = graph.derived("degrees", dict)
    names = ("csr", "csc") if "sources" in directions else ("csr",)
    for name in names:
        if name not in kept:
            if graph.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            kept[name] = _spread(getattr(graph, name))
    return [kept[name] for name in names]


def key_of(
    family: Any, problem: Any, graph: Graph, directions: Sequence[str], offers: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return what a timing is remembered by, as readable text; None while a new graph is captured.

    Sizes, degrees and how the candidates' own estimates compare count by octaves, so that similar graphs, such as the
    batches of one data set, share a timing; what a candidate reads from a graph beyond that shows in its estimate.

    Args:
        family: Whose kernels (:class:`~pyg_dfgnn.dispatch.core.Family`).
        problem: What is computed, a dataclass.
        graph: On which graph.
        directions: Which passes.
        offers: The options of each pass by schedule.
    """
    degrees = _degrees(graph, directions)
    if degrees is None:
        return None
    estimates = [
        {
            name: None if option.reasons else _octave(option.cost.seconds / each[family.fallback].cost.seconds)
            for name, option in each.items()
        }
        for each in offers
    ]
    values = {field.name: getattr(problem, field.name) for field in fields(problem) if field.name != "device"}
    facts = {
        "family": family.name,
        "gpu": gpu_of(problem.device).name,
        "sources": _sources(family, problem, directions, offers),
        "directions": list(directions),
        "problem": {name: v if isinstance(v, (int, float, str)) else str(v) for name, v in values.items()},
        "sizes": [_octave(size) for size in (graph.num_src, graph.num_dst, graph.num_edges)],
        "degrees": degrees,
        "estimates": estimates,
    }
    return json.dumps(facts, sort_keys=True)


def _path(key: str) -> Path:
    return kernel_cache_dir() / f"pyg_dfgnn-autotune-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def recall(key: str | None) -> Seconds | None:
    """The timing of a key, if one was ever taken; a file that cannot be read counts as none."""
    if key is None:
        return None
    seconds = _remembered.get(key)
    if seconds is None:
        seconds = _read(key)
        if seconds is not None:
            _remembered[key] = seconds
    return seconds


def _read(key: str) -> Seconds | None:
    try:
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
        if kept["key"] != json.loads(key):
            return None
        return {
            direction: {name: float(seconds) for name, seconds in times.items()}
            for direction, times in kept["seconds"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def remember(key: str, seconds: Seconds) -> None:
    """Keep a timing. The file appears whole or not at all.

    One that ran out of memory, for all candidates or some, or whose folder cannot be written, is kept for this process
    only.
    """
    _remembered[key] = seconds
    if any(not times or math.inf in times.values() for times in seconds.values()):
        return
    path = _path(key)
    text = json.dumps({"key": json.loads(key), "seconds": seconds}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", encoding="utf-8", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        _logger.info("the timing of an autotune is kept for this process only: %s", error)


def forget() -> None:
    """Forget what this process has read or timed; files stay."""
    _remembered.clear()
