"""The oracle: float64 results of an op on a graph of any size, and the errors of others against them.

Import ``float64_reference`` and ``compare``. Both take the op as data: a plain torch function and the role of each
input, which says what its first dimension is: "src" or "dst" nodes, "edge", or "param".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dfgnn.reference.zoo import EdgeList

Inputs = dict[str, Tensor]
Plain = Callable[[Tensor, int, Inputs, Tensor | None], Tensor]
"""``plain(edge_index, num_dst, inputs, keep)`` returns the output [num_dst, ...]; ``keep`` holds dropout factors."""

CHUNK_BYTES = 2 << 30
HUB_DEGREE = 1000
VANISHING = 1e-9
_NORM_PIECE = 1 << 26


def _row_blocks(graph: EdgeList, edges_per_block: int) -> list[tuple[int, int, int, int]]:
    """Blocks of targets with at most ``edges_per_block`` edges (or one row): (row, row, edge, edge) ends."""
    if graph.num_edges <= edges_per_block:
        return [(0, graph.num_dst, 0, graph.num_edges)]
    ptr, blocks, row = graph.row_ptr, [], 0
    while row < graph.num_dst:
        first = int(ptr[row])
        last_row = int(torch.searchsorted(ptr, first + edges_per_block, right=True)) - 1
        last_row = max(last_row, row + 1)
        blocks.append((row, last_row, first, int(ptr[last_row])))
        row = last_row
    return blocks


def float64_reference(
    plain: Plain,
    roles: Mapping[str, str],
    graph: EdgeList,
    inputs: Inputs,
    grad_out: Tensor,
    keep: Tensor | None = None,
    *,
    target_rows_of: Mapping[str, str] | None = None,
    constants: Mapping[str, tuple[str, Tensor]] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, Tensor]:
    """Return the output and every gradient in float64, one block of target rows after another to bound the memory.

    Args:
        plain: The op in plain torch, that autograd can differentiate.
        roles: Name -> "src", "dst", "edge" or "param", for every input.
        graph: On which edges; only ``edge_index`` is used, never the package's own CSR.
        inputs: Tensors of any type by name; they are upcast, so round them first.
        grad_out: Gradient of the output, [N_dst, ...].
        keep: Dropout factors [E, H] in the order of ``edge_index``, or None.
        target_rows_of: Inputs of ``plain`` that are the targets' rows of another input, such as
            ``{"x_dst": "x_src"}`` for a graph whose sources are its targets.
        constants: Inputs of ``plain`` without gradients, such as types: role and tensor, which is passed on as it is.
        chunk_bytes: Size of one float64 tensor of messages of a block.

    Returns:
        'out' and 'grad_<input>' for every input.
    """
    device = graph.device
    row_bytes = 8 * max(grad_out[:1].numel(), 1)
    # One leaf for every tensor that all blocks share; rows of targets and of edges belong to one block each.
    shared = {n: inputs[n].detach().double().requires_grad_() for n, r in roles.items() if r in ("src", "param")}
    owned = {n: torch.zeros(inputs[n].shape, dtype=torch.float64, device=device) for n in roles if n not in shared}
    out = torch.zeros(grad_out.shape, dtype=torch.float64, device=device)
    for row, last_row, edge, last_edge in _row_blocks(graph, max(chunk_bytes // row_bytes, 1)):
        ids = graph.by_target[edge:last_edge]
        source, target = graph.edge_index[:, ids]
        rows: dict[str, slice | Tensor] = {n: slice(row, last_row) if roles[n] == "dst" else ids for n in owned}
        block = {n: inputs[n].detach()[rows[n]].double().requires_grad_() for n in owned}
        local = {n: block[n] if n in block else shared[n] for n in roles}
        local |= {name: shared[of][row:last_row] for name, of in (target_rows_of or {}).items()}
        parts: dict[str, slice | Tensor] = {"edge": ids, "dst": slice(row, last_row)}
        for name, (role, tensor) in (constants or {}).items():
            local[name] = tensor[parts[role]] if role in parts else tensor
        local_keep = None if keep is None else keep[ids].double()
        result = plain(torch.stack([source, target - row]), last_row - row, local, local_keep)
        if result.requires_grad and result.numel():
            result.backward(grad_out[row:last_row].double())
        out[row:last_row] = result.detach()
        for name, leaf in block.items():
            if leaf.grad is not None:
                owned[name][rows[name]] = leaf.grad
    gradients = {n: owned[n] if n in owned else _gradient(shared[n]) for n in roles}
    return {"out": out, **{f"grad_{name}": grad.detach() for name, grad in gradients.items()}}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _norms(actual: Tensor, expected: Tensor) -> Tensor:
    """[|actual - expected|, |expected|] in float64, piece by piece so that no large temporary is made."""
    total = torch.zeros(2, dtype=torch.float64, device=expected.device)
    for left, right in zip(actual.reshape(-1).split(_NORM_PIECE), expected.reshape(-1).split(_NORM_PIECE), strict=True):
        right = right.double()
        total += torch.stack([(left.double() - right).square().sum(), right.square().sum()])
    return total.sqrt()


@dataclass(frozen=True)
class Errors:
    """Relative errors by tensor: over the whole tensor, and over the row of the largest hub (NaN-safe)."""

    whole: dict[str, float]
    hub: dict[str, float]

    @property
    def named(self) -> dict[str, float]:
        """All errors by name; 'x[hub]' is the hub's row of x; NaN counts as infinite."""
        errors = {**self.whole, **{f"{name}[hub]": value for name, value in self.hub.items()}}
        return {name: value if value == value else float("inf") for name, value in errors.items()}

    @property
    def worst(self) -> tuple[str, float]:
        """The worst tensor and its error."""
        errors = self.named
        name = max(errors, key=lambda key: errors[key])
        return name, errors[name]


