"""Passes: pure functions from a program to one with equal results, and the pipeline of them."""

from pyg_dfgnn.ir.passes.compact import compact, decompact
from pyg_dfgnn.ir.passes.differentiate import differentiate
from pyg_dfgnn.ir.passes.linear import aggregate_first, reorder, scale_first
from pyg_dfgnn.ir.passes.parts import join_pads, push_slices, split_concats
from pyg_dfgnn.ir.passes.pipeline import PASSES, Passes, RowCounts, Stage, optimise, rounded
from pyg_dfgnn.ir.passes.sums import share_sums
from pyg_dfgnn.ir.simplify import common_subexpressions, remove_dead

__all__ = [
    "PASSES",
    "Passes",
    "RowCounts",
    "Stage",
    "aggregate_first",
    "common_subexpressions",
    "compact",
    "decompact",
    "differentiate",
    "join_pads",
    "optimise",
    "push_slices",
    "remove_dead",
    "reorder",
    "rounded",
    "scale_first",
    "share_sums",
    "split_concats",
]
