"""What a call of cuSPARSE sets on its handle, against a library that notes it."""

import time
from contextlib import contextmanager
from threading import Thread

import pytest
import torch

from pyg_dfgnn.runtime import cusparse


class Library:
    """Holds what was set, as cuSPARSE does, and is slow at it."""

    def __init__(self):
        self.set, self.launched, self.device = {}, [], 0

    def setStream(self, handle, stream):
        self.set["stream"] = stream

    def dnMatSetValues(self, matrix, values):
        self.set[matrix] = values
        time.sleep(1e-4)

    def spMM(self, *arguments):
        self.launched.append((self.device, self.set["stream"], self.set["B"], self.set["C"]))


@pytest.fixture
def library(monkeypatch):
    library = Library()

    @contextmanager
    def device(index):
        before, library.device = library.device, index
        yield
        library.device = before

    monkeypatch.setattr(cusparse, "_binding", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(cusparse, "cuda_device", lambda: library.device)
    monkeypatch.setattr(cusparse, "cuda_stream", lambda index: 100 + index)
    return library


def product(index):
    spmm = cusparse.SpMM.__new__(cusparse.SpMM)
    spmm._index, spmm._head, spmm._input, spmm._output = index, (0,), "B", "C"
    spmm._workspace = torch.empty(1)
    return spmm


@pytest.fixture(autouse=True)
def nothing_to_destroy(monkeypatch):
    monkeypatch.delattr(cusparse.SpMM, "__del__")


def test_a_product_runs_on_the_device_of_its_matrix(library):
    product(1)(3, 4)
    assert library.launched == [(1, 101, 3, 4)] and library.device == 0


def test_threads_share_a_product(library):
    spmm = product(0)
    threads = [Thread(target=lambda i=i: [spmm(i, i) for _ in range(50)]) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.launched) == 150 and all(b == c for *_, b, c in library.launched)
