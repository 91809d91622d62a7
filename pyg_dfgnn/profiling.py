"""Ranges in profilers while `settings(profile=True)` is in force, and nothing that a call does while it is not.

Where profiling begins, what a call runs is replaced: attributes of classes, and the code of functions that are made
from text. Where it ends, all of it is put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch

_lock = threading.RLock()
_MISSING = object()
_programs: WeakKeyDictionary[FunctionType, CodeType] = WeakKeyDictionary()
"""Functions that run programs -> their own code."""
_swaps: list[tuple[Any, str, Any]] = []
"""Owners and names of attributes, and what stands there while profiling is on."""
_before: list[tuple[Any, str, Any]] = []
"""Owners, names and values of attributes before."""
_starts: list[Callable[[], None]] = []
_has_gpu = False
_active = 0
"""Numbers of settings and of blocks that ask for profiling."""


class _ProgramCount(threading.local):
    programs = 0
    """Programs that this thread has run."""


thread = _ProgramCount()


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Name what runs in the block in torch's profiler, and by NVTX where there is a GPU."""
    has_gpu = _has_gpu
    if has_gpu:
        torch.cuda.nvtx.range_push(label)
    try:
        with torch.profiler.record_function(label):
            yield
    finally:
        if has_gpu:
            torch.cuda.nvtx.range_pop()


def _in_range(own: CodeType, label: str, names: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
    """Run the code of a function with these globals as a range."""
    thread.programs += 1
    with labelled(label):
        return FunctionType(own, names)(*arguments)


def _bracketed(*arguments: Any) -> Any:
    # Names of the globals of the function that has this code.
    return in_range(own_code, range_label, globals(), arguments)  # type: ignore[name-defined] # noqa: F821


def program(function: FunctionType, label: str) -> None:
    """Let a function, whose globals are its own, be a range with this label while profiling is on."""
    function.__globals__.update(in_range=_in_range, own_code=function.__code__, range_label=label)
    with _lock:
        _programs[function] = function.__code__
        if _active:
            function.__code__ = _bracketed.__code__


def swap(owner: Any, name: str, profiled: Any) -> None:
    """Let an attribute of a class or a module have another value while profiling is on."""
    with _lock:
        _swaps.append((owner, name, profiled))
        if _active:
            _put(owner, name, profiled)


def at_start(start: Callable[[], None]) -> None:
    """Call a function whenever profiling begins."""
    _starts.append(start)


def _put(owner: Any, name: str, profiled: Any) -> None:
    _before.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, profiled)


def is_on() -> bool:
    """Return whether the process, or a block of any of its threads, asks for profiling."""
    return _active > 0


def begin() -> None:
    """Turn profiling on until :func:`end` has been called as often."""
    global _active, _has_gpu
    if torch.compiler.is_compiling():
        return
    with _lock:
        _active += 1
        if _active > 1:
            return
        _has_gpu = torch.cuda.is_available()
        for start in _starts:
            start()
        for each in _swaps:
            _put(*each)
        for function in list(_programs):
            function.__code__ = _bracketed.__code__


def end() -> None:
    """Undo one call of :func:`begin`."""
    global _active
    if torch.compiler.is_compiling():
        return
    with _lock:
        _active -= 1
        if _active:
            return
        while _before:
            owner, name, value = _before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for function, own in list(_programs.items()):
            function.__code__ = own
