"""Values of edges that a layer's code computes and keeps: they are computed when something reads them, if at all.

`edge_updater` returns attention that only flows into `propagate`, and messages leave theirs in an attribute that
`forward` clears. While a forward runs, such a value is an :class:`EdgeValue`: `propagate` joins the program of one that
it is passed to its own, and what is left when the forward returns becomes a plain tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyg_dfgnn.ir.domains import E
from pyg_dfgnn.ir.program import Builder, Program


class Pending(NamedTuple):
    """What computes a value of edges.

    Attributes:
        program: The program.
        output: Name of the value among its outputs.
        inputs: Its inputs.
        edges: The edges of the call.
        sizes: Numbers of nodes.
        dtype: Of all inputs and of the value.
        compute: () -> the value.
    """

    program: Program
    output: str
    inputs: Mapping[str, Tensor]
    edges: Tensor
    sizes: tuple[int, int]
    dtype: torch.dtype
    compute: Callable[[], Tensor]


class EdgeValue(Tensor):
    """A tensor [E, ...] that any function but those of its shape computes first; it has no memory until then."""

    _pending: Pending | None
    _versions: list[tuple[Tensor, int]]
    _result: Tensor
    _is_grad_enabled: bool
    __class__ = property(lambda self: Tensor)  # type: ignore[assignment]

    @staticmethod
    def of(pending: Pending, shape: Sequence[int]) -> EdgeValue:
        """Return a value that is to be computed.

        Args:
            pending: What computes it.
            shape: Sizes of a row.
        """
        number = torch.empty((), dtype=pending.dtype, device=pending.edges.device)
        value: EdgeValue = Tensor._make_subclass(EdgeValue, number.expand(pending.edges.size(1), *shape))
        value._pending, value._is_grad_enabled = pending, torch.is_grad_enabled()
        value._versions = [(tensor, tensor._version) for tensor in (pending.edges, *pending.inputs.values())]
        return value

    def is_current(self) -> bool:
        """Whether what it is made of is unedited, and gradients are asked for as they were when it was."""
        is_edited = any(tensor._version != version for tensor, version in self._versions)
        return not is_edited and self._is_grad_enabled is torch.is_grad_enabled()

    @property
    def pending(self) -> Pending | None:
        """What computes it; None if it has been computed."""
        return self._pending

    def value(self) -> Tensor:
        """Return it as a plain tensor.

        Raises:
            RuntimeError: A tensor that it is made of was edited in place since.
        """
        if self._pending is not None:
            if any(tensor._version != version for tensor, version in self._versions):
                raise RuntimeError(
                    f"'{self._pending.output}' of {self._pending.program.name} is read after a tensor that it is made "
                    "of was edited in place; edit a copy, or use settings(compile_messages=False)"
                )
            with torch.set_grad_enabled(self._is_grad_enabled):
                self._result = self._pending.compute()
            self._pending, self._versions = None, []
        return self._result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(EdgeValue, EdgeValue.value, (args, kwargs or {}))
        return func(*args, **kwargs)


_FACTS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_inference, Tensor.__len__),
}
"""Functions of the shape and the kind of a tensor."""


class _Forward(NamedTuple):
    """A forward that runs: its layer, and the values of edges that it has made."""

    layer: Any
    made: list[weakref.ref[EdgeValue]]


class _Stack(threading.local):
    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_stack = _Stack()


def run_forward(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a layer; of its edge values those that outlive it are plain tensors afterwards."""
    _stack.forwards.append(_Forward(layer, []))
    try:
        result = forward(layer, *args, **kwargs)
        made = _stack.forwards[-1].made
        if any(reference() is not None for reference in made):
            result = tree_map_only(EdgeValue, EdgeValue.value, result)
            for module in layer.modules():
                for name, held in module.__dict__.items():
                    if isinstance(held, EdgeValue):
                        module.__dict__[name] = held.value()
                    elif type(held) in (list, dict):
                        for key, kept in enumerate(held) if type(held) is list else held.items():
                            if isinstance(kept, EdgeValue):
                                held[key] = kept.value()
            for reference in made:
                value = reference()
                if value is not None:
                    value.value()
        return result
    finally:
        _stack.forwards.pop()


def may_wait(layer: Any) -> bool:
    """Whether a forward of the layer runs, which will see to what it leaves."""
    return bool(_stack.forwards) and _stack.forwards[-1].layer is layer


def left_by(layer: Any, value: EdgeValue) -> EdgeValue:
    """Note a value that the forward of a layer which runs has made."""
    _stack.forwards[-1].made.append(weakref.ref(value))
    return value


_joined: dict[tuple[Any, ...], tuple[Program, Program, Program]] = {}
"""Numbers of two programs and how they are joined -> both, which so stay alive, and the joined one."""
_MOST_JOINED = 1024


def join(
    program: Program, inputs: dict[str, Tensor], joins: Callable[[Program, str, EdgeValue], bool]
) -> tuple[Program, dict[str, Tensor]]:
    """Return a program and inputs in which the programs of edge values stand in for them, those of theirs too.

    Args:
        program: A program some of whose inputs are edge values.
        inputs: Its inputs.
        joins: (program, name of an input, its value) -> whether the program of the value may be joined.
    """
    while True:
        found = next(((name, tensor) for name, tensor in inputs.items() if isinstance(tensor, EdgeValue)), None)
        if found is None:
            return program, inputs
        name, value = found
        pending = value.pending
        if pending is None or not joins(program, name, value):
            inputs = {**inputs, name: value.value()}
            continue
        others = {n: t for n, t in inputs.items() if n != name}
        names = {}
        for own, tensor in pending.inputs.items():
            domain = _input(pending.program, own)
            same = (n for n, t in others.items() if t is tensor and _input(program, n) == domain)
            names[own] = next(same, f"{name}.{own}")
        key = id(program), name, id(pending.program), pending.output, tuple(names.items())
        known = _joined.get(key)
        if known is None:
            if len(_joined) >= _MOST_JOINED:
                _joined.pop(next(iter(_joined)))
            known = _joined[key] = program, pending.program, _join(program, name, pending, names)
        program = known[2]
        given = {**others, **{names[own]: tensor for own, tensor in pending.inputs.items()}}
        # A seed that is not yet drawn is given later.
        inputs = {n: given[n] for n in program.inputs if n in given}


def _input(program: Program, name: str) -> tuple[Any, ...]:
    """Return the domain and the shape of an input."""
    value = program.values[program.inputs[name]]
    return value.domain, value.shape


def _join(program: Program, name: str, pending: Pending, names: Mapping[str, str]) -> Program:
    builder, ids = Builder(share=True), dict[int, int]()
    producer, last = pending.program, dict(pending.program.outputs)[pending.output]
    live = Program("", producer.values, ((pending.output, last),)).live
    for i in sorted(live):
        value = producer.values[i]
        if value.op == "input":
            own, *rest = value.attrs
            ids[i] = builder.copy(replace(value, attrs=(names[own], *rest)), ())
        else:
            ids[i] = builder.copy(value, [ids[arg] for arg in value.args])
    made = builder.emit("gather", ids[last], attrs=(E,))
    ids = {}
    for i, value in enumerate(program.values):
        if value.op == "input" and value.attrs[0] == name:
            ids[i] = builder.emit("view", made, attrs=(value.shape,))
        else:
            ids[i] = builder.copy(value, [ids[arg] for arg in value.args])
    return builder.build(program.name, {n: ids[i] for n, i in program.outputs})
