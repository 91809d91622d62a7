"""What each pass is there for: the values that it removes, moves or multiplies earlier."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import (
    D,
    Domain,
    E,
    IndexSpace,
    One,
    R,
    S,
    U,
    V,
    concat,
    dot,
    interpret,
    relational,
    softmax,
    sum_to,
    to,
)
from pyg_dfgnn.ir.layers import rgat, rgcn_mean, rgcn_sum
from pyg_dfgnn.ir.passes import (
    Passes,
    aggregate_first,
    common_subexpressions,
    compact,
    decompact,
    differentiate,
    join_pads,
    optimise,
    remove_dead,
    reorder,
    scale_first,
    share_sums,
    split_concats,
)
from pyg_dfgnn.ir.program import Builder, Program
from tests.ir.cases import PROGRAMS, case

SIZES = {One: 1, R: 20, S: 1000, D: 1000, U: 6000, V: 3000, E: 10_000}
RGAT = rgat(1, "additive-self-attention", "across-relation").program(
    x=(16,), xd=(16,), weight=(16, 16), q=(16, 1), k=(16, 1)
)


def of(program: Program, *ops: str) -> list[tuple[Domain, tuple[int, ...]]]:
    """Domain and row shape of the live values of some operators."""
    values = [program.values[i] for i in sorted(program.live)]
    return [(value.domain, value.shape) for value in values if value.op in ops]


def test_equal_values_become_one_and_dead_ones_go():
    program = PROGRAMS["logits"]
    shared = common_subexpressions(program)
    counts = [sum(v.op == "linear" for v in p.values) for p in (program, shared, remove_dead(program))]
    assert counts == [3, 2, 2]


def test_products_with_a_weight_come_first_where_nothing_else_reads_the_map():
    # The target's rows lose their matrix product; the source's are needed by the messages.
    assert of(RGAT, "linear", "matmul") == [(U, (16,)), (V, (16,)), (V, (1,)), (U, (1,))]
    assert of(reorder(RGAT, SIZES), "linear", "matmul") == [(U, (16,)), (R, (16, 1)), (V, (1,)), (U, (1,))]
    few = {**SIZES, R: 10**6}
    assert reorder(RGAT, few) == RGAT
    dots = reorder(PROGRAMS["logits"], SIZES)
    assert of(dots, "inner") == [] and of(dots, "linear") == [(U, (1,)), (V, (1,))]


def test_heads_are_reordered():
    """Weights of several heads are multiplied head by head."""

    @relational
    def heads(x: S, weight: One, by_head: R):
        return to(E, (x @ weight).view(4, 3) @ by_head)

    program = heads.program(x=(2,), weight=(2, 12), by_head=(4, 3, 8))
    assert of(reorder(program, SIZES), "linear", "matmul") == [(R, (4, 2, 8)), (U, (4, 8))]
    drawn = case(program, "dense")
    results = [interpret(p, drawn.rows, drawn.inputs)["out"] for p in (program, reorder(program, SIZES))]
    assert (results[0] - results[1]).abs().max() < 1e-12


@pytest.mark.parametrize("layer", [rgcn_sum, rgcn_mean])
def test_sums_come_before_the_map_where_targets_have_fewer_pairs(layer):
    program = layer.program(x=(16,), weight=(16, 16))
    assert of(aggregate_first(program, SIZES), "linear") == [(V, (16,))]
    assert of(aggregate_first(program, {**SIZES, V: 7000}), "linear") == [(U, (16,))]


def test_a_mean_is_made_before_the_map():
    """Backward then reads the gradients of targets, without a row of them per pair."""
    shapes = {"x": (16,), "weight": (16, 16)}
    sums = aggregate_first(rgcn_mean.program(**shapes), SIZES)
    scaled = remove_dead(scale_first(sums))
    linear = next(value for value in scaled.values if value.op == "linear")
    assert [scaled.values[i].op for i in linear.args] == ["div", "input"]
    outer = [v for v in optimise(sums, SIZES, wrt=["weight"])[-1].program.values if v.op == "outer"]
    assert len(outer) == 1 and outer[0].shape == (16, 16)
    plain = rgcn_sum.program(**shapes)
    assert scale_first(plain) == plain


def test_a_share_is_multiplied_in_after_the_map():
    """Another pass gives it, so that before the map it would take a pass over the pairs."""

    @relational
    def shared(x: S, weight: R, logits: V):
        share = softmax(logits, among=D, over=V)
        return sum_to(D, share * (sum_to(V, x) @ weight), over=V)

    program = shared.program(x=(3,), weight=(3, 3), logits=(1,))
    assert scale_first(program) == program


def test_attention_is_applied_before_the_map():
    """The logits then are products with the folded weight, so that no row has been mapped per source and relation."""
    program = aggregate_first(RGAT, SIZES)
    assert of(program, "linear") == [(V, (16,)), (V, (1,)), (U, (1,)), (V, (1, 1, 16))]
    assert of(aggregate_first(RGAT, {**SIZES, V: 7000}), "linear") == of(RGAT, "linear")

    @relational
    def returned(x: S, weight: R, c: E):
        return {"out": sum_to(D, c * (x @ weight)), "mapped": x @ weight}

    program = common_subexpressions(returned.program(x=(3,), weight=(3, 3), c=(1,)))
    assert aggregate_first(program, SIZES) == program


@pytest.mark.parametrize(("pairs", "domain"), [(100, U), (7900, U), (8100, E), (10_000, E)])
def test_pairs_are_used_where_they_are_few(pairs, domain):
    @relational
    def messages(x: S, weight: R, e: E):
        return sum_to(D, (x @ weight).apply("relu") * e)

    program = messages.program(x=(3,), weight=(3, 2), e=(2,))
    sizes = {**SIZES, U: pairs}
    assert of(compact(program, sizes), "linear", "relu") == [(domain, (2,))] * 2
    assert of(compact(decompact(program), sizes), "linear", "relu") == [(domain, (2,))] * 2
    assert of(decompact(program), "linear", "relu") == [(E, (2,))] * 2


def test_maps_of_gathered_rows_move_to_the_nodes():
    @relational
    def gathered(x: S, weight: One):
        return sum_to(D, to(E, x) @ weight)

    program = gathered.program(x=(3,), weight=(3, 2))
    assert of(program, "linear") == [(E, (2,))] and of(compact(program, SIZES), "linear") == [(S, (2,))]

    @relational
    def roots(x: S):
        return sum_to(D, to(E, x).apply("sqrt") + (to(E, x) * 2.0).apply("sqrt"))

    # The square root of a row that no edge reads may have no gradient.
    program = compact(roots.program(x=(3,)), SIZES)
    assert of(program, "sqrt") == [(E, (3,))] * 2 and of(program, "mul") == [(S, (3,))]


@pytest.mark.parametrize(
    "program",
    [rgcn_mean.program(x=(16,), weight=(16, 16)), rgcn_sum.program(x=(16,), weight=(16, 16)), RGAT],
    ids=["rgcn-mean", "rgcn-sum", "rgat"],
)
def test_no_map_has_a_row_per_edge_in_either_direction(program):
    joint = optimise(program, SIZES, wrt=tuple(program.inputs))[-1].program
    assert all(domain is not E for domain, _ in of(joint, "linear", "matmul"))
    ranges = {value.attrs[1] for value in joint.values if value.op == "outer"}
    assert ranges <= {U, V}
    if program is not RGAT:
        assert all(value.domain is not E for value in joint.values)


def test_backward_without_use_is_not_written():
    """Only what is asked for is differentiated, and an input that no output reads has a gradient of zeros."""
    program = PROGRAMS["rgcn-mean"]
    only = remove_dead(differentiate(program, ("x",)))
    assert [name for name, _ in only.outputs] == ["out", "d_x"] and of(only, "outer") == []

    @relational
    def ignores(x: S, unread: R):
        return sum_to(D, x)

    drawn = case(ignores.program(x=(2,), unread=(2, 3)), "dense")
    joint = differentiate(drawn.program, ("unread",))
    gradient = interpret(joint, drawn.rows, {**drawn.inputs, **drawn.upstream_named("d_")})["d_unread"]
    assert gradient.shape == drawn.inputs["unread"].shape and not gradient.any()


def test_passes_leave_their_program_alone():
    program = PROGRAMS["rgat-additive-within"]
    twin = replace(program)
    optimise(program, SIZES, wrt=("x",))
    assert program == twin and str(program) == str(twin)


def test_batches_of_about_a_size_share_a_program():
    program = rgcn_mean.program(x=(16,), weight=(16, 16))
    near = {**SIZES, S: 1010, D: 990, U: 6100, E: 10_100}
    assert Passes().run(program, SIZES, ["x"]) is Passes().run(program, near, ["x"])
    assert Passes().run(program, SIZES, ["x"]) is not Passes().run(program, SIZES, ["weight"])
    # Large graphs are worth a look at their own sizes.
    few, many = ({**SIZES, U: pairs, V: 4_000_000, E: 2_000_000} for pairs in (1_590_000, 1_610_000))
    assert [of(Passes().run(rgcn_sum.program(x=(16,), weight=(16, 16)), s), "linear")[0][0] for s in (few, many)] == [
        U,
        E,
    ]


def test_gradients_of_a_softmax_take_no_sum_over_edges_of_their_own():
    """Their sum over a row follows from its output, also by way of the sums of pairs that make up the output."""

    @relational
    def attention(q: D, k: S, v: S):
        return sum_to(D, softmax(dot(q, k), among=D).view(4, 1) * v)

    def sums(program: Program, wrt: tuple[str, ...]) -> list[list[tuple[Domain, Domain]]]:
        """Domains of the sums before and after the pass, of the output without the weights."""
        program = Program(program.name, program.values, program.outputs[:1])
        before = common_subexpressions(differentiate(program, wrt))
        return [
            [p.values[i].attrs for i in sorted(p.live) if p.values[i].op == "sum" and p.values[i].attrs[0] in (D, V)]
            for p in (before, remove_dead(share_sums(before)))
        ]

    assert sums(attention.program(q=(4, 8), k=(4, 8), v=(4, 8)), ("q", "k", "v")) == [[(D, E)] * 3, [(D, E)] * 2]
    early = aggregate_first(reorder(RGAT, SIZES), {**SIZES, V: 1000})
    assert sums(early, ("x",)) == [[(V, E), (D, V), (D, E)], [(V, E), (D, V), (D, V)]]
    # What a target adds to its logits has a gradient that cancels.
    assert (D, E) in sums(early, ("x", "xd"))[1]


def test_gradients_of_the_parts_of_a_weight_are_joined():
    builder = Builder()
    parts = [builder.input(name, One, (3, width)) for name, width in (("a", 2), ("b", 3), ("c", 1))]
    placed = [builder.emit("pad", part, attrs=zeros) for part, zeros in zip(parts, [(0, 4), (2, 1), (5, 0)])]
    whole = builder.emit("add", builder.emit("add", placed[1], placed[0]), placed[2])
    apart = builder.emit("add", placed[0], placed[2])
    program = builder.build("parts", [("whole", whole), ("apart", apart)])
    joined = remove_dead(join_pads(program))
    assert of(joined, "concat", "add", "pad") == [(One, (3, 6))] * 4
    inputs = {name: torch.randn(3, width) for name, width in (("a", 2), ("b", 3), ("c", 1))}
    rows = IndexSpace(Graph.of(torch.tensor([[0], [0]]), 1))
    want, got = (interpret(one, rows, inputs) for one in (program, joined))
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_joined_rows_are_joined_after_sums():
    """Also after what is computed of them number by number, with parts of what runs over the parts."""

    @relational
    def gates(t: D, k: S, v: S, w: E, b: One):
        gate = (t + k).apply("sigmoid")
        return {"out": sum_to(D, concat(gate * v, gate).apply("relu") * w), "biased": sum_to(D, concat(gate, v) + b)}

    split = remove_dead(split_concats(gates.program(t=(4,), k=(4,), v=(4,), w=(1,), b=(8,))))
    assert of(split, "concat") == [(D, (8,))] * 2 and of(split, "slice") == [(One, (4,))] * 2
    assert of(split, "sum") == [(D, (4,))] * 4
