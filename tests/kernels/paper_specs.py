"""The specialised modules of the schedules `smmf` and `pmf` that stand for all of them."""

import torch

from pyg_dfgnn.dispatch.attention.paper import ABLATIONS, pmf, smmf
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.statements.spec import Spec
from tests.kernels.covering import Row, covering

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((64, 1), (3, 7), (8, 16), (1, 128), (2, 131), (1, 512))
SOURCES = (("forward", smmf), ("targets", smmf), ("forward", pmf), ("targets", pmf), ("sources", pmf))


def problem(row: Row) -> AttentionProblem:
    heads, channels = row["shape"]
    device = torch.device("cpu")
    return AttentionProblem(row["score"], heads, channels, row["dtype"], device, row["edge"], row["dropout"])


def is_supported(row: Row) -> bool:
    """The cosine score takes no edge features."""
    return not (row["edge"] and row["score"] == "cosine")


def paper_specs() -> list[Spec]:
    """A covering set of constants for each source, and each ablation once."""
    axes = {"score": ("dot", "cosine", "add"), "dtype": DTYPES, "shape": SHAPES}
    rows = covering({**axes, "edge": (False, True), "dropout": (False, True)}, is_supported)
    # Calls without edge features and dropout are capped at fewer registers.
    plain = covering({**axes, "edge": [False], "dropout": [False]})
    # A hub leaves room for one head in a block of smmf, and is shared by the warps of a block of pmf.
    light, heavy = (Graph.of(torch.zeros(2, edges, dtype=torch.long), 1) for edges in (2, 20000))
    cases = [(*source, row, light) for source in SOURCES for row in rows + plain]
    cases += [(*source, row, heavy) for source in SOURCES for row in plain]
    cases += [("forward", candidate, row, light) for candidate, row in zip(ABLATIONS.values(), rows, strict=False)]
    return [
        candidate.specs(problem(row), direction, candidate.plan_pass(problem(row), direction, graph))[0]
        for direction, candidate, row, graph in cases
    ]
