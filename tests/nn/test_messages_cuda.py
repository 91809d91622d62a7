"""Compiled messages on a GPU: every class that kernels take gives PyG's outputs and gradients, run to run the same."""

import pytest
import torch

from pyg_dfgnn.reference.tolerances import BACKWARD, largest_errors, tolerance, worst_beside
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import local_settings
from tests.nn.message_cases import EDGE_MLP, REFUSED, outputs_and_gradients, twins, watched
from tests.nn.test_messages import CASES

pytestmark = pytest.mark.cuda

LEFT = {*REFUSED, *EDGE_MLP, "PANConv", "PNAConv"} - {"HEATConv"}
LEFT |= {f"user-{name}" for name in ("Gaussian", "Distances", "Einsteinian", "Corners")}
"""What kernels do not take: maps of what is computed per edge, numbers that change lanes, and what is refused."""
GRAPHS = ("self-loops", "isolated", "hub")


def named(results):
    """Results with the names that the table of tolerances knows."""
    return {f"grad_{name[2:]}" if name.startswith("d_") else name: tensor.cpu() for name, tensor in results.items()}


@pytest.fixture
def ordered_sums():
    """The norms that PyG adds up around the kernels are the same in every run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT])
@pytest.mark.filterwarnings("ignore")
def test_kernels_give_what_pyg_gives_in_float64(name, ordered_sums):
    case = CASES[name]
    layer, marked = twins(case.make)
    for graph in GRAPHS if name != "SAGEConv" else GRAPHS[:1]:
        expected = named(outputs_and_gradients(layer, case, ZOO[graph]()))
        marked.to("cuda", torch.float32)
        results = []
        with local_settings(fallback="error", check_ids="now"), watched() as captured:
            for _ in range(2):
                results.append(named(outputs_and_gradients(marked, case, ZOO[graph](), torch.float32, "cuda")))
        assert captured.programs and not captured.left, captured.reasons
        assert all(torch.equal(results[0][key], results[1][key]) for key in expected)
        errors = largest_errors(results[0], expected)
        bound = tolerance("float32", BACKWARD, "relational").largest
        if not worst_beside(errors, bound).is_right:
            own = twins(case.make)[0].to("cuda", torch.float32)
            pygs = largest_errors(
                named(outputs_and_gradients(own, case, ZOO[graph](), torch.float32, "cuda")), expected
            )
            assert worst_beside(errors, bound, pygs).is_right, (graph, errors, pygs)


@pytest.mark.parametrize("name", ["user-Modulated", "user-Temperature", "GATv2Conv", "LEConv"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_take_16_bits(name, dtype):
    case, graph = CASES[name], ZOO["self-loops"]()
    layer, marked = twins(case.make)
    rounded = {key: value.to(dtype).double() for key, value in layer.state_dict().items()}
    layer.load_state_dict(rounded)
    expected = named(outputs_and_gradients(layer, case, graph))
    marked.load_state_dict(rounded)
    with local_settings(fallback="error"):
        actual = named(outputs_and_gradients(marked.to("cuda", dtype), case, graph, dtype, "cuda"))
    own = named(outputs_and_gradients(layer.to("cuda", dtype), case, graph, dtype, "cuda"))
    errors, pygs = largest_errors(actual, expected), largest_errors(own, expected)
    bound = tolerance(dtype, BACKWARD, "relational").largest
    assert worst_beside(errors, bound, pygs).is_right, (errors, pygs)
