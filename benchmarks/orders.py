"""Cost of orders of the nodes, and how much faster layers are on reordered graphs.

``python -m benchmarks experiment=reorder`` times attention layers on graphs such as ``cornell5+rcm``,
``experiment=reorder_segment`` aggregations. ``python -m benchmarks.orders`` measures the cost of these orders and the
gathers that are estimated to miss, adds to ``results/bench/<gpu>/reorder-cost.csv`` what is not there yet for these
sources, and prints both side by side.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch_geometric.data import Data

from benchmarks import CONFIGS
from benchmarks.graphs import benchmark_graph, recipe_of
from benchmarks.results import Rows, Table, default_folder, environment, file_stem, markdown, now
from benchmarks.tables import TITLES, in_order, label, milliseconds, place_of, timed
from pyg_dfgnn.transforms import Reorder, break_even_epochs

FIELDS = "graph nodes edges cost_s misses_before misses_after gpu torch cuda pyg cupy commit digest time".split()


def experiment_graphs() -> list[str]:
    """The reordered graphs of the experiment."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return [name for name in compose("bench", ["experiment=reorder"]).graphs if "+" in name]


def measure(name: str, device: torch.device, small: bool) -> dict[str, Any]:
    """Return the row of a reordered graph, such as ``cornell5+rcm``, or of its miniature."""
    graph = benchmark_graph(name.partition("+")[0], device, small=small)
    reorder = Reorder(recipe_of(name).order)
    # The first call of a process also loads libraries.
    for edge_index in (graph.edge_index[:, :1], graph.edge_index):
        reorder(Data(edge_index=edge_index, num_nodes=graph.num_src))
    assert reorder.report is not None
    return {
        "graph": name,
        "nodes": graph.num_src,
        "edges": graph.num_edges,
        "cost_s": f"{reorder.report.cost_s:.4g}",
        "misses_before": f"{reorder.report.misses_before:.4f}",
        "misses_after": f"{reorder.report.misses_after:.4f}",
        "time": now(),
        **environment(device),
    }


def gains_table(costs: Rows, times: Rows) -> str:
    """Return a table: how many times faster forward and backward of each layer is on each reordered graph.

    A cell holds the factor of each dtype, float32 with the calls after which the order has paid for itself.

    Args:
        costs: Rows of :func:`measure`.
        times: Rows of the experiment, those on the graphs in their own order among them.
    """
    time_ms = {(*place_of(row), label(row)): milliseconds(row) for row in timed(times) if row["direction"] == "fwd+bwd"}
    cost_of = {row["graph"]: row for row in costs}
    cells: dict[str, dict[str, list[str]]] = {}
    for (layer, size, direction, graph, implementation), after_ms in time_ms.items():
        before_ms = time_ms.get((layer, size, direction, graph.partition("+")[0], implementation))
        if before_ms is None or graph not in cost_of:
            continue
        calls = break_even_epochs(float(cost_of[graph]["cost_s"]), before_ms / 1e3, after_ms / 1e3)
        pays = implementation == TITLES["fused"] and calls < math.inf
        text = f"{before_ms / after_ms:.2f}" + (f" ({calls:,})" if pays else "")
        cells.setdefault(graph, {}).setdefault(layer, []).append(text)
    layers = dict.fromkeys(layer for line in cells.values() for layer in line)
    body = []
    for graph in in_order(cells):
        cost = cost_of[graph]
        misses = f"{float(cost['misses_before']):.0%} to {float(cost['misses_after']):.0%}"
        factors = (", ".join(cells[graph].get(layer, ())) for layer in layers)
        body.append([graph, f"{float(cost['cost_s']):.2g}", misses, *factors])
    return markdown(["graph", "cost, s", "misses", *layers], body)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", help="such as cornell5+rcm (default: those of the experiment)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="(default: results/bench; outputs/bench if small or on a CPU)")
    parser.add_argument("--small", action="store_true", help="miniature graphs")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    folder = (options.folder or default_folder("bench", device, options.small)) / file_stem(device, options.small)
    table = Table(folder / "reorder-cost.csv", FIELDS)
    done = {(row["graph"], row["digest"]) for row in table.rows()}
    for name in options.graphs or experiment_graphs():
        if (name, environment(device)["digest"]) in done:
            continue
        try:
            table.append([measure(name, device, options.small)])
        except (FileNotFoundError, ModuleNotFoundError) as error:
            print(f"skipped {name}: {error}")
    # A run with other sources leaves rows behind that its own replace.
    costs = list({row["graph"]: row for row in table.rows()}.values())
    table.keep(costs)
    shown = FIELDS[: FIELDS.index("gpu")]
    print(markdown(shown, ([row[column] for column in shown] for row in costs)))
    times = folder / "reorder.csv"
    if times.exists():
        print(gains_table(costs, Table.read(times)))
    else:
        print(f"no times in {times}: python -m benchmarks experiment=reorder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
