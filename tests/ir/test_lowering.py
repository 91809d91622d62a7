"""The steps of a lowered program, interpreted one after the other, give what the program gives."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.ir import (
    D,
    E,
    IndexSpace,
    One,
    R,
    S,
    V,
    dot,
    interpret,
    lowering,
    materialize,
    relational,
    softmax,
    sum_to,
)
from pyg_dfgnn.ir.interpreter import run_values
from pyg_dfgnn.ir.kernel_steps import Lowered
from pyg_dfgnn.ir.layers import film, rgat
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import PASSES, optimise
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ir.register_layout import LoweringError, infer_layout
from pyg_dfgnn.ir.register_matmul import MAX_OUTER
from tests.covering import over
from tests.ir.cases import ALL_GRAPHS, PARTS, PROGRAMS, Case, case, gaussians, many_gaussians
from tests.ir.test_passes import compare_all
from tests.ir.test_rewrites import SIZES

REFUSED = {
    "pairs": "concat .* : E.* moves numbers between the lanes of an edge",
    "rgat-multiplicative-across": "a part of the heads or channels",
    "rgat-multiplicative-within": "a part of the heads or channels",
}
"""Programs that no kernels run, and why."""
LOWERED = {name: program for name, program in PROGRAMS.items() if name not in REFUSED.keys() | PARTS.keys()}
for _mechanism in ("across", "within"):
    _traced = rgat(2, "multiplicative-self-attention", f"{_mechanism}-relation")
    LOWERED[f"rgat-multiplicative-{_mechanism}-1"] = _traced.program(x=(6,), xd=(6,), weight=(6, 8), q=(8, 2), k=(8, 2))
_program = LOWERED["rgat-additive-across"]
LOWERED["rgat-out"] = replace(_program, outputs=_program.outputs[:1])


def joint(case: Case, off: tuple[str, ...] = ()) -> Program:
    return optimise(case.program, case.rows.sizes, wrt=tuple(case.inputs), off=off)[-1].program


def run_steps(lowered: Lowered, rows: IndexSpace, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Interpret each step on what the steps before it have left."""
    tensors = dict(tensors)
    for step in lowered.static:
        tensors |= run_values(step.program, rows, {}, torch.empty(0, dtype=torch.float64))
    for step in (*lowered.forward, *lowered.backward):
        results = interpret(step.program, rows, {name: tensors[name] for name in step.reads})
        assert results.keys() == set(step.writes)
        tensors |= results
    results = {}
    for name, (buffer, shape) in lowered.outputs.items():
        lead = () if lowered.buffers[buffer].domain is One else tensors[buffer].shape[:1]
        results[name] = tensors[buffer].reshape(*lead, *shape)
    return results


@pytest.fixture
def most_operators(monkeypatch):
    """most_operators(number) of which lanes rather run so many than read what they make."""

    def allow(number):
        monkeypatch.setattr(materialize, "MOST_OPERATORS", number)
        lowering._lowered.cache_clear()

    yield allow
    lowering._lowered.cache_clear()


@over(name=("gaussians", "typed-gaussians", "many-gaussians"), graph=tuple(ALL_GRAPHS))
def test_steps_give_what_is_computed_once_for_each_edge(name, graph, most_operators):
    most_operators(2)
    drawn = case(LOWERED[name], graph)
    program = joint(drawn)
    lowered = lower(program, dict(drawn.program.outputs))
    assert name == "many-gaussians" or any(step.kind == "map" and step.domain is E for step in lowered.forward)
    inputs = {**drawn.inputs, **drawn.upstream_named("d_")}
    compare_all(name, run_steps(lowered, drawn.rows, inputs), interpret(program, drawn.rows, inputs))


@over(name=tuple(LOWERED), graph=tuple(ALL_GRAPHS))
def test_steps_give_values_and_gradients(name, graph):
    drawn = case(LOWERED[name], graph)
    inputs = {**drawn.inputs, **drawn.upstream_named("d_")}
    for off in ((), ("compact",), tuple(PASSES)):
        program = joint(drawn, off)
        lowered = lower(program, dict(drawn.program.outputs))
        compare_all(f"all but {off}", run_steps(lowered, drawn.rows, inputs), interpret(program, drawn.rows, inputs))


@over(name=tuple(PARTS), graph=tuple(ALL_GRAPHS))
def test_steps_read_and_write_parts_of_rows(name, graph):
    drawn = case(PARTS[name], graph)
    inputs = {**drawn.inputs, **drawn.upstream_named("d_")}
    for off in ((), ("compact",)):
        program = joint(drawn, off)
        lowered = lower(program, dict(drawn.program.outputs))
        compare_all(f"all but {off}", run_steps(lowered, drawn.rows, inputs), interpret(program, drawn.rows, inputs))


