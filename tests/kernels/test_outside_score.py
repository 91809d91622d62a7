"""Scores without a tuning: two stated outside the package, as a record and a CUDA struct, and those of SuperGAT."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.ops.core import draw_seed
from pyg_dfgnn.reference.attention import edge_attention
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.settings import settings
from pyg_dfgnn.statements import score as statements
from pyg_dfgnn.statements.scores import SUPERGAT_MX, SUPERGAT_SD, EdgeOperands, Score, register
from tests.covering import covering
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.kernels.nvrtc import ARCHS, compile_cubin, missing
from tests.kernels.problems import assert_largest_close, build_graph, heavy_graph, sparse_graph, square_graph
from tests.kernels.specs import spec_of

# S = -scale * (l_i - r_j + t_ij)^2, on scalars of nodes and edges.
DISTANCE = Score(
    name="distance",
    source="""
    struct Score : ScoreDefaults {
        static __device__ float difference(const Terms& t) { return t.target() - t.source() + t.edge; }

        static __device__ float logit(const Terms& t, const ScoreInputs& in) {
            const float z = difference(t);
            return -t.factor * in.scale * z * z;
        }

        static __device__ float edge_scalar_grad(float ds, const Terms& t, const ScoreInputs& in) {
            return -2.0f * in.scale * difference(t) * ds;
        }

        static __device__ float target_scalar_grad(float sum, float ds, const Terms& t, const ScoreInputs& in) {
            return sum + edge_scalar_grad(ds, t, in);
        }

        static __device__ float source_scalar_grad(float sum, float ds, const Terms& t, const ScoreInputs& in) {
            return sum - edge_scalar_grad(ds, t, in);
        }
    };""",
    reference=lambda o: -o.scale * (o.target_scalars - o.source_scalars + (0 if o.edge is None else o.edge)) ** 2,
    node_scalars="input",
    edge="scalar",
    numbers=("scale",),
    gradients=("value", "target_scalars", "source_scalars", "edge"),
)


def tanh_logits(o: EdgeOperands) -> Tensor:
    hidden = o.target + o.key + (0 if o.edge is None else o.edge)
    return o.scale * (o.parameter * hidden.tanh()).sum(-1)


# S = scale * <a, tanh(q_i + k_j + e_ij)>, Bahdanau's attention, on vectors with a parameter per head.
TANH = Score(
    name="tanh",
    source="""
    struct Score : ScoreDefaults {
        static __device__ float slope(const Channel& c, const ScoreInputs& in) {
            const float y = tanhf(c.target + c.source);
            return in.scale * c.parameter * (1.0f - y * y);
        }

        static __device__ float product(float sum, const Channel& c, const ScoreInputs& in) {
            return sum + in.scale * c.parameter * tanhf(c.target + c.source);
        }

        static __device__ float target_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
            return sum + ds * slope(c, in);
        }

        static __device__ float source_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
            return sum + ds * slope(c, in);
        }

        static __device__ float edge_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
            return sum + ds * slope(c, in);
        }

        static __device__ float parameter_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
            return sum + ds * in.scale * tanhf(c.target + c.source);
        }
    };""",
    reference=tanh_logits,
    target=True,
    key=True,
    edge="vector",
    parameter=("H", "C"),
    numbers=("scale",),
    gradients=("target", "key", "value", "parameter", "edge"),
)
SCORES = {score.name: score for score in (DISTANCE, TANH)}
UNTUNED = {**SCORES, SUPERGAT_MX.name: SUPERGAT_MX, SUPERGAT_SD.name: SUPERGAT_SD}
HEADS, NUMBERS = 8, {"scale": 0.7, "slope": 0.2}


def random_inputs(score: Score, graph: Graph, channels: int, dtype: torch.dtype, edge: bool) -> dict[str, Tensor]:
    """Inputs by the names of the operands, on the device of the graph."""
    nodes = {"target": graph.num_dst, "key": graph.num_src, "value": graph.num_src}
    inputs = {name: torch.randn(count, HEADS, channels).to(dtype) for name, count in nodes.items()}
    inputs["target_scalars"] = torch.randn(graph.num_dst, HEADS)
    inputs["source_scalars"] = torch.randn(graph.num_src, HEADS)
    inputs["parameter"] = torch.randn(HEADS, channels) / channels**0.5
    inputs["edge"] = torch.randn(graph.num_edges, HEADS)
    if score.edge == "vector":
        inputs["edge"] = torch.randn(graph.num_edges, HEADS, channels).to(dtype)
    taken = {*score.gradients} - (set() if edge else {"edge"})
    return {name: tensor.to(graph.device) for name, tensor in inputs.items() if name in taken}


def results(out: Tensor, inputs: dict[str, Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    """The output and its gradients, by name."""
    grads = torch.autograd.grad(out, list(inputs.values()), grad_out.to(out.dtype))
    return {"out": out.detach(), **{f"grad {name}": grad for name, grad in zip(inputs, grads, strict=True)}}


def fused(score: Score, graph: Graph, given: dict[str, Tensor], grad_out: Tensor, p: float) -> dict[str, Tensor]:
    """Output and gradients of the kernels, and the weights."""
    inputs = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    torch.manual_seed(5)
    found = results(ops.edge_attention(graph, score, **inputs, **NUMBERS, dropout_p=p), inputs, grad_out)
    torch.manual_seed(5)
    with torch.no_grad():
        out, weights = ops.edge_attention(graph, score, **given, **NUMBERS, dropout_p=p, return_weights=True)
    assert torch.equal(out, found["out"])
    return {**found, "weights": weights}


def exact(score: Score, graph: Graph, given: dict[str, Tensor], grad_out: Tensor, p: float) -> dict[str, Tensor]:
    """Output, weights and gradients by autograd in float64."""
    wide = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    torch.manual_seed(5)
    seed = draw_seed(grad_out.device) if p else None
    keep = (
        None
        if seed is None
        else dropout_factor(torch.arange(graph.num_edges, device=graph.device), HEADS, p, seed).double()
    )
    out, weights = edge_attention(score, graph.edge_index, graph.num_dst, **wide, **NUMBERS, keep=keep)
    return {**results(out, wide, grad_out), "weights": weights.detach()}


@pytest.fixture(autouse=True)
def registered():
    """Register the scores for one test."""
    for score in SCORES.values():
        register(score)
    yield
    for name in SCORES:
        del statements._scores[name]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, default_settings):
    """Rows of more than a few edges are split."""
    monkeypatch.setattr(row_split, "max_edges_of", lambda *sizes: 4)
    monkeypatch.setattr(row_split, "ORDERED_EDGES", 4)


CASES = covering(
    {
        "score": tuple(UNTUNED),
        "dtype": (torch.float32, torch.bfloat16),
        "channels": (7, 16),
        "edge": (False, True),
        "dropout": (0.0, 0.4),
        "graph": (heavy_graph, sparse_graph, square_graph),
    },
    pairs=[("score", "edge")],
)


DEVICES = (
    pytest.param("cpu", marks=needs_compiler),
    pytest.param("cuda", marks=pytest.mark.cuda),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", CASES, ids=lambda row: "-".join(str(getattr(v, "__name__", v)) for v in row.values()))
def test_equals_autograd_in_float64(row, device):
    score, dtype, p = UNTUNED[row["score"]], row["dtype"], row["dropout"]
    # The graph whose sources are its targets fits in shared memory.
    schedule = "smem" if row["graph"] is square_graph else "row_split"
    settings(schedule=schedule, fallback="error")
    graph = build_graph(*row["graph"](), device)
    given = random_inputs(score, graph, row["channels"], dtype, row["edge"])
    grad_out = torch.randn(graph.num_dst, HEADS, row["channels"]).to(device, dtype)
    with emulated_device(seed=1) if device == "cpu" else nullcontext() as launched:
        actual = fused(score, graph, given, grad_out, p)
    expected = exact(score, graph, given, grad_out, p)
    assert launched is None or ("attention_forward_merge" in launched) == (row["graph"] is heavy_graph)
    assert {*actual} == {*expected}
    assert_largest_close(dtype, actual, expected)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("stem", ["forward", "backward_targets", "backward_sources", "weights"])
@pytest.mark.parametrize("score", UNTUNED)
def test_compiles_with_nvrtc(score, stem):
    problem = row_split.AttentionProblem(score, HEADS, 16, torch.bfloat16, torch.device("cpu"), score in SCORES, True)
    direction = {"backward_targets": "targets", "backward_sources": "sources"}.get(stem, "forward")
    spec = spec_of(stem, score, row_split.pass_constants(problem, direction, wide=True))
    compiled = compile_cubin(spec.source, ARCHS[-1])
    assert not compiled.warnings and compiled.usage


def test_an_error_in_the_text_names_its_line():
    wrong = SCORES["tanh"].source.replace(
        "return sum + ds * in.scale * tanhf", "return sum + ds * in.steepness * tanhf"
    )
    spec = spec_of("backward_targets", "tanh", {})
    problem = row_split.AttentionProblem("tanh", HEADS, 16, torch.float32, torch.device("cpu"), False, False)
    constants = tuple(row_split.pass_constants(problem, "targets", wide=True).items())
    line = 1 + wrong[: wrong.index("in.steepness")].count("\n")
    source = type(spec)(spec.path, constants, texts=(("score.cuh", wrong),)).source
    with pytest.raises(RuntimeError, match=rf"score.cuh\({line}\): error: .* has no member .steepness"):
        compile_cubin(source, ARCHS[-1])
