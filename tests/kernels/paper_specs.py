"""The specialised modules of the schedules `smmf` and `pmf` that stand for all of them."""

import itertools

import torch

from pyg_dfgnn.dispatch.attention.paper import ABLATIONS, pmf, smmf
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.statements.spec import Spec
from tests.covering import Row, covering_calls

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((64, 1), (3, 7), (8, 16), (1, 128), (2, 131), (1, 512))
SOURCES = (("forward", smmf), ("targets", smmf), ("forward", pmf), ("targets", pmf), ("sources", pmf))


def problem(row: Row) -> AttentionProblem:
    heads, channels = row["shape"]
    device = torch.device("cpu")
    return AttentionProblem(row["score"], heads, channels, row["dtype"], device, row["edge"], row["dropout"])


def paper_specs() -> list[Spec]:
    """A covering set of constants for each source, and each ablation once."""
    # A hub leaves room for one head in a block of smmf, and is shared by the warps of a block of pmf.
    graphs = {edges: Graph.of(torch.zeros(2, edges, dtype=torch.long), 1) for edges in (2, 20000)}
    axes = {"score": ("dot", "cosine", "add"), "dtype": DTYPES, "shape": SHAPES, "edges": tuple(graphs)}
    rows = covering_calls(axes, lambda row: row["edges"] == 2 or not (row["edge"] or row["dropout"]))
    # Eight edges of a row at once.
    rows.append(
        {"score": "add", "dtype": torch.float32, "shape": (8, 16), "edges": 20000, "edge": False, "dropout": False}
    )
    cases = [(*source, row) for source in SOURCES for row in rows]
    cases += [("forward", candidate, row) for candidate, row in zip(ABLATIONS.values(), itertools.cycle(rows))]
    return [
        candidate.specs(problem(row), direction, candidate.plan_pass(problem(row), direction, graphs[row["edges"]]))[0]
        for direction, candidate, row in cases
    ]
