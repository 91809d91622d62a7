"""The linear maps and outer products of programs, on the reference path of the products: in float64."""

import pytest
import torch

from pyg_dfgnn.ir import D, Domain, E, One, R, S, interpret, relational, sum_to
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import PASSES
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.ops.relational import products
from tests.ir.cases import case
from tests.ir.test_lowering import LOWERED, joint


@relational
def headed(x: S, xd: D, weight: R, shared: One, e: E):
    """Maps by several heads of a row that they share, and by one weight that heads share."""
    mapped = x.view(1, -1) @ weight
    return sum_to(D, mapped * (e @ shared)[..., None]) * (xd @ shared).view(-1, 1)


CASES = {**LOWERED, "headed": headed.program(x=(4,), xd=(3,), weight=(2, 4, 3), shared=(3, 2), e=(3,))}


@pytest.mark.parametrize("graph", ["dense", "isolated-R4", "no-edges-R3"])
@pytest.mark.parametrize("off", [(), tuple(PASSES)], ids=["optimised", "as written"])
@pytest.mark.parametrize("name", CASES)
def test_products_of_steps(name, off, graph):
    drawn = case(CASES[name], graph)
    lowered = lower(joint(drawn, off), dict(drawn.program.outputs))
    generator = torch.Generator().manual_seed(1)
    for step in (*lowered.forward, *lowered.backward):
        if step.kind not in ("linear", "outer"):
            continue

        def draw(domain: Domain, shape: tuple[int, ...]) -> torch.Tensor:
            size = (drawn.rows.sizes[domain], *shape)
            return torch.randn(size, dtype=torch.float64, generator=generator)

        buffers = {name: draw(lowered.buffers[name].domain, lowered.buffers[name].shape) for name in step.reads}
        inputs = {n: t.squeeze(0) if lowered.buffers[n].domain is One else t for n, t in buffers.items()}
        (output,) = step.writes
        expected = interpret(step.program, drawn.rows, inputs)[output]
        product, out = products.prepare(step, (), drawn.rows, torch.float64), torch.empty_like(expected)
        product.run(*(None if name is None else buffers[name] for name in product.reads), out)
        torch.testing.assert_close(out, expected, msg=str(step))


def test_some_of_the_heads_are_refused():
    @relational
    def mixed(x: S, weight: R):
        return sum_to(D, x @ weight)

    drawn = case(mixed.program(x=(2, 1, 4), weight=(3, 4, 5)), "dense")
    lowered = lower(joint(drawn), ("out",))
    (step,) = (step for step in lowered.forward if step.kind == "linear")
    with pytest.raises(LoweringError, match="some of 6 heads"):
        products.prepare(step, (), drawn.rows, torch.float64)
