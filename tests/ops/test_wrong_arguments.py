"""Each argument of each operator wrong on purpose: one error that names the argument, what it needs, what was given."""

import re

import pytest
import torch

from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.reference.zoo import EdgeList
from tests.emu import require_compiler
from tests.kernels.emulated import emulated_device
from tests.ops.problems import SCORES, Problem

CASE = EdgeList("small", torch.tensor([[0, 1, 1, 2, 3], [1, 1, 0, 1, 2]]), 4, 3)
H, C, E = 2, 4, 5
# Letters and sizes of every tensor argument.
SHAPES = {
    "dot": {
        "query": "N_dst=3, H=2, C=4",
        "key": "N_src=4, H=2, C=4",
        "value": "N_src=4, H, C",
        "edge": "E=5, H=2, C=4",
    },
    "cosine": {"x_src": "N_src=4, H, C", "x_dst": "N_dst=3, H=2, C=4"},
    "add": {
        "value": "N_src=4, H, C",
        "alpha_src": "N_src=4, H=2",
        "alpha_dst": "N_dst=3, H=2",
        "alpha_edge": "E=5, H=2",
    },
    "gatv2": {
        "x_src": "N_src=4, H, C",
        "x_dst": "N_dst=3, H=2, C=4",
        "att": "H=2, C=4",
        "edge": "E=5, H=2, C=4",
    },
}
ARGUMENTS = [(score, name) for score in SCORES for name in SHAPES[score]]


@pytest.fixture(params=["reference", "fused"], autouse=True)
def path(request):
    """Nothing wrong gets as far as a launch."""
    if request.param == "reference":
        yield
        return
    require_compiler()
    with emulated_device() as launched:
        yield
    assert launched == []


def refuse(error, message, score, graph=None, **changes):
    problem = Problem(score, CASE, H, C, edge=score != "cosine")
    arguments = {**problem.inputs, **changes}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        problem.op(problem.graph if graph is None else graph, **arguments)


def sizes(spec):
    return [int(part.split("=")[1]) if "=" in part else {"H": H, "C": C}[part] for part in spec.split(", ")]


@pytest.mark.parametrize(("score", "name"), ARGUMENTS)
def test_one_row_too_many(score, name):
    spec = SHAPES[score][name]
    shape = sizes(spec)
    shape[0] += 1
    refuse(ValueError, f"'{name}' needs shape [{spec}] (got {shape})", score, **{name: torch.randn(shape)})


@pytest.mark.parametrize(("score", "name"), [pair for pair in ARGUMENTS if "H=" in SHAPES[pair[0]][pair[1]]])
def test_heads_of_another_number(score, name):
    """The values decide what H is."""
    spec = SHAPES[score][name]
    shape = sizes(spec)
    shape[spec.split(", ").index("H=2")] = 1
    refuse(ValueError, f"'{name}' needs shape [{spec}] (got {shape})", score, **{name: torch.randn(shape)})


@pytest.mark.parametrize(("score", "name"), [pair for pair in ARGUMENTS if "C=" in SHAPES[pair[0]][pair[1]]])
def test_channels_of_another_number(score, name):
    spec = SHAPES[score][name]
    shape = [*sizes(spec)[:-1], 5]
    refuse(ValueError, f"'{name}' needs shape [{spec}] (got {shape})", score, **{name: torch.randn(shape)})


@pytest.mark.parametrize(("score", "name"), ARGUMENTS)
def test_flattened(score, name):
    spec = SHAPES[score][name]
    flat = torch.randn(sizes(spec)).flatten()
    refuse(ValueError, f"'{name}' needs shape [{spec}] (got {list(flat.shape)})", score, **{name: flat})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("score", "name"), ARGUMENTS)
def test_dtype(score, name, dtype):
    given = torch.ones(sizes(SHAPES[score][name])).to(dtype)
    need = "torch.float32 or torch.float16 or torch.bfloat16 or torch.float64"
    refuse(TypeError, f"'{name}' needs dtype {need} (got {dtype})", score, **{name: given})


@pytest.mark.parametrize(("score", "name"), ARGUMENTS)
def test_device(score, name):
    given = torch.empty(sizes(SHAPES[score][name]), device="meta")
    refuse(ValueError, f"'{name}' needs device cpu (got meta)", score, **{name: given})


@pytest.mark.parametrize(("score", "name"), ARGUMENTS)
def test_no_tensor(score, name):
    given = [[1.0]]
    refuse(TypeError, f"'{name}' needs a torch.Tensor (got list [[1.0]])", score, **{name: given})


@pytest.mark.parametrize(
    ("score", "name"), [pair for pair in ARGUMENTS if pair[1] not in ("edge", "alpha_edge", "alpha_dst")]
)
def test_none_where_a_tensor_is_needed(score, name):
    refuse(TypeError, f"'{name}' needs a torch.Tensor (got None)", score, **{name: None})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (1.5, ValueError, "'dropout_p' needs a value in [0.0, 1.0] (got 1.5)"),
        (-0.1, ValueError, "'dropout_p' needs a value in [0.0, 1.0] (got -0.1)"),
        (float("nan"), ValueError, "'dropout_p' needs a value in [0.0, 1.0] (got nan)"),
        ("0.5", TypeError, "'dropout_p' needs a number (got str '0.5')"),
        (True, TypeError, "'dropout_p' needs a number (got bool True)"),
        (None, TypeError, "'dropout_p' needs a number (got None)"),
        (torch.tensor(0.5), TypeError, "'dropout_p' needs a number (got a tensor of shape [])"),
    ],
    ids=["above", "below", "nan", "str", "bool", "none", "tensor"],
)
def test_dropout(score, given, error, message):
    refuse(error, message, score, dropout_p=given)


