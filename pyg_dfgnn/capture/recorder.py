"""Work on a GPU recorded as a CUDA graph."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.errors import check_type
from pyg_dfgnn.torch_private import end_allocations, tree_leaves

Work = Callable[[], tuple[Tensor, Any]]
"""Returns a loss and an output: a tensor, or tensors in containers."""


class Recording:
    """Work on a GPU that was captured as a CUDA graph; each replay writes to `results`."""

    def __init__(self, work: Work, stream: torch.cuda.Stream, pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(stream.device)
        drawn = torch.cuda.get_rng_state(stream.device)
        # Weights that autocast has cast belong to the moment, not to the replays.
        torch.clear_autocast_cache()
        try:
            # A thread of the loader may pin memory during the capture.
            capture = torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with capture, _waiting_refused():
                self.results = work()
        except BaseException:
            _end_allocations(stream.device, self.graph)
            _renew_random_numbers(stream.device, drawn)
            raise
        finally:
            # PyTorch leaves the stream of a capture that failed in place.
            torch.cuda.set_stream(current)
            torch.clear_autocast_cache()

    def replay(self) -> tuple[Tensor, Any]:
        """Launch the work again."""
        self.graph.replay()
        return self.results


def _end_allocations(device: torch.device, graph: torch.cuda.CUDAGraph) -> None:
    """Let PyTorch's allocator free memory again after a capture that CUDA has ended, which it takes to be under way."""
    # Where the capture came to its end there is nothing to end.
    with suppress(RuntimeError):
        end_allocations(device.index, graph.pool())


def _renew_random_numbers(device: torch.device, state: Tensor) -> None:
    """Let PyTorch draw numbers outside of captures again, whose generator takes a failed capture to be under way.

    Args:
        device: The device.
        state: The state of its generator before the capture.
    """
    try:
        torch.empty(1, device=device).uniform_()
    except RuntimeError:
        # Graphs that were recorded before keep the state that they know.
        fresh = torch.Generator(device)
        torch.cuda.default_generators[device.index].graphsafe_set_state(fresh.graphsafe_get_state())
    torch.cuda.set_rng_state(state, device)


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """A block in which an operation that waits for the device raises before CUDA sees it and spoils the capture.

    PyTorch's mode for this holds for all threads of the process. Where there are others, which may wait, CUDA itself
    ends the capture.
    """
    if threading.active_count() > 1:
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch warns once that it does not know every such operation.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class Recorder:
    """One stream and one memory pool for all recordings, which share memory because they never run together.

    Args:
        device: CUDA device of the recordings.

    Raises:
        ValueError: The device is no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        check_type("device", device, torch.device, "a torch.device")
        if device.type != "cuda":
            raise ValueError(f"'device' needs a CUDA device for steps in a CUDA graph (got {device})")
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, work: Work) -> tuple[Tensor, Any]:
        """Launch work on the stream of the recordings, which PyTorch asks for before it is captured."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = work()
        current.wait_stream(self.stream)
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                tensor.record_stream(current)
        return results

    def record(self, work: Work) -> Recording:
        """Capture work without running it."""
        return Recording(work, self.stream, self.pool)
