"""Edges that a forward makes of others, kept: PyG's functions of edges give again what an equal earlier call gave.

Such a function launches a dozen kernels and waits for the device, and it returns new tensors each time, whose graph is
found by another wait. While the forward of a compiled layer runs, stand-ins take the place of those that it names. They
return the very tensors of an earlier call for as long as its arguments live unchanged. Of a norm whose weights are
learnt or new, the edges with self-loops are kept and the weights are computed anew. A CUDA graph reads what is kept of
edges that stay as they are; while another is captured PyG's functions run.
"""

from __future__ import annotations

import dis
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops, scatter

from pyg_dfgnn.graph.cache import GraphCache
from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.graph.graph import FLOWS
from pyg_dfgnn.nn.gate import transform_reasons
from pyg_dfgnn.nn.stand_ins import codes_in
from pyg_dfgnn.ops.segment import symmetric_norm
from pyg_dfgnn.settings import current

FUNCTIONS = (gcn_norm, add_self_loops, remove_self_loops, add_remaining_self_loops)
"""Functions of edges and plain values that return a pair and read nothing else."""
MOST_KEPT = 32
"""Calls whose results are kept, of all layers together."""
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})
_MADE = "made"
_NORM = signature(gcn_norm)
_Made = tuple[list[Any], list[tuple[Tensor, int]]]
"""What a function has returned, with the place of an argument for it, and the tensors with their versions."""
_kept: GraphCache[Derived] = GraphCache(MOST_KEPT)


_once: dict[tuple[Any, ...], weakref.ref[Tensor]] = {}
"""Calls that came once, by their edges."""


class _Capture(threading.local):
    """The capture of this thread whose edges stay.

    Attributes:
        read: What it reads of what is kept; None outside of such a capture.
    """

    read: list[Tensor] | None = None


_capture = _Capture()


@contextmanager
def edges_stay(do_they: bool) -> Iterator[list[Tensor]]:
    """Say whether the edges stay of what this thread captures in the block: no replay follows an edit of them.

    Yields:
        Edges of which the capture reads what is kept, and that: to live as long, and not to be edited.
    """
    before, read = _capture.read, list[Tensor]()
    _capture.read = read if do_they else None
    try:
        yield read
    finally:
        _capture.read = before


def names_of(forward: Any) -> list[str]:
    """Return the names by which a function calls functions of edges, none if it edits its globals or asks for them."""
    if type(forward) is not FunctionType:
        return []
    steps = [step for code in codes_in(forward.__code__) for step in dis.get_instructions(code)]
    names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    if names & {"globals", "eval", "exec"} or any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in steps):
        return []
    return sorted(name for name in names if any(forward.__globals__.get(name) is function for function in FUNCTIONS))


