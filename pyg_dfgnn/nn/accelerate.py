"""Take the layers of an existing model, list what became of them, and ask which kernels they would run."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from inspect import signature
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.to_hetero_module import ToHeteroLinear

from pyg_dfgnn.errors import as_device
from pyg_dfgnn.fallback import inform
from pyg_dfgnn.graph.ends import PartitionedEdges
from pyg_dfgnn.nn.captured_forward import ON_PART
from pyg_dfgnn.nn.conv.to_hetero import join_relations, split_relations
from pyg_dfgnn.nn.gate import FusedConv, statistics_of
from pyg_dfgnn.nn.messages import Mark, describe, standing
from pyg_dfgnn.nn.owned import OfLayers
from pyg_dfgnn.nn.registry import (
    CONTAINERS,
    MARK,
    Description,
    LayerReport,
    copied,
    drop_ins,
    layer_rows,
    set_propagate,
    shown,
    upstream_of,
)
from pyg_dfgnn.settings import current, local_settings
from pyg_dfgnn.torch_private import OptimizedModule

Model = TypeVar("Model", bound=torch.nn.Module)


def _checked(model: Any) -> torch.nn.Module:
    """Return a module; of one that `torch.compile` has returned the module inside."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"'model' needs a torch.nn.Module (got {type(model).__name__})")
    return model._orig_mod if isinstance(model, OptimizedModule) else model


_left_out = OfLayers[str](str)
"""Why `accelerate` has left a layer as it is."""
_LEFT_BY = "left out by '{}' of pyg_dfgnn.accelerate"

LayerChoice = type | str | Iterable[type | str] | None


def accelerate(model: Model, *, only: LayerChoice = None, skip: LayerChoice = None) -> Model:
    """Take the layers of a model, in place, and say in one line what was changed.

    PyG's convs become drop-ins. The forward of every other `MessagePassing` is compiled: see
    :mod:`pyg_dfgnn.nn.messages`. While `settings(linear="kernels")` is in force, linear layers of PyG and torch become
    drop-ins too, also those in convs. Parameters, buffers, hooks and settings stay as they are. Only modules of exactly
    these classes become drop-ins; a subclass may mean something else. Compile the model afterwards.

    Args:
        model: Any module, also a single conv.
        only: What to take: a class, PyG's or ours, the dotted name of a layer, a pattern of names such as
            `"encoder.*"`, or several.
        skip: What to leave, likewise.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a module, or `only` or `skip` names layers by anything else than classes and names.
        ValueError: No layer of `model` has a name in `only` or `skip`.
    """
    inner = _checked(model)
    chosen = _chosen(inner, only, skip)
    table = drop_ins()
    for module in chosen:
        if type(module) is not (upstream := upstream_of(type(module))) and not _suits(type(module), module):
            # Made by a name of ours.
            module.__class__ = upstream
            set_propagate(module)
    # A drop-in reduces by itself; where PyG's code runs in its place, so does PyG's reduction.
    reducers = {
        part
        for module in inner.modules()
        if isinstance(module, MessagePassing) and _reduces(table.get(upstream_of(type(module))), module)
        for part in module.aggr_module.modules()
    }
    swapped = [
        module
        for module in chosen
        if type(module) in table and module not in reducers and _suits(table[type(module)], module)
    ]
    ours = tuple(table.values())
    inside = {part for module in inner.modules() if isinstance(module, ours) for part in module.modules()}
    for module in swapped:
        inside.update(module.modules())
        module.__class__ = table[type(module)]
        set_propagate(module)
    joined = [module for module in chosen if type(module) in CONTAINERS]
    for module in joined:
        module.__class__ = CONTAINERS[type(module)]
    hetero = sum(join_relations(module) for module in chosen if isinstance(module, GraphModule))
    compiled = [m for m in chosen if isinstance(m, MessagePassing) and m not in inside and MARK not in m.__dict__]
    for module in compiled:
        module.__dict__[MARK] = Mark(type(module))
    if current().fallback != "silent":
        others = [*(type(module).__name__ for module in joined), *(["to_hetero layer"] * hetero)]
        inform(_summary(inner, {*swapped}, {*compiled}, others))
    return model


