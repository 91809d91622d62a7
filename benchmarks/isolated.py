"""Work in a process of its own, ended when its time is up: a compiler that does not come back ends alone."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any


class EndedError(RuntimeError):
    """The process gave no result in time, or ended without one."""


def results(work: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], limit_s: float) -> Iterator[Any]:
    """Yield the results of ``work``, a function of a module, from a process of its own.

    Arguments and results are pickled. A None that it yields is a sign of life and left out; without one for `limit_s`
    the process is ended, which raises an EndedError, as its end by itself does.
    """
    # Never forked: a child cannot use the CUDA context of its parent, and an import may have touched a GPU.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, arguments, sender))
    process.start()
    sender.close()
    try:
        while True:
            if not receiver.poll(limit_s):
                raise EndedError(f"no result within {limit_s:g} s")
            try:
                is_last, message = receiver.recv()
            except EOFError:
                process.join()
                raise EndedError(f"failed: process ended with {process.exitcode}") from None
            if is_last:
                return
            if message is not None:
                yield message
    finally:
        receiver.close()
        # The group also holds the compiler's own processes.
        with suppress(ProcessLookupError):
            if process.pid is not None:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _send(work: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], sender: Any) -> None:
    os.setsid()
    for message in work(*arguments):
        sender.send((False, message))
    sender.send((True, None))
