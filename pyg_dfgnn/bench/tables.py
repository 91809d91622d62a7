"""Markdown tables of timing results: times side by side, speed-ups, ablations, choices, the state of the targets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import product
from statistics import geometric_mean
from typing import Any

from pyg_dfgnn.bench.graphs import RECIPES, TABLE_1
from pyg_dfgnn.bench.results import Rows, markdown
from pyg_dfgnn.bench.targets import (
    CHOICE_LOSS,
    EAGER_MS,
    FASTER_IN_PAPER,
    HEADS_RATIO,
    PEAK_MB,
    REPLAY_MS,
    SPEEDUP,
    TARGETS,
    Key,
    best_peer,
    verdict,
)
from pyg_dfgnn.dispatch.attention.row_split import has_tangent
from pyg_dfgnn.dispatch.core import BACKWARD, BY_NAME

NAMES = ("graph", "score", "heads", "channels", "dtype", "implementation", "schedule", "direction", "state")
SHOWN = {
    "pyg": "PyG",
    "unfused": "cuSPARSE, unfused",
    "compile": "torch.compile of PyG",
    "flex": "FlexAttention",
    "dgl": "DGL",
}
"""Other implementations, as tables and figures name them."""
KINDS = {"batch": TABLE_1[:6], "full": TABLE_1[6:], "all": TABLE_1}

Row = Mapping[str, Any]
Found = dict[tuple[str, ...], Row]


def latest(rows: Rows) -> Found:
    """The last row of every measured thing; a resumed run appends."""
    return {tuple(str(row[name]) for name in NAMES): row for row in rows}


def timed(rows: Rows, state: str = "warm") -> list[Row]:
    """The last rows with a time in one state of the cache."""
    return [r for r in latest(rows).values() if r["status"] == "ok" and r["state"] == state and r["score"] != "graph"]


def label(row: Row) -> str:
    """The implementation, ours with the schedule that was asked for."""
    if row["implementation"] != "fused":
        return SHOWN[row["implementation"]]
    return "ours" if row["schedule"] in ("", "auto") else f"ours, {row['schedule']}"


def size(row: Row) -> str:
    return f"H={row['heads']} d={row['channels']}"


def milliseconds(row: Row) -> float:
    return float(row["median_ms"])


def in_order(names: Iterable[str]) -> list[str]:
    """Graphs without repetition, as the recipes list them; batches of other sizes by their count."""
    order = list(RECIPES)

    def place(name: str) -> tuple[int, int]:
        stem, _, count = name.partition("@")
        return order.index(stem), int(count or 0)

    return sorted(dict.fromkeys(names), key=place)


def _schedules(row: Row) -> str:
    """The schedule of each walk of a direction; one name where they agree."""
    walks = ["forward"] if row["direction"] == "fwd" else ["forward", "targets", "sources"]
    names = [row[f"{walk}_schedule"] for walk in walks]
    return str(names[0]) if len(set(names)) == 1 else "/".join(map(str, names))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{milliseconds(row):.4g}" if row["status"] == "ok" else str(row["status"]).split(":")[0]


def times_table(rows: Rows, state: str = "warm") -> str:
    """Median milliseconds: one line per layer, size, direction and implementation, one column per graph."""
    shown = [row for row in latest(rows).values() if row["state"] in (state, "") and row["score"] != "graph"]
    graphs = in_order(row["graph"] for row in shown)
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in shown:
        key = (row["layer"], size(row), row["direction"], label(row), row["dtype"])
        lines.setdefault(key, {})[row["graph"]] = row
    body = [[*key, *(_cell(line.get(graph)) for graph in graphs)] for key, line in sorted(lines.items())]
    return markdown(["layer", "size", "direction", "implementation", "dtype", *graphs], body)


def peers_table(rows: Rows) -> str:
    """Our times beside the fastest right result of another package."""
    body = []
    for row in sorted(timed(rows), key=lambda r: (r["layer"], size(r), r["direction"], r["dtype"], r["graph"])):
        peer = best_peer(_key(row), row["graph"])
        if label(row) == "ours" and peer is not None:
            what = [row["layer"], size(row), row["direction"], row["dtype"], row["graph"]]
            ratio = peer.time_ms / milliseconds(row)
            name = peer.name if peer.key[3] == row["dtype"] else f"{peer.name} ({peer.key[3]})"
            body.append([*what, f"{milliseconds(row):.4g}", f"{peer.time_ms:.4g}", name, f"{ratio:.2f}x"])
    return markdown(["layer", "size", "direction", "dtype", "graph", "ours", "peer", "package", "faster"], body)


def _key(row: Row) -> Key:
    return row["score"], int(row["heads"]), int(row["channels"]), row["dtype"], row["direction"]


def targets_table(rows: Rows) -> str:
    """Each target with the measured time and 'reached' or by how much it is missed."""
    found = {(_key(row), row["graph"]): row for row in timed(rows) if label(row) == "ours"}
    body: list[list[Any]] = []
    for key, by_graph in TARGETS.items():
        for graph, target in by_graph.items():
            row = found.get((key, graph))
            if row is None:
                continue
            levels = (target.must, target.release, target.aim)
            verdicts = [verdict(milliseconds(row), level) for level in levels]
            shown = ["" if level is None else level for level in levels]
            body.append([_name(key), graph, f"{milliseconds(row):.4g} ms", *shown, *verdicts])
    for (key, graph), limit in PEAK_MB.items():
        row = found.get((key, graph))
        if row is not None and row["peak_mb"]:
            value = float(row["peak_mb"])
            body.append([f"{_name(key)} peak", graph, f"{value:.0f} MB", limit, "", "", verdict(value, limit), "", ""])
    for state, limit in (("warm", EAGER_MS), ("replay", REPLAY_MS)):
        for row in timed(rows, state):
            if (label(row), row["graph"], row["direction"], size(row)) == ("ours", "b", "fwd", "H=1 d=128"):
                value = call_ms(row)
                what = f"{_name(_key(row))} {'eager' if state == 'warm' else state}"
                body.append([what, "b", f"{value:.4g} ms", limit, limit, "", *2 * [verdict(value, limit)], ""])
    return markdown(["what", "graph", "measured", "must", "release", "aim", "must?", "release?", "aim?"], body)


def _name(key: Key) -> str:
    score, heads, channels, dtype, direction = key
    return f"{score} {direction} {dtype} H={heads} d={channels}"


Speedups = dict[tuple[str, str, str, str, str], float]
"""(layer, size, direction, graph, label) -> times faster."""


def speedups(rows: Rows, baseline: str = "unfused", with_host: bool = False) -> Speedups:
    """How many times faster than a baseline every implementation is, float32, warm.

    Args:
        rows: Of an experiment.
        baseline: Name of the implementation to compare with.
        with_host: Take what the host needs for a call where that is longer than what the device needs.
    """
    cost = call_ms if with_host else milliseconds
    shown = [row for row in timed(rows) if row["dtype"] == "float32"]
    base = {_place(row): cost(row) for row in shown if row["implementation"] == baseline}
    return {
        (*_place(row), label(row)): base[_place(row)] / cost(row)
        for row in shown
        if _place(row) in base and row["implementation"] != baseline
    }


def call_ms(row: Row) -> float:
    """Milliseconds of an eager call: the slower of device and host."""
    return max(milliseconds(row), float(row["host_us"] or 0) / 1e3)


def _place(row: Row) -> tuple[str, str, str, str]:
    return row["layer"], size(row), row["direction"], row["graph"]


def speedup_table(rows: Rows) -> str:
    """Ours against unfused calls and PyG, with the schedules that ran, the share of the bandwidth, and the means."""
    against = [speedups(rows), speedups(rows, with_host=True), speedups(rows, "pyg")]
    shown = sorted(
        (row for row in timed(rows) if row["implementation"] == "fused" and row["dtype"] == "float32"),
        key=lambda row: (row["layer"], row["direction"], int(row["channels"]), label(row)),
    )
    body = []
    for graph in in_order(row["graph"] for row in shown):
        for row in (row for row in shown if row["graph"] == graph):
            factors = [each.get((*_place(row), label(row))) for each in against]
            cells = ["" if factor is None else f"{factor:.2f}x" for factor in factors]
            shares = [f"{100 * float(row[name]):.1f} %" for name in ("utilisation", "gather_roof")]
            what = [graph, row["layer"], size(row), row["direction"], label(row), _schedules(row)]
            body.append([*what, f"{milliseconds(row):.4g}", *cells, *shares])
    header = [
        "graph",
        "layer",
        "size",
        "direction",
        "implementation",
        "schedules",
        "ms",
        "over unfused",
        "with host",
        "over PyG",
    ]
    return markdown([*header, "of compulsory roof", "of gather roof"], body)


def means_table(rows: Rows, with_host: bool = False) -> str:
    """Geometric means of the speed-up over unfused calls: batches, full graphs, and all twelve data sets."""
    found = speedups(rows, with_host=with_host)
    labels = sorted({key[4] for key in found if key[4].startswith("ours")})
    body = []
    for (layer, direction), name in product(sorted({(key[0], key[2]) for key in found}), labels):
        factors = {
            key[3]: value for key, value in found.items() if (key[0], key[2], key[4]) == (layer, direction, name)
        }
        cells: list[str] = []
        for kind, graphs in KINDS.items():
            values = [factors[graph] for graph in graphs if graph in factors]
            if not values:
                cells.append("")
                continue
            mean, wanted = geometric_mean(values), SPEEDUP.get((kind, direction))
            judged = "" if wanted is None or name != "ours" else f", {verdict(wanted, mean)}"
            cells.append(f"{mean:.2f}x ({len(values)} of {len(graphs)}{judged})")
        slowest = min(factors, key=lambda graph: factors[graph])
        body.append([layer, direction, name, *cells, f"{factors[slowest]:.2f}x ({slowest})"])
    return markdown(["layer", "direction", "implementation", *KINDS, "least"], body)


def slower_table(rows: Rows) -> str:
    """Where another implementation is faster than ours: same graph, layer, size and direction, float32, warm."""
    body = []
    for baseline in dict.fromkeys(row["implementation"] for row in timed(rows) if row["implementation"] != "fused"):
        for key, factor in speedups(rows, baseline).items():
            if key[4] == "ours" and factor < 1.0:
                body.append([key[3], key[0], key[1], key[2], SHOWN[baseline], f"{1 / factor:.2f}x"])
    if not body:
        return "Nowhere."
    return markdown(["graph", "layer", "size", "direction", "implementation", "faster than ours"], body)


def rivals_table(rows: Rows) -> str:
    """The schedules side by side, and whether the faster one is the paper's."""
    shown = timed(rows)
    schedules = list(dict.fromkeys(row["schedule"] for row in shown))
    body = []
    for key in sorted({_place(row)[:3] for row in shown}):
        for graph in in_order(row["graph"] for row in shown):
            times = {row["schedule"]: milliseconds(row) for row in shown if _place(row) == (*key, graph)}
            if len(times) == len(schedules):
                fastest = min(times, key=lambda schedule: times[schedule])
                expected = FASTER_IN_PAPER.get((key[0], graph)) if key[1:] == ("H=1 d=128", "fwd") else None
                judged = "" if expected is None else f"{expected}: {'same' if expected == fastest else 'other'}"
                body.append([*key, graph, *(f"{times[schedule]:.4g}" for schedule in schedules), fastest, judged])
    return markdown(["layer", "size", "direction", "graph", *schedules, "faster", "in the paper"], body)