@pytest.mark.parametrize("name", PARTS)
def test_no_row_of_an_edge_is_stored_for_its_parts(name):
    lowered = lower(joint(case(PARTS[name], "dense")), dict(PARTS[name].outputs))
    assert not lowered.edge_rows
    dense = [step.program for step in lowered.backward if step.kind == "dense"]
    joined = [value for program in dense for value in program.values if value.op == "concat" and value.domain is E]
    # A number, 33 and 34 of them make one gradient: no kernel has lanes for all, and torch joins them.
    assert bool(joined) == (name == "rejoined-68")


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_lanes_hold_is_refused_by_name(name):
    drawn = case(PROGRAMS[name], "dense")
    with pytest.raises(LoweringError, match=REFUSED[name]):
        lower(joint(drawn), dict(drawn.program.outputs))


@pytest.mark.parametrize("name", LOWERED)
def test_kernels_store_no_vector_per_edge(name):
    """Of a graph with few pairs per edge, edges hold at most a number per head, but for what is given or asked for."""
    drawn = case(LOWERED[name], "dense")
    lowered = lower(joint(drawn), dict(drawn.program.outputs))
    named = {buffer for buffer, _ in lowered.outputs.values()} | drawn.inputs.keys() | {"d_alpha"}
    wide = [b for b in lowered.buffers.values() if b.domain is E and b.name not in named and sum(b.shape) > 4]
    assert not wide
    kinds = {step.kind for step in (*lowered.forward, *lowered.backward)}
    assert kinds <= {"traversal", "map", "linear", "outer", "dense"}
    for step in (*lowered.forward, *lowered.backward):
        if step.kind in ("traversal", "map"):
            infer_layout(step.program)


@pytest.mark.parametrize(("size", "passes"), [(8, [S, D]), (16, [S, D, D])])
def test_sums_that_fill_the_registers_are_shared_out(size, passes):
    """Two gradients of weights for each of two functions and so many coordinates."""
    program = gaussians.program(x=(128,), edge=(size,), mu=(2, size), sigma=(2, size))
    lowered = lower(optimise(program, SIZES, wrt=tuple(program.inputs))[-1].program, ("out",))
    assert [step.domain for step in lowered.forward if step.kind == "traversal"] == [D]
    assert [step.domain for step in lowered.backward if step.over is E] == passes


def test_a_number_of_an_edge_comes_from_the_pass_that_has_both_its_rows():
    """Gradients of Gaussians need a product of rows, which the pass that gathers one of them has at hand."""
    program = gaussians.program(x=(128,), edge=(8,), mu=(2, 8), sigma=(2, 8))
    lowered = lower(optimise(program, SIZES, wrt=("x", "mu"))[-1].program, ("out",))
    first, second = (step for step in lowered.backward if step.kind == "traversal")
    assert (first.domain, second.domain) == (S, D)
    assert {"x", "d_out"} <= set(first.reads) and not {"x", "d_out"} & set(second.reads)
    assert set(first.writes) & set(second.reads)


@pytest.mark.parametrize("is_stored", [False, True])
def test_numbers_that_much_arithmetic_makes_of_edges_are_computed_once_for_each(is_stored, most_operators):
    """A number per function of an edge is read by the passes, which else compute it in every lane."""
    most_operators(5 if is_stored else 1000)
    program = gaussians.program(x=(128,), edge=(8,), mu=(2, 8), sigma=(2, 8))
    lowered = lower(optimise(program, SIZES, wrt=("x",))[-1].program, ("out",))
    maps = [step for step in lowered.forward if step.kind == "map" and step.domain is E]
    assert len(maps) == is_stored
    passes = [step for step in (*lowered.forward, *lowered.backward) if step.kind == "traversal"]
    assert [step.domain for step in passes] == [D, S]
    assert all(("edge" in step.reads) is not is_stored for step in passes)
    kept = [buffer for buffer in lowered.buffers.values() if buffer.domain is E and buffer.name != "edge"]
    assert [(buffer.shape, buffer.is_exact) for buffer in kept] == [((2, 1), True)] * is_stored


