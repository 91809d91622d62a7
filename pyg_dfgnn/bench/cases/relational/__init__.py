"""The relational family: what a layer computes of typed edges, and how PyG and other schedules compute it."""

from __future__ import annotations

from pyg_dfgnn.bench.case import Family
from pyg_dfgnn.bench.cases.relational.case import LAYERS, RelationalCase
from pyg_dfgnn.bench.cases.relational.implementations import IMPLEMENTATIONS

RELATIONAL = Family(tuple(LAYERS), (), {}, RelationalCase.of, IMPLEMENTATIONS)

__all__ = ["IMPLEMENTATIONS", "LAYERS", "RELATIONAL", "RelationalCase"]
