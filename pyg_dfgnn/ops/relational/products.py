"""The linear maps and outer products of a program, prepared for a graph: products of rows sorted by type."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.graph.typed_rows import TypedRows, one_type, pairs_by_relation, sorted_by_type
from pyg_dfgnn.ir import Domain, IndexSpace, One, Program, R, U, V
from pyg_dfgnn.ir.kernel_steps import KernelStep
from pyg_dfgnn.ir.materialize import ADD
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.ops.relational.segment_gemm import SegmentLinear, SegmentOuter

_PAIRS = {U: "source_relations", V: "target_relations"}


class Product(NamedTuple):
    """A product that is ready to run.

    Attributes:
        run: Called with what it reads, and what it writes.
        reads: Names of the buffers that it reads, in the dtype of features; None for one that is not there.
        result: Dtype of what it writes.
    """

    run: Callable[..., None]
    reads: tuple[str | None, ...]
    result: torch.dtype


def prepare(step: KernelStep, exact: Collection[str], rows: IndexSpace, dtype: torch.dtype) -> Product:
    """Return the launch of a linear map or of a sum of outer products.

    Args:
        step: The step.
        exact: Names of the buffers that are float32.
        rows: The rows of the domains.
        dtype: Dtype of the features.

    Raises:
        Refusal: The heads of the operands fit no product.
    """
    (output,) = step.writes
    values = step.program.values
    root = values[step.program.outputs[0][1]]
    bias: str | None = None
    if root.op == ADD:
        product, other = sorted(root.args, key=lambda arg: values[arg].op != "linear")
        bias, root = _operand(step.program, other), values[product]
    left, right = root.args
    is_outer = root.op == "outer"
    heads = prod(root.shape[: -2 if is_outer else -1])
    # A gathered operand has the rows of what is gathered.
    domains = [values[_source(step.program, arg)].domain for arg in root.args]
    over, domain = (step.over, step.domain) if is_outer else (root.domain, domains[1])
    typed, order = _typed(rows, over, domain)
    x, y = _operand(step.program, left), _operand(step.program, right)
    gather = [_gather(rows, over, domain, other, order) for other in domains]
    # Rows that have no size for heads are the same for all.
    x_heads, y_heads = (_heads(step.program, arg, heads, 1 if is_outer or arg == left else 2) for arg in root.args)
    if is_outer:
        features, channels = root.shape[-2:]
        outer = SegmentOuter(
            typed,
            features,
            channels,
            dtype,
            heads=heads,
            x_shared=x_heads < heads,
            grad_shared=y_heads < heads,
            gather_x=gather[0],
            gather_grad=gather[1],
        )
        return Product(outer.run, (x, y), dtype)
    transposed = values[right].op == "permute"
    places, columns = values[left].shape[-1], root.shape[-1]
    features, channels = (columns, places) if transposed else (places, columns)
    # All rows have a type: nothing of the result is left out.
    linear = SegmentLinear(
        typed,
        features,
        channels,
        dtype,
        heads=heads,
        transposed=transposed,
        shared=x_heads < heads,
        gather=gather[0],
        scatter=order,
        is_exact=output in exact,
    )
    return Product(partial(linear.run, y_heads), (x, y, bias), linear.result)


def _operand(program: Program, i: int) -> str:
    """Return the buffer that a value has the numbers of."""
    name: str = program.values[_source(program, i)].attrs[0]
    return name


def _source(program: Program, i: int) -> int:
    """Return the input that a value has the numbers of."""
    while program.values[i].op in ("view", "gather", "permute"):
        i = program.values[i].args[0]
    return i


def _heads(program: Program, i: int, heads: int, sizes: int) -> int:
    """Return the heads of an operand whose last `sizes` sizes are its row or matrix."""
    own = prod(program.values[i].shape[:-sizes])
    if own not in (1, heads):
        value = program.values[i]
        raise LoweringError(f"%{i} = {value} : {value.domain}{list(value.shape)} has some of {heads} heads")
    return own


def _typed(rows: IndexSpace, over: Domain, domain: Domain) -> tuple[TypedRows, Tensor | None]:
    """Return the rows of a domain by type, and the row at each place unless they lie in this order."""
    if domain is One:
        return one_type(rows.lists, rows.sizes[over]), None
    if over in _PAIRS and domain is R:
        return pairs_by_relation(rows.graph, _PAIRS[over]), None
    return sorted_by_type(rows.lists, (over, domain), rows.index(over, domain), rows.sizes[domain])


def _gather(rows: IndexSpace, over: Domain, domain: Domain, other: Domain, order: Tensor | None) -> Tensor | None:
    """Return the row of another domain at each place of :func:`_typed`; None where the places are its rows."""
    if other is over:
        return order
    index = rows.at_rows(over, other)
    if order is None:
        return index
    # Kept with the lists, so that other streams wait for it.
    return rows.derived(("at_places", over, domain, other), lambda: index.index_select(0, order))
