"""The cache of graphs: found by the identity of what they were built from, and gone with it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from pyg_dfgnn.graph.derived import Derived, WeakEntry

Kept = TypeVar("Kept", bound=Derived)
CacheKey = tuple[Hashable, ...]


class GraphCache(Generic[Kept]):
    """Graphs keyed by the identities of their anchors, the objects they were built from, and by their sizes.

    An address alone proves nothing, because it is used again after a tensor dies. An entry therefore holds weak
    references and counts only while they lead to the very objects asked for, each at the same version (an in-place edit
    raises it). The weak references also remove the entry when an anchor dies. Reading takes no lock.

    Args:
        max_graphs: The oldest graph that is not pinned leaves when there are more.
    """

    def __init__(self, max_graphs: int) -> None:
        self.max_graphs = max_graphs
        self.entries: dict[CacheKey, WeakEntry] = {}
        self._lock = threading.Lock()
        # A child forked while another thread holds the lock would wait forever.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def get(self, key: CacheKey, anchors: Sequence[Any], versions: Sequence[Hashable]) -> Kept | None:
        """Return the graph built from `anchors` at `versions`, if it is here."""
        entry = self.entries.get(key)
        return entry.value if entry is not None and entry.is_of(anchors, versions) else None

    def put(self, key: CacheKey, anchors: Sequence[Any], versions: Sequence[Hashable], graph: Kept) -> None:
        """Keep `graph` while all anchors live, unless an edit of one would leave no trace."""
        if None in versions:
            return
        entry = WeakEntry(graph, anchors, versions, partial(self._drop, key))
        with self._lock:
            before = self.entries.pop(key, None)
            is_other = before is not None and before.value is not graph and before.is_of(anchors, versions)
            if before is not None and is_other and before.value.pinned:
                # A captured CUDA graph points into it for as long as the anchors live.
                graph._derived["captured",] = before.value
                graph.pin()
            self.entries[key] = entry
            if len(self.entries) <= self.max_graphs:
                return
            # Listing entries would allocate, and with that collect garbage and drop entries meanwhile; keys do not.
            for old in list(self.entries):
                held = self.entries.get(old)
                if held is not None and not held.value.pinned:
                    self.entries.pop(old, None)
                    return

    def _drop(self, key: CacheKey, ref: weakref.ref) -> None:
        # Runs whenever the garbage collector does, perhaps inside `put`: it must not take the lock.
        entry = self.entries.get(key)
        if entry is not None and any(ref is held for held in entry.refs):
            self.entries.pop(key, None)

    def forget(self, is_unwanted: Callable[[Kept], bool]) -> None:
        """Forget some graphs."""
        for key, entry in list(self.entries.items()):
            if is_unwanted(entry.value):
                self.entries.pop(key, None)

    def clear(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self.entries.clear()
