"""The terms of nodes in the additive score on a GPU: against float64, more rows than blocks, in a CUDA graph."""

import pytest
import torch

from pyg_dfgnn.ops.attention import terms as ops
from pyg_dfgnn.ops.attention.terms import attention_terms
from tests.ops.test_attention_terms import SETUPS, check, draw, run

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def on_the_device():
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("rows", [1, 37, 20_000])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"H{s[0]}-C{s[1]}-{s[2]}")
def test_against_float64(setup, rows, vectors, monkeypatch):
    # Fewer blocks than 20,000 rows fill, so that each takes several.
    monkeypatch.setattr(ops, "_BLOCKS_PER_MULTIPROCESSOR", 2)
    tensors = draw(rows, *setup, vectors)
    grads = [torch.randn(rows, setup[0]) for _ in range(vectors)]
    actual = check(tensors, grads)
    again = run(tensors, grads)
    assert all(torch.equal(tensor, again[name]) for name, tensor in actual.items())


def test_capture_and_replay():
    leaves = [tensor.requires_grad_() for tensor in draw(500, 8, 16)]
    grads = [torch.randn(500, 8) for _ in range(2)]

    def step():
        return torch.autograd.grad(attention_terms(*leaves), leaves, grads)

    step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(2)
    captured.replay()
    want = step()
    assert all(map(torch.equal, found, want))
