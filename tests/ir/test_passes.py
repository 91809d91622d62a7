"""Every pass leaves the values and the gradients of every program as they are; the differentiated one is autograd's."""

import pytest
import torch

from pyg_dfgnn.ir import E, S, U, interpret
from pyg_dfgnn.ir.passes import (
    PASSES,
    decompact,
    differentiate,
    optimise,
)
from pyg_dfgnn.ir.program import Program
from tests.ir.cases import GRAPHS, PROGRAMS, Case, case

GRIDS = pytest.mark.parametrize("graph", GRAPHS), pytest.mark.parametrize("name", PROGRAMS)


def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, name
    scale = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12 * max(scale, 1.0), msg=lambda text: f"{name}: {text}")


def values_and_gradients(program: Program, case: Case, prefix: str = "d_") -> dict[str, torch.Tensor]:
    """The outputs of a program and, by autograd, its gradients."""
    outputs = interpret(program, case.rows, case.inputs)
    used = [(outputs[name], case.upstream[name]) for name in outputs if outputs[name].requires_grad]
    gradients = torch.autograd.grad(
        [y for y, _ in used], list(case.inputs.values()), [g for _, g in used], allow_unused=True
    )
    results = {name: y.detach() for name, y in outputs.items()}
    for (name, x), gradient in zip(case.inputs.items(), gradients):
        results[prefix + name] = torch.zeros_like(x) if gradient is None else gradient
    return results


def check(program: Program, case: Case) -> None:
    want, got = values_and_gradients(case.program, case), values_and_gradients(program, case)
    assert got.keys() == want.keys()
    for name in want:
        compare(name, got[name], want[name])


def both(test):
    for grid in GRIDS:
        test = grid(test)
    return test


# What every graph and sizes that make every rewrite pay off are given to the passes.
@both
@pytest.mark.parametrize("name_of_pass", [*PASSES, "decompact"])
def test_pass_keeps_values_and_gradients(name, graph, name_of_pass):
    drawn = case(PROGRAMS[name], graph)
    if name_of_pass == "decompact":
        return check(decompact(drawn.program), drawn)
    check(PASSES[name_of_pass](drawn.program, drawn.rows.sizes), drawn)
    eager = {domain: 10**6 if domain in (E, U, S) else 1 for domain in drawn.rows.sizes}
    check(PASSES[name_of_pass](drawn.program, eager), drawn)


@both
@pytest.mark.parametrize("off", [(), tuple(PASSES), ("compact",), ("reorder", "aggregate_first")], ids=str)
def test_pipeline_gives_values_and_gradients(name, graph, off):
    drawn = case(PROGRAMS[name], graph)
    want = values_and_gradients(drawn.program, drawn)
    program = optimise(drawn.program, drawn.rows.sizes, wrt=tuple(drawn.inputs), off=off)[-1].program
    got = interpret(program, drawn.rows, {**drawn.inputs, **drawn.upstream_named("d_")})
    assert got.keys() == want.keys()
    for key in want:
        compare(key, got[key], want[key])


@pytest.mark.parametrize("name", PROGRAMS)
def test_backward_of_the_backward_is_autograds(name):
    drawn = case(differentiate(PROGRAMS[name], tuple(PROGRAMS[name].inputs)), "dense")
    program = differentiate(drawn.program, tuple(drawn.inputs), "second_")
    want = values_and_gradients(drawn.program, drawn, "second_")
    got = interpret(program, drawn.rows, {**drawn.inputs, **drawn.upstream_named("second_")})
    assert got.keys() == want.keys()
    for key in got:
        compare(key, got[key], want[key])