def _chosen(model: torch.nn.Module, only: LayerChoice, skip: LayerChoice) -> list[torch.nn.Module]:
    """Return the modules that `only` and `skip` leave, and keep why the others are left out.

    Raises:
        TypeError: Layers are named by anything else than classes and names.
        ValueError: No layer of the model has a name.
    """
    taken, left_out = _choices("only", only), _choices("skip", skip)
    named = list(model.named_modules())
    for argument, choices in (("only", taken), ("skip", left_out)):
        for name in choices:
            if isinstance(name, str) and not any(fnmatch(known, name) for known, _ in named):
                raise ValueError(f"{argument!r} needs names of layers of the model (got {name!r}, which no layer has)")
    chosen = []
    paired = {id(module.hetero_module) for _, module in named if isinstance(module, ToHeteroLinear)}
    for name, module in named:
        if _is_in(left_out, name, module):
            _left_out.put(module, _LEFT_BY.format("skip"))
        elif only is not None and not _is_in(taken, name, module):
            _left_out.put(module, _LEFT_BY.format("only"))
        elif id(module) in paired:
            _left_out.put(module, "ToHeteroLinear gives tables and tensors the same bits, by PyG's products in both")
        else:
            _left_out.drop(module)
            chosen.append(module)
    return chosen


def _summary(
    model: torch.nn.Module, swapped: set[torch.nn.Module], compiled: set[torch.nn.Module], others: list[str]
) -> str:
    """Return in one line which layers of a model are new drop-ins, compiled and left."""
    rows = list(_rows(model))
    new = _counted([*(row.kind for module, row in rows if module in swapped), *others])
    left = _counted(row.kind for _, row in rows if row.state == "left")
    kinds = [row.kind for module, row in rows if module in compiled and row.compiled]
    compiling = f"compiled: {_counted(kinds)}; " if kinds else ""
    return f"accelerate: new drop-ins: {new}; {compiling}left: {left}; pyg_dfgnn.report(model) says why"


def _suits(drop_in: type, layer: torch.nn.Module) -> bool:
    """Return whether a drop-in has kernels for a layer as it was made; else its forward is compiled."""
    asked: Callable[[torch.nn.Module], bool] | None = getattr(drop_in, "_suits", None)
    return asked is None or asked(layer)


def _reduces(drop_in: Any, conv: Any) -> bool:
    """Return whether a drop-in has kernels for a conv with the aggregation that it was made with."""
    if drop_in is None or not issubclass(drop_in, FusedConv) or not _suits(drop_in, conv):
        return False
    reduction = conv.aggr_module
    is_scaled = drop_in._scaler is not None and upstream_of(type(reduction)) is drop_in._scaler
    statistics = statistics_of(reduction.aggr if is_scaled else reduction)
    return bool(statistics) and drop_in._fused_statistics.issuperset(statistics)


def _choices(name: str, choice: LayerChoice) -> tuple[type | str, ...]:
    """Return the classes and patterns of names in `only` or `skip`."""
    if choice is None:
        return ()
    is_several = isinstance(choice, Iterable) and not isinstance(choice, (type, str))
    choices: tuple[Any, ...] = tuple(choice) if is_several else (choice,)  # type: ignore[arg-type]
    for entry in choices:
        if not isinstance(entry, (type, str)):
            raise TypeError(f"'{name}' needs a class, a name, or several of them (got {type(entry).__name__})")
    return choices


def _is_in(choices: tuple[type | str, ...], name: str, module: torch.nn.Module) -> bool:
    # Our class names the layers that it would be taken for.
    return any(fnmatch(name, c) if isinstance(c, str) else isinstance(module, (c, upstream_of(c))) for c in choices)


def _rows(model: torch.nn.Module) -> Iterator[tuple[Any, LayerReport]]:
    """Yield the layers of a model; one whose messages are not compiled says why."""
    for module, row in layer_rows(model):
        left_out = _left_out.get(module)
        if row.compiled:
            is_program, reasons = standing(module)
            row = row._replace(compiled=is_program, why="; ".join(reasons))
        elif row.state == "left" and left_out is not None:
            row = row._replace(why=left_out)
        elif row.state == "left" and isinstance(module, MessagePassing) and type(module) not in drop_ins():
            row = row._replace(why=f"{row.why}; it is not compiled: call pyg_dfgnn.accelerate(model) first")
        yield module, row


def restore(model: Model) -> Model:
    """Undo :func:`accelerate`, in place: drop-ins become the classes they stand for, and no forward is compiled.

    Args:
        model: Any module, also a single conv.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a module.
    """
    for module in list(_checked(model).modules()):
        if isinstance(module, GraphModule):
            split_relations(module)
        module.__dict__.pop(MARK, None)
        _left_out.drop(module)
        if is_parametrized(module):
            # Of a class of its own, which torch has derived from the layer's.
            (base,) = type(module).__bases__
            type(module).__bases__ = (upstream_of(base),)
            continue
        upstream = upstream_of(type(module))
        if upstream is not type(module):
            module.__class__ = upstream
            set_propagate(module)
    return model