@pytest.mark.parametrize(("shape", "is_refused"), [((6, 4, 2, 3), False), ((16, 16, 3, 3), True)])
def test_functions_of_edges_that_fill_the_registers_are_refused(shape, is_refused):
    weights = {"mu": shape, "sigma": shape, "g": shape[:3]}
    program = many_gaussians.program(x=shape[:1], edge=shape[3:], **weights)
    with pytest.raises(LoweringError, match="a row that does not fit the lanes") if is_refused else nullcontext():
        lower(optimise(program, SIZES)[-1].program, ("out",))


def test_sums_over_the_same_rows_are_one_step():
    drawn = case(LOWERED["hgt-4"], "dense")
    lowered = lower(joint(drawn), ("out",))
    first = next(step for step in lowered.forward if step.kind == "traversal")
    assert [value.op for value in first.program.values if value.op in ("max", "sum")] == ["max", "sum"]
    assert (first.over, first.domain) == (E, D)
    # Logits gather vectors and are read again.
    assert any(lowered.buffers[name].domain is E and lowered.buffers[name].is_exact for name in first.writes)
    assert "saved: " in str(lowered)


@pytest.mark.parametrize("has_backward", [False, True])
def test_attention_on_features_reads_each_edge_once(has_backward):
    """One pass gives the logits, the softmax within relations and what it weights; two passes give the gradients."""
    drawn = case(LOWERED["hgt-features"], "dense")
    wrt = tuple(drawn.inputs) if has_backward else ()
    lowered = lower(optimise(drawn.program, drawn.rows.sizes, wrt=wrt)[-1].program, ("out",))
    passes = [[step.domain for step in part if step.over is E] for part in (lowered.forward, lowered.backward)]
    assert passes == [[V], [S, V] if has_backward else []]


def test_numbers_of_pairs_are_stored_where_several_steps_read_them():
    """One step takes a dot product of rows, the other reads the number."""

    @relational
    def dots(x: V, y: V):
        return {"out": sum_to(D, dot(x, y), over=V), "total": sum_to(R, dot(x, y), over=V)}

    lowered = lower(dots.program(x=(8,), y=(8,)), ("out", "total"))
    assert [step.kind for step in lowered.forward if "x" in step.reads] == ["map"]
    assert [step.domain for step in lowered.forward if step.kind == "traversal"] == [D, R]


@pytest.mark.parametrize("act,wrt,count", [("relu", True, 3), ("relu", False, 0), ("tanh", True, 0)])
def test_maps_from_which_gradients_choose_a_branch_are_float32(act, wrt, count):
    """Those of the sign of what a ReLU takes; what the maps' own gradients multiply is rounded."""
    row, matrix, bias = (24,), (24, 16), (16,)
    shapes = {"x": row, "xd": row, "weight": matrix, "gamma": matrix, "gamma_bias": bias, "beta": matrix}
    program = film("mean", act).program(**shapes, beta_bias=bias)
    joint = optimise(program, SIZES, wrt=tuple(program.inputs) if wrt else ())[-1].program
    lowered = lower(joint, ("out",))
    written = [lowered.buffers[n] for step in (*lowered.forward, *lowered.backward) for n in step.writes]
    assert sum(buffer.is_exact and buffer.shape == bias for buffer in written) == count
    read = {name for step in lowered.backward if step.is_by_relation for name in step.reads}
    assert read and not any(lowered.buffers[n].is_exact for n in read) if wrt else not read


def test_without_gradients_nothing_is_saved():
    program = optimise(LOWERED["hgt-4"], case(LOWERED["hgt-4"], "dense").rows.sizes)[-1].program
    lowered = lower(program, ("out",))
    assert lowered.backward == () and lowered.saved == ()


def test_inputs_called_as_gradients_are_saved():
    @relational
    def gated(d_x: S, e: E):
        return sum_to(D, d_x * e.apply("tanh"))

    program = optimise(gated.program(d_x=(8,), e=(8,)), SIZES, wrt=("d_x", "e"))[-1].program
    assert {"d_x", "e"} <= set(lower(program, ("out",)).saved)


def test_softmax_weights_in_its_own_pass():
    """Unless the weights are asked for, and if what it weights is summed over the rows that it ranges over."""
    passes = {}
    for name in ("rgat-additive-across", "rgat-additive-within"):
        for outputs in (("out",), ("out", "alpha")):
            drawn = case(LOWERED[name], "dense")
            named = tuple((n, i) for n, i in drawn.program.outputs if n in outputs)
            drawn = replace(drawn, program=replace(drawn.program, outputs=named))
            steps = lower(joint(drawn), outputs).forward
            passes[name, outputs] = sum(step.kind == "traversal" for step in steps)
    assert passes["rgat-additive-across", ("out",)] == 1
    assert {count for key, count in passes.items() if key != ("rgat-additive-across", ("out",))} == {2}


