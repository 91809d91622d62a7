"""Drop-ins in whose place `torch.jit.script` compiles PyG's classes and functions."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from pyg_dfgnn.fallback import report_fallback
from pyg_dfgnn.nn.registry import upstream_of

F = TypeVar("F", bound=Callable[..., Any])

SCRIPTED = "torch.jit.script puts PyG's class in its place, in this model too: give it a copy to keep the drop-in"


class Scripted:
    """A drop-in in whose place `torch.jit.script` compiles a module of PyG's own class with the same parameters."""

    def __prepare_scriptable__(self: Any) -> nn.Module:
        upstream = upstream_of(type(self))
        if upstream is type(self):
            return self  # type: ignore[return-value]
        report_fallback(type(self).__name__, [SCRIPTED])
        twin: nn.Module = object.__new__(upstream)
        twin.__dict__.update(self.__dict__)
        return twin


def scripts(upstream: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator of a function in whose place `torch.jit.script` compiles PyG's function."""

    def mark(function: F) -> F:
        # torch.jit asks functions for this too.
        vars(function)["__prepare_scriptable__"] = lambda: upstream
        return function

    return mark
