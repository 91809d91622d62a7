"""How users learn that PyG's own code runs in place of a fused kernel, and why."""

import logging
import sys
from collections.abc import Sequence

import torch

from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.settings import current

SMALL = "the edges are few, and new or read by few operators: PyG's code takes them in less time"
NO_DEVICE = "the tensors are not on a CUDA device"
CPU = (NO_DEVICE,)
"""Reasons where nothing but the device is against kernels."""
FEW = (SMALL,)
"""Reasons where nothing but the number of edges is against kernels."""
ON_CPU = "PyG's own code runs where the tensors are on a CPU; the fused kernels need a CUDA device"

logger = logging.getLogger("pyg_dfgnn")
logged: set[tuple[str, str]] = set()


def inform(message: str) -> None:
    """Log a line as INFO; where no logging is set up, print it to stderr, which the logging module would not do."""
    if logger.hasHandlers():
        logger.info(message)
    else:
        print(f"pyg_dfgnn: {message}", file=sys.stderr)


def inform_once(message: str) -> None:
    """Log a line as :func:`inform` does, but the same line only once in a process."""
    if ("", message) not in logged:
        logged.add(("", message))
        inform(message)


# Marked constant: torch.compile runs this function while it traces and leaves nothing of it in the graph.
@torch.compiler.assume_constant_result
def log_once(name: str, reasons: tuple[str, ...]) -> None:
    """Log each reason once per class; that tensors are on a CPU is one line for all classes."""
    for reason in reasons:
        if reason == NO_DEVICE:
            inform_once(ON_CPU)
        elif (name, reason) not in logged:
            logged.add((name, reason))
            logger.warning("%s takes PyG's own path: %s", name, reason)


def is_told_of_cpu() -> bool:
    """Return whether nobody is to be told, or told again, that tensors on a CPU are PyG's."""
    fallback = current().fallback
    return fallback == "silent" or (fallback == "log" and ("", ON_CPU) in logged)


def report_fallback(name: str, reasons: Sequence[str]) -> None:
    """Tell the user, as `settings(fallback=...)` asks, why PyG's own code takes a call of a layer.

    Args:
        name: Class name of the layer.
        reasons: Why; `NO_DEVICE` is an error only where there is a GPU, and `SMALL` is none and is not told.

    Raises:
        UnsupportedError: The settings ask for an error.
    """
    if reasons is FEW:
        return
    fallback = current().fallback
    # What torch.compile traces must not depend on what has been logged.
    if fallback == "log" and len(reasons) == 1 and not torch.compiler.is_compiling():
        if (("", ON_CPU) if reasons[0] is NO_DEVICE else (name, reasons[0])) in logged:
            return
    reasons = [reason for reason in reasons if reason is not SMALL]
    if fallback == "error":
        fatal = [reason for reason in reasons if reason != NO_DEVICE or torch.cuda.is_available()]
        if fatal:
            raise UnsupportedError(fatal, what=f"the fused {name}")
    if fallback != "silent":
        log_once(name, tuple(reasons))
