"""Relational programs on the emulator: outputs and every gradient against the interpreter in float64."""

import pytest
import torch
from torch import Tensor

from pyg_dfgnn.dispatch import relational as dispatch
from pyg_dfgnn.dispatch.traversal import RowSplitPlan, items_per_block, joined_edges
from pyg_dfgnn.ir import IndexSpace, R, interpret
from pyg_dfgnn.ir.layers import rgcn_mean, rgcn_sum
from pyg_dfgnn.ir.passes import Passes, optimise
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ops.relational import Prepared, apply, prepared_for, traversal
from tests.covering import product
from tests.emu import ORDERS, needs_compiler
from tests.ir.cases import ALL_GRAPHS, PARTS, apart, case, gatv2, joined_heads, rows_named
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import assert_largest_close
from tests.kernels.relational_specs import (
    functions,
    gaussians_of,
    hgt_of,
    many_gaussians_of,
    maps_of,
    rgat_of,
    without_attention,
)

pytestmark = needs_compiler

PARAMETERS = ("wk", "wq", "wv", "key", "value", "weight", "w", "wp", "gate", "wd", "we")


LAYERS: dict[str, Program] = {
    "rgcn": rgcn_mean.program(x=(8,), weight=(8, 8)),
    "rgcn_sum": rgcn_sum.program(x=(8,), weight=(8, 8)),
    "rgat": without_attention(rgat_of(2, 4, 8)),
    "hgt": hgt_of(1, 8, 8),
    "maps": maps_of(5, 32, 3, 14),
    "gatv2": gatv2.program(x=(8,), xd=(8,), edge=(8,), w=(8, 6), wd=(8, 6), we=(8, 6), att=(2, 3)),
    "gaussians": gaussians_of(2, 64, 8),
    "many_gaussians": many_gaussians_of(6, 4, 2, 3),
    # More numbers of a source than a group of lanes joins.
    "wide_gaussians": gaussians_of(25, 32, 2),
    "heads": joined_heads.program(x=(192,), xd=(6,), gate=(6, 32)),
    **PARTS,
    # Parts that begin at a multiple of the numbers of a load, of which 16-bit rows have no wider one.
    "apart-halves": apart.program(x=(35,), edge=(35,)),
}
EVERY_GRAPH = product({"layer": ("rgcn", "rgat", "hgt"), "graph": tuple(ALL_GRAPHS)})
RUNS = [
    *((row["layer"], torch.float32, row["graph"]) for row in EVERY_GRAPH),
    *(
        (name, torch.float32, graph)
        for name in ("heads", "maps", "gaussians", "many_gaussians")
        for graph in ("hub", "duplicates", "dense", "no-edges-R3")
    ),
    *((name, torch.float32, graph) for name in PARTS for graph in ("hub", "duplicates", "no-edges-R3")),
    *(
        (name, torch.float32, graph)
        for name in ("thirds", "overlapping-40")
        for graph in ("dense", "isolated-R4", "no-targets", "loop-R2")
    ),
    ("thirds-64", torch.bfloat16, "duplicates"),
    ("thirds", torch.float16, "isolated-R4"),
    ("apart-halves", torch.bfloat16, "duplicates"),
    ("rejoined-68", torch.bfloat16, "dense"),
    # A maximum of one edge, which no rounding of logits moves to another.
    ("heads", torch.float16, "isolated-R4"),
    ("maps", torch.bfloat16, "isolated-R4"),
    ("gaussians", torch.bfloat16, "duplicates"),
    ("many_gaussians", torch.float16, "bipartite"),
    ("wide_gaussians", torch.float32, "dense"),
    *(("gatv2", torch.bfloat16, graph) for graph in ("hub", "duplicates", "dense", "no-targets")),
    *(("rgcn_sum", torch.bfloat16, graph) for graph in ALL_GRAPHS),
]


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch):
    """Let all graphs share the kernels of one, with short chunks, and edges or rows side by side in a warp.

    The chunks of a row are merged by another kernel or, in some kernels, joined in their thread block.
    """
    sizes = rows_named("dense").sizes

    def plan(problem, side):
        if side is None:
            return dispatch.plan_step(problem, side)
        constants = dispatch.constants_of(problem, wide=len(problem.text) % 2 == 0)
        if len(problem.text) % 3 == 0:
            constants |= {"JOINED": 1}
            return RowSplitPlan(constants, joined_edges(side, items_per_block(constants)), 1)
        return RowSplitPlan({**constants, "ORDERED": 1}, 4, 1)

    monkeypatch.setattr(Passes, "run", lambda _, traced, sizes_here, wrt: optimise(traced, sizes, wrt=wrt)[-1].program)
    monkeypatch.setattr(traversal, "plan_step", plan)


