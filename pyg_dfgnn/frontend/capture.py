"""The forward of a class captured by TorchDynamo: one code object for each size of its layers, by settings of ours."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from pyg_dfgnn.frontend.backend import Compiler
from pyg_dfgnn.frontend.importer import is_users, place_of
from pyg_dfgnn.frontend.scatter_package import substitute
from pyg_dfgnn.ops.visits import capturing, step
from pyg_dfgnn.torch_private import (
    ConvertFrameReturn,
    ResumePrologueTracingError,
    dynamo_config,
    optimize,
    shapes_config,
)

DYNAMO: dict[str, Any] = {
    "assume_static_by_default": False,
    "automatic_dynamic_shapes": True,
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    # Of sizes that are symbols, an entry takes longer to make than it saves.
    "fake_tensor_cache_enabled": False,
    "skip_nnmodule_hook_guards": False,
    "specialize_float": True,
    "suppress_errors": False,
}
"""Settings of TorchDynamo while a layer is compiled; users' own graphs are compiled by theirs."""
_MOST_ERRORS = 3
_OPS = tuple(str(Path(__file__).parents[1] / room) + os.sep for room in ("ops", "ir", "graph", "runtime", "dispatch"))
"""Folders of code that is called while a forward runs, such as by gradients that it computes, and is no part of it."""
_RESUMED = re.compile(r"torch_dynamo_resume_in_\w+_at_(\d+)")
"""Name of the code behind a break of a graph, with the line of the break."""
_logger = logging.getLogger("pyg_dfgnn")
# Dynamo is to print no traceback of code that it cannot capture, and that runs as it is.
for _name in ("_dynamo.convert_frame", "_subclasses.fake_tensor"):
    logging.getLogger(f"torch.{_name}").addFilter(lambda record: not step.is_captured)


class _Configured:
    """A callback of TorchDynamo that compiles by our settings; a warm call does not come here.

    Args:
        callback: TorchDynamo's own.
        compiler: The backend, which knows the layer that is being called.
        whole: Whether code that is no one graph is an error.

    Attributes:
        errors: How often the capture of a function has failed.
    """

    def __init__(self, callback: Any, compiler: Compiler, whole: bool) -> None:
        self.callback, self.compiler, self.whole = callback, compiler, whole
        self.errors: Counter[CodeType] = Counter()
        # By this name Dynamo finds the backend behind a callback, whose cache a call looks in.
        self._torchdynamo_orig_backend = callback

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        file, resumed = frame.f_code.co_filename, _RESUMED.fullmatch(frame.f_code.co_name)
        if file.startswith(_OPS):
            return ConvertFrameReturn()
        if resumed and is_users(file):
            self.compiler.breaks.append(place_of(file, int(resumed[1])))
        with ExitStack() as settings:
            settings.enter_context(dynamo_config.patch(DYNAMO))
            settings.enter_context(shapes_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
            settings.enter_context(torch.compiler.config.patch(dynamic_sources=self._dynamic_sources()))  # type: ignore[attr-defined]
            settings.enter_context(capturing())
            substitute()
            try:
                return self.callback(frame, *args, **kwargs)
            except ResumePrologueTracingError:
                raise
            except Exception as error:
                if self.whole:
                    raise
                # Wrong arguments fail here before they do in the user's code, which may be called with right ones next.
                self.errors[frame.f_code] += 1
                _logger.info("no graph of %s (%s: %s)", frame.f_code.co_name, type(error).__name__, error)
                return ConvertFrameReturn(apply_to_code=self.errors[frame.f_code] >= _MOST_ERRORS)

    def _dynamic_sources(self) -> str:
        """Return patterns of the buffers whose sizes may change: edges, if they are a buffer of the layer."""
        layer = self.compiler.layer
        names = [] if layer is None else [name for name, x in layer.named_buffers() if not x.is_floating_point()]
        users = torch.compiler.config.dynamic_sources
        patterns = {rf".*_buffers\['{re.escape(name.rpartition('.')[2])}'\]" for name in names}
        return ",".join([*([users] if users else []), *sorted(patterns)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.callback, name)


def captured(function: Any, compiler: Compiler, whole: bool = False) -> Callable[..., Any]:
    """Return a function whose graphs are compiled by a backend of its own.

    Args:
        function: The function, written in Python.
        compiler: The backend.
        whole: Whether a function that is no one graph raises TorchDynamo's error, before any of it has run.
    """
    # Dynamo keeps at most 8 graphs for one code object.
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    context: Any = optimize(backend=compiler, nopython=whole)
    context.callback = _Configured(context.callback, compiler, whole)
    compiled: Callable[..., Any] = context(own)
    return compiled
