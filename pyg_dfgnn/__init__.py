"""Fused CUDA kernels as drop-ins for layers of PyTorch Geometric: attention, aggregation, relations, messages.

Swap the import (``from pyg_dfgnn.nn import GATConv``) or call ``pyg_dfgnn.accelerate(model)``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyg_dfgnn.threads import let_threads_sleep

if sys.argv[:1] == ["-m"] or "".join(sys.argv[:1]).endswith("pyg-dfgnn"):
    # Python looks for a command of this package, or the console script has started: before torch is loaded.
    let_threads_sleep()

from pyg_dfgnn import operator as _operator  # noqa: E402, F401
from pyg_dfgnn.settings import local_settings, settings  # noqa: E402

if TYPE_CHECKING:
    from pyg_dfgnn.capture import capture_step
    from pyg_dfgnn.graph import Graph
    from pyg_dfgnn.nn import accelerate, describe_plan, report, restore, stats

__version__ = "0.3.0.dev0"
__all__ = [
    "Graph",
    "__version__",
    "accelerate",
    "capture_step",
    "describe_plan",
    "local_settings",
    "report",
    "restore",
    "settings",
    "stats",
]

# Resolved on first use, so that `import pyg_dfgnn` does not pay for PyTorch Geometric.
_LAZY = {
    "Graph": "pyg_dfgnn.graph",
    "capture_step": "pyg_dfgnn.capture",
    **dict.fromkeys(("accelerate", "describe_plan", "report", "restore", "stats"), "pyg_dfgnn.nn"),
}
_MODULES = frozenset("capture datasets errors frontend graph ir models nn ops training transforms utils".split())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
