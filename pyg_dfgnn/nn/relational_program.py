"""Programs of relational layers: what the gate asks of them, how they run in PyG's dtypes, and what describes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.traversal import storage_reasons
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.ir import DensePairs, Domain, IndexSpace, One
from pyg_dfgnn.ir.layers import Layer, layer_of
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.nn.gate import finalize_dtype, promoted_dtype
from pyg_dfgnn.ops.relational import RowSet, apply, apply_to_new, apply_traced


@dataclass(frozen=True)
class RelationalProblem:
    """Facts of a call that the gate asks about before a program is known.

    Attributes:
        dtype: Dtype of the features.
        device: Their device.
    """

    dtype: torch.dtype
    device: torch.device


def reasons_of_problem(problem: RelationalProblem) -> list[str]:
    """Return every reason why no kernels run programs on such features."""
    return storage_reasons(problem.dtype, problem.device)


def run(
    layer: Layer,
    rows: IndexSpace | DensePairs | RowSet,
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype,
    outputs: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Return outputs of a layer's program, all by default, in PyG's dtype; inputs are cast to `dtype`.

    With a :class:`~pyg_dfgnn.ops.relational.RowSet`, which torch.compile traces, the registered operator runs it; with
    :class:`~pyg_dfgnn.ir.DensePairs` operators of torch do.
    """
    inputs = {name: x if x.dtype is dtype else x.to(dtype) for name, x in inputs.items()}
    if isinstance(rows, RowSet):
        results, device = apply_traced(layer, rows, inputs, outputs), rows.anchors[0].device
    elif isinstance(rows, DensePairs):
        results, device = apply_to_new(layer_of(layer), rows, inputs, outputs), rows.device
    else:
        results, device = apply(layer_of(layer), rows, inputs, outputs), rows.device
    dtype = promoted_dtype(dtype, dtype, device.type == "cuda")
    return {name: finalize_dtype(x, dtype, False) for name, x in results.items()}


def traffic_elements(
    layer: Layer, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[Domain, int], wrt: Sequence[str] = ()
) -> int:
    """Return how many numbers the steps of a layer's program read and write, forward and backward.

    Args:
        layer: The layer.
        shapes: Name of an input -> sizes of its rows.
        sizes: Rows of each domain.
        wrt: Inputs whose gradients are wanted.
    """
    program = layer_of(layer).program(**shapes)
    return lower(Passes().run(program, sizes, wrt), dict(program.outputs)).traffic_elements(sizes)


def explain(layer: Layer, rows: IndexSpace, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None = None) -> str:
    """Return the program that runs on rows for these inputs, after all passes, and its steps, for reading.

    Raises:
        UnsupportedError: Some value has no kernel.
    """
    front = layer_of(layer)
    program = front.program(**{name: tuple(x.shape[front.domains[name] is not One :]) for name, x in inputs.items()})
    outputs = tuple(name for name, _ in program.outputs) if outputs is None else outputs
    wrt = tuple(name for name, x in inputs.items() if x.requires_grad)
    try:
        steps = lower(Passes().run(program, rows.sizes, wrt), outputs)
    except LoweringError as refusal:
        raise UnsupportedError([str(refusal)]) from refusal
    return f"{Passes().run(program, rows.sizes)}\nsteps of {steps}"


def kept_by_dropout(p: float, size: Sequence[int], like: Tensor) -> Tensor:
    """Return what dropout multiplies numbers by: 0, or 1 / (1 - p), drawn as PyG's dropout of `size` numbers draws."""
    return torch.nn.functional.dropout(like.new_ones(size), p)


def dtype_reasons(x: Tensor, weight: Tensor) -> list[str]:
    """Return what the dtypes of features and of a parameter have against a program, whose inputs have one dtype."""
    if x.dtype is weight.dtype or not x.is_floating_point():
        return []
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype):
        return []
    return [f"x is in {x.dtype} and the parameters in {weight.dtype}"]