def ablation_table(rows: Rows) -> str:
    """Times relative to the first schedule measured on each graph."""
    shown = timed(rows)
    schedules = list(dict.fromkeys(row["schedule"] for row in shown))
    body = []
    for graph in in_order(row["graph"] for row in shown):
        times = {row["schedule"]: milliseconds(row) for row in shown if row["graph"] == graph}
        first = times.get(schedules[0])
        if first is not None:
            cells = [f"{times[s]:.4g} ms, {first / times[s]:.3f}x" if s in times else "" for s in schedules]
            body.append([graph, *cells])
    return markdown(["graph", *schedules], body)


def heads_table(rows: Rows) -> str:
    """8 heads of 16 against 1 of 128."""
    ours = [row for row in timed(rows) if label(row) == "ours" and row["direction"] in ("fwd", "fwd+bwd")]
    times = {(row["layer"], row["dtype"], row["direction"], row["graph"], size(row)): row for row in ours}
    body = []
    for key in sorted({key[:4] for key in times}):
        one, eight = times.get((*key, "H=1 d=128")), times.get((*key, "H=8 d=16"))
        if one is not None and eight is not None:
            ratio = milliseconds(eight) / milliseconds(one)
            cells = [f"{milliseconds(row):.4g}" for row in (one, eight)]
            body.append([*key, *cells, f"{ratio:.3f}", "reached" if ratio <= HEADS_RATIO else "missed"])
    header = ["layer", "dtype", "direction", "graph", "1 x 128 ms", "8 x 16 ms", "ratio"]
    return markdown([*header, f"at most {HEADS_RATIO}?"], body)


