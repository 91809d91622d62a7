"""Drop-ins for PyG's HeteroLinear and HeteroDictLinear: rows of all types in one product."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import dense

from pyg_dfgnn.errors import IdRangeError, check_shape
from pyg_dfgnn.fallback import NO_DEVICE, report_fallback
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import IndexSpace
from pyg_dfgnn.nn.dense.linear import Linear
from pyg_dfgnn.nn.gate import export_reasons, is_plain_layer, reasons_on_device, storage_dtype
from pyg_dfgnn.nn.on_cpu import is_on_cpu
from pyg_dfgnn.nn.registry import Description, shown
from pyg_dfgnn.nn.relational_program import RelationalProblem, dtype_reasons, explain, reasons_of_problem, run
from pyg_dfgnn.nn.scripted import Scripted
from pyg_dfgnn.ops.eager import is_eager
from pyg_dfgnn.ops.relational import RowSet, index_space_of
from pyg_dfgnn.ops.visits import MEASURED_NUMBERS, is_left, is_new_outside_captures
from pyg_dfgnn.torch_private import is_tracing

_FEW_NUMBERS = 1 << 23
"""Numbers that all types make of all rows, forward or backward, below which the rows of no type are listed."""
FEW_TYPES = 16
"""Types up to which PyG's loop takes less of the host than the lists of new rows."""
MANY_TYPES = 10
"""Types from which one product is faster than one each, as PyG has it."""


def rows_of_types(type_vec: Tensor, num_types: int) -> IndexSpace | RowSet:
    """Return rows of these types, kept while `type_vec` lives unchanged; while torch.compile traces, what names them.

    Args:
        type_vec: Type of each row, int64 or int32 [N].
        num_types: Number of types.

    Raises:
        ValueError: A type is outside of [0, num_types).
    """
    if torch.compiler.is_compiling():
        return RowSet("types", (type_vec,), (num_types,))
    return index_space_of(Graph.of_index(type_vec, num_types), source_type=type_vec, num_types=num_types)