def compare(
    roles: Mapping[str, str],
    graph: EdgeList,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    grad_out: Tensor,
) -> Errors:
    """Return the relative Frobenius errors |actual - expected| / |expected| of the output and every gradient.

    A gradient that vanishes by cancellation (rows of one edge) has no scale of its own and is measured against what
    cancels, <grad_out, out>: |grad_out| times the RMS norm of the output's rows. Where a node has at least 1000
    neighbours its row is also compared alone, against its norm or the RMS norm of the tensor's rows, whichever is
    larger: a mean of n random rows cancels to 1 / sqrt(n) of its terms.

    Args:
        roles: As for :func:`float64_reference`.
        graph: On which edges.
        actual: 'out' and 'grad_<input>'.
        expected: As ``actual``, from :func:`float64_reference`; what it lacks is not compared.
        grad_out: Gradient of the output, [N_dst, H, C].

    Raises:
        ValueError: Shapes differ.
    """
    roles = {"out": "dst", **{f"grad_{name}": role for name, role in roles.items()}}
    hubs = graph.hubs
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, role in roles.items():
        if name not in expected:
            continue
        if actual[name].shape != expected[name].shape:
            raise ValueError(f"'{name}' needs shape {list(expected[name].shape)} (got {list(actual[name].shape)})")
        pairs[name] = actual[name], expected[name]
        if role in hubs and hubs[role][1] >= HUB_DEGREE:
            row = hubs[role][0]
            pairs[f"{name}[hub]"] = actual[name][row], expected[name][row]
    norms = torch.stack([_norms(*pair) for pair in pairs.values()] + [_norms(grad_out, grad_out)]).tolist()
    grad_out_norm = norms.pop()[1]
    out_rows = max(1, grad_out.shape[:-1].numel())
    cancelled = grad_out_norm * norms[0][1] / out_rows**0.5
    relative: dict[str, float] = {}
    scales: dict[str, float] = {}
    for name, (difference, scale) in zip(pairs, norms, strict=True):
        if scale <= VANISHING * grad_out_norm and name != "out":
            scale = cancelled
        if name.endswith("[hub]"):
            whole_name = name.removesuffix("[hub]")
            scale = max(scale, scales[whole_name] / expected[whole_name].size(0) ** 0.5)
        scales[name] = scale
        relative[name] = difference / scale if scale else (0.0 if difference == 0.0 else float("inf"))
    whole = {name: value for name, value in relative.items() if not name.endswith("[hub]")}
    hub = {name.removesuffix("[hub]"): value for name, value in relative.items() if name.endswith("[hub]")}
    return Errors(whole, hub)
