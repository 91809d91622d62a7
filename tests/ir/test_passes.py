"""Every pass leaves the values and the gradients of every program as they are; the differentiated one is autograd's."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.ir import D, E, S, U, interpret, max_to, relational
from pyg_dfgnn.ir.passes import PASSES, decompact, differentiate, optimise
from pyg_dfgnn.ir.program import Program
from tests.covering import over
from tests.ir.cases import ALL_GRAPHS, PROGRAMS, Case, case


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


def compare_all(what: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys(), what
    for name in want:
        compare(f"{name} after {what}", got[name], want[name])


@over(name=tuple(PROGRAMS), graph=tuple(ALL_GRAPHS))
def test_passes_keep_values_and_gradients(name, graph):
    """By the sizes of the graph, and by sizes that make every rewrite pay; each program that comes out once."""
    drawn = case(PROGRAMS[name], graph)
    want = values_and_gradients(drawn.program, drawn)
    eager = {domain: 10**6 if domain in (E, U, S) else 1 for domain in drawn.rows.sizes}
    rewritten = {"decompact": decompact(drawn.program)}
    for sizes in (drawn.rows.sizes, eager):
        rewritten |= {f"{what} of {sizes}": run(drawn.program, sizes) for what, run in PASSES.items()}
    compared = [drawn.program]
    for what, program in rewritten.items():
        if program not in compared:
            compared.append(program)
            compare_all(what, values_and_gradients(program, drawn), want)


@over(name=tuple(PROGRAMS), graph=tuple(ALL_GRAPHS))
def test_pipeline_gives_values_and_gradients(name, graph):
    """With each pass switched off and with all of them, the differentiated program gives the gradients of autograd."""
    drawn = case(PROGRAMS[name], graph)
    want = values_and_gradients(drawn.program, drawn)
    compared = []
    for off in ((), *((what,) for what in PASSES), tuple(PASSES)):
        program = optimise(drawn.program, drawn.rows.sizes, wrt=tuple(drawn.inputs), off=off)[-1].program
        if program in compared:
            continue
        compared.append(program)
        got = interpret(program, drawn.rows, {**drawn.inputs, **drawn.upstream_named("d_")})
        compare_all(f"all but {off}", got, want)


def test_equal_maxima_share_their_gradient():
    """As torch's scatter shares it, also with the initial 0 where that is the maximum."""

    @relational
    def largest(x: S):
        return max_to(D, x)

    drawn = case(largest.program(x=(5,)), "dense")
    x = (
        torch.randint(-4, 1, drawn.inputs["x"].shape, generator=torch.Generator().manual_seed(0))
        .double()
        .requires_grad_()
    )
    drawn = replace(drawn, inputs={"x": x})
    want = values_and_gradients(drawn.program, drawn)
    assert (want["out"] == 0).any() and (want["out"] < 0).any()
    got = interpret(differentiate(drawn.program, ("x",)), drawn.rows, {"x": x, **drawn.upstream_named("d_")})
    compare_all("differentiate", got, want)


@pytest.mark.parametrize("name", PROGRAMS)
def test_backward_of_the_backward_is_autograds(name):
    drawn = case(differentiate(PROGRAMS[name], tuple(PROGRAMS[name].inputs)), "dense")
    program = differentiate(drawn.program, tuple(drawn.inputs), "second_")
    want = values_and_gradients(drawn.program, drawn, "second_")
    got = interpret(program, drawn.rows, {**drawn.inputs, **drawn.upstream_named("second_")})
    compare_all("two backwards", got, want)