@lru_cache(8)
def _types_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the type of each row where rows of one type follow each other, int32 [N]."""
    with torch.inference_mode(False):
        types = torch.arange(len(sizes), dtype=torch.int32, device=device)
        return types.repeat_interleave(torch.tensor(sizes, device=device), output_size=sum(sizes))


class TypedLayer(Scripted, torch.nn.Module):
    """A drop-in for a linear layer with a weight per type.

    Its `_reasons(*arguments of forward)` returns what is against the program, and `_typed(...)` the rows and inputs.
    """

    _problem_type = RelationalProblem
    _reasons_against = staticmethod(reasons_of_problem)

    def _reasons(self, *args: Any) -> list[str]:
        raise NotImplementedError

    def _typed(self, *args: Any) -> tuple[IndexSpace | RowSet, dict[str, Tensor]]:
        raise NotImplementedError

    def _product(self, *args: Any) -> Tensor:
        """Return `x_i W_{t(i)} + b_{t(i)}` for a call that nothing is against."""
        rows, inputs = self._typed(*args)
        return run(("hetero_linear",), rows, inputs, storage_dtype(inputs["x"]))["out"]

    def _standing_reasons(self, like: Tensor | None = None) -> list[str]:
        """Return what is against the program whatever the input."""
        weight = next(self.parameters())
        return self._reasons_against(RelationalProblem(weight.dtype, weight.device))

    def _describe(self, device: torch.device | None, *args: Any) -> Description:
        """Return what a call would run; see :func:`pyg_dfgnn.describe_plan`."""
        own = [reason for reason in self._reasons(*args) if reason != NO_DEVICE]
        if own:
            return Description(shown(self), tuple(own))
        rows, inputs = self._typed(*args)
        assert isinstance(rows, IndexSpace)
        x = inputs["x"]
        problem = RelationalProblem(storage_dtype(x), x.device if device is None else device)
        if reasons := self._reasons_against(problem):
            return Description(shown(self), tuple(reasons), problem)
        plan = explain(("hetero_linear",), rows, inputs)
        return Description(shown(self), (), problem, plan, f"{x.size(0)} rows of {inputs['weight'].size(0)} types")

    def _reasons_of(self, x: Tensor, weight: Tensor) -> list[str]:
        """Return what is against the program for features and a weight of the layer."""
        if not torch.compiler.is_compiling() and (not is_eager() or is_tracing()):
            return ["torch traces or transforms the call"]
        if isinstance(weight, torch.nn.parameter.UninitializedParameter):
            return ["the weight has no shape before the first call"]
        reasons = [] if x.dim() == 2 else [f"x is no matrix [N, F] ({list(x.shape)})"]
        return [
            *reasons,
            *export_reasons(),
            *dtype_reasons(x, weight),
            *reasons_on_device(type(self), x.device, storage_dtype(x), x.device),
        ]


class HeteroLinear(TypedLayer, dense.HeteroLinear):
    """PyG's `HeteroLinear` without a loop over types: same arguments, parameters, results and gradients.

    `y_i = x_i W_{t(i)} + b_{t(i)}`; rows need no order, with `is_sorted` too.
    """

    weight: Tensor
    bias: Tensor | None
    num_types: int
    is_sorted: bool
    in_channels: int
    out_channels: int

    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """PyG's forward; see `torch_geometric.nn.HeteroLinear.forward`."""
        if is_left() or (is_on_cpu(x) and type_vec.dtype is torch.int64 and type_vec.shape == x.shape[:1]):
            return super().forward(x, type_vec)  # type: ignore[no-any-return]
        taker = None if torch.compiler.is_compiling() else self._taker_of_new(x)
        if taker is not None and self._is_new(x, type_vec):
            return taker(x, type_vec)
        if reasons := self._reasons(x, type_vec):
            report_fallback(type(self).__name__, reasons)
            out: Tensor = super().forward(x, type_vec)
            return out
        return self._product(x, type_vec)

    def _taker_of_new(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the forward that takes rows of new types; None where that is the program, which lists them."""
        rows = x.size(0) if x.dim() else 0
        # Backward makes rows of the input for all types.
        if rows * self.num_types * max(self.in_channels, self.out_channels) < _FEW_NUMBERS:
            return self._of_all_types
        # Told that they are sorted, PyG's loop takes unsorted rows for sorted ones.
        is_few = rows * (self.in_channels + self.out_channels) < MEASURED_NUMBERS
        is_looped = self.num_types <= FEW_TYPES and not self.is_sorted and is_few
        return super().forward if is_looped else None

    def _of_all_types(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """Return the rows of their types, of those that all types make of every row."""
        rows = x.unsqueeze(0).expand(self.num_types, -1, -1)
        products = rows @ self.weight if self.bias is None else self.bias.unsqueeze(1).baddbmm(rows, self.weight)
        return products.gather(0, type_vec.long().view(1, -1, 1).expand(1, -1, products.size(2))).squeeze(0)

    def _is_new(self, x: Tensor, type_vec: Tensor) -> bool:
        """Return whether the types of rows are new.

        Raises:
            IdRangeError: Such a type is out of range.
        """
        # Under autocast PyG's results have the dtype of the weight.
        if x.dtype is not self.weight.dtype or torch.is_autocast_enabled(x.device.type):
            return False
        if type_vec.dtype not in (torch.int64, torch.int32):
            return False
        if x.dim() != 2 or type_vec.shape != x.shape[:1] or not is_new_outside_captures(self, type_vec):
            return False
        if type_vec.numel():
            # PyG's loop would write out of bounds.
            low, high = torch.stack(type_vec.aminmax()).tolist()
            if low < 0 or high >= self.num_types:
                raise IdRangeError(f"'type_vec' needs types in [0, num_types={self.num_types}) (got {low} to {high})")
        return True

    def _reasons(self, x: Tensor, type_vec: Tensor) -> list[str]:
        reasons = self._reasons_of(x, self.weight)
        if type_vec.dim() != 1 or type_vec.dtype not in (torch.int64, torch.int32):
            reasons.append(f"type_vec is no int64 or int32 vector ({type_vec.dtype}, {list(type_vec.shape)})")
        elif type_vec.device != x.device:
            reasons.append(f"type_vec is on {type_vec.device} and x on {x.device}")
        return reasons

    def _typed(self, x: Tensor, type_vec: Tensor) -> tuple[IndexSpace | RowSet, dict[str, Tensor]]:
        return typed_rows(self, x, type_vec)


def typed_rows(
    layer: Any, x: Tensor, type_vec: Tensor, name: str = "type_vec"
) -> tuple[IndexSpace | RowSet, dict[str, Tensor]]:
    """Return the rows and the inputs of the program of a `HeteroLinear`, of ours or of PyG.

    Raises:
        ValueError: `type_vec`, by its name, has another shape, or a type is out of range.
    """
    # A text with a size in it would make the size a constant to torch.compile.
    if type_vec.shape != x.shape[:1]:
        check_shape(name, type_vec, (x.size(0),), f"[N={x.size(0)}]")
    inputs = {"x": x, "weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
    try:
        return rows_of_types(type_vec, layer.weight.size(0)), inputs
    except ValueError as error:
        raise type(error)(str(error).replace("'index'", f"'{name}'").replace("num_groups", "num_types")) from error


HETERO_LINEAR, LINEAR = (dense.HeteroLinear, HeteroLinear), (dense.Linear, Linear)


class HeteroDictLinear(TypedLayer, dense.HeteroDictLinear):
    """PyG's `HeteroDictLinear` with one product for many types: same arguments, parameters, results and gradients.

    `y_k = x_k W_k^T + b_k`; below ten types PyG's code runs, a product each, which no setting reports.
    """

    lins: Any

    def forward(self, x_dict: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """PyG's forward; see `torch_geometric.nn.HeteroDictLinear.forward`."""
        if is_left():
            return super().forward(x_dict)  # type: ignore[no-any-return]
        if reasons := self._reasons(x_dict):
            if len(self._keys(x_dict)) >= MANY_TYPES:
                report_fallback(type(self).__name__, reasons)
            results: dict[Any, Tensor] = super().forward(x_dict)
            return results
        keys = self._keys(x_dict)
        rows = self._product(x_dict).split([x_dict[key].size(0) for key in keys])
        return dict(zip(keys, rows, strict=True))

    def _keys(self, x_dict: dict[Any, Tensor]) -> list[Any]:
        return [key for key in self.lins if key in x_dict]

    def _reasons(self, x_dict: dict[Any, Tensor]) -> list[str]:
        keys = self._keys(x_dict)
        if torch.compiler.is_compiling():
            return ["the types of the rows while compiling"]
        if len(keys) < MANY_TYPES:
            return [f"{len(keys)} types take a product each, {MANY_TYPES} and more are one"]
        layers, first = [self.lins[key] for key in keys], x_dict[keys[0]]
        if not all(is_plain_layer(layer, LINEAR) for layer in layers):
            return ["a layer of one type is not PyG's Linear, has hooks, or has no weight before the first call"]
        if any(x_dict[key].shape[1:] != first.shape[1:] for key in keys):
            return ["the features have several widths"]
        if any(x_dict[key].dtype is not first.dtype or x_dict[key].device != first.device for key in keys):
            return ["the features have several dtypes or devices"]
        return self._reasons_of(first, layers[0].weight)

    def _typed(self, x_dict: dict[Any, Tensor]) -> tuple[IndexSpace | RowSet, dict[str, Tensor]]:
        keys = self._keys(x_dict)
        layers, features = [self.lins[key] for key in keys], [x_dict[key] for key in keys]
        inputs = {"x": torch.cat(features), "weight": torch.stack([layer.weight.t() for layer in layers])}
        if layers[0].bias is not None:
            inputs["bias"] = torch.stack([layer.bias for layer in layers])
        type_vec = _types_of(tuple(x.size(0) for x in features), features[0].device)
        return rows_of_types(type_vec, len(keys)), inputs


HETERO_DICT_LINEAR = (dense.HeteroDictLinear, HeteroDictLinear)
