"""The relational family: what a layer computes of typed edges, and how PyG and other schedules compute it."""

from __future__ import annotations

from benchmarks.case import Family
from benchmarks.cases.relational.case import LAYERS, RelationalCase
from benchmarks.cases.relational.implementations import IMPLEMENTATIONS

RELATIONAL = Family(tuple(LAYERS), RelationalCase.of, IMPLEMENTATIONS)

__all__ = ["IMPLEMENTATIONS", "LAYERS", "RELATIONAL", "RelationalCase"]
