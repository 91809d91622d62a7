"""Timings of relational layers: each implementation is right, a wrong one is refused, the experiment runs on a CPU."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch_geometric.nn

import pyg_dfgnn.nn
from benchmarks import run
from benchmarks.case import in_force
from benchmarks.cases import case_of
from benchmarks.cases.relational import (
    LAYERS,
    RELATIONAL,
    CaseEdges,
    CompiledPyGRelational,
    Fasten,
    FastPyG,
    Hector,
    HectorCompact,
    HectorReordered,
    Ours,
    PyGRelational,
)
from benchmarks.graphs import RECIPES, benchmark_graph, compare_with_recipe, compressed, recipe_of
from pyg_dfgnn.datasets.files import SEARCH
from pyg_dfgnn.ir import E, IndexSpace, Program, U, V
from pyg_dfgnn.ir.layers import rgat
from pyg_dfgnn.reference.tolerances import tolerance
from tests.benchmarks.quick import QUICK, composed, graph_of, layers_in, results
from tests.kernels.emulated import emulated_device

KINDS = [Ours(), PyGRelational(), FastPyG(), Hector(), HectorCompact(), HectorReordered()]
GRAPHS = ["mag_like", "aifb", "many-relations", "duplicates", "no-edges"]


# Compiling takes long, and compiles PyG's code.
POINTS = [(kind, op, name) for kind in KINDS for op in LAYERS for name in GRAPHS]
POINTS += [(CompiledPyGRelational("eager"), "rgat", "mag_like")]


@pytest.mark.parametrize(("implementation", "op", "name"), POINTS, ids=lambda value: getattr(value, "name", value))
def test_implementations_agree_with_float64(implementation, op, name):
    graph, case = graph_of(name), case_of(op, "1x8" if op == "rgcn" or name == "duplicates" else "2x4")
    if reasons := implementation.reasons(case, graph):
        assert reasons == [f"has no {case.layer}"]
        return
    if name == "no-edges" and op == "hgt" and isinstance(implementation, PyGRelational):
        # PyG has no product of no rows with weights of types.
        graph = graph_of("duplicates")
    worst, error = results(implementation, case, graph)[2].worst
    assert error < case.bound("float32"), f"{worst}: {error:.2e}"


@pytest.mark.parametrize("name", GRAPHS)
def test_rgcn_on_products_of_segments_agrees_with_float64(name, monkeypatch):
    """FASTEN's own product needs a GPU; a plain one stands in for it."""

    def product(rows, weight, kinds, engine):
        return torch.bmm(rows[:, None], weight[kinds]).squeeze(1)

    fasten = SimpleNamespace(compact_tensor_types=lambda data, types, **_: types, Engine=SimpleNamespace(AUTO=None))
    fasten.ops = SimpleNamespace(fasten_segment_matmul=product)
    monkeypatch.setitem(sys.modules, "fasten", fasten)
    graph, case = graph_of(name), case_of("rgcn", "1x8")
    assert Fasten().reasons(case, graph) == []
    worst, error = results(Fasten(), case, graph)[2].worst
    assert error < case.bound("float32"), f"{worst}: {error:.2e}"


def test_fasten_says_why_it_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fasten", None)
    few = ["graphs=[mag_like]", "sizes=[1x8]", "implementations=[fasten]", f"folder={tmp_path}"]
    assert run.run(composed("experiment=relational", *QUICK, *few)) == 0
    status = {row["op"]: row["status"] for row in layers_in(tmp_path)}
    assert status == {
        "rgcn": "not run: fasten is not installed",
        "rgat": "not run: has no RGAT",
        "hgt": "not run: has no HGT",
    }