@pytest.mark.parametrize(("score", "name"), [("dot", "scale"), ("add", "negative_slope"), ("gatv2", "negative_slope")])
@pytest.mark.parametrize("given", ["0.2", True, [0.2]], ids=str)
def test_numbers(score, name, given):
    refuse(TypeError, f"'{name}' needs a number (got {type(given).__name__} {given!r})", score, **{name: given})


@pytest.mark.parametrize("score", ["add", "gatv2"])
def test_no_slope(score):
    refuse(TypeError, "'negative_slope' needs a number (got None)", score, negative_slope=None)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.ones(2), ValueError, "'beta' needs one element (got shape [2])"),
        (torch.ones(1, dtype=torch.int64), TypeError, "'beta' needs dtype torch.float32 or torch.float16 or "
         "torch.bfloat16 or torch.float64 (got torch.int64)"),
        (torch.ones(1, device="meta"), ValueError, "'beta' needs device cpu (got meta)"),
        ("1", TypeError, "'beta' needs a number (got str '1')"),
        (None, TypeError, "'beta' needs a number (got None)"),
    ],
    ids=["shape", "dtype", "device", "str", "none"],
)  # fmt: skip
def test_beta(given, error, message):
    refuse(error, message, "cosine", beta=given)


@pytest.mark.parametrize("given", [CASE.edge_index, (CASE.edge_index, 4, 3), "graph"], ids=["tensor", "tuple", "str"])
def test_graph_of_another_type(score, given):
    refuse(TypeError, f"'graph' needs a Graph or an EdgeSet (got {type(given).__name__})", score, graph=given)


@pytest.mark.parametrize(("num_src", "num_dst"), [(5, 3), (4, 5)])
def test_graph_of_another_size(score, num_src, num_dst):
    graph = Graph.of(CASE.edge_index, num_src, num_dst)
    problem = Problem(score, CASE, H, C)
    with pytest.raises(ValueError, match=r"^'\w+' needs shape \[N_(src=5|dst=5), .* \(got \[[43], 2(, 4)?\]\)$"):
        problem.op(graph, **problem.inputs)


@pytest.mark.parametrize("score", ["dot", "add", "gatv2"])
def test_edge_features_without_those_of_the_loops(score):
    """With self-loops replaced there are other edges than were given."""
    square = EdgeList("square", CASE.edge_index, 4, 4)
    problem = Problem(score, square, H, C, edge=True)
    name, letters = ("alpha_edge", "H=2") if score == "add" else ("edge", "H=2, C=4")
    given = list(problem.inputs[name].shape)
    for graph in (Graph.of(square.edge_index, 4, self_loops=True), EdgeSet(square.edge_index, 4, 4, self_loops=True)):
        with pytest.raises(ValueError, match=re.escape(f"'{name}' needs shape [E=8, {letters}] (got {given})")):
            problem.op(graph, **problem.inputs)


@pytest.mark.parametrize(
    ("edges", "error", "message"),
    [
        (EdgeSet(torch.ones(3, 5).long(), 4, 3), ValueError, "'edge_index' needs shape [2, E] (got [3, 5])"),
        (EdgeSet(torch.zeros(2, 5), 4, 3), TypeError, "'edge_index' needs dtype torch.int64 or torch.int32 (got "
         "torch.float32)"),
        (EdgeSet([[0], [0]], 4, 3), TypeError, "'edge_index' needs a torch.Tensor (got list [[0], [0]])"),
        (EdgeSet(CASE.edge_index + 3, 4, 3), IndexError, "'edge_index' needs source ids in [0, num_src=4) (got 3 to "
         "6): only those are valid indices"),
        (EdgeSet(CASE.edge_index, 4, -3), ValueError, "'num_dst' needs a value in [0, 2147483647] (got -3)"),
    ],
    ids=["shape", "dtype", "type", "ids", "negative"],
)  # fmt: skip
def test_edge_set(score, edges, error, message):
    refuse(error, message, score, graph=edges)


def test_targets_may_only_be_left_out_where_they_are_the_sources():
    refuse(TypeError, "'x_dst' needs a torch.Tensor (got None)", "cosine", x_dst=None)
    problem = Problem("cosine", CASE, H, C)
    x = problem.inputs["x_src"]
    with pytest.raises(ValueError, match=re.escape("'x_dst' needs shape [N_dst=3, H=2, C=4] (got [4, 2, 4])")):
        problem.op(problem.graph, x, x, beta=1.0)


def test_unknown_argument(score):
    problem = Problem(score, CASE, H, C)
    with pytest.raises(TypeError, match="unexpected keyword argument 'slope'"):
        problem.op(problem.graph, **problem.inputs, slope=0.2)
