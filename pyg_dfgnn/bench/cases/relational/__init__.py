"""The relational family: what a layer computes of typed edges, and how PyG and other schedules compute it."""

from __future__ import annotations

from pyg_dfgnn.bench.case import Case, Family
from pyg_dfgnn.bench.cases.relational.case import LAYERS, RelationalCase
from pyg_dfgnn.bench.cases.relational.implementations import IMPLEMENTATIONS


def check_groups() -> dict[str, list[Case]]:
    """The correctness grid: none, until the family has kernels whose cases cover their constants."""
    return {}


RELATIONAL = Family(tuple(LAYERS), (), {}, RelationalCase.of, IMPLEMENTATIONS, check_groups)

__all__ = ["IMPLEMENTATIONS", "LAYERS", "RELATIONAL", "RelationalCase"]
