"""What code reads besides the layer: a change of it is seen in the next call, or PyG's code runs in each."""

import os
import random
import sys
import time
import types
from random import uniform

import pytest
import torch
from torch_geometric.nn import MessagePassing

from pyg_dfgnn import accelerate, local_settings
from pyg_dfgnn.nn import messages

MISSING = object()
LIST, MODULE = [1.0], types.ModuleType("a_module_without_a_file")


class Base(MessagePassing):
    factor = 1.0

    def __init__(self):
        super().__init__(aggr="add")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    @classmethod
    def of_class(cls):
        return cls.factor


class Scale:
    factor = 1.0


COUNT = 0


class OfClass(Base):
    """Counts its calls in its class."""

    count = 0

    def message(self, x_j):
        type(self).count += 1
        return x_j * self.count


class OfModule(Base):
    """Counts its calls in a global."""

    def message(self, x_j):
        global COUNT
        COUNT += 1
        return x_j * COUNT


class Children(Base):
    """Goes through the children of a container."""

    def __init__(self):
        super().__init__()
        self.seq = torch.nn.Sequential(torch.nn.ReLU())

    def message(self, x_j):
        return self.seq(x_j)


def default(values=LIST):
    return values[0]


def keyword(*, values=LIST):
    return values[0]


def given(x, factor=MISSING, part=slice(None), of=...):
    return x[of, part] if factor is MISSING else factor * x


FOLLOWED = {
    "class of the layer": lambda self, x_j: x_j * type(self).factor,
    "its class": lambda self, x_j: x_j * self.__class__.factor,
    "class method": lambda self, x_j: x_j * self.of_class(),
    "another class": lambda self, x_j: x_j * Scale.factor,
    "module": lambda self, x_j: x_j * MODULE.factor,
    "defaults of a helper": lambda self, x_j: given(x_j) * Scale.factor,
    "list that is a default": lambda self, x_j: x_j * default() * keyword(),
}
LEFT = {
    "a base": lambda self, x_j: x_j * type(self).__mro__[1].factor,
    "environment": lambda self, x_j: x_j * float(os.environ["FACTOR"]),
    "getenv": lambda self, x_j: x_j * float(os.getenv("FACTOR")),
    "modules": lambda self, x_j: x_j * sys.modules[MODULE.__name__].factor,
    "globals": lambda self, x_j: x_j * globals()["LIST"][0],
    "vars": lambda self, x_j: x_j * vars(Scale)["factor"],
    "eval": lambda self, x_j: x_j * eval("LIST[0]"),
    "clock": lambda self, x_j: x_j * (time.time() > 0) * LIST[0],
    "random": lambda self, x_j: x_j * (random.random() < 2) * LIST[0],
    "uniform": lambda self, x_j: x_j * (uniform(0, 1) < 2) * LIST[0],
}


def set_all(factor):
    Base.factor = Scale.factor = MODULE.factor = LIST[0] = factor
    os.environ["FACTOR"] = str(factor)


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.setenv("FACTOR", "1.0")
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)
    yield
    set_all(1.0)


def layers(message, source):
    """Two layers of a class with a message of its own, whose code comes from a file, a notebook or a prompt."""
    message = types.FunctionType(
        message.__code__.replace(co_filename=source or message.__code__.co_filename),
        globals(),
        "message",
    )
    kind = type("Reading", (Base,), {"message": message, "__module__": __name__})
    return kind(), accelerate(kind())


def calls_of(message, source):
    """Whether each call of a layer, with other numbers around it, ran as a program; all give what PyG gives."""
    plain, layer = layers(message, source)
    x, edge_index, ran = torch.randn(5, 4), torch.randint(5, (2, 9)), []
    messages.watchers.append(lambda _, method, outcome, reasons: ran.append((outcome.returned is not None, reasons)))
    try:
        with messages.interpreted(), local_settings(fallback="silent"):
            for factor in (1.0, 3.0, 1.0, 5.0):
                set_all(factor)
                torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
    finally:
        messages.watchers.pop()
    return ran


@pytest.mark.parametrize("source", ["", "<stdin>", "<ipython-input-3-abc>"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_is_seen(name, source):
    assert all(is_program for is_program, _ in calls_of(FOLLOWED[name], source))


@pytest.mark.parametrize("source", ["", "<stdin>"])
@pytest.mark.parametrize("name", LEFT)
def test_what_answers_anew_in_each_call_is_left_to_pyg(name, source):
    calls = calls_of(LEFT[name], source)
    assert not any(is_program for is_program, _ in calls)
    assert all("is asked for" in reasons[0] or "asks for" in reasons[0] for _, reasons in calls)


@pytest.mark.parametrize("kind", [OfClass, OfModule])
def test_a_count_is_that_of_pyg(kind):
    """Tracing calls the code, and undoes what that counts."""
    global COUNT
    x, edge_index, results = torch.randn(5, 4), torch.randint(5, (2, 9)), []
    with messages.interpreted(), local_settings(fallback="silent"):
        for layer in (kind(), accelerate(kind())):
            COUNT = OfClass.count = 0
            results.append([layer(x, edge_index) for _ in range(3)])
    torch.testing.assert_close(*results)


def test_a_child_that_is_appended_is_called():
    x, edge_index = torch.randn(5, 4), torch.randint(5, (2, 9))
    plain, layer = Children(), accelerate(Children())
    with messages.interpreted(), local_settings(fallback="error"):
        for _ in range(2):
            torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
            for each in (plain, layer):
                each.seq.append(torch.nn.Softplus())
        for each in (plain, layer):
            del each.seq[1]
        torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
