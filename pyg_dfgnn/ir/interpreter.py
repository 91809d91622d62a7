"""The meaning of programs: differentiable plain torch on any device and in any dtype; the oracle of all else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.errors import check_device, check_dtype, check_shape, check_tensor
from pyg_dfgnn.ir.dense_pairs import NODES, DensePairs
from pyg_dfgnn.ir.domains import D, Domain, E, One, R, S
from pyg_dfgnn.ir.index_space import IndexSpace
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Program, Shape, Value
from pyg_dfgnn.reference.philox import dropout_factor

EPSILON = 1e-16
"""Number that PyG adds to the sum of a softmax."""


def interpret(program: Program, rows: IndexSpace | DensePairs, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a program.

    Args:
        program: The program.
        rows: The rows of its domains.
        inputs: Name -> tensor [rows, *shape] of one dtype; [*shape] on the domain of one row. A seed is int64.

    Returns:
        Name -> tensor of each output, shaped as inputs are.

    Raises:
        TypeError: An input is no tensor, or inputs have several dtypes.
        ValueError: An input is missing or unknown, or has another shape or device; or the graph lacks a domain.
    """
    check_inputs(program, rows, inputs)
    like = next((inputs[name] for name in program.features), torch.empty(0)).new_empty(0, device=rows.device)
    named = {name: inputs[name][None] if program.values[i].domain is One else inputs[name]
             for name, i in program.inputs.items()}  # fmt: skip
    results = run_values(program, rows, named, like)
    return {n: results[n].squeeze(0) if program.values[i].domain is One else results[n] for n, i in program.outputs}


def run_values(
    program: Program,
    rows: IndexSpace | DensePairs,
    inputs: Mapping[str, Tensor],
    like: Tensor,
    exact: Collection[str] = (),
) -> dict[str, Tensor]:
    """Run a program on tensors that need no check, with a row also on the domain of one row.

    Args:
        program: The program.
        rows: The rows of its domains.
        inputs: Name -> tensor [rows, *shape].
        like: What constants are made like.
        exact: Names of outputs that are float32 whatever the dtype of the inputs.

    Returns:
        Name -> tensor [rows, *shape] of each output.
    """
    results: list[Tensor] = []
    wide = {i for name, i in program.outputs if name in exact}
    for i, value in enumerate(program.values):
        if value.op == "input":
            results.append(inputs[value.attrs[0]])
            continue
        operands = [(program.values[arg], results[arg]) for arg in value.args]
        results.append(run_value(value, operands, rows, like, i in wide))
    return {name: results[i] for name, i in program.outputs}


def run_value(
    value: Value,
    operands: list[tuple[Value, Tensor]],
    rows: IndexSpace | DensePairs,
    like: Tensor,
    is_exact: bool = False,
) -> Tensor:
    """Return the rows of a value that is no input.

    Args:
        value: The value.
        operands: Its operands, with their rows.
        rows, like: As for :func:`run_values`.
        is_exact: Whether it is float32 whatever the dtype of the operands.
    """
    return (_run_exactly if is_exact else _run)(value, operands, rows, like)


def check_inputs(program: Program, rows: IndexSpace | DensePairs, inputs: Mapping[str, Tensor]) -> None:
    """Check the inputs of a program.

    Raises:
        TypeError: An input is no tensor, or inputs have several dtypes.
        ValueError: An input is missing or unknown, or has another shape or device; or the graph lacks a domain.
    """
    known = program.inputs
    if known.keys() != inputs.keys():
        raise ValueError(f"'inputs' needs {', '.join(known) or 'none'} (got {', '.join(inputs) or 'none'})")
    for name, tensor in inputs.items():
        check_tensor(name, tensor)
    dtypes = [inputs[name].dtype for name in program.features]
    for name, i in known.items():
        value = program.values[i]
        _check_input(value, rows, inputs[name], torch.int64 if value.is_seed else dtypes[0])


