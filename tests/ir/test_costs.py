"""What lowered programs cost: numbers that steps move, kernels that are launched, rows that are held."""

from collections.abc import Mapping
from math import prod

import pytest

from pyg_dfgnn.ir import D, Domain, E, One, R, S, U, V
from pyg_dfgnn.ir.kernel_steps import Lowered
from pyg_dfgnn.ir.layers import rgcn_mean, rgcn_sum
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes, optimise

AIFB = {One: 1, R: 90, S: 8_285, D: 8_285, U: 26_432, V: 26_432, E: 58_086}
FB15K = {One: 1, R: 474, S: 14_541, D: 14_541, U: 161_880, V: 161_880, E: 620_232}
MAG = {One: 1, R: 4, S: 1_939_743, D: 1_939_743, U: 3_251_095, V: 1_541_110, E: 21_111_007}
WIKIKG = {One: 1, R: 535, S: 2_500_604, D: 2_500_604, U: 13_209_529, V: 12_726_253, E: 16_109_182}


def test_numbers_that_steps_move():
    """Rows count as often as they are gathered, weights once."""
    program = rgcn_sum.program(x=(8,), weight=(8, 4))
    sizes = {One: 1, R: 3, S: 100, D: 90, U: 40, V: 5, E: 700}

    def traffic(*off):
        return lower(optimise(program, sizes, off=off)[-1].program, ("out",)).traffic_elements(sizes)

    mapped_first = [40 * 8 + 3 * 8 * 4 + 40 * 4, 700 * 4 + 90 * 4]
    summed_first = [700 * 8 + 5 * 8, 5 * 8 + 3 * 8 * 4 + 5 * 4, 5 * 4 + 90 * 4]
    assert (traffic("aggregate_first"), traffic()) == (sum(mapped_first), sum(summed_first))


@pytest.mark.parametrize(
    "sizes,has_backward,is_summed_first",
    [
        (WIKIKG, False, False),
        (WIKIKG, True, True),
        (MAG, False, True),
        (MAG, True, True),
        (FB15K, False, False),
        (FB15K, True, False),
    ],
)
def test_sums_come_before_the_map_where_all_steps_then_move_less(sizes, has_backward, is_summed_first):
    """Gradients read the sums again, so that without any the other order may be better."""
    program = rgcn_mean.program(x=(64,), weight=(64, 64))
    wrt = ("x", "weight") if has_backward else ()
    ways = [optimise(program, sizes, wrt=wrt, off=off)[-1].program for off in ((), ("aggregate_first",))]
    summed, mapped = (lower(way, ("out",)).traffic_elements(sizes) for way in ways)
    assert (summed < mapped) == is_summed_first
    chosen = Passes().run(program, sizes, wrt)
    assert Passes().run(program, sizes, wrt) is chosen
    first = next(value for value in chosen.values if value.op == "linear")
    assert (chosen.values[first.args[0]].op != "input") == is_summed_first


def held(lowered: Lowered, sizes: Mapping[Domain, int]) -> int:
    """Return the most numbers at any time in rows wider than one number, the user's among them."""
    forward, steps = len(lowered.forward), [*lowered.forward, *lowered.backward]
    results, written = {name for name, _ in lowered.outputs.values()}, {n for step in steps for n in step.writes}
    inputs = {name for step in steps for name in step.reads} - written
    live: set[str] = set()
    most = 0
    for i, step in enumerate(steps):
        live |= {*step.writes}
        given = {name for name in inputs if i >= forward or not name.startswith("d_")}
        rows = [b for b in map(lowered.buffers.__getitem__, live | given) if b.domain is not R and prod(b.shape) > 1]
        most = max(most, sum(sizes[buffer.domain] * prod(buffer.shape) for buffer in rows))
        read_later = {name for later in steps[i + 1 :] for name in later.reads}
        live &= read_later | results
    return most


@pytest.mark.parametrize("sizes", [AIFB, FB15K, MAG, WIKIKG], ids=["aifb", "fb15k237", "mag", "wikikg2"])
def test_rgcn_takes_three_launches_forward_and_six_backward(sizes):
    """The gradient of weights takes two, sums of pieces and their sum."""
    program = rgcn_mean.program(x=(64,), weight=(64, 64))
    lowered = lower(Passes().run(program, sizes, ("x", "weight")), ("out",))
    parts = [[1 + (step.kind == "outer") for step in part] for part in (lowered.forward, lowered.backward)]
    assert sum(parts[0]) <= 3 and sum(parts[1]) <= 6


@pytest.mark.parametrize("layer", [rgcn_mean, rgcn_sum], ids=["mean", "sum"])
@pytest.mark.parametrize("sizes", [AIFB, FB15K, MAG, WIKIKG], ids=["aifb", "fb15k237", "mag", "wikikg2"])
def test_rgcn_holds_four_rows_of_nodes_and_two_of_pairs(layer, sizes):
    """Features and results with their gradients; rows of pairs before and after a map."""
    program = layer.program(x=(64,), weight=(64, 64))
    lowered = lower(Passes().run(program, sizes, ("x", "weight")), ("out",))
    assert held(lowered, sizes) <= 64 * (4 * sizes[S] + 2 * max(sizes[U], sizes[V]))
