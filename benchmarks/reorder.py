"""What each order of the nodes costs, and after how many calls of a layer it has paid for itself.

``python -m benchmarks experiment=reorder`` times attention layers on graphs such as ``cornell5+rcm``,
``experiment=reorder_segment`` aggregations. This command measures the cost of the orders of those graphs and the
gathers that are estimated to miss, adds to ``results/bench/<gpu>/reorder-cost.csv`` what is not there yet for these
sources, and prints both side by side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch_geometric.data import Data

from benchmarks import CONFIGS
from benchmarks.graphs import benchmark_graph, recipe_of
from benchmarks.orders import GAIN, gains
from benchmarks.results import Table, environment, markdown, now, parsed
from pyg_dfgnn.transforms import Reorder

FIELDS = "graph nodes edges cost_s misses_before misses_after gpu torch cuda pyg cupy commit digest time".split()


def experiment_graphs() -> list[str]:
    """The reordered graphs of the experiment."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return [name for name in compose("bench", ["experiment=reorder"]).graphs if "+" in name]


def measure(name: str, device: torch.device, small: bool) -> dict[str, Any]:
    """The row of a reordered graph.

    Args:
        name: Name of a graph, '+' and a method.
        device: Where the graph lies.
        small: A miniature graph.
    """
    graph = benchmark_graph(name.partition("+")[0], device, small=small)
    data = Data(edge_index=graph.edge_index, num_nodes=graph.num_src)
    reorder = Reorder(recipe_of(name).order)
    # The first call of a process also loads libraries.
    reorder(Data(edge_index=graph.edge_index[:, :1], num_nodes=graph.num_src))
    reorder(data)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", help="such as cornell5+rcm (default: those of the experiment)")
    options, device, folder = parsed(parser, arguments)
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
        print(markdown(GAIN, (row.values() for row in gains(costs, Table.read(times)))))
    else:
        print(f"no times in {times}: python -m benchmarks experiment=reorder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