def _check_input(value: Value, rows: IndexSpace | DensePairs, tensor: Tensor, dtype: torch.dtype) -> None:
    name, domain = value.attrs[0], value.domain
    if domain is not One:
        rows.index(domain, One)
    size = () if domain is One else (rows.sizes[domain],)
    spec = ", ".join([*(f"{domain}={n}" for n in size), *map(str, value.shape)])
    check_shape(name, tensor, (*size, *value.shape), f"[{spec}]")
    check_dtype(name, tensor, dtype)
    check_device(name, tensor, rows.device)


def _run_exactly(
    value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs, like: Tensor
) -> Tensor:
    """Return a value in float32. Products of 16-bit numbers are exact there: tensor cores add them in float32."""
    if value.op == "linear" and like.is_cuda and value.domain is operands[0][0].domain:
        (_, x), (_, w) = operands
        if x.dim() == 2 and w.size(0) == 1:
            weight = w[0].movedim(-2, 0).flatten(1)
            return torch.mm(x, weight, out_dtype=torch.float32).view(x.size(0), *value.shape)
    with torch.autocast(like.device.type, enabled=False):
        return _run(value, [(operand, tensor.float()) for operand, tensor in operands], rows, like.float())


def _run(value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs, like: Tensor) -> Tensor:
    op, attrs, domain = value.op, value.attrs, value.domain
    if op == "const":
        return like.new_full((1,), attrs[0])
    if op in _REDUCTIONS:
        return _REDUCTIONS[op](value, operands, rows, like)
    if op == "dropout_mask":
        return _kept(value, operands[0][1], rows, like)
    if op in ("table_rows", "stack"):
        return _stacked(value, operands[0][1], rows)
    if op in ("linear", "matmul") and operands[1][0].domain is not domain:
        return _linear(value, operands, rows)
    tensors = [_gathered(operand, tensor, domain, rows) for operand, tensor in operands]
    size, shape = rows.sizes[domain], value.shape
    if op in POINTWISE:
        tensors = [_padded(tensor, len(shape)) for tensor in tensors]
        return POINTWISE[op].compute(*tensors, *attrs)
    x = tensors[0]
    if op in ("linear", "matmul"):
        return _multiplied(value, x, tensors[1])
    if op == "inner":
        rank = max(t.dim() for t in tensors) - 1
        return (_padded(x, rank) * _padded(tensors[1], rank)).sum(-1)
    if op == "view":
        return x.reshape(size, *shape)
    if op == "permute":
        return x.permute(0, *(1 + i for i in attrs[0]))
    if op == "expand":
        return _padded(x, len(shape)).expand(size, *shape)
    if op == "fold":
        return _folded(x, shape)
    if op == "concat":
        return torch.cat(tensors, dim=-1)
    if op == "slice":
        return x[..., attrs[0] : attrs[1]]
    if op == "pad":
        return torch.nn.functional.pad(x, attrs)
    if op == "amax":
        return x.amax(-1)
    if op == "detach":
        return x.detach()
    if op == "gather":
        return x
    raise AssertionError(f"the operator {op!r} has no meaning")


def _kept(value: Value, seed: Tensor, rows: IndexSpace | DensePairs, like: Tensor) -> Tensor:
    domain, shape, p, stream = value.attrs
    numbers = torch.arange(rows.sizes[domain], device=rows.device)
    factor = dropout_factor(numbers, prod(shape), p, seed, stream).to(like.dtype).reshape(-1, *shape)
    return factor if value.domain is domain else factor.index_select(0, rows.index(value.domain, domain))


def _stacked(value: Value, x: Tensor, rows: IndexSpace | DensePairs) -> Tensor:
    """One value of many rows as rows, or the other way round."""
    is_stack = value.op == "stack"
    need, have = (value.attrs[0], x.size(0)) if is_stack else (rows.sizes[value.domain], x.size(1))
    if need != have:
        raise ValueError(f"'{value.op}' needs {need} rows (got {have})")
    return x[None] if is_stack else x.squeeze(0)