def results(
    traced: Program, rows: IndexSpace, inputs: dict[str, Tensor], upstream: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs and the gradient of each input."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    is_reference = leaves["x"].dtype == torch.float64
    outputs = interpret(traced, rows, leaves) if is_reference else apply(traced, rows, leaves)
    upstream = {name: gradient.to(outputs[name].dtype) for name, gradient in upstream.items()}
    gradients = torch.autograd.grad(
        list(outputs.values()),
        list(leaves.values()),
        [upstream[name] for name in outputs],
        allow_unused=True,
        materialize_grads=True,
    )
    named = {f"grad {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: output.detach() for name, output in outputs.items()} | named


def drawn(traced: Program, graph: str, dtype: torch.dtype) -> tuple[IndexSpace, dict[str, Tensor], dict[str, Tensor]]:
    posed = case(traced, graph)
    scaled = {n: t.detach() * (8**-0.5 if n in PARAMETERS else 1.0) for n, t in posed.inputs.items()}
    inputs = {name: tensor.to(dtype) for name, tensor in scaled.items()}
    return posed.rows, inputs, {name: tensor.to(dtype) for name, tensor in posed.upstream.items()}


@pytest.mark.parametrize(("layer", "dtype", "graph"), RUNS, ids=lambda value: str(value).removeprefix("torch."))
def test_outputs_and_gradients(layer, dtype, graph):
    rows, inputs, upstream = drawn(LAYERS[layer], graph, dtype)
    order = ORDERS[list(ALL_GRAPHS).index(graph) % len(ORDERS)]
    with emulated_device(order, seed=1) as launched:
        actual = results(LAYERS[layer], rows, inputs, upstream)
        again = results(LAYERS[layer], rows, inputs, upstream)
        assert isinstance(prepared_for(LAYERS[layer], rows, inputs), Prepared)
    if rows.graph.num_edges:
        typed = any(value.domain is R for value in LAYERS[layer].values)
        assert {"relational_traversal", *(("segment_gemm", "segment_outer") if typed else ())} <= set(launched)
    if graph == "hub" and not layer.startswith("rgcn"):
        assert "relational_traversal_merge" in launched
    assert all(torch.equal(actual[name], again[name]) for name in actual), "two runs differ"
    wide = [{name: tensor.double() for name, tensor in some.items()} for some in (inputs, upstream)]
    assert_largest_close(dtype, actual, results(LAYERS[layer], rows, *wide), "relational")


def test_every_function():
    traced = functions.program(x=(4,), e=(4,))
    used = {value.op for value in traced.values if value.op in POINTWISE}
    assert used | {"pow", "leaky_relu"} == set(POINTWISE)
    posed = case(traced, "dense")
    inputs = {name: tensor.detach().float() for name, tensor in posed.inputs.items()}
    with emulated_device() as launched:
        out = apply(traced, posed.rows, inputs)["out"]
    assert launched[0] == "relational_traversal"
    expected = interpret(traced, posed.rows, {name: tensor.double() for name, tensor in inputs.items()})["out"]
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6 * expected.abs().max().item())


def test_attention_that_is_asked_for():
    traced = rgat_of(2, 4, 8)
    rows, inputs, _ = drawn(traced, "dense", torch.float32)
    with emulated_device() as launched:
        actual = apply(traced, rows, inputs)
    # The pass that weights the sources writes the attention.
    assert "relational_map" not in launched
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    expected = interpret(traced, rows, wide)
    assert_largest_close(torch.float32, actual, expected, "relational")


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_stays_in_its_rows(number):
    """As in the interpreter, such an input makes those outputs that depend on it no numbers, and no others."""
    traced = LAYERS["rgat"]
    rows, inputs, _ = drawn(traced, "isolated-R4", torch.float32)
    inputs["x"][3] = number
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    with emulated_device():
        actual = apply(traced, rows, leaves)["out"]
    expected = interpret(traced, rows, {name: tensor.double() for name, tensor in inputs.items()})["out"]
    assert torch.equal(actual.isfinite(), expected.isfinite())
    assert not actual.isfinite().all() and actual[3].isfinite().all() and actual[3].any()
