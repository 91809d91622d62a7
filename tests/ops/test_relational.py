"""Programs as users call them: what is remembered, what falls back, what is refused."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.ir import (
    D,
    E,
    IndexSpace,
    One,
    R,
    S,
    concat,
    dot,
    interpret,
    leaky_relu,
    max_to,
    mean_to,
    relational,
    sum_to,
    to,
)
from pyg_dfgnn.ir.layers import rgat
from pyg_dfgnn.ir.passes import PASSES, Passes
from pyg_dfgnn.ir.program import SEED, Builder, Program
from pyg_dfgnn.ops.relational import apply, index_space_of, prepared_for, program
from pyg_dfgnn.ops.relational.segment_gemm import SegmentLinear, SegmentOuter
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import build_together, emulated_device


@relational
def mapped(x: S, weight: R):
    """A map per relation, and plain sums."""
    return {"out": sum_to(D, x @ weight), "plain": sum_to(D, x)}


@relational
def joined(x: S, xd: D):
    joint = concat(to(E, x), to(E, xd))
    return sum_to(D, dot(joint, joint).view(1))


@relational
def gated(x: S, weight: R):
    """A map per relation between two that are nonlinear: backward reads what each of them has left."""
    return {"out": sum_to(D, leaky_relu(leaky_relu(x @ weight, 0.2) @ weight, 0.2))}


@relational
def largest(x: S):
    """Backward reads an output, which is given twice."""
    most = max_to(D, x)
    return {"most": most, "again": most, "square": most * most}


@relational
def averaged(x: S, weight: R):
    """A map per relation, of which rows are averaged."""
    return mean_to(D, to(E, x) @ weight)


def takes_a_name(x: S):
    return sum_to("D", x)


@pytest.fixture
def graph() -> Graph:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(6, (2, 40), generator=generator)
    edge_type = torch.randint(3, (40,), generator=generator)
    return Graph.of(edge_index, 6, edge_type=edge_type, num_relations=3)


def inputs_of(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"x": (6, 8), "weight": (3, 8, 8)}
    return {name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}


def test_interpreter_runs_what_kernels_cannot(graph):
    inputs, rows = inputs_of(torch.float64), index_space_of(graph)
    out = apply(mapped, rows, inputs)
    expected = interpret(mapped.program(x=(8,), weight=(8, 8)), rows, inputs)
    assert out.keys() == {"out", "plain"}
    assert torch.equal(out["out"], expected["out"])
    grads = torch.autograd.grad(out["out"].sum(), list(inputs.values()), create_graph=True)
    assert all(grad.requires_grad for grad in grads[:1])
    assert any("float64" in reason for reason in prepared_for(mapped, rows, inputs))


def test_second_calls_neither_trace_nor_lower(graph, monkeypatch):
    rows, calls = index_space_of(graph), []
    with emulated_device():
        first = apply(mapped, rows, inputs := inputs_of())
        for owner, name in ((program.Passes, "run"), (program, "lower")):
            monkeypatch.setattr(owner, name, lambda *_, name=name, **__: calls.append(name))
        monkeypatch.setattr(type(mapped), "program", lambda *_, **__: calls.append("trace"))
        second = apply(mapped, index_space_of(graph), inputs)
        assert torch.equal(first["out"], second["out"]) and not calls


def test_outputs_that_are_not_wanted_are_not_computed(graph):
    rows = index_space_of(graph)
    with emulated_device() as launched:
        assert apply(mapped, rows, inputs_of(), outputs=("plain",)).keys() == {"plain"}
    assert launched == ["relational_traversal"]


def test_gradients_of_some_inputs_and_outputs(graph):
    inputs, rows = inputs_of(), index_space_of(graph)
    inputs["weight"].requires_grad_(False)
    with emulated_device():
        out = apply(mapped, rows, inputs)
        (actual,) = torch.autograd.grad(out["out"].sum(), [inputs["x"]])
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    (expected,) = torch.autograd.grad(apply(mapped, rows, wide)["out"].sum(), [wide["x"]])
    torch.testing.assert_close(actual.double(), expected, **elementwise("float32/few_terms"))


def test_outputs_may_be_edited_in_place(graph):
    gradients = []
    for is_edited in (False, True):
        x = torch.arange(48.0).sin().view(6, 8).requires_grad_()
        with emulated_device():
            out = apply(largest, index_space_of(graph), {"x": x})
            loss = sum((place + 1) * tensor.sum() for place, tensor in enumerate(out.values()))
            assert torch.equal(out["most"], out["again"])
            if is_edited:
                out["most"].detach().zero_()
                assert out["again"].any()
            gradients += torch.autograd.grad(loss, [x])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("off", [(), tuple(PASSES)], ids=["optimised", "as written"])
def test_other_streams_hear_of_all_arrays_that_a_program_reads(off, graph):
    """The lists of the rows tell them of what they keep."""
    rows = index_space_of(graph)
    with emulated_device():
        prepared = prepared_for(averaged, rows, inputs_of(), passes=Passes(frozenset(off)))
    known = {id(tensor) for holder in (rows.lists, rows.graph) for tensor in tensors_of(holder._derived)}
    read = []
    for function in (prepared.forward, prepared.backward):
        for value in function.__globals__.values():
            product = getattr(getattr(value, "func", value), "__self__", None)
            if isinstance(product, (SegmentLinear, SegmentOuter)):
                read += [tensor for tensor in vars(product).values() if isinstance(tensor, Tensor)]
            elif isinstance(value, Tensor) and value is not function.__globals__["like"]:
                read.append(value)
    assert len(read) > 4
    assert all(id(tensor) in known for tensor in read)


def noisy() -> Program:
    """A sum of what is left of squares, with the mask of a seed."""
    builder = Builder()
    x, seed = builder.input("x", S, (8,)), builder.seed()
    kept = builder.emit("mul", builder.emit("dropout_mask", seed, attrs=(E, (8,), 0.4, 0)), builder.emit("mul", x, x))
    return builder.build("noisy", {"out": builder.emit("sum", kept, attrs=(D, E))})


PROGRAMS = [(mapped, "x weight"), (gated, "x weight"), (largest, "x"), (noisy(), "x @seed"), (joined, "x xd")]


@pytest.mark.parametrize("function, names", PROGRAMS, ids=["mapped", "gated", "largest", "noisy", "joined"])
def test_gradients_are_programs_too(function, names, graph):
    """Second and third derivatives are those of generated kernels, where there are any."""
    drawn, rows, results = inputs_of(), index_space_of(graph), []
    for dtype in (torch.float32, torch.float64):
        inputs = {name: drawn.get(name, drawn["x"]).detach().to(dtype).requires_grad_() for name in names.split()}
        if SEED in inputs:
            inputs[SEED] = torch.tensor([5])
        leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
        with emulated_device() as launched:
            grads: Any = apply(function, rows, inputs).values()
            for _ in range(3):
                before = len(launched)
                grads = torch.autograd.grad(sum((x / 30).sin().sum() for x in grads), leaves, create_graph=True)
                results.append([grad.detach() for grad in grads])
        assert (len(launched) > before) is (dtype is torch.float32 and function is not joined)
    for actual, expected in zip(results[:3], results[3:], strict=True):
        for got, want in zip(actual, expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@relational
def powers(x: S):
    return sum_to(D, x**2 + x**1 + x**3)


def test_powers_of_zero_stay_finite(graph):
    x = torch.zeros(6, 8, requires_grad=True)
    with emulated_device():
        (found,) = apply(powers, index_space_of(graph), {"x": x}).values()
        for _ in range(4):
            (found,) = torch.autograd.grad(found.sum(), x, create_graph=True)
            assert found.isfinite().all()
            found = found + x


def test_refusal_is_reported_and_the_interpreter_runs(graph, monkeypatch):
    rows, inputs = index_space_of(graph), {"x": torch.randn(6, 8), "xd": torch.randn(6, 8)}
    with emulated_device():
        (reason,) = prepared_for(joined, rows, inputs)
        assert "concat" in reason
        assert apply(joined, rows, inputs)["out"].shape == (6, 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with local_settings(fallback="error"), pytest.raises(UnsupportedError, match="concat"):
            apply(joined, rows, inputs)


def test_wrong_inputs_are_named(graph):
    rows, inputs = index_space_of(graph), inputs_of()
    with emulated_device():
        with pytest.raises(ValueError, match=r"'x' needs shape \[S=6, 8\] \(got \[5, 8\]\)"):
            apply(mapped, rows, {**inputs, "x": torch.randn(5, 8)})
        with pytest.raises(TypeError, match="'weight' needs dtype torch.float32 .got torch.float16."):
            apply(mapped, rows, {**inputs, "weight": inputs["weight"].half()})
        with pytest.raises(ValueError, match="'inputs' needs x, weight .got x."):
            apply(mapped, rows, {"x": inputs["x"]})
        with pytest.raises(ValueError, match="'inputs' needs x, weight .got x, weight, y."):
            apply(mapped, rows, {**inputs, "y": inputs["x"]})
        for given, text in ((None, "None"), (inputs["x"].detach().numpy(), "ndarray array")):
            for program in (mapped, mapped.program(x=(8,), weight=tuple(inputs["weight"].shape[1:]))):
                with pytest.raises(TypeError, match=f"'x' needs a torch.Tensor .got {text}"):
                    apply(program, rows, {**inputs, "x": given})
        with pytest.raises(ValueError, match="'outputs' needs out, plain .got other."):
            apply(mapped, rows, inputs, outputs=("other",))
        with pytest.raises(TypeError, match="'outputs' needs a list of names .got str 'out'."):
            apply(mapped, rows, inputs, outputs="out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source_type": torch.zeros(6), "num_types": 2},
            "'source_type' needs dtype .*int64 or .*int32 .got .*float32.",
        ),
        ({"target_type": torch.ones(6).bool(), "num_types": 2}, "'target_type' needs dtype .* .got torch.bool."),
        ({"source_type": [0] * 6, "num_types": 2}, "'source_type' needs a torch.Tensor .got list"),
        ({"source_type": torch.zeros(6).long(), "num_types": "2"}, "'num_types' needs an integer .got str '2'."),
    ],
)
@pytest.mark.parametrize("make", [index_space_of, IndexSpace])
def test_wrong_types_are_named(make, options, message, graph):
    with pytest.raises(TypeError, match=message):
        make(graph, **options)


def test_rows_are_kept_with_the_graph_and_its_types(graph):
    types = torch.tensor([0, 1, 0, 1, 0, 1])
    lists = index_space_of(graph, source_type=types, num_types=2).lists
    assert index_space_of(graph, source_type=types, num_types=2).lists is lists
    assert index_space_of(graph).lists is index_space_of(graph).lists is not lists
    types[0] = 1
    assert index_space_of(graph, source_type=types, num_types=2).lists is not lists


def test_graph_is_freed_with_its_edges():
    edge_index, edge_type = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])
    graph = Graph.of(edge_index, 6, edge_type=edge_type, num_relations=3)
    gc.collect()
    gc.disable()
    try:
        with emulated_device():
            out = apply(mapped, index_space_of(graph), inputs_of())["out"]
            rows, alive = weakref.ref(index_space_of(graph).lists), weakref.ref(graph)
            del edge_index, edge_type, graph
            # Its arrays are read by the backward pass.
            assert alive() is not None
            out.sum().backward()
            del out
        assert alive() is None and rows() is None
    finally:
        gc.enable()


def test_rows_keep_their_graph():
    for make in (index_space_of, IndexSpace):
        rows = make(Graph.of(torch.tensor([[0], [0]]), 1))
        gc.collect()
        assert rows.graph.num_edges == 1


def test_layers_keep_their_programs():
    assert rgat(2, "additive-self-attention", "across-relation") is rgat(
        2, "additive-self-attention", "across-relation"
    )


@pytest.mark.parametrize("is_last", [True, False], ids=["last", "retained"])
def test_a_backward_pass_lets_go_of_what_it_has_read(graph, is_last):
    inputs, saved, held = inputs_of(), [], []

    def pack(tensor):
        saved.append(weakref.ref(tensor))
        return tensor

    def run(*launch):
        held.append(sum(tensor() is not None for tensor in saved))
        emulate(*launch)

    with emulated_device(), launcher.override(run, build_together) as emulate:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = apply(gated, index_space_of(graph), inputs)["out"]
        held.clear()
        grads = torch.autograd.grad(out.sum(), list(inputs.values()), retain_graph=True)
        first = held.copy()
        held.clear()
        again = torch.autograd.grad(out.sum(), list(inputs.values()), retain_graph=not is_last)
    assert first == [len(saved)] * len(first) and all(map(torch.equal, grads, again))
    assert (held[-1] < held[0]) is is_last


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda graph: apply(mapped, graph, {}), r"'rows' needs the IndexSpace of a graph, .* \(got Graph"),
        (
            lambda graph: apply(lambda x: x, index_space_of(graph), {}),
            "'program' needs a Program or a function under @rel",
        ),
        (
            lambda graph: index_space_of(graph.edge_index),
            r"'graph' needs a pyg_dfgnn.Graph \(got a tensor of shape \[2, 40\]",
        ),
        (lambda graph: IndexSpace("edges"), r"'graph' needs a pyg_dfgnn.Graph \(got str 'edges'\)"),
        (lambda graph: relational("rgcn"), r"'function' needs a function \(got str 'rgcn'\)"),
        (lambda graph: relational(takes_a_name).program(x=(4,)), r"'domain' needs a domain such as .* \(got str 'D'\)"),
    ],
    ids=["rows", "program", "index_space_of", "IndexSpace", "relational", "sum_to"],
)
def test_arguments_of_other_classes(graph, call, message):
    with pytest.raises(TypeError, match=message):
        call(graph)


def program_on(graph, write, **shapes):
    """A program that is written by hand, its inputs, and what the interpreter makes of them in float64."""
    builder, generator = Builder(), torch.Generator().manual_seed(0)
    ids = {name: builder.input(name, *domain_and_shape) for name, domain_and_shape in shapes.items()}
    written = builder.build("by_hand", write(builder, **ids))
    sizes = index_space_of(graph).sizes
    inputs = {
        name: torch.randn(*(() if domain is One else (sizes[domain],)), *shape, generator=generator)
        for name, (domain, shape) in shapes.items()
    }
    return written, inputs


@needs_compiler
@pytest.mark.parametrize("bounds", [(0.0, float("inf")), (float("-inf"), 0.5), (np.float64(0.1), np.float64(0.5))])
def test_numbers_of_operators_that_torch_runs(bounds, graph):
    """Of the one row of weights, with an infinite bound and with NumPy's numbers."""

    def write(builder, x, w):
        weight = builder.emit("clamp", w, attrs=bounds)
        return {"out": builder.emit("sum", builder.emit("mul", x, weight), attrs=(D, E))}

    written, inputs = program_on(graph, write, x=(S, (8,)), w=(One, (8,)))
    want = interpret(written, index_space_of(graph), {name: x.double() for name, x in inputs.items()})["out"]
    with emulated_device(), local_settings(fallback="error"):
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        out = apply(written, index_space_of(graph), leaves)["out"]
        torch.testing.assert_close(out.double(), want, **elementwise("float32/few_terms"))
        (gradient,) = torch.autograd.grad(out.sum(), leaves["w"])
    inside = (inputs["w"] >= bounds[0]) & (inputs["w"] <= bounds[1])
    assert torch.equal(gradient != 0, inside)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_in_a_region_of_autocast_that_forward_was_not_in(dtype, graph):
    written, inputs = program_on(
        graph,
        lambda builder, x, w: {
            "out": builder.emit("sum", builder.emit("linear", builder.emit("gather", x, attrs=(E,)), w), attrs=(D, E))
        },
        x=(S, (8,)),
        w=(One, (8, 16)),
    )
    gradients = []
    with emulated_device(), local_settings(fallback="error"):
        for is_inside in (False, True):
            leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
            out = apply(written, index_space_of(graph), leaves)["out"]
            with torch.autocast("cpu", dtype, enabled=is_inside):
                gradients.append(torch.autograd.grad(out.square().sum(), list(leaves.values())))
    for inside, outside in zip(*gradients, strict=True):
        assert torch.equal(inside, outside)


