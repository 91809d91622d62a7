"""How much memory torch holds at most while some code runs, counted operator by operator."""

from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_dfgnn.graph import adjacency
from pyg_dfgnn.graph.derived import tensors_of


class PeakBytes(TorchDispatchMode):
    """Count the bytes of all tensors that operators return, for as long as anybody holds them.

    A sort adds what CUDA's radix sort allocates inside: the positions that go in, int64, and room for a second copy of
    keys and positions. An index of int32 or bool adds its copy in int64.

    Args:
        theirs: What was there before and does not count.

    Attributes:
        peak: Most bytes at any time.
    """

    def __init__(self, *theirs):
        super().__init__()
        self._theirs = {tensor.untyped_storage()._cdata for tensor in tensors_of(theirs)}
        self._held = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._theirs and storage._cdata not in self._held:
                    self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        inside = 0
        if func.overloadpacket is torch.ops.aten.sort:
            inside = args[0].numel() * (8 + args[0].itemsize + 8)
        elif func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            copied = (index for index in args[1] if index is not None and index.dtype is not torch.int64)
            inside = sum(8 * int(index.sum() if index.dtype is torch.bool else index.numel()) for index in copied)
        self.peak = max(self.peak, inside + sum(nbytes for _, nbytes in self._held.values()))
        return results


@contextmanager
def sorted_in_spans(monkeypatch, spans=16):
    """Let graphs of any size take the path of large ones."""
    with monkeypatch.context() as patch:
        patch.setattr(adjacency, "SORTED_AT_ONCE", 0)
        patch.setattr(adjacency, "SPAN_EDGES", 1)
        patch.setattr(adjacency, "_MAX_SPANS", spans)
        yield