def _counted(names: Iterable[str]) -> str:
    kinds = Counter(names)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


class ModelReport(tuple[LayerReport, ...]):
    """The layers of a model as rows; `str()` is a table."""

    def __str__(self) -> str:
        table = [("module", "class", "state", "why")]
        table += [(row.name or "(the model)", row.kind, row.state, row.why) for row in self]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def report(model: torch.nn.Module) -> ModelReport:
    """List the layers of a model: name, class, drop-in, compiled or left, and why.

    The reasons are those that hold for every call, and of compiled messages those of the last calls, which tell whether
    the code of a layer becomes a program; ask :func:`describe_plan` about one call.

    Args:
        model: Any module, also a single conv.

    Returns:
        Rows with the fields `name`, `kind`, `drop_in`, `why`, `compiled` and `state`; `str()` of all is a table.

    Raises:
        TypeError: `model` is not a module.
    """
    return ModelReport(row for _, row in _rows(_checked(model)))


def describe_plan(
    model: torch.nn.Module, *args: Any, device: torch.device | str | None = None, **kwargs: Any
) -> Description:
    """Say which kernels each layer of a model would run in a forward call, or every reason why it would not.

    Args:
        model: A drop-in, a layer with compiled messages, or a model with such layers. A copy of the model runs.
        *args: Arguments of the forward.
        device: Plan for this device in place of the tensors'; a CUDA device that is not there is taken for an H200.
        **kwargs: Further arguments of the forward.

    Returns:
        A description with the fields `fused`, `reasons`, `problem`, `plan`, `graph` and `memory`; of a model with one
        such description per layer in `layers`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `device` is none that PyTorch knows.
    """
    model = _checked(model)
    device = None if device is None else as_device("device", device)
    rows = {row.name: (module, row) for module, row in _rows(model)}
    if "" in rows:
        return _describe(*rows[""], device, *args, **kwargs)
    if not rows:
        why = f"{type(model).__name__} has no layer that passes messages"
        return Description(shown(model), (why,))
    return Description(shown(model), layers=dict(_layers(model, device, args, kwargs)))


def _describe(
    module: torch.nn.Module, row: LayerReport, device: torch.device | None, *args: Any, **kwargs: Any
) -> Description:
    is_on_part = any(isinstance(each, PartitionedEdges) for each in (*args, *kwargs.values()))
    if is_on_part and MARK in module.__dict__:
        return Description(shown(module), (ON_PART,))
    if MARK in module.__dict__:
        return describe(module, device, *args, **kwargs)
    if not row.drop_in:
        return Description(shown(module), (row.why,))
    # Positions and names of the arguments as the forward takes them.
    call = signature(module.forward).bind(*args, **kwargs)
    description: Description = module._describe(device, *call.args, **call.kwargs)  # type: ignore[operator]
    return Description(shown(module), (ON_PART,)) if is_on_part and description.reasons else description


def _layers(
    model: torch.nn.Module, device: torch.device | None, args: Any, kwargs: Any
) -> Iterator[tuple[str, Description]]:
    """Run a copy of the model, so that caches, running statistics and lazy sizes of the user's stay, and yield the
    description of the first call of each layer.
    """
    model_rows = [row for _, row in _rows(model)]
    model, grad = copied(model), torch.is_grad_enabled()
    layers: dict[str, Description] = {}
    copies = dict(model.named_modules())
    rows = {row.name: (copies[row.name], row) for row in model_rows}
    for name, (module, row) in rows.items():

        def hook(_: Any, args: Any, kwargs: Any, name: str = name, layer: Any = (module, row)) -> None:
            if name not in layers:
                with torch.set_grad_enabled(grad), local_settings(fallback=fallback):
                    layers[name] = _describe(*layer, device, *args, **kwargs)

        hook.of_description = True  # type: ignore[attr-defined]
        module.register_forward_pre_hook(hook, with_kwargs=True)
    fallback = current().fallback
    is_eager = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), torch.random.fork_rng(), local_settings(fallback="silent"), is_eager:
        model(*args, **kwargs)
    for name, (module, _) in rows.items():
        yield name, layers.get(name, Description(shown(module), ("this forward does not call the layer",)))