@needs_compiler
@pytest.mark.parametrize("domain", [D, One])
def test_sums_with_a_bias_over_more_edges_than_float16_counts(domain):
    edge_index = torch.stack([torch.arange(70_000) % 20, torch.full((70_000,), 3)])
    graph = Graph.of(edge_index, 20)

    def write(builder, x, w, b):
        mapped = builder.emit("add", builder.emit("linear", builder.emit("gather", x, attrs=(E,)), w), b)
        return {"out": builder.emit("sum", mapped, attrs=(domain, E))}

    written, inputs = program_on(graph, write, x=(S, (4,)), w=(One, (4, 16)), b=(One, (16,)))
    inputs = {"x": inputs["x"] * 1e-3, "w": inputs["w"], "b": (torch.arange(16) % 2) * 1e-3}
    inputs = {name: x.half() for name, x in inputs.items()}
    want = interpret(written, index_space_of(graph), {name: x.double() for name, x in inputs.items()})["out"]
    with emulated_device(), local_settings(fallback="error"):
        out = apply(written, index_space_of(graph), inputs)["out"]
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2 * want.abs().max().item())


@needs_compiler
@pytest.mark.parametrize("num_nodes", [1, 4])
def test_results_share_no_memory(num_nodes):
    """Neither with inputs nor with each other: users edit them in place."""
    graph = Graph.of(torch.randint(num_nodes, (2, 5), generator=torch.Generator().manual_seed(0)), num_nodes)

    def write(builder, x, y, w):
        total = builder.emit("sum", builder.emit("gather", y, attrs=(E,)), attrs=(D, E))
        column = builder.emit("permute", builder.emit("view", total, attrs=((1, 8),)), attrs=((1, 0),))
        halves = {"first": (0, 4), "second": (4, 8)}
        parts = {name: builder.emit("slice", total, attrs=ends) for name, ends in halves.items()}
        return {"total": total, "column": column, **parts, "x": builder.emit("slice", x, attrs=(0, 4)),
                "w": builder.emit("slice", w, attrs=(0, 4)), "whole": builder.emit("detach", w)}  # fmt: skip

    written, inputs = program_on(graph, write, x=(D, (8,)), y=(S, (8,)), w=(One, (8,)))
    with emulated_device(), local_settings(fallback="error"):
        results = apply(written, index_space_of(graph), inputs)
    memory = [tensor.untyped_storage().data_ptr() for tensor in (*inputs.values(), *results.values())]
    assert len(set(memory)) == len(memory)