def keeping(forward: Any, kind: type) -> Any:
    """Return the forward of a class as a function that calls the stand-ins; the forward itself if it needs none."""
    if not names_of(forward):
        return forward
    # Names replaced in the module would show to TorchScript, pickles and whoever imports them. Globals of its own
    # show to nobody but torch.compile, which takes them for a plain dict and is told to skip this copy of the code.
    code, own = forward.__code__.replace(), _Globals(forward.__globals__, kind)
    function = FunctionType(code, own, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return torch.compiler.disable(function, recursive=False)


class _Globals(dict[str, Any]):
    """The globals of a module as they are when they are read, but for stand-ins.

    Python reads globals through `__getitem__` where they are no plain dict. What reads them otherwise, such as imports,
    sees them as they were.

    Args:
        module: The globals.
        kind: Class whose forward reads them. Layers of others share nothing with it: they may edit what they are given.
    """

    def __init__(self, module: dict[str, Any], kind: type) -> None:
        super().__init__(module)
        self._module = module
        self._stand_ins: dict[int, Any] = {id(function): partial(_call, kind, function) for function in FUNCTIONS}

    def __getitem__(self, name: str) -> Any:
        value = self._module[name]
        return self._stand_ins.get(id(value), value)


def _call(kind: type, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what an equal earlier call of a function gave in the forward of a class, or call it."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    given = (*args, *kwargs.values())
    tensors: list[Tensor] = []
    facts: list[Any] = [kind, function, len(args), *kwargs, torch.get_default_dtype()]
    for value in given:
        if isinstance(value, Tensor):
            tensors.append(value)
            facts.append(id(value))
        elif type(value) in _PLAIN:
            facts += type(value), value
        else:
            return function(*args, **kwargs)
    own = function
    if function is gcn_norm:
        function = partial(_norm, kind)
    if not tensors or not _may_keep(tensors):
        return function(*args, **kwargs)
    device = tensors[0].device
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    # Between replays all but edges may be written anew.
    if is_captured and (_capture.read is None or len(tensors) > 1):
        return function(*args, **kwargs)
    facts.append(torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type))
    key, versions = tuple(facts), [tensor._version for tensor in tensors]

    def make() -> _Made:
        # An argument that is returned would keep itself alive: its place stands for it.
        returned = function(*args, **kwargs)
        parts = [next((k for k, value in enumerate(given) if value is part), part) for part in returned]
        return parts, [(part, part._version) for part in parts if isinstance(part, Tensor)]

    # Made without gradients and inference mode; other streams wait for it, as for what graphs keep.
    made = _kept.get(key, tensors, versions)
    if made is None and current().leaves_new and not _came_before(key, tensors[0]):
        return own(*args, **kwargs)
    parts, seen = made.derived(_MADE, make) if made is not None else ([], [])
    if made is None or any(part._version != version or part.requires_grad for part, version in seen):
        if is_captured:
            return function(*args, **kwargs)
        made = Derived(device)
        parts, _ = made.derived(_MADE, make)
        _kept.put(key, tensors, versions, made)
    if _capture.read is not None:
        _capture.read += [*tensors, *(part for part, _ in seen)]
    return tuple(given[part] if type(part) is int else part for part in parts)


def _came_before(key: tuple[Any, ...], edges: Tensor) -> bool:
    """Note a call, and return whether it is not the first with these edges: of edges that come once nothing is kept."""
    known = _once.pop(key, None)
    if known is not None and known() is edges:
        return True
    if len(_once) >= MOST_KEPT:
        _once.clear()
    _once[key] = weakref.ref(edges)
    return False


def _norm(kind: type, /, *args: Any, **kwargs: Any) -> Any:
    """Return what `gcn_norm` does, with self-loops that are found once for the edges, and gradients without a sort."""
    call = _NORM.bind(*args, **kwargs)
    call.apply_defaults()
    edge_index, weight, num_nodes, improved, adds_loops, flow, _ = call.args
    is_plain = type(edge_index) is Tensor and edge_index.layout is torch.strided and type(num_nodes) is int
    is_plain &= flow in FLOWS
    if not is_plain or weight is None or not weight.is_floating_point() or weight.shape != edge_index.shape[1:]:
        return gcn_norm(*args, **kwargs)
    if adds_loops:
        edge_index, own, loops, nodes = _call(kind, _with_loops, edge_index, num_nodes)
        new = weight.new_full((num_nodes,), 2.0 if improved else 1.0)
        if loops.numel():
            # As PyG does, also where a node has several: the last counts, and each gets its gradient.
            weight, new = weight.index_select(0, own), new.index_put((nodes,), weight.index_select(0, loops))
        weight = torch.cat([weight, new])
    targets = edge_index[1 if flow == "source_to_target" else 0]
    degree = scatter(weight, targets, dim_size=num_nodes)
    return edge_index, symmetric_norm(edge_index, weight, degree)


def _with_loops(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """Return edges with a self-loop per node behind all others; which edges are none, which are, and of what nodes."""
    looped, _ = add_remaining_self_loops(edge_index, None, num_nodes=num_nodes)
    source, target = edge_index
    loops = (source == target).nonzero().view(-1)
    return looped, (source != target).nonzero().view(-1), loops, source[loops].long()


def _may_keep(tensors: list[Tensor]) -> bool:
    """Whether a call may be given what an equal one gave, and others what it gives."""
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        if tensor.requires_grad or tensor.is_inference():
            return False
    return current().compile_messages and not transform_reasons() and not torch._C._len_torch_dispatch_stack()
