"""What users do to a conv's output in place must not touch what backward has saved."""

import pytest
import torch

import pyg_dfgnn.nn as ours
from tests.covering import over
from tests.kernels.emulated import emulated_device

CONVS = {
    "agnn": lambda: ours.AGNNConv(),
    "gat": lambda: ours.GATConv(8, 4, heads=2, bias=False),
    "gatv2": lambda: ours.GATv2Conv(8, 4, heads=2, bias=False),
    "transformer": lambda: ours.TransformerConv(8, 4, heads=2, root_weight=False),
}


@over(name=tuple(CONVS), compiled=(False, True))
def test_output_may_be_edited_in_place(name, compiled):
    conv = CONVS[name]()
    called = torch.compile(conv, backend="aot_eager", fullgraph=True) if compiled else conv
    edge_index = torch.randint(10, (2, 40))
    x = torch.randn(10, 8)
    gradients = []
    # Not by relu_, which changes no number that meets a gradient.
    for edit in (lambda out: out.mul_(2), lambda out: out.mul(2)):
        leaf = x.clone().requires_grad_()
        with emulated_device() as launched:
            edit(called(leaf, edge_index)).sin().sum().backward()
        assert "attention_forward" in launched
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", CONVS)
def test_nothing_is_copied_and_reshaped_behind_the_kernels(name):
    """What the op gives is what the user gets: no node of autograd is behind it."""
    conv = CONVS[name]()
    x = torch.randn(10, 8, requires_grad=True)
    with emulated_device():
        out = conv(x, torch.randint(10, (2, 40)))
    assert out.grad_fn.name() == "FusedBackward" and not out._is_view()


def test_compiled_for_one_width_after_another():
    """torch.compile would make the width a variable; kernels need a number. Nodes may vary."""
    called = torch.compile(ours.AGNNConv(), backend="aot_eager", fullgraph=True)
    edge_index = torch.randint(10, (2, 40))
    for width, nodes in ((8, 10), (12, 10), (20, 14), (12, 11)):
        with emulated_device() as launched:
            called(torch.randn(nodes, width, requires_grad=True), edge_index).sum().backward()
        assert "attention_forward" in launched
