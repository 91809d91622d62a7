"""Errors of refused arguments in one wording: the name of the argument, what it needs, what was given.

Torch is imported where it is used, so that `import pyg_dfgnn` does not load it: see :mod:`pyg_dfgnn.threads`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class UnsupportedError(RuntimeError):
    """A kernel or schedule that the user asked for cannot run here; `reasons` lists every reason.

    Args:
        reasons: One sentence per obstacle.
        what: What was asked for.
    """

    def __init__(self, reasons: Iterable[str], what: str = "the fused kernel") -> None:
        self.reasons = list(reasons)
        self.what = what
        super().__init__(f"{what} cannot run here: {'; '.join(self.reasons)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reasons, self.what)


class IdRangeError(IndexError, ValueError):
    """An id of a node, relation or group points to no row: an IndexError, as PyG raises, and a ValueError."""


class StaleError(RuntimeError):
    """A value that a captured step relies on has changed in a way that its replay cannot follow."""


def _given(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def check_tensor(name: str, value: Any) -> None:
    """Check that an argument is a tensor.

    Raises:
        TypeError: The value is something else.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"'{name}' needs a torch.Tensor (got {_given(value)})")


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], need: str) -> None:
    """Check that an argument is of a class.

    Args:
        name: The user's name of the argument.
        value: The argument.
        kinds: The class, or several.
        need: What the message says that it needs.

    Raises:
        TypeError: The value is of another class.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"'{name}' needs {need} (got {_given(value)})")


def check_shape(name: str, tensor: Tensor, expected: Sequence[int | str], spec: str) -> None:
    """Check the shape of a tensor.

    Args:
        name: The user's name of the argument.
        tensor: The tensor, any shape.
        expected: One entry per dimension; an int must match, a str (such as `"E"`) stands for any size.
        spec: The expected shape as the message shows it, such as `"[E, edge_dim=4]"`.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: The shape differs.
    """
    check_tensor(name, tensor)
    shape = tensor.shape
    if len(shape) != len(expected) or any(
        not isinstance(want, str) and want != have for want, have in zip(expected, shape)
    ):
        raise ValueError(f"'{name}' needs shape {spec} (got {list(shape)})")


def check_dtype(name: str, tensor: Tensor, dtypes: torch.dtype | Sequence[torch.dtype]) -> None:
    """Check that a tensor has one of the given dtypes.

    Raises:
        TypeError: `tensor` is not a tensor or has another dtype.
    """
    check_tensor(name, tensor)
    dtypes = tuple(dtypes) if isinstance(dtypes, Sequence) else (dtypes,)
    if tensor.dtype not in dtypes:
        raise TypeError(f"'{name}' needs dtype {' or '.join(map(str, dtypes))} (got {tensor.dtype})")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Check that a tensor lives on the given device.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: The tensor lives on another device.
    """
    check_tensor(name, tensor)
    if tensor.device != device:
        raise ValueError(f"'{name}' needs device {device} (got {tensor.device})")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that a value is one of a few; 1 is not True.

    Raises:
        ValueError: The value is none of them.
    """
    if value not in choices or (value in (0, 1) and type(value) not in map(type, choices)):
        raise ValueError(f"'{name}' needs one of {', '.join(map(repr, choices))} (got {value!r})")


def check_bool(name: str, value: Any) -> None:
    """Check that a value is True or False.

    Raises:
        TypeError: The value is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"'{name}' needs True or False (got {_given(value)})")


def check_integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> None:
    """Check that a value is an integer with `low <= value <= high`; a bound that is None is open.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"'{name}' needs an integer (got {_given(value)})")
    check_range(name, value, low, high)


def as_integer(name: str, value: Any) -> int:
    """Return a number of rows as an int: PyG takes NumPy integers and tensors of one integer too.

    Args:
        name: The user's name of the argument.
        value: The argument; the host waits for a tensor on a GPU.

    Raises:
        TypeError: The value is not an integer.
    """
    if type(value) is int:
        return value
    import torch

    if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype is torch.bool):
        raise TypeError(f"'{name}' needs an integer (got {_given(value)})")
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"'{name}' needs an integer (got {_given(value)})") from None


def as_device(name: str, value: Any) -> torch.device:
    """Return the device that an argument names.

    Raises:
        ValueError: PyTorch has no such device.
    """
    import torch

    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"'{name}' needs a device, such as 'cuda' or 'cuda:1' (got {value!r})") from None


def check_range(name: str, value: Any, low: float | None = None, high: float | None = None) -> None:
    """Check `low <= value <= high`; a bound that is None is open.

    Raises:
        TypeError: The value is not a number.
        ValueError: The value is out of range.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"'{name}' needs a number (got {_given(value)})")
    if (low is None or value >= low) and (high is None or value <= high):
        return
    if low is None:
        need = f"<= {high}"
    elif high is None:
        need = f">= {low}"
    else:
        need = f"in [{low}, {high}]"
    raise ValueError(f"'{name}' needs a value {need} (got {value})")


def need_extra(module: str, what: str, extra: str) -> None:
    """Check that an optional package is installed.

    Args:
        module: The module that will be imported.
        what: What needs it, in the plural.
        extra: The extra of this package that installs it.

    Raises:
        ModuleNotFoundError: The package is missing; the message names it and the extra.
    """
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        # The module may be there, and a package that it imports may not.
        missing = (error.name or module).partition(".")[0]
        raise ModuleNotFoundError(f"{what} need {missing}: {how_to_install(extra)}", name=missing) from error


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of this package; the builds of `sparse` import torch."""
    option = "--no-build-isolation " if extra == "sparse" else ""
    return f'pip install {option}".[{extra}]" in a clone of pyg_dfgnn'


def end_without_extra(module: str, what: str, extra: str) -> None:
    """End a command with the message of :func:`need_extra` where the package is missing."""
    try:
        need_extra(module, what, extra)
    except ModuleNotFoundError as error:
        sys.exit(f"{type(error).__name__}: {error}")