@pytest.mark.parametrize("size", ["1x64", "8x16"])
def test_no_logit_is_on_another_side_of_the_kink_than_in_float64(size):
    graph, case = graph_of("aifb"), case_of("rgat", size)
    logits = {}
    for dtype in (torch.float32, torch.float64):
        x, weight, q, k, _ = (tensor.to(dtype) for tensor in case.make_inputs(graph).values())
        rows = torch.einsum("ni,rio->rno", x, weight)
        keys, queries = rows @ k, torch.einsum("ni,rij->rnj", x, weight @ q)
        source, target = graph.edge_index
        logits[dtype] = keys[graph.edge_type, source] + queries[graph.edge_type, target]
    assert logits[torch.float64].std() > 0.5
    assert torch.equal(logits[torch.float32].double(), logits[torch.float64])


@pytest.mark.parametrize("op", LAYERS)
def test_the_reference_is_pyg_in_float64(op, monkeypatch):
    """Blocks of targets and all; the interpreter by our own passes agrees as well."""
    defaults = {"target_rows_of": None, "constants": None, "chunk_bytes": 8 * 8 * 40}
    monkeypatch.setattr("pyg_dfgnn.reference.oracle.float64_reference.__kwdefaults__", defaults)
    for kind in (PyGRelational(), HectorReordered()):
        actual, expected, _ = results(kind, case_of(op, "2x4"), graph_of("mag_like"), "float64")
        for name, want in expected.items():
            torch.testing.assert_close(
                actual[name], want, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_schedules_of_hector_are_those_that_they_are_called():
    """Compact sources are rows of pairs; rows of targets, and sums of features before their maps, are not Hector's."""
    rows = IndexSpace(compressed(graph_of("mag_like")))
    program = rgat(1, "additive-self-attention", "across-relation").program(
        x=(8,), xd=(8,), weight=(8, 8), q=(8, 1), k=(8, 1)
    )
    program = Program(program.name, program.values, program.outputs[:1])
    linear = {}
    for kind in (Hector, HectorCompact, HectorReordered):
        made = kind.passes.run(program, rows.sizes)
        live = [made.values[i] for i in sorted(made.live)]
        assert not any(value.domain is V for value in live)
        linear[kind] = [(value.domain, value.shape) for value in live if value.op == "linear"]
    assert linear[Hector][:2] == [(E, (8,)), (E, (8,))] and linear[HectorCompact][:2] == [(U, (8,)), (E, (8,))]
    # Queries and keys are then maps of features by products of weights.
    assert sorted(shape for _, shape in linear[HectorReordered]) == [(1,), (1,), (8,)]


def test_kernels_of_a_schedule_of_hector_agree_with_float64():
    graph, case = graph_of("duplicates"), case_of("rgat", "1x8")
    with emulated_device() as launched:
        worst, error = results(HectorReordered(), case, graph)[2].worst
    assert "relational_traversal" in launched
    assert error < case.bound("float32"), f"{worst}: {error:.2e}"


@pytest.mark.parametrize("op", LAYERS)
def test_kernels_that_may_round_to_tf32_are_within_its_bound(op):
    graph, case = graph_of("mag_like"), case_of(op, "1x64")
    with in_force("auto", "tf32"), emulated_device() as launched:
        worst, error = results(Ours(), case, graph)[2].worst
    assert "segment_gemm" in launched
    assert case.bound("float32") < error < case.bound("tf32"), f"{worst}: {error:.2e}"


def test_types_that_nothing_leads_to_have_no_output():
    graph = graph_of("mag_like")
    edges = CaseEdges.of(graph)
    assert edges.ends == ((1, 2), (1, 0), (0, 0), (0, 3)) and len(edges.sizes) == 4
    expected = results(PyGRelational(), case_of("hgt", "1x8"), graph)[1]
    author = graph.node_type == 1
    assert not expected["out"][author].any() and expected["out"][~author].any(dim=1).all()
    first = torch.tensor([0, *edges.sizes]).cumsum(0)
    for number, part in enumerate(edges.edge_index_dict().values()):
        ends = torch.stack([side + first[kind] for side, kind in zip(part, edges.ends[number])])
        assert torch.equal(ends, graph.edge_index[:, graph.edge_type == number])


def test_another_mean_is_refused(tmp_path, monkeypatch):
    """A layer that takes the mean over all edges of a target, as PyG's does with pyg-lib's segment_matmul."""

    class OneMean(torch_geometric.nn.RGCNConv):
        def forward(self, x, edge_index, edge_type):
            messages = torch.bmm(x[edge_index[0], None], self.weight[edge_type]).squeeze(1)
            mean = torch_geometric.utils.scatter(messages, edge_index[1], dim_size=len(x), reduce="mean")
            return mean + x @ self.root + self.bias

    monkeypatch.setattr(pyg_dfgnn.nn, "RGCNConv", OneMean, raising=False)
    few = ["graphs=[mag_like]", "ops=[rgcn]", "sizes=[1x8]", "implementations=[fused]", f"folder={tmp_path}"]
    assert run.run(composed("experiment=relational", *QUICK, *few)) == 1
    assert {row["status"] for row in layers_in(tmp_path)} == {"WRONG"}


def test_a_tiny_version_of_the_experiment_runs_on_a_cpu(tmp_path):
    names = "fused,pyg,pyg_fast,hector,hector_c,hector_cf"
    few = ["graphs=[mag_like]", "sizes=[1x8]", f"implementations=[{names}]", f"folder={tmp_path}"]
    assert run.run(composed("experiment=relational", *QUICK, *few)) == 0
    rows = layers_in(tmp_path)
    rounded = [row for row in rows if row["dtype"] == "tf32"]
    assert len(rows) - len(rounded) == 3 * 6 * 2
    # Ours alone may round, and is judged by another bound then.
    assert {(row["implementation"], float(row["bound"])) for row in rounded} == {
        ("fused", tolerance("tf32", op="gemm").relative)
    }
    for row in rows:
        ops = RELATIONAL.implementations[row["implementation"]].ops
        has_it = ops is None or row["op"] in ops
        assert row["status"] == "ok" if has_it else row["status"].startswith("not run: "), row


def test_the_experiment_has_the_graphs_of_the_targets():
    experiment = run.Experiment.of(composed("experiment=relational"))
    assert experiment.graphs == ("aifb", "mutag", "fb15k237", "mag_like", "wikikg2_like")
    assert experiment.sizes == ("1x64",) and set(experiment.ops) == set(LAYERS)


@pytest.mark.parametrize("size", ["0x8", "8", "1x8x2", "many"])
def test_sizes_of_another_form_are_refused(size):
    with pytest.raises(ValueError, match=rf"'sizes' needs a list of heads x channels.*\(got '{size}'\)"):
        case_of("rgcn", size)


@pytest.mark.parametrize("name", ["aifb", "fb15k237"])
def test_real_graphs_are_those_of_the_targets(name, monkeypatch):
    monkeypatch.setenv("PYG_DFGNN_DATA", next(filter(os.path.isdir, SEARCH), "nowhere"))
    try:
        graph = benchmark_graph(name, "cpu")
    except FileNotFoundError as error:
        pytest.skip(str(error).splitlines()[0])
    line = compare_with_recipe(graph, RECIPES[name])
    rho = {"aifb": "90 relations, rho_s 0.455, rho_d 0.455", "fb15k237": "474 relations, rho_s 0.261, rho_d 0.261"}
    assert rho[name] in line and line.endswith("identical")
    benchmark_graph.cache_clear()


def test_generated_graphs_print_their_compaction():
    recipe = replace(recipe_of("bgs_like"))
    graph = benchmark_graph("bgs_like", "cpu")
    assert "122 relations, rho_s 0.348, rho_d 0.348: identical" in compare_with_recipe(graph, recipe)
    with pytest.raises(ValueError, match=r"'graphs' needs a graph without relations before '\+'"):
        recipe_of("mag_like+rcm")
