"""The terms of nodes in the additive score: plain torch, and the kernels emulated."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.ops.attention import terms as ops
from pyg_dfgnn.ops.attention.terms import attention_terms
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.ops.problems import Recorder

SETUPS = [
    (3, 7, torch.float32),
    (8, 16, torch.float32),
    (1, 128, torch.float32),
    (5, 1, torch.float32),
    (2, 40, torch.bfloat16),
    (1, 64, torch.float16),
]


def draw(rows, heads, channels, dtype=torch.float32, vectors=2, vector_dtype=torch.float32):
    x = torch.randn(rows, heads, channels).to(dtype)
    return [x, *(torch.randn(1, heads, channels).to(vector_dtype) for _ in range(vectors))]


def run(tensors, grads, call=attention_terms):
    """The terms and the gradient of every input, by name."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    terms = [term for term in call(*leaves) if term is not None]
    found = torch.autograd.grad(terms, leaves, [grad.to(term.dtype) for grad, term in zip(grads, terms)])
    names = ["first", "second"][: len(terms)]
    results = dict(zip(names, (term.detach() for term in terms)))
    return {**results, **{f"grad {name}": grad for name, grad in zip(["x", *names], found)}}


def expected(tensors, grads):
    """The same in float64."""

    def plain(x, *vectors):
        return [(x * vector).sum(dim=-1) for vector in vectors]

    return run([tensor.double() for tensor in tensors], [grad.double() for grad in grads], plain)


def check(tensors, grads):
    actual = run(tensors, grads)
    want = expected(tensors, grads)
    for dtype in {tensor.dtype for tensor in actual.values()}:
        assert_all_close({name: (got, want[name]) for name, got in actual.items() if got.dtype == dtype})
    return actual


@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"H{s[0]}-C{s[1]}-{s[2]}")
def test_against_float64(setup, rows, vectors, fused):
    tensors = draw(rows, *setup, vectors)
    grads = [torch.randn(rows, setup[0]) for _ in range(vectors)]
    actual = check(tensors, grads)
    assert fused == ["attention_terms", "attention_terms_backward"]
    assert {name: tensor.dtype for name, tensor in actual.items() if name != "grad x"} == dict.fromkeys(
        [name for name in actual if name != "grad x"], torch.float32
    )


@pytest.mark.parametrize("heads_channels", [(8, 16), (3, 7)], ids=["whole-warps", "parts"])
def test_more_rows_than_the_blocks_take_at_once(heads_channels, fused, monkeypatch):
    monkeypatch.setitem(gpu.known, torch.device("cpu"), replace(gpu.H200, multiprocessors=1))
    monkeypatch.setattr(ops, "_BLOCKS_PER_MULTIPROCESSOR", 2)
    tensors = draw(150, *heads_channels)
    grads = [torch.randn(150, heads_channels[0]) for _ in range(2)]
    actual = check(tensors, grads)
    again = run(tensors, grads)
    assert all(torch.equal(tensor, again[name]) for name, tensor in actual.items())


def test_no_rows(fused):
    results = run(draw(0, 2, 4), [torch.empty(0, 2)] * 2)
    assert results["first"].shape == (0, 2) and not bool(results["grad first"].any())
    assert fused == []


def test_layouts(fused):
    x, first, second = draw(9, 3, 8)
    grads = [torch.ones(()).expand(9, 3), torch.randn(3, 9).t()]
    contiguous = run([x, first, second], [grad.clone() for grad in grads])
    strided = torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]
    vector = torch.cat([first.new_full((1,), torch.nan), first.flatten()])[1:].view(first.shape)
    leaves = [strided.requires_grad_(), vector.requires_grad_(), second.requires_grad_()]
    found = torch.autograd.grad(attention_terms(*leaves), leaves, grads)
    names = ("grad x", "grad first", "grad second")
    assert all(torch.equal(grad, contiguous[name]) for name, grad in zip(names, found))


def test_vectors_of_another_dtype(fused):
    tensors = draw(9, 2, 8, torch.bfloat16, vector_dtype=torch.bfloat16)
    actual = check(tensors, [torch.randn(9, 2)] * 2)
    assert actual["grad first"].dtype == torch.bfloat16 and actual["first"].dtype == torch.float32


def test_no_autograd_without_a_gradient(fused, monkeypatch):
    tensors = draw(9, 2, 8)
    with_grad = attention_terms(*(tensor.clone().requires_grad_() for tensor in tensors))
    monkeypatch.setattr(ops, "_apply_terms", None)
    without = attention_terms(*tensors)
    assert all(map(torch.equal, with_grad, without)) and with_grad[0].requires_grad


def test_what_no_kernel_takes_is_plain_torch(fused):
    """Another dtype, a dispatch mode, torch.compile."""
    x, first, second = draw(9, 2, 8)
    assert attention_terms(x.double(), first.double())[0].dtype == torch.float64
    want = [(x * vector).sum(dim=-1) for vector in (first, second)]
    with Recorder():
        assert all(map(torch.equal, attention_terms(x, first, second), want))
    compiled = torch.compile(attention_terms, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(x, first, second), want))
    assert fused == []
    alone, nothing = attention_terms(x, first)
    assert nothing is None and fused == ["attention_terms"]
    torch.testing.assert_close(alone, want[0])


def test_gradients_that_may_be_differentiated(fused):
    """They come in batches too."""
    leaves = [tensor.requires_grad_() for tensor in draw(9, 2, 8)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    second = []
    for x, first, other in (leaves, wide):
        terms = attention_terms(x, first, other)
        grads = torch.autograd.grad(sum(t.square().sum() for t in terms), (x, first, other), create_graph=True)
        second.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), (x, first, other)))
    assert_all_close({str(place): pair for place, pair in enumerate(zip(*second))})
    assert fused[0] == "attention_terms"
    terms, batch = attention_terms(*leaves), torch.randn(3, 9, 2)
    found = torch.autograd.grad(terms[0], leaves[:2], batch, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda grad: torch.autograd.grad(terms[1], leaves[2], grad, retain_graph=True)[0])(batch)
    torch.testing.assert_close(mapped, torch.einsum("bnh,nhc->bhc", batch, leaves[0].detach()).unsqueeze(1))
    want = torch.autograd.grad((wide[0] * wide[1]).sum(-1), wide[:2], batch.double(), is_grads_batched=True)
    assert_all_close({str(place): pair for place, pair in enumerate(zip(found, want))})


def test_gradcheck_of_plain_torch():
    leaves = [tensor.double().requires_grad_() for tensor in draw(4, 2, 3)]
    assert torch.autograd.gradcheck(attention_terms, leaves)
