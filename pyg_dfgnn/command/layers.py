"""Layers that the commands run: one of each family of kernels, or a model and a batch of a user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, MessagePassing, RGCNConv, SAGEConv

from pyg_dfgnn.torch_private import tree_leaves, tree_map

FUNCTION = "a function of yours that returns (model, batch) or (model, tuple of arguments); layers of ours by default"
NO_GPU = "PyTorch finds no GPU, and kernels run on no CPU"
RELATIONS = 3


class UserError(Exception):
    """A mistake of a user, which ends a command with this message."""


class Gate(MessagePassing):
    """A layer of a user's own."""

    def __init__(self, channels: int) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(self.lin(torch.cat([x_i, x_j], dim=-1))) * x_j


LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "attention": lambda channels: GATConv(channels, channels // 4, heads=4),
    "aggregation": lambda channels: SAGEConv(channels, channels),
    "relations": lambda channels: RGCNConv(channels, channels, RELATIONS),
    "layers of your own": Gate,
}
"""Family of kernels -> the layer of it with as many channels as features."""


class Case(NamedTuple):
    """A model with the arguments of its forward."""

    name: str
    model: torch.nn.Module
    arguments: tuple[Any, ...]

    def to(self, device: torch.device) -> Case:
        """Return the case on a device."""
        arguments = tree_map(lambda each: each.to(device) if hasattr(each, "to") else each, self.arguments)
        return self._replace(model=self.model.to(device), arguments=arguments)

    @property
    def text(self) -> str:
        """Sizes of the arguments."""
        return ", ".join(_shown(each) for each in self.arguments)


def _shown(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else " ".join(str(value).split())[:100]


def builtin_cases(nodes: int, edges: int, channels: int) -> list[Case]:
    """Return the layer of each family on one random graph."""
    torch.manual_seed(0)
    x, edge_index = torch.randn(nodes, channels), torch.randint(nodes, (2, edges))
    edge_type = torch.randint(RELATIONS, (edges,))
    cases = []
    for name, make in LAYERS.items():
        more = (edge_type,) if name == "relations" else ()
        cases.append(Case(name, make(channels), (x, edge_index, *more)))
    return cases


def users_case(source: str) -> Case:
    """Return the case that a user's function makes.

    Args:
        source: "module:function"; the folder that the command runs in is searched first.

    Raises:
        UserError: There is no such function, or it returns something else.
    """
    module, _, name = source.partition(":")
    if not module or not name:
        raise UserError(f"the function needs the form module:function (got {source!r})")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise UserError(f"{source}: {error}") from error
    except AttributeError as error:
        raise UserError(f"{source}: the module {module!r} has no {name!r}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        raise UserError(f"{source}: {name!r} needs a function (got {type(function).__name__})")
    result = function()
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.nn.Module):
        kinds = [type(each).__name__ for each in result] if isinstance(result, tuple) else type(result).__name__
        raise UserError(f"{source}: the result needs (model, batch) or (model, tuple of arguments) (got {kinds})")
    model, batch = result
    return Case(name, model, batch if isinstance(batch, tuple) else (batch,))


def loss_of(out: Any) -> Tensor:
    """Return a number of all floats that a model returns, to differentiate.

    Raises:
        UserError: Nothing of what it returns has a gradient.
    """
    parts = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.requires_grad]
    if not parts:
        raise UserError("the model returns no tensor that has a gradient")
    return torch.stack([part.float().square().mean() if part.dim() else part.float() for part in parts]).sum()
