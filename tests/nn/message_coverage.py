"""Write docs/message_passing_coverage.md: what becomes of each class of `torch_geometric.nn.conv`.

Run it from the root of the repository: python -m tests.nn.message_coverage
Without torch_sparse the row of PANConv stays as it is.
"""

import re
import warnings
from pathlib import Path

import torch
import torch_geometric.nn.conv as pyg
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import WITH_TORCH_SPARSE

from pyg_dfgnn.ir import D, E, One, R, S, U, V
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.nn import DROP_INS, messages
from pyg_dfgnn.nn.captured_forward import NO_GRAPH
from pyg_dfgnn.nn.messages import lowered
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import local_settings
from tests.nn.message_cases import EDGE_MLP, REFUSED, TRACED, Case, Graphs, Inputs, twins, watched

NAMES = sorted({*pyg.__all__} - {"MessagePassing"})
PAGE = Path(__file__).parents[2] / "docs" / "message_passing_coverage.md"
_MOVES = {"input", "const", "gather", "view", "permute", "expand", "concat", "slice", "detach", "table_rows"}
HEAD = """# What is compiled of PyG's convs

Written by `python -m tests.nn.message_coverage`; a test compares it with the code.

- *drop-in*: our class stands in for PyG's; its forward can be compiled too.
- *fused*: all gathers and reductions by the ends of the edges are in programs, whose operators are listed; outputs and
  gradients equal PyG's in float64.
- *in part*: some are, and the lines shown stay PyTorch's; *PyG*: none is.
- *by programs*: how many of the gathers and reductions are in programs.
- *on kernels*: whether generated kernels run the programs and their gradients, or why PyTorch's operators run them on a
  GPU. `stored rows`: they write [rows of edges](edge_networks.md), which products read.

| class | how | by programs | operators, and what stays PyTorch's | on kernels |
|---|---|---|---|---|
"""
STORED = "stored rows"
SIZES = {One: 1, R: 5, S: 10**7, D: 10**7, U: 5 * 10**7, V: 5 * 10**7, E: 2 * 10**8}


def captured_of(case: Case) -> Graphs:
    """Return what becomes of the graphs that are captured for calls of a layer."""
    _, marked = twins(case.make)
    with messages.interpreted(), watched() as graphs, local_settings(fallback="silent"):
        case.call(marked, Inputs(ZOO["self-loops"]()))
    return graphs


def reasons_on_kernels(program: Program) -> list[str]:
    """Return whether generated kernels of a program and its gradients store rows of edges, or why none runs it."""
    steps, reasons = lowered(program, SIZES, program.features, list(dict(program.outputs)))
    return [STORED] if steps is not None and steps.edge_rows else reasons


def row(name: str) -> str:
    """Return the row of a class, whose layers compute in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        return _row(name, getattr(pyg, name))
    finally:
        torch.set_default_dtype(torch.float32)


def _row(name: str, kind: type) -> str:
    case = {**TRACED, **EDGE_MLP, **REFUSED}.get(name)
    if case is None:
        why = "needs an extra of PyG that is not installed here" if issubclass(kind, MessagePassing) else ""
        return f"| {name} | - |  | {why or 'has no propagation of its own; the layers inside are taken'} |  |"
    graphs = captured_of(case)
    programs = graphs.programs
    every, inside = (sum(graph.counts[k] for graph in graphs) for k in (0, 1))
    how = "drop-in" if kind in DROP_INS else "PyG" if not inside else "fused" if inside == every else "in part"
    ops = ", ".join(sorted({value.op for program in programs for value in program.values} - _MOVES))
    reasons = dict.fromkeys(graphs.reasons if inside or graphs.reasons else [NO_GRAPH])
    reason = "; ".join(reasons).replace("|", "\\|")
    kernels = ""
    if how != "drop-in" and programs:
        kernels = "; ".join(dict.fromkeys(why for program in programs for why in reasons_on_kernels(program))) or "yes"
    return f"| {name} | {how} | {inside} of {every} | {'; '.join(filter(None, [ops, reason]))} | {kernels} |"


def rows() -> list[str]:
    """Return the rows of all classes; without torch_sparse PANConv, which takes a SparseTensor, keeps its row."""
    kept = {} if WITH_TORCH_SPARSE else {"PANConv": re.findall(r"^\| PANConv .*$", PAGE.read_text(), re.MULTILINE)[0]}
    return [kept.get(name) or row(name) for name in NAMES]


def page(rows: list[str]) -> str:
    """Return the text of the page."""
    counts = {how: sum(f"| {how} |" in line for line in rows) for how in ("drop-in", "fused", "in part", "PyG")}
    total = ", ".join(f"{count} {how}" for how, count in counts.items())
    return f"{HEAD}{chr(10).join(rows)}\n\nOf {len(rows)} classes: {total}.\n"


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PAGE.write_text(page(rows()))