def _gathered(value: Value, tensor: Tensor, domain: Domain, rows: IndexSpace | DensePairs) -> Tensor:
    if value.domain is One and tensor.size(0) == 1:
        # The gradient is a sum in pairs then, rather than one addition after another.
        return tensor.expand(rows.sizes[domain], *tensor.shape[1:])
    if isinstance(rows, DensePairs) and domain in NODES and value.domain in (R, NODES[domain]):
        return rows.spread(tensor, domain, value.domain).flatten(0, 1)
    return tensor if value.domain is domain else tensor.index_select(0, rows.index(domain, value.domain))


def _padded(tensor: Tensor, rank: int) -> Tensor:
    """Give rows sizes of 1 in front until they have so many sizes."""
    return tensor.reshape(tensor.size(0), *(1,) * (rank - tensor.dim() + 1), *tensor.shape[1:])


def _folded(tensor: Tensor, shape: Shape) -> Tensor:
    """Sum the sizes of rows that a shape lacks or has as 1."""
    padded = (1,) * (tensor.dim() - 1 - len(shape)) + shape
    sums = [1 + i for i, (have, want) in enumerate(zip(tensor.shape[1:], padded)) if want == 1 and have != 1]
    return (tensor.sum(sums, keepdim=True) if sums else tensor).reshape(tensor.size(0), *shape)


def _by_weight(domain: Domain, weight: Domain, rows: IndexSpace | DensePairs) -> list[tuple[int, Tensor]]:
    """The rows of a domain by the row of the weight that they read: pairs of that row and positions."""
    index = rows.index(domain, weight)
    counts = torch.bincount(index, minlength=rows.sizes[weight]).tolist()
    parts = index.argsort(stable=True).split(counts)
    return [(row, part) for row, part in enumerate(parts) if counts[row]]


def _linear(value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs) -> Tensor:
    """The maps of the rows that share a weight at a time, so that no weight is gathered per row."""
    (xv, x), (wv, w) = operands
    if isinstance(rows, DensePairs) and value.domain in NODES and wv.domain is R:
        return _linear_of_pairs(value, xv, x, w, rows)
    x = _gathered(xv, x, value.domain, rows)
    if wv.domain is One:
        return _multiplied(value, x, w)
    parts = _by_weight(value.domain, wv.domain, rows)
    if not parts:
        return x.new_zeros(rows.sizes[value.domain], *value.shape) + 0 * (x.sum() + w.sum())
    products = torch.cat([_multiplied(value, x[part], w[row : row + 1]) for row, part in parts])
    return products[torch.cat([part for _, part in parts]).argsort()]


def _linear_of_pairs(value: Value, xv: Value, x: Tensor, w: Tensor, rows: DensePairs) -> Tensor:
    """The maps of all pairs, by one product of batches."""
    is_node = xv.domain is NODES[value.domain]
    x = x.unsqueeze(0) if is_node else rows.by_relation(_gathered(xv, x, value.domain, rows))
    w = _padded(w, len(value.shape) + (value.op == "linear")).unsqueeze(1)
    x = x.reshape(*x.shape[:2], *(1,) * (len(value.shape) - x.dim() + 2), *x.shape[2:])
    if value.op == "matmul":
        out = x @ w
    elif len(value.shape) == 1:
        out = x @ w.squeeze(1)
    else:
        # Leading sizes of a row are batches, in front of the nodes.
        out = (x.movedim(1, -2) @ w.squeeze(1)).movedim(-2, 1)
    return out.reshape(rows.sizes[value.domain], *value.shape)


def _multiplied(value: Value, x: Tensor, w: Tensor) -> Tensor:
    """Multiply rows by their weights, or by the one weight of them all."""
    is_vector = value.op == "linear"
    if is_vector and w.size(0) == 1:
        # One product, or one for each head, rather than one for each row.
        if x.dim() == 2:
            return (x @ w[0].movedim(-2, 0).flatten(1)).view(x.size(0), *value.shape)
        if w.dim() == 3:
            return x @ w[0]
        if w.dim() == x.dim() + 1 == 4 and w.size(1) == x.size(1):
            return (x.transpose(0, 1) @ w[0]).transpose(0, 1)
    w = _padded(w, len(value.shape) + is_vector)
    x = _padded(x, len(value.shape))
    return (x.unsqueeze(-2) @ w).squeeze(-2) if is_vector else x @ w


