"""Swap the layers of an existing model, list what became of them, and ask which kernels they would run."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.nn.drop_ins import DROP_INS, Description, Row, rows_of
from pyg_dfgnn.nn.fallback import say
from pyg_dfgnn.settings import current, settings

Model = TypeVar("Model", bound=torch.nn.Module)


def _check_module(name: str, value: Any) -> None:
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"'{name}' needs a torch.nn.Module (got {type(value).__name__})")


def accelerate(model: Model) -> Model:
    """Turn the PyG convs and linear layers of a model into drop-ins, in place, and say in one line what was changed.

    Parameters, buffers, hooks and settings stay as they are. Only modules of exactly PyG's classes change; a subclass
    may mean something else. Compile the model afterwards.

    Args:
        model: Any module, also a single conv.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a module.
    """
    _check_module("model", model)
    swapped = [module for module in model.modules() if type(module) in DROP_INS]
    for module in swapped:
        module.__class__ = DROP_INS[type(module)]
        if isinstance(module, MessagePassing):
            # As in a constructor: generate the propagation of the class where no instance has done so yet.
            MessagePassing._set_jittable_templates(module)
    if current().fallback != "silent":
        rows = list(rows_of(model))
        new = _counted(row.kind for module, row in rows if module in set(swapped))
        left = _counted(row.kind for _, row in rows if not row.drop_in)
        say(f"accelerate: new drop-ins: {new}; left: {left}; pyg_dfgnn.report(model) says why")
    return model


def _counted(names: Iterable[str]) -> str:
    kinds = Counter(names)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


class Report(tuple[Row, ...]):
    """The layers of a model as rows; `str()` is a table."""

    def __str__(self) -> str:
        table = [("module", "class", "state", "why")]
        table += [(row.name or "(the model)", row.kind, "drop-in" if row.drop_in else "left", row.why) for row in self]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def report(model: torch.nn.Module) -> Report:
    """List the layers of a model: name, class, drop-in or left, and why.

    The reasons are those that hold for every call; ask :func:`describe_plan` about one call.

    Args:
        model: Any module, also a single conv.

    Returns:
        Rows with the fields `name`, `kind`, `drop_in` and `why`; `str()` of all is a table.

    Raises:
        TypeError: `model` is not a module.
    """
    _check_module("model", model)
    return Report(row for _, row in rows_of(model))


def describe_plan(
    model: torch.nn.Module, *args: Any, device: torch.device | str | None = None, **kwargs: Any
) -> Description:
    """Say which kernels each layer of a model would run in a forward call, or every reason why it would not.

    Args:
        model: A drop-in, or a model with layers of which some are drop-ins. A copy of the model runs.
        *args: Arguments of the forward.
        device: Plan for this device in place of the tensors'; a CUDA device that is not there is taken for an H200.
        **kwargs: Further arguments of the forward.

    Returns:
        A description with the fields `fused`, `reasons`, `problem`, `plan`, `graph` and `memory`; of a model with one
        such description per layer in `layers`.

    Raises:
        TypeError: `model` is not a module.
    """
    _check_module("model", model)
    device = None if device is None else torch.device(device)
    rows = {row.name: (module, row) for module, row in rows_of(model)}
    if "" in rows:
        return _describe(*rows[""], device, *args, **kwargs)
    if not rows:
        return Description(str(model), (f"{type(model).__name__} has no layer that passes messages, nor a linear one",))
    return Description(str(model), layers=dict(_layers(model, device, args, kwargs)))


def _describe(module: torch.nn.Module, row: Row, device: torch.device | None, *args: Any, **kwargs: Any) -> Description:
    if not row.drop_in:
        return Description(str(module), (row.why,))
    description: Description = module._describe(device, *args, **kwargs)  # type: ignore[operator]
    return description


def _layers(
    model: torch.nn.Module, device: torch.device | None, args: Any, kwargs: Any
) -> Iterator[tuple[str, Description]]:
    """Run a copy of the model, so that caches, running statistics and lazy sizes of the user's stay, and yield the
    description of the first call of each layer.
    """
    model, grad = copy.deepcopy(model), torch.is_grad_enabled()
    layers: dict[str, Description] = {}
    rows = {row.name: (module, row) for module, row in rows_of(model)}
    for name, (module, row) in rows.items():

        def hook(_: Any, args: Any, kwargs: Any, name: str = name, layer: Any = (module, row)) -> None:
            if name not in layers:
                with torch.set_grad_enabled(grad), settings(fallback=fallback):
                    layers[name] = _describe(*layer, device, *args, **kwargs)

        module.register_forward_pre_hook(hook, with_kwargs=True)
    fallback = current().fallback
    with torch.no_grad(), torch.random.fork_rng(), settings(fallback="silent"):
        model(*args, **kwargs)
    for name, (module, _) in rows.items():
        yield name, layers.get(name, Description(str(module), ("this forward does not call the layer",)))
