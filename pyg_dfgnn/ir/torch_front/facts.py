"""What code may ask of a tensor while it is traced, and what it must not."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from pyg_dfgnn.ir.torch_front.counts import Shape
from pyg_dfgnn.ir.torch_front.registry import FUNCTIONS, Handler
from pyg_dfgnn.ir.torch_front.symbols import Tracer

_ASKED = "dim ndim ndimension dtype layout is_sparse is_floating_point is_complex"
_UNDECIDED = {
    "decides by numbers that differ from call to call": "__bool__ item tolist __int__ __float__ __index__ __contains__ "
    "equal allclose is_nonzero any all",
    "leaves the traced tensor": "numpy __array__ cpu cuda data_ptr untyped_storage __repr__ __format__ __setstate__",
    "orders or selects edges by their numbers": "nonzero masked_select unique sort argsort topk argmax argmin cumsum",
    "draws random numbers": "rand randn rand_like randn_like bernoulli normal multinomial randint randperm uniform_",
    "assigns some entries of a tensor": "__setitem__ index_put index_put_ index_fill index_fill_ masked_scatter",
}


def _attribute(name: str) -> Handler:
    def read(t: Tracer, x: Any, *args: Any, **kwargs: Any) -> Any:
        value = getattr(t.symbol(x), name)
        return value(*args, **kwargs) if callable(value) else value

    return read


def _sized(name: str) -> Handler:
    """What answers by numbers of rows among others."""
    ask = _attribute(name)

    def read(t: Tracer, x: Any, *args: Any, **kwargs: Any) -> Any:
        if name in ("numel", "nelement"):
            return prod(map(t.count, t.symbol(x).shape))
        value = ask(t, x, *args, **kwargs)
        return Shape(map(t.count, value)) if isinstance(value, torch.Size) else t.count(value)

    return read


def _undecided(name: str, what: str) -> Handler:
    def read(t: Tracer, *args: Any, **kwargs: Any) -> Any:
        raise t.stop(f"`{name}` {what}")

    return read


for _name in _ASKED.split():
    FUNCTIONS[f".{_name}"] = _attribute(_name)
for _name in ("size", "shape", "numel", "nelement"):
    FUNCTIONS[f".{_name}"] = _sized(_name)


def _length(t: Tracer, x: Any) -> int:
    if not t.is_asked_by_pyg() and t.domain_of_size(len(t.symbol(x))) is not None:
        raise t.stop("`len` gives a number of rows, and what it decides is not seen: use size(0)")
    return len(t.symbol(x))


FUNCTIONS[".__len__"] = _length
for _what, _names in _UNDECIDED.items():
    for _name in _names.split():
        FUNCTIONS[f".{_name}"] = _undecided(_name, _what)


def _chosen(name: str, answer: Any) -> Handler:
    """PyG asks this to choose between equal ways; what a layer does with it may differ from call to call."""

    def read(t: Tracer, x: Any) -> Any:
        if not t.is_asked_by_pyg():
            raise t.stop(f"`{name}` differs from call to call")
        return answer

    return read


for _name, _answer in {"is_cuda": False, "requires_grad": False, "grad_fn": None, "is_leaf": False}.items():
    FUNCTIONS[f".{_name}"] = _chosen(_name, _answer)
FUNCTIONS[".device"] = lambda t, x: t.device
FUNCTIONS[".is_contiguous"] = lambda t, x, **_: True
