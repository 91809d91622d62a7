"""Values derived from the edges of a graph: kept by key, and known to the allocator on all streams that read them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from pyg_dfgnn.torch_private import cuda_stream

T = TypeVar("T")
_MISSING: Any = object()


def version_of(tensor: Tensor) -> int | None:
    """Return the number that every in-place edit of a tensor raises; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


class WeakEntry:
    """A value with what it was made from: weak references to its anchors and the versions that were read.

    Args:
        value: What was made.
        anchors: Objects that can be referred to weakly, most often tensors.
        versions: One per anchor; None for one whose edits leave no trace.
        on_death: Called with the reference to an anchor that has died.
    """

    __slots__ = ("refs", "value", "versions")

    def __init__(
        self,
        value: Any,
        anchors: Sequence[Any],
        versions: Sequence[Hashable],
        on_death: Callable[[weakref.ref], None] | None = None,
    ) -> None:
        self.value = value
        self.refs = tuple(weakref.ref(anchor, on_death) for anchor in anchors)
        self.versions = tuple(versions)

    def is_of(self, anchors: Sequence[Any], versions: Sequence[Hashable]) -> bool:
        """Return whether the value was made from these very objects as they are now."""
        if len(anchors) != len(self.refs) or None in versions:
            return False
        return all(ref() is anchor for ref, anchor in zip(self.refs, anchors)) and self.versions == tuple(versions)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a derived value: of tensors, containers and data classes, nested as they come."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, WeakEntry):
        yield from tensors_of(value.value)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        for part in list(value.values()):
            yield from tensors_of(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def in_units(nbytes: float) -> str:
    """Return a number of bytes for reading, in powers of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


class Derived:
    """A container of derived values.

    Attributes:
        device: Where the arrays live.
        pinned: Whether the cache must keep the container for as long as its anchors live (see :meth:`pin`).
        get: Returns the value under a key of :meth:`derived` that has no anchors of its own, None unless it was built.
            It costs a call no Python frame, and leaves streams to :meth:`on_this_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = False
        self._derived: dict[Hashable, Any] = {}
        self.get = self._derived.get
        # Raw handles of the streams that are known to the allocator; None on a CPU.
        self._streams: set[int] | None = None
        # What another stream has to wait for.
        self._made: torch.cuda.Event | None = None

    def derived(self, key: Hashable, build: Callable[[], T], anchors: Sequence[Tensor] = ()) -> T:
        """Return the value under a key, built on first use and kept with the container.

        Args:
            key: What the value is; by convention a name, or a tuple that begins with one.
            build: Makes the value, whose arrays are found by :func:`tensors_of`.
            anchors: Tensors beyond those of the container that the value depends on, such as `edge_weight`: it is built
                again when they are others or have been edited. The container keeps none of them alive.
        """
        value = self._derived.get(key, _MISSING)
        versions = [version_of(anchor) for anchor in anchors]
        if self._streams is not None:
            self.on_this_stream()
        if isinstance(value, WeakEntry):
            value = value.value if value.is_of(anchors, versions) else _MISSING
        if value is _MISSING:
            with torch.inference_mode(False), torch.no_grad():
                value = build()
            has_arrays = self._streams is not None and next(tensors_of(value), None) is not None
            if has_arrays:
                # Before another thread finds the arrays, whose stream then waits until they are written.
                self._reset_streams()
            if anchors:
                self._derived[key] = WeakEntry(value, anchors, versions)
            else:
                # Two threads may build at once: both get what the first has kept.
                value = self._derived.setdefault(key, value)
            if has_arrays:
                self._streams = {cuda_stream(self.device.index)}
        return value  # type: ignore[no-any-return]

    def derived_bytes(self) -> dict[Hashable, int]:
        """Return the bytes on the device under each key; what several values share counts for the first of them."""
        seen: set[int] = set()
        sizes: dict[Hashable, int] = {}
        for key, value in list(self._derived.items()):
            sizes[key] = sum(value.derived_bytes().values()) if isinstance(value, Derived) else 0
            for tensor in tensors_of(value):
                storage = tensor.untyped_storage()
                if tensor.device == self.device and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sizes[key] += storage.nbytes()
        return sizes

    def describe_bytes(self) -> str:
        """Return :meth:`derived_bytes` for reading: the sum, then what takes any, the most first."""
        sizes = sorted(self.derived_bytes().items(), key=lambda item: -item[1])
        parts = [
            f"{' '.join(map(str, key)) if isinstance(key, tuple) else key} {in_units(nbytes)}"
            for key, nbytes in sizes
            if nbytes
        ]
        return f"{in_units(sum(nbytes for _, nbytes in sizes))} ({', '.join(parts)})"

    def pin(self) -> Self:
        """Keep the container in the cache while its anchors live, for captured CUDA graphs that point into it."""
        self.pinned = True
        return self

    def _reset_streams(self) -> None:
        """Forget which streams the allocator knows to read the arrays: some have been added on the current one."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            self._streams = {stream.cuda_stream}
            if not torch.cuda.is_current_stream_capturing():
                self._made = stream.record_event()

    def on_this_stream(self) -> Self:
        """Return the container once the allocator knows that the current stream reads it; a capture pins it."""
        # Other streams wait for what has been built. Its memory belongs to the stream it was made on, and the allocator
        # must learn of each other one before it hands that memory out again.
        streams = self._streams
        if streams is None:
            return self
        handle = cuda_stream(self.device.index)
        # The default stream, whose handle is 0, cannot be captured.
        if handle == 0 and 0 in streams:
            return self
        if torch.cuda.is_current_stream_capturing():
            return self.pin()
        if handle not in streams:
            stream = torch.cuda.current_stream(self.device)
            if self._made is not None:
                stream.wait_event(self._made)
            for tensor in tensors_of(self._derived):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
            # Not to the set of another thread that has added arrays meanwhile.
            streams.add(handle)
        return self