class Choice:
    """What `auto` takes on one case, and what it loses, forward or backward; times are those of each pass alone.

    `own_ms` is what the passes took when `auto` itself ran; the loss compares the times of the schedules it takes, so
    that the same kernels timed twice are no loss, unless `differs`: what another forward pass left makes other kernels
    of them. A backward pair is any pass over targets with any pass over sources,
    except that schedules which hand over from one to the other go with themselves. Where `row_split` reads over
    targets what
    a forward pass by `row_split` leaves, and another schedule went forward, `tangent_ms` counts: what `row_split`
    takes longer.
    """

    def __init__(
        self,
        walks: tuple[str, ...],
        times: Mapping[tuple[str, str], float],
        taken: tuple[str, ...],
        own_ms: float | None,
        differs: bool = False,
        tangent_ms: float = 0.0,
    ) -> None:
        self.own_ms = own_ms
        schedules = list(dict.fromkeys(schedule for schedule, _ in times))
        self.totals = {
            team: sum(times[schedule, walk] for schedule, walk in zip(team, walks, strict=True))
            + (tangent_ms if walks == BACKWARD and team[0] == "row_split" else 0.0)
            for team in product(schedules, repeat=len(walks))
            if all((schedule, walk) in times for schedule, walk in zip(team, walks, strict=True))
            and (len(set(team)) == 1 or not any(BY_NAME[schedule].hands_over for schedule in team))
        }
        self.taken = taken
        self.taken_ms = own_ms if differs else self.totals.get(taken)
        self.best = min(self.totals, key=lambda team: self.totals[team], default=None)

    @property
    def loss(self) -> float | None:
        """How much longer the chosen passes take than the fastest; None where a time is missing."""
        if self.best is None or self.taken_ms is None:
            return None
        return max(0.0, self.taken_ms / self.totals[self.best] - 1.0)


