"""The graph cache: one entry per edge set in use, found by identity, gone with the tensor it was built from."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyg_dfgnn.graph.graph import Graph


class Entry:
    """A graph, what it was built from (weakly), and the version that was read."""

    __slots__ = ("graph", "ref", "version")

    def __init__(self, ref: weakref.ref, version: Hashable, graph: Graph) -> None:
        self.ref, self.version, self.graph = ref, version, graph


class GraphCache:
    """Graphs keyed by the identity of the object they were built from.

    An address alone proves nothing, because it is used again after a tensor dies. An entry therefore holds a weak
    reference and counts only while that is the very object asked for, at the same version (an in-place edit raises it).
    The weak reference also removes the entry when the object dies. Reading takes no lock.

    Args:
        max_graphs: The oldest graph that is not pinned leaves when there are more.
    """

    def __init__(self, max_graphs: int) -> None:
        self.max_graphs = max_graphs
        self.entries: dict[tuple[Any, ...], Entry] = {}
        self._lock = threading.Lock()
        # A child forked while another thread holds the lock would wait forever.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...], anchor: object, version: Hashable) -> Graph | None:
        """The graph built from `anchor` at `version`, if it is here."""
        entry = self.entries.get(key)
        if entry is not None and entry.ref() is anchor and entry.version == version:
            return entry.graph
        return None

    def put(self, key: tuple[Any, ...], anchor: object, version: Hashable, graph: Graph) -> None:
        """Keep `graph` for as long as `anchor` lives."""
        entry = Entry(weakref.ref(anchor, partial(self._drop, key)), version, graph)
        with self._lock:
            self.entries.pop(key, None)
            self.entries[key] = entry
            if len(self.entries) <= self.max_graphs:
                return
            # Listing entries would allocate, and with that collect garbage and drop entries meanwhile; keys do not.
            for old in list(self.entries):
                held = self.entries.get(old)
                if held is not None and not held.graph.pinned:
                    self.entries.pop(old, None)
                    return

    def _drop(self, key: tuple[Any, ...], ref: weakref.ref) -> None:
        # Runs whenever the garbage collector does, perhaps inside `put`: it must not take the lock.
        entry = self.entries.get(key)
        if entry is not None and entry.ref is ref:
            self.entries.pop(key, None)

    def clear(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self.entries.clear()