def test_requested_edge_values_are_written_by_a_traversal():
    drawn = case(LOWERED["rgat-additive-across"], "dense")
    lowered = lower(joint(drawn), ("out", "alpha"))
    assert [step.kind for step in lowered.forward].count("map") == 0


def test_gradients_of_edge_inputs_are_written_by_a_traversal():
    """One that gathers all that they are made of, so that no pass over the edges is for them alone."""

    @relational
    def weighted(x: S, weight: E):
        return sum_to(D, x * weight)

    program = weighted.program(x=(8,), weight=(1,))
    lowered = lower(optimise(program, SIZES, wrt=("x", "weight"))[-1].program, ("out",))
    assert [(step.kind, step.domain) for step in lowered.backward] == [("traversal", S)]
    assert not lowered.edge_rows


def test_attention_takes_a_pass_forward_and_two_backward():
    """Logits are computed again where their vectors are gathered anyway."""

    @relational
    def attention(q: D, k: S, v: S):
        return sum_to(D, softmax(dot(q, k), among=D).view(4, 1) * v)

    program = attention.program(q=(4, 8), k=(4, 8), v=(4, 8))
    lowered = lower(optimise(program, SIZES, wrt=("q", "k", "v"))[-1].program, ("out",))
    passes = [
        [step.domain for step in steps if step.kind == "traversal"] for steps in (lowered.forward, lowered.backward)
    ]
    assert passes == [[D], [S, D]]
    # The gradient of the weights, for which the second pass back would gather v alone.
    assert [b.shape for b in lowered.buffers.values() if b.domain is E] == [(4,)]


@relational
def matrices(x: S, w: R):
    """A product of matrices for each pair."""
    return sum_to(D, x.emit("matmul", w))


def test_matrix_per_pair_is_refused():
    with pytest.raises(LoweringError, match="matmul .* : U.* needs a matrix per row"):
        lower(matrices.program(x=(2, 3), w=(3, 3)), ("out",))


def test_gradient_of_transposed_weights_is_dense():
    """A layer's weight is read transposed where it lies; its gradient is turned back by torch."""

    @relational
    def transposed(x: S, edge: E, weight: One):
        return sum_to(D, (x + edge @ weight.permute(1, 0)).apply("relu"))

    program = transposed.program(x=(6,), edge=(3,), weight=(6, 3))
    joint = optimise(program, {One: 1, S: 5, D: 5, E: 9}, wrt=("x", "edge", "weight"))[-1].program
    steps = lower(joint, ["out"]).backward
    (turned,) = (step for step in steps if any(v.op == "permute" for v in step.program.values) and not step.reads[1:])
    assert turned.kind == "dense"


@pytest.mark.parametrize(("size", "columns", "stored"), [(3, 8, 0), (32, 128, 0), (33, 8, 2), (32, 136, 2)])
def test_short_rows_of_edges_are_mapped_in_registers(size, columns, stored):
    """Up to a number of numbers; sums of outer products are shared out to as many kernels as they need."""

    @relational
    def gated(x: S, edge: E, weight: One, bias: One):
        return sum_to(D, x * (edge @ weight + bias).apply("sigmoid"))

    drawn = case(gated.program(x=(columns,), edge=(size,), weight=(size, columns), bias=(columns,)), "dense")
    program = joint(drawn)
    lowered = lower(program, ["out"])
    assert len(lowered.edge_rows) == stored
    steps = [
        step
        for step in lowered.backward
        if step.kind == "traversal" and any(value.op == "outer" for value in step.program.values)
    ]
    assert len(steps) == (0 if stored else -(-size * columns // MAX_OUTER))
    inputs = {**drawn.inputs, **drawn.upstream_named("d_")}
    compare_all("lowering", run_steps(lowered, drawn.rows, inputs), interpret(program, drawn.rows, inputs))


def test_computed_rows_of_edges_that_are_only_summed_are_summed_before_they_are_mapped():
    @relational
    def moved(x: S, xd: D, weight: One):
        y = (x + xd).apply("relu") @ weight
        return {"in": sum_to(D, y), "out": sum_to(S, -y)}

    drawn = case(moved.program(x=(6,), xd=(6,), weight=(6, 4)), "dense")
    lowered = lower(drawn.program, ["in", "out"])
    assert all(
        value.domain is not E for step in lowered.forward for value in step.program.values if value.op == "linear"
    )
    compare_all(
        "lowering", run_steps(lowered, drawn.rows, drawn.inputs), interpret(drawn.program, drawn.rows, drawn.inputs)
    )
