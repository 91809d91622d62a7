"""Torch's fused Adam in pieces: the bits of its own step."""

import copy

import pytest
import torch

from pyg_dfgnn.training import adam


def build(device="cpu", **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(150, 130), torch.nn.Linear(130, 3), torch.nn.Linear(3, 2))
    model[2].requires_grad_(False)
    model.to(device)
    groups = [
        {"params": model[0].parameters()},
        {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 0.1},
    ]
    return model, torch.optim.Adam(groups, lr=0.01, fused=True, **options)


def take(model, optimizer, step):
    torch.manual_seed(1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(7, 150, device=next(model.parameters()).device)).square().sum().backward()
        step(optimizer)


def test_bits(monkeypatch):
    monkeypatch.setattr(adam, "PIECE", 1000)
    (own, first), (model, second) = build(weight_decay=0.1), build(weight_decay=0.1)
    assert not adam.takes_pieces(second)
    take(own, first, torch.optim.Adam.step)
    sizes = []

    def step(optimizer):
        if adam.takes_pieces(optimizer):
            sizes.append(max(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]))
            adam.step_in_pieces(optimizer)
        else:
            optimizer.step()

    take(model, second, step)
    # The first step makes the states.
    assert sizes == [150 * 130] * 3
    for each, other in zip(own.parameters(), model.parameters(), strict=True):
        assert torch.equal(each, other)
    states = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in (first, second)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert all(torch.equal(state[name], states[1][key][name]) for name in state)


@pytest.mark.parametrize("kind", ["amsgrad", "maximize", "AdamW", "plain", "small", "strided"])
def test_what_takes_its_own_step(kind):
    options = {kind: True} if kind in ("amsgrad", "maximize") else {}
    model, optimizer = build(**options)
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if kind == "plain":
        optimizer = torch.optim.Adam(model.parameters())
    if kind == "small":
        optimizer = torch.optim.Adam(model[1].parameters(), fused=True)
    take(model, optimizer, type(optimizer).step)
    if kind == "strided":
        assert adam.takes_pieces(optimizer)
        model[0].weight.grad = model[0].weight.grad.t().contiguous().t()
    assert not adam.takes_pieces(optimizer)
