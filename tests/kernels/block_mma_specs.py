"""The specialised modules of the schedule `block_mma` that stand for all of them."""

import torch

from pyg_dfgnn.dispatch.attention import block_mma
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.statements.op import DIRECTIONS
from pyg_dfgnn.statements.spec import Spec
from tests.covering import Row, covering

# Wide and narrow rows, odd numbers of products, heads that share a thread block or do not.
SHAPES = ((1, 128), (4, 64), (8, 16), (1, 32), (3, 24), (6, 8), (1, 96), (3, 40))
# Float32 with and without rounding to TF32.
PRODUCTS = ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False))
# One graph that suits windows of 64 rows, one that suits 80, one of many steps, one whose columns are listed.
SIZES = ((64, 64), (80, 80), (200, 200), (70, 40))


def problem(row: Row) -> AttentionProblem:
    (heads, channels), (dtype, tf32) = row["shape"], row["product"]
    device = torch.device("cpu")
    return AttentionProblem(row["score"], heads, channels, dtype, device, False, False, tf32=tf32)


def taken(row: Row) -> bool:
    """Listed columns take no full float32."""
    return row["size"] != (70, 40) or row["product"] != (torch.float32, False)


def block_mma_specs() -> list[Spec]:
    """A covering set of what dispatch plans for each source."""
    axes = {"score": ("dot", "cosine", "add"), "product": PRODUCTS, "shape": SHAPES, "size": SIZES}
    rows = covering(axes, taken, [("score", "product")])
    # Heads in pairs where other products have four.
    pairs = {"score": ("dot", "cosine"), "product": [(torch.float32, True)], "shape": [(8, 16)]}
    rows += covering({**pairs, "size": ((64, 64), (70, 40))})
    graphs = {size: Graph.of(torch.ones(size).nonzero().t(), *size) for size in SIZES}
    return [
        spec
        for direction in DIRECTIONS
        for row in rows
        for graph in [graphs[row["size"]]]
        for spec in block_mma.specs(problem(row), direction, block_mma.plan_pass(problem(row), direction, graph))
    ]
