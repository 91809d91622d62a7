"""`torch.compile(model, backend="pyg_dfgnn")`: regions on edges are operators with gradients, all else Inductor's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from pyg_dfgnn.frontend.backend import compiled, watchers
from pyg_dfgnn.frontend.run import Region
from pyg_dfgnn.ir import register_layout
from pyg_dfgnn.ir.domains import D, E, One, R, S, U, V
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.torch_front import TraceError
from pyg_dfgnn.ops.function import run_traced
from pyg_dfgnn.ops.relational.backend import KERNELS, backend
from pyg_dfgnn.ops.relational.program import selected
from pyg_dfgnn.ops.relational.traced import Name
from pyg_dfgnn.torch_private import lookup_backend

_logger = logging.getLogger("pyg_dfgnn")
_NODES, _EDGES = 10_000, 160_000
"""Numbers of rows that the lowering is asked for; the operator asks again with those of its graph."""


class Operator:
    """A region as a call of the registered operator, with its gradients.

    Args:
        region: The region.

    Raises:
        Refusal: No kernels take it.
    """

    def __init__(self, region: Region) -> None:
        if reasons := _reasons(region):
            raise TraceError(*(f"{region.line}: {reason}" for reason in reasons))
        kind = "edges" if region.types is None else "relations"
        self.region, self.name = region, Name(kind, region.transposed, region.program).text

    def __call__(self, *args: Any) -> Any:
        """Return the outputs."""
        region = self.region
        num_src, num_dst, types, inputs = region.read(args)
        anchors, sizes = [args[region.edges]], [num_src, num_dst]
        if types is not None:
            anchors, sizes = [*anchors, types[0]], [*sizes, types[1]]
        outputs = run_traced(self.name, anchors, sizes, (), [inputs[name] for name in region.program.inputs])
        return region.returned(list(outputs))


def _reasons(region: Region) -> list[str]:
    """Return why a region stays torch's while a whole model is compiled."""
    if region.has_seed:
        return ["random numbers are drawn on edges, while compiling"]
    if backend() is not KERNELS:
        return []
    program, num_types = region.program, 0 if region.types is None else region.types[1]
    sizes = {One: 1, S: _NODES, D: _NODES, E: _EDGES}
    sizes |= {R: num_types, U: _EDGES, V: _EDGES} if num_types else {}
    try:
        steps = [lower(Passes().run(program, sizes), region.names)]
        gradients = ["d_" + name for name in program.features]
        steps.append(lower(selected(Passes().run(program, sizes, program.features), gradients), gradients))
    except register_layout.LoweringError as refusal:
        return [str(refusal)]
    rows = {f"{buffer.name} : {buffer.domain}{list(buffer.shape)}": None for each in steps for buffer in each.edge_rows}
    return [f"rows of edges are mapped, which is left to Inductor ({', '.join(rows)})"] if rows else []


def compile_model(
    module: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return what runs a graph of `torch.compile`: kernels for its regions on edges, and another backend's code.

    Args:
        module: The graph.
        example_inputs: Tensors and sizes like its arguments.
        mode: Mode of the other backend, as in `torch.compile`.
        options: Its options; "backend" names another one than Inductor.
    """
    options = dict(options or {})
    inner = lookup_backend(options.pop("backend", "inductor"))
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    devices = backend().devices
    if devices is None or any(tensor.device.type in devices for tensor in tensors):
        try:
            graph, module = compiled(module, "torch.compile", Operator, derives=False)
            for watcher in watchers:
                watcher(graph)
        except Exception as error:
            _logger.warning("a captured graph stays PyTorch's (%s: %s)", type(error).__name__, error)
    given = {key: value for key, value in (("mode", mode), ("options", options)) if value}
    run: Callable[..., Any] = inner(module, example_inputs, **given)
    return run