def tangent_cost(score: str, times: Mapping[tuple[str, str], float], forward: str) -> float:
    """What `row_split` takes longer than the schedule that went forward, where its pass over targets reads a
    tangent."""
    if not has_tangent(score, False):
        return 0.0
    needed, taken = (times.get((schedule, "forward")) for schedule in ("row_split", forward))
    return 0.0 if needed is None or taken is None else max(0.0, needed - taken)


def choices(rows: Rows) -> dict[tuple[str, str, str, str, str], Choice]:
    """(graph, layer, size, dtype, 'forward' or 'backward') -> what was chosen among what."""
    shown = timed(rows)
    found = {}
    for graph in in_order(row["graph"] for row in shown):
        mine = [row for row in shown if row["graph"] == graph]
        for case in dict.fromkeys((row["layer"], size(row), row["dtype"]) for row in mine):
            measured = [row for row in mine if (row["layer"], size(row), row["dtype"]) == case]
            own = {row["direction"]: row for row in measured if row["schedule"] == "auto"}
            if not own:
                continue
            auto = next(iter(own.values()))
            times = {(r["schedule"], r["direction"]): milliseconds(r) for r in measured if r["schedule"] != "auto"}
            for direction, walks in (("forward", ("forward",)), ("backward", BACKWARD)):
                taken = tuple(auto[f"{walk}_schedule"] for walk in walks)
                own_ms = sum(milliseconds(own[walk]) for walk in walks) if own.keys() >= set(walks) else None
                # Asked for by name, rows also runs forward and leaves a tangent for its pass over targets.
                differs = walks == BACKWARD and "row_split" in taken and auto["forward_schedule"] != "row_split"
                differs = differs and has_tangent(auto["score"], False)
                tangent_ms = tangent_cost(auto["score"], times, auto["forward_schedule"])
                chosen = Choice(walks, times, taken, own_ms, differs, tangent_ms)
                if chosen.totals:
                    found[graph, case[0], case[1], case[2], direction] = chosen
    return found


