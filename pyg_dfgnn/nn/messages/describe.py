"""What a compiled layer would do with a call: the steps of its programs, or what was refused and where."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.dispatch.traversal import storage_reasons
from pyg_dfgnn.fallback import NO_DEVICE, SMALL
from pyg_dfgnn.ir.domains import E
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ir.rows import Rows
from pyg_dfgnn.nn.drop_ins import Description, copied, shown
from pyg_dfgnn.nn.messages.call import Outcome, last, late_reasons, state_reasons, watchers
from pyg_dfgnn.nn.messages.kept import names_of
from pyg_dfgnn.nn.messages.refusals import lowered, with_lines
from pyg_dfgnn.nn.messages.spec import STEPS, original
from pyg_dfgnn.nn.reads import Reads
from pyg_dfgnn.ops.relational.backend import INTERPRETER, KERNELS, Backend, dtype_of, is_small, match_of, running
from pyg_dfgnn.settings import current, local_settings

UNCALLED = "its first call tells whether its messages become a program"
"""Said of a layer of which nothing is known before."""


def standing(layer: Any) -> tuple[bool, list[str]]:
    """Return whether a layer's code may become a program, and why its calls are PyG's own, as far as that is known:
    by its state and its device, and by its last calls or, before any, by what its code asks for.
    """
    tensor = next((t for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()), torch.empty(0))
    reasons = [*state_reasons(layer), *storage_reasons(tensor.dtype, tensor.device)]
    code, calls = late_reasons(layer, "propagate"), last.peek(layer)
    if calls:
        told = [reason for against, _ in calls.values() for reason in against if reason != NO_DEVICE]
        is_program = not code and any(is_program for _, is_program in calls.values())
        return is_program, list(dict.fromkeys([*told, *reasons]))
    code += _code_reasons(type(layer))
    return not code, list(dict.fromkeys([*code, *reasons])) or [UNCALLED]


def _code_reasons(kind: type) -> list[str]:
    """Return what no trace of the messages of a class follows, whatever they are called with."""
    reads = Reads(inspect.getsourcefile(kind))
    for name in STEPS["propagate"]:
        reads.of_class(kind, name)
    reads.settle()
    return reads.reasons


def describe(layer: Any, device: torch.device | None, *args: Any, **kwargs: Any) -> Description:
    """Return what a copy of a layer would do with a call: the steps of its programs, or what was refused and where."""
    refused: list[str] = []
    runs: dict[tuple[int, tuple[str, ...]], tuple[Program, Rows, torch.dtype]] = {}
    is_called, has_grad = False, torch.is_grad_enabled()
    layer = copied(layer)
    for module in layer.modules():
        # A description of a whole model has come here through hooks of its own.
        for key in [key for key, hook in module._forward_pre_hooks.items() if hasattr(hook, "of_description")]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]

    def watch(other: Any, method: str, outcome: Outcome, reasons: Sequence[str]) -> None:
        nonlocal is_called
        if other is layer:
            is_called = True
            refused.extend(reasons)

    def find(program: Program, rows: Rows, inputs: Mapping[str, Tensor], names: Sequence[str]) -> Any:
        runs[id(program), tuple(names)] = program, rows, dtype_of(inputs)
        backend = KERNELS if rows.device.type in fused_device_types else INTERPRETER
        return backend.find(program, rows, inputs, names)

    watchers.append(watch)
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(),
            local_settings(fallback="silent", check_ids="now"),
            running(Backend(find, None)),
        ):
            layer(*args, **kwargs)
    finally:
        watchers.remove(watch)
    reasons, plans = [*refused] if is_called else ["this forward does not pass messages"], []
    for (_, names), (program, rows, dtype) in runs.items():
        plan, against = _plan(layer, program, rows, dtype, names, rows.device if device is None else device, has_grad)
        reasons += against
        plans.append(plan)
    small = [rows.device.type == "cuda" and is_small(program, rows.sizes[E]) for program, rows, _ in runs.values()]
    if small and all(small) and current().leaves_few:
        reasons.append(SMALL)
    if functions := names_of(original(type(layer).forward)):
        plans.append(f"what {', '.join(functions)} returns is kept while the arguments live unchanged")
    return Description(shown(layer), tuple(dict.fromkeys(reasons)), None, "\n".join(dict.fromkeys(plans)) or None)


def _plan(
    layer: Any,
    program: Program,
    rows: Rows,
    dtype: torch.dtype,
    names: Sequence[str],
    device: torch.device,
    has_grad: bool,
) -> tuple[str, Sequence[str]]:
    """Return the steps that a device would run for some outputs of a layer's program, and what is in their way."""
    if device.type not in fused_device_types:
        return str(program), (NO_DEVICE,)
    reasons = storage_reasons(dtype, device)
    family = match_of(program, dtype, device, names)
    if family is not None:
        return f"{program}\nwhich is {family.name}: hand-written kernels run it", reasons
    wrt = program.features if has_grad else ()
    steps, against = lowered(program, rows.sizes, wrt, names)
    against = with_lines(layer, program, rows.sizes, wrt, names, against)
    return str(program if steps is None else steps), [*reasons, *against]
