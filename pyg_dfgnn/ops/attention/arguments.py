"""Arguments of the attention operators: what they need, and what is remembered of those that passed."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import AttentionProblem, fused_device_types, unsupported_reasons
from pyg_dfgnn.errors import check_device, check_dtype, check_shape
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.forms import check_edge_index
from pyg_dfgnn.ops.eager import is_eager, is_plain
from pyg_dfgnn.settings import current

Edges = Graph | EdgeSet
MAX_PLANS = 256
"""Bounds what a graph remembers when a scale or slope is another number in each call."""

FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_graph(graph: Edges) -> tuple[Edges, torch.device]:
    """The edges, as a Graph unless torch.compile traces, and their device."""
    if isinstance(graph, Graph):
        return graph.on_this_stream(), graph.device
    if not isinstance(graph, EdgeSet):
        raise TypeError(f"'graph' needs a Graph or an EdgeSet (got {type(graph).__name__})")
    check_edge_index(graph.edge_index)
    return graph if torch.compiler.is_compiling() else Graph.resolve(*graph.key), graph.edge_index.device


def check_tensor(name: str, tensor: Any, device: torch.device, **sizes: int | None) -> None:
    """Check dtype, device and shape, given as one letter and size per dimension; None stands for any size."""
    check_dtype(name, tensor, FEATURE_DTYPES)
    check_device(name, tensor, device)
    fits = len(tensor.shape) == len(sizes) and all(
        size is None or size == given for size, given in zip(sizes.values(), tensor.shape, strict=True)
    )
    if not fits:
        expected = tuple(letter if size is None else size for letter, size in sizes.items())
        spec = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in sizes.items())
        check_shape(name, tensor, expected, f"[{spec}]")


def signature_of(
    graph: Edges, score: str, numbers: tuple[Any, ...], features: Sequence[Any], scalars: Sequence[Any] = ()
) -> Any:
    """What decides whether arguments are valid and which kernels they take; None for what is not worth remembering.

    Args:
        graph: The edges.
        score: The score.
        numbers: Arguments that are numbers.
        features: Tensors that need a common dtype; None when they have several, since they are cast then.
        scalars: Further tensors.
    """
    if not is_eager_on(graph):
        return None
    found: list[Any] = [score, numbers]
    dtype = None
    for tensor in features:
        if is_plain(tensor):
            if dtype is None:
                dtype = tensor.dtype
            elif tensor.dtype is not dtype:
                return None
            found += (tensor.shape, tensor.device)
        elif tensor is None:
            found.append(None)
        else:
            return None
    for tensor in scalars:
        if is_plain(tensor):
            found += (tensor.shape, tensor.dtype, tensor.device)
        elif tensor is None:
            found.append(None)
        else:
            return None
    found.append(dtype)
    return tuple(found)


def recall(graph: Any, signature: Any) -> Any:
    """The kernels for arguments like these, if such have passed all checks on this graph before."""
    if signature is None:
        return None
    plans = graph.peek("plans")
    if plans is None:
        return None
    try:
        kernels = plans.get(signature)
    except TypeError:
        # A number that is not even hashable: the checks will name it.
        return None
    if kernels is None or kernels.device_type not in fused_device_types:
        return None
    settings = current()
    # Most often they are the same object; each `with` block has one of its own.
    if kernels.settings is not settings and kernels.settings != settings:
        return None
    if kernels.problem.tf32 is not tf32_allowed(kernels.problem.dtype):
        return None
    if graph.device.type == "cuda":
        graph.on_this_stream()
    return kernels


def remember(graph: Graph, signature: Any, kernels: Any) -> None:
    """Keep the kernels for arguments like these with the graph, while there is room."""
    plans: dict[Any, Any] = graph.derived("plans", dict)
    if signature is not None and len(plans) < MAX_PLANS:
        plans[signature] = kernels


def num_edges(graph: Edges) -> int | None:
    """The number of edges, unknown before tracing ends when self-loops are added."""
    if isinstance(graph, Graph):
        return graph.num_edges
    return None if graph.self_loops else graph.edge_index.shape[1]


def is_fusable(score: str, value: Tensor, edge: Tensor | None, dropout_p: float) -> bool:
    _, heads, channels = value.shape
    has_edge, drops = edge is not None, dropout_p > 0.0
    problem = AttentionProblem(score, heads, channels, value.dtype, value.device, has_edge, drops, False)
    return not unsupported_reasons(problem)


def common_dtype(*tensors: Tensor | None) -> torch.dtype:
    present = [t.dtype for t in tensors if t is not None]
    dtype = present[0]
    for other in present[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


def in_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float32 else tensor.float()


def draw_seed(device: torch.device) -> Tensor:
    """A key for one call from torch's generator of the device, so that manual_seed and graph capture work as usual."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def is_eager_on(graph: Edges) -> TypeGuard[Graph]:
    return is_eager() and isinstance(graph, Graph)
