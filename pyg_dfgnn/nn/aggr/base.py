"""Base class of the drop-in aggregations: the check whether kernels take a call, and the description of a call."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr

from pyg_dfgnn.dispatch.core import device_reasons
from pyg_dfgnn.nn import segment
from pyg_dfgnn.nn.on_cpu import is_on_cpu
from pyg_dfgnn.nn.registry import DROP_INS, Description, keep_signature
from pyg_dfgnn.nn.scripted import Scripted
from pyg_dfgnn.ops.visits import is_left


class FusedAggregation(Scripted, aggr.Aggregation):
    """A drop-in aggregation: it subclasses PyG's class under the same name and adds no parameter."""

    _stats: tuple[str, ...] = ("sum",)
    """Reductions of one gather of the aggregation, by PyG's names; none where each of several makes its own."""
    _is_whole = True
    """Whether these are all that PyG's code computes."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        keep_signature(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What PyG's constructor has made of names.
        for module in self.modules():
            module.__class__ = DROP_INS.get(type(module), type(module))

    def _inner(self) -> Iterable[nn.Module]:
        """Return the aggregations that this one combines."""
        return ()

    def _standing_reasons(self, like: Tensor | None = None) -> list[str]:
        """Return what is against the fused kernels whatever the input, on the device of `like`."""
        reasons = [f"the reduction {stat!r} has no fused kernel" for stat in self._stats if stat not in segment.NAMES]
        inner = list(self._inner())
        for module in inner:
            if not isinstance(module, FusedAggregation):
                reasons.append(f"{type(module).__name__} has no drop-in")
            else:
                reasons += module._standing_reasons()
        reasons = reasons if len(reasons) >= len(inner) else []
        return reasons if like is None else [*reasons, *device_reasons(like.device)]

    def _describe(self, device: torch.device | None, *args: Any, **kwargs: Any) -> Description:
        """Return what a call would run; see :func:`pyg_dfgnn.describe_plan`."""
        stats = self._stats or ("sum",)
        is_whole = self._is_whole and bool(self._stats)
        return segment.describe(self, device, self._standing_reasons(), stats, is_whole, *args, **kwargs)

    def _takes(
        self,
        x: Tensor,
        index: Tensor | None,
        ptr: Tensor | None,
        dim_size: int | None,
        dim: int,
        stats: Sequence[str],
    ) -> bool:
        """Return whether the kernels take a call; report why not."""
        return segment.takes(type(self).__name__, x, index, ptr, dim, stats, self, dim_size, self._is_whole)

    def reduce(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        reduce: str = "sum",
    ) -> Tensor:
        """PyG's `Aggregation.reduce` in one fused gather."""
        # As `is_pygs` does: a layer may reduce often, and each function that a call enters costs the host.
        if is_left() or (type(x) is Tensor and not x.is_cuda and is_on_cpu(x)):
            return super().reduce(x, index, ptr, dim_size, dim, reduce)
        if ptr is not None and self._deterministic:
            index = None
        if not self._takes(x, index, ptr, dim_size, dim, (reduce,)):
            return super().reduce(x, index, ptr, dim_size, dim, reduce)
        return segment.reduce(x, index, ptr, dim_size, dim, (reduce,))[0]
