"""The comparison of bits: what it calls equal, and that results which change are found."""

import pytest
import torch
from torch_geometric.nn import SAGEConv

from pyg_dfgnn.nn import DROP_INS
from pyg_dfgnn.reference.zoo import sbm
from tests.emu import needs_compiler
from tests.nn.message_cases import FEATURES, WIDTH, Case
from tests.proofs import determinism
from tests.proofs.determinism import EQUAL, PartInputs, Row, beside, bits_of, compare, compared
from tests.proofs.outcomes import FAILED, PASSED

BATCH = sbm(4, 10)


def test_every_drop_in_has_a_case():
    assert {kind.__name__ for kind in DROP_INS} <= {*determinism.cases()}


def test_differences_are_of_the_largest_number():
    one = {"out0": torch.tensor([1.0, 8.0]), "d x": torch.tensor([0.5]), "d none": torch.empty(0)}
    assert compared(one, one) == EQUAL
    assert compared(one, {**one, "out0": torch.tensor([1.0, 8.008])}) == "differs by 1e-03"
    assert compared({**one, "d x": torch.tensor([float("nan")])}, one) == "differs by nan"
    assert compared({**one, "d x": torch.tensor([-0.0])}, {**one, "d x": torch.tensor([0.0])}) != EQUAL
    assert bits_of(one) == bits_of(dict(reversed(one.items()))) != bits_of({**one, "d x": torch.tensor([0.25])})


def test_inputs_of_a_part_are_rows_of_the_whole():
    whole, part = (PartInputs(BATCH, number, BATCH.edge_index, torch.float32) for number in (None, 2))
    assert torch.equal(whole.x[20:30], part.x) and part.graph.num_src == 10
    assert torch.equal(whole.edge_attr[part.edges], part.edge_attr)
    assert torch.equal(whole.edge_type[part.edges], part.edge_type)
    assert torch.equal(whole.edge_index[:, part.edges] - 20, part.edge_index) and part.edge_index.max() < 10


@needs_compiler
@pytest.mark.parametrize("setting", determinism.SETTINGS)
def test_a_layer_on_the_emulator(setting):
    row = compare("SAGEConv", "float32", setting, BATCH)
    assert (row.outcome, row.run_to_run, row.threads, row.call_to_call) == (PASSED, EQUAL, EQUAL, EQUAL), row


@needs_compiler
def test_results_that_change_are_a_failure(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def noisy(layer, inputs):
        return layer(inputs.x, inputs.edge_index) + 1e-3 * torch.randn((), generator=generator)

    case = Case(lambda: SAGEConv(FEATURES, WIDTH), noisy)
    monkeypatch.setattr(determinism, "cases", lambda: {"Noisy": case})
    row = compare("Noisy", "float32", "deterministic", BATCH)
    assert row.outcome == FAILED and row.reason == "run_to_run, threads must be bit-equal"
    assert row.run_to_run.startswith("differs by ")


def test_bits_of_other_gpus(tmp_path):
    own, other = (tmp_path / f"determinism-nvidia-{name}.csv" for name in ("h200", "h100"))
    row = Row("a", PASSED, op="GATConv", dtype="float32", setting="default", bits="abc")
    assert beside(row, tmp_path, own) == "not run"
    own.write_text("op,dtype,setting,bits\nGATConv,float32,default,abc\n")
    assert beside(row, tmp_path, own) == "not run"
    other.write_text("op,dtype,setting,bits\nGATConv,float32,default,abc\nGATConv,float32,other,x\n")
    assert beside(row, tmp_path, own) == "bit-equal (nvidia-h100)"
    other.write_text("op,dtype,setting,bits\nGATConv,float32,default,abd\n")
    assert beside(row, tmp_path, own) == "differs (nvidia-h100)"