def _sum(value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs, like: Tensor) -> Tensor:
    domain, over = value.attrs
    x = _gathered(*operands[0], over, rows)
    if domain is One:
        return x.sum(0, keepdim=True)
    if isinstance(rows, DensePairs) and over in NODES and domain in (R, NODES[over]):
        return rows.by_relation(x).sum(1 if domain is R else 0)
    return x.new_zeros(rows.sizes[domain], *value.shape).index_add_(0, rows.index(over, domain), x)


def _max(value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs, like: Tensor) -> Tensor:
    domain, over = value.attrs
    return _largest(_gathered(*operands[0], over, rows), rows.index(over, domain), rows.sizes[domain])


def _largest(x: Tensor, index: Tensor, size: int) -> Tensor:
    index = index.reshape(-1, *(1,) * (x.dim() - 1)).expand_as(x)
    return x.new_zeros(size, *x.shape[1:]).scatter_reduce(0, index, x, "amax", include_self=False)


def _lengths(rows: IndexSpace | DensePairs, domain: Domain, over: Domain) -> Tensor:
    """Return how many rows of `over` each row of a domain has."""
    if isinstance(rows, DensePairs):
        index = rows.index(over, domain)
        return index.new_zeros(rows.sizes[domain]).index_add_(0, index, torch.ones_like(index))
    if over is E and domain in (S, D):
        # Of the sorted edges, for which no device is waited for.
        return rows.adjacency(domain, over).rowptr.diff()
    return torch.bincount(rows.index(over, domain), minlength=rows.sizes[domain])


def _count(value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs, like: Tensor) -> Tensor:
    domain, over = value.attrs
    return _lengths(rows, domain, over).clamp(min=1).to(like.dtype)


def _is_used(value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs, like: Tensor) -> Tensor:
    """1 for rows that have any of those that are ranged over, 0 for the others."""
    domain, over = value.attrs
    return (_lengths(rows, domain, over) > 0).to(like.dtype)


def _outer(value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs, like: Tensor) -> Tensor:
    """The products of the rows of one sum at a time, so that no outer product per row exists."""
    domain, over = value.attrs
    x, y = (_padded(_gathered(*operand, over, rows), len(value.shape) - 1) for operand in operands)
    if domain in (One, over):
        product = torch.einsum(f"n...k,n...m->{'n' if domain is over else ''}...km", x, y)
        return product.reshape(rows.sizes[domain], *value.shape)
    if isinstance(rows, DensePairs) and over in NODES and domain is R:
        return torch.einsum("rn...k,rn...m->r...km", rows.by_relation(x), rows.by_relation(y)).reshape(-1, *value.shape)
    out = x.new_zeros(rows.sizes[domain], *value.shape)
    parts = _by_weight(over, domain, rows)
    if not parts:
        return out + 0 * (x.sum() + y.sum())
    sums = torch.stack([torch.einsum("n...k,n...m->...km", x[part], y[part]) for _, part in parts])
    return out.index_add(0, torch.tensor([row for row, _ in parts], device=rows.device), sums)


def _softmax(value: Value, operands: list[tuple[Value, Tensor]], rows: IndexSpace | DensePairs, like: Tensor) -> Tensor:
    domain, over = value.attrs
    index, x = rows.index(over, domain), _gathered(*operands[0], over, rows)
    most = _largest(x.detach(), index, rows.sizes[domain])
    exp = (x - most[index]).exp()
    total = x.new_zeros(most.shape).index_add_(0, index, exp) + EPSILON
    return exp / total[index]


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "max": _max,
    "count": _count,
    "is_used": _is_used,
    "outer": _outer,
    "softmax": _softmax,
}
