"""Write docs/message_passing_coverage.md: what becomes of each class of `torch_geometric.nn.conv`.

Run it from the root of the repository: python -m tools.message_coverage
"""

import warnings
from pathlib import Path

import torch
import torch_geometric.nn.conv as pyg
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.ir import D, E, One, R, S, U, V
from pyg_dfgnn.ir.lanes import Refusal
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.nn import DROP_INS, messages
from pyg_dfgnn.ops.relational.backend import stored_reasons
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import local_settings
from tests.nn.message_cases import EDGE_MLP, REFUSED, TRACED, Case, Inputs, twins, watched

PAGE = Path(__file__).parents[1] / "docs" / "message_passing_coverage.md"
_MOVES = {"input", "const", "gather", "view", "permute", "expand", "concat", "slice", "detach", "unstack"}
HEAD = """# What is compiled of PyG's convs

Written by `python -m tools.message_coverage`; a test compares it with the code.

- *drop-in*: our class stands in for PyG's; its messages trace too.
- *traced*: the messages are a program, whose operators are listed; outputs and gradients equal PyG's in float64.
- *edge product*: traced, with a map of values that only edges have: a network of two layers here. With one `Linear` in
  its place kernels run.
- *refused*: PyG's own code runs, for the reason shown.
- *on kernels*: whether generated kernels run the messages and their gradients, where there is no drop-in, or why PyG's
  code runs on a GPU.

| class | how | operators, or why not | on kernels |
|---|---|---|---|
"""
SIZES = {One: 1, R: 5, S: 1000, D: 1000, U: 5000, V: 5000, E: 20000}


def traces_of(case: Case) -> tuple[list[messages.Trace], list[str]]:
    """Return the programs of a call of a layer, and the reasons for which there are none."""
    _, marked = twins(case.make)
    with messages.interpreted(), watched() as calls, local_settings(fallback="silent"):
        case.call(marked, Inputs(ZOO["self-loops"]()))
    programs = [trace for *_, trace, _ in calls if trace is not None and trace.program is not None]
    return programs, [reason for *_, reasons in calls for reason in reasons]


def reasons_on_kernels(trace: messages.Trace) -> list[str]:
    """Return why generated kernels do not run a program and its gradients."""
    assert trace.program is not None
    program = trace.program
    try:
        lowered = lower(Passes().run(program, SIZES, tuple(program.inputs)), list(dict(program.outputs)))
    except Refusal as refusal:
        return [str(refusal)]
    return stored_reasons(lowered.edge_rows)


def row(name: str, kind: type) -> str:
    """Return the row of a class."""
    case = {**TRACED, **EDGE_MLP, **REFUSED}.get(name)
    if case is None:
        why = "needs an extra of PyG that is not installed here" if issubclass(kind, MessagePassing) else ""
        return f"| {name} | - | {why or 'has no propagation of its own; the layers inside are taken'} |  |"
    programs, reasons = traces_of(case)
    how = "drop-in" if kind in DROP_INS else "edge product" if name in EDGE_MLP else "traced"
    ops = {value.op for trace in programs if trace.program is not None for value in trace.program.values} - _MOVES
    reason = "; ".join(dict.fromkeys(reasons)).replace("|", "\\|")
    kernels = ""
    if how != "drop-in" and not reasons:
        kernels = "; ".join(dict.fromkeys(why for trace in programs for why in reasons_on_kernels(trace))) or "yes"
    return f"| {name} | {'refused' if reasons else how} | {reason or ', '.join(sorted(ops))} | {kernels} |"


def page() -> str:
    """Return the text of the page."""
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = [row(name, getattr(pyg, name)) for name in sorted(pyg.__all__) if name != "MessagePassing"]
    finally:
        torch.set_default_dtype(torch.float32)
    counts = {
        how: sum(f"| {how} |" in line for line in rows) for how in ("drop-in", "traced", "edge product", "refused")
    }
    total = ", ".join(f"{count} {how}" for how, count in counts.items())
    return f"{HEAD}{chr(10).join(rows)}\n\nOf {len(rows)} classes: {total}.\n"


if __name__ == "__main__":
    PAGE.write_text(page())