def choice_table(rows: Rows) -> str:
    """What `auto` takes against the fastest candidate; worst first."""
    body = []
    found = choices(rows)
    for key in sorted(found, key=lambda key: -(found[key].loss or 0.0)):
        choice = found[key]
        loss, best = choice.loss, choice.best
        shown = "not measured" if loss is None else f"{100 * loss:.1f} %"
        homogeneous = {team[0]: total for team, total in choice.totals.items() if len(set(team)) == 1}
        times = ", ".join(f"{name} {total:.4g}" for name, total in homogeneous.items())
        names = ["/".join(dict.fromkeys(team)) if team else "" for team in (choice.taken, best)]
        own_ms = "" if choice.own_ms is None else f"{choice.own_ms:.4g}"
        body.append([*key, *names, shown, own_ms, times])
    losses = [choice.loss for choice in found.values() if choice.loss is not None]
    over = sum(loss > CHOICE_LOSS for loss in losses)
    limit = f"{100 * CHOICE_LOSS:.0f} %"
    head = f"{len(losses)} choices, {over} lose more than {limit}, {len(found) - len(losses)} not measured"
    header = ["graph", "layer", "size", "dtype", "pass", "auto takes", "fastest", "loss", "auto ms", "ms by schedule"]
    return f"{head}\n\n{markdown(header, body)}"


def not_timed(rows: Rows) -> str:
    """What has no time, and why; what has the same reason on several graphs or in several directions in one line."""
    graphs: dict[tuple[str, str], dict[str, None]] = {}
    for row in latest(rows).values():
        if row["status"] == "ok":
            continue
        what = f"{row['layer']} {size(row)} {row['dtype']}, {label(row)}"
        if not row["status"].startswith("not run"):
            what += f", {row['direction']}"
        graphs.setdefault((what, row["status"]), {})[row["graph"]] = None
    return "\n".join(f"- {', '.join(names)}: {what}: {status}" for (what, status), names in graphs.items())


def line(row: Row) -> str:
    """One row for the terminal."""
    what = f"{row['graph']}: {row['layer']} H={row['heads']} d={row['channels']} {row['dtype']}"
    how = f"{label(row)} {row['direction']}"
    if row["status"] != "ok":
        return f"{what} {how}: {row['status']} {row.get('worst', '')} {row.get('error', '')}".strip()
    extra = [f"iqr {row['iqr_ms']}", f"n {row['n']}"]
    extra += [f"{name} {row[key]}" for name, key in (("error", "error"), ("peak MB", "peak_mb")) if row.get(key)]
    return f"{what} {how}: {row['state']} {row['median_ms']} ms, {', '.join(extra)}"


def _times(rows: Rows) -> list[tuple[str, str]]:
    titles = {"warm": "Warm", "flushed": "L2 flushed", "replay": "Replayed CUDA graph"}
    states = {row["state"] for row in rows}
    return [(f"{title}, median ms", times_table(rows, state)) for state, title in titles.items() if state in states]


Part = tuple[str, Callable[[Rows], str]]
_SPEEDUP: tuple[Part, ...] = (
    ("Speed-up", speedup_table),
    ("Geometric means of the speed-up over unfused cuSPARSE calls", means_table),
    ("The same with the host's time, where that is longer", partial(means_table, with_host=True)),
    ("Slower than a baseline", slower_table),
)
_PEERS: tuple[Part, ...] = (
    ("Targets", targets_table),
    ("Slower than a baseline", slower_table),
    ("Other packages, as measured once", peers_table),
)
PARTS: dict[str, tuple[Part, ...]] = {
    **dict.fromkeys(("peers", "compile", "tf32"), _PEERS),
    **dict.fromkeys(("fig9", "fig15", "fig10a", "fig10b", "fig13", "fig14"), _SPEEDUP),
    "fig11": (("Gain over feature-parallel fusion", ablation_table),),
    "fig12": (("Side by side, ms", rivals_table),),
    "heads": (("8 heads against 1", heads_table),),
    "choice": (("Choices", choice_table),),
}
"""What is shown of an experiment beside its times."""


def of(name: str, rows: Rows, without: Collection[str] = ()) -> str:
    """All tables of an experiment but those with a title of `without`."""
    parts = [] if name == "choice" else _times(rows)
    parts += [(title, table(rows)) for title, table in PARTS.get(name, ()) if title not in without]
    missing = not_timed(rows)
    if missing:
        parts.append(("Not timed", missing))
    return "\n\n".join(f"#### {title}\n\n{text}" for title, text in parts)
