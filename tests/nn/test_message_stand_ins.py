"""Code that asks what a value is: it decides as it does with PyG, whether a program has it or PyG's code runs."""

import copy
import functools
import operator
import pickle
import reprlib
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.nn.test_message_traps import CHANNELS, NODES, Layer, compare, twins

pytestmark = pytest.mark.usefixtures("in_float64")
EDGES = 15
KIND, IDENTITY, SEEN, BY_VALUE = Tensor, operator.is_, set(), {}
SIZE = sys.getsizeof(torch.ones(1))
CLASSES, LAYERS, BY_LAYER = [], [], {}


@functools.singledispatch
def factor_of(value):
    return 100


@factor_of.register
def _(value: Tensor):
    return 2


def is_exact(value, kinds=(Tensor,)):
    return type(value) in kinds


def has(value, name):
    try:
        getattr(value, name)
    except AttributeError:
        return False
    return True


def matched(value):
    match value:
        case torch.FloatTensor() | torch.DoubleTensor():
            return True
    return False


def caught(function, value):
    try:
        return function(value)
    except Exception:
        return "an error"


VALUES = {
    "type": lambda self, x_j, e: type(x_j) is Tensor,
    "type of one among several": lambda self, x_j, e: type(x_j) in (Tensor, nn.Parameter),
    "type by a helper": lambda self, x_j, e: is_exact(x_j),
    "type by map": lambda self, x_j, e: [*map(type, (x_j,))] == [Tensor],
    "type under another name": lambda self, x_j, e: (lambda kind: kind(x_j) is Tensor)(type),
    "name of the type": lambda self, x_j, e: type(x_j).__name__ == "Tensor",
    "class": lambda self, x_j, e: x_j.__class__ is Tensor,
    "class by getattr": lambda self, x_j, e: getattr(x_j, "__class__") is Tensor,  # noqa: B009
    "class by operator": lambda self, x_j, e: operator.attrgetter("__class__")(x_j) is Tensor,
    "class of a result": lambda self, x_j, e: (x_j * 2).__class__ is KIND,
    "name of the class": lambda self, x_j, e: x_j.__class__.__name__ == "Tensor",
    "dispatch": lambda self, x_j, e: factor_of(x_j) == 2,
    "isinstance": lambda self, x_j, e: isinstance(x_j, Tensor),
    "isinstance of a parameter": lambda self, x_j, e: isinstance(x_j, nn.Parameter),
    "isinstance of an old class": lambda self, x_j, e: isinstance(x_j, (torch.FloatTensor, torch.DoubleTensor)),
    "isinstance of a kept class": lambda self, x_j, e: isinstance(x_j, self.old),
    "match": lambda self, x_j, e: matched(x_j),
    "name of the old class": lambda self, x_j, e: x_j.type() == "torch.DoubleTensor",
    "name of the old class in a list": lambda self, x_j, e: x_j.type() in ("torch.DoubleTensor",),
    "typename": lambda self, x_j, e: torch.typename(x_j) == "torch.DoubleTensor",
    "is_tensor": lambda self, x_j, e: torch.is_tensor(x_j),
    "is_floating_point": lambda self, x_j, e: torch.is_floating_point(x_j) and not torch.is_complex(x_j),
    "is_storage": lambda self, x_j, e: torch.is_storage(x_j),
    "is_meta": lambda self, x_j, e: x_j.is_meta,
    "is_cpu": lambda self, x_j, e: x_j.is_cpu,
    "device": lambda self, x_j, e: x_j.device.type == "cpu",
    "is_leaf": lambda self, x_j, e: e.is_leaf,
    "copy": lambda self, x_j, e: copy.copy(x_j).device.type == "cpu",
    "deepcopy": lambda self, x_j, e: copy.deepcopy(e.detach()).device.type == "cpu",
    "pickle": lambda self, x_j, e: len(pickle.dumps(e.detach())) > 600,
    "repr": lambda self, x_j, e: "meta" in repr(x_j),
    "str": lambda self, x_j, e: "meta" in str(x_j),
    "text": lambda self, x_j, e: "meta" in f"{x_j}",
    "format": lambda self, x_j, e: "meta" in "{}".format(x_j),  # noqa: UP032
    "percent": lambda self, x_j, e: "meta" in "%s" % x_j,  # noqa: UP031
    "reprlib": lambda self, x_j, e: "meta" in reprlib.repr(x_j),
    "caught": lambda self, x_j, e: caught(repr, x_j) != "an error",
    "text of a shape": lambda self, x_j, e: str(x_j.shape) == f"torch.Size([{EDGES}, {CHANNELS}])",
    "text of a size": lambda self, x_j, e: f"{x_j.size(0)}" == str(EDGES),
    "type of a size": lambda self, x_j, e: type(x_j.size(0)) is int,
    "class of a size": lambda self, x_j, e: x_j.size(0).__class__ is int,
    "class of a shape": lambda self, x_j, e: x_j.shape.__class__ is torch.Size and isinstance(x_j.shape, torch.Size),
    "numel of a shape": lambda self, x_j, e: x_j.shape.numel() == EDGES * CHANNELS,
    "id": lambda self, x_j, e: id(e) in SEEN,
    "is": lambda self, x_j, e: e is self.kept,
    "is not": lambda self, x_j, e: e is not self.kept,
    "is by operator": lambda self, x_j, e: IDENTITY(e, self.kept),
    "hash": lambda self, x_j, e: BY_VALUE.get(e) is not None,
    "in a list": lambda self, x_j, e: any(e is other for other in (self.kept, x_j)),
    "weak reference": lambda self, x_j, e: self.reference() is e,
    "vars": lambda self, x_j, e: len(vars(x_j)) == 0,
    "dict": lambda self, x_j, e: len(x_j.__dict__) == 0,
    "dir": lambda self, x_j, e: "lead" in dir(x_j),
    "size of": lambda self, x_j, e: sys.getsizeof(e) == SIZE,
    "own attribute": lambda self, x_j, e: hasattr(x_j, "rows"),
    "own attribute by default": lambda self, x_j, e: getattr(x_j, "number", None) is None,
    "own attribute caught": lambda self, x_j, e: has(x_j, "ids"),
    "attribute of the argument": lambda self, x_j, e: hasattr(e, "flag"),
    "attribute by default": lambda self, x_j, e: getattr(e, "flag", 0) == 3,
    "attribute caught": lambda self, x_j, e: has(e, "flag"),
    "number of the argument": lambda self, x_j, e: getattr(e, "other", 1) == 2,
    "parameter": lambda self, x_j, e: isinstance(self.weight, nn.Parameter) and type(self.weight) is nn.Parameter,
    "type of the layer": lambda self, x_j, e: type(self) is CLASSES[0],
    "class of the layer": lambda self, x_j, e: self.__class__ is CLASSES[0],
    "name of the layer": lambda self, x_j, e: type(self).__name__ == "Asking" == self.__class__.__name__,
    "bases of the layer": lambda self, x_j, e: type(self).__bases__ == (Layer,),
    "type of a part": lambda self, x_j, e: type(self.norm) is nn.LayerNorm,
    "class of a part": lambda self, x_j, e: self.norm.__class__ is nn.LayerNorm,
    "isinstance of a part": lambda self, x_j, e: isinstance(self.norm, nn.LayerNorm),
    "types of parts": lambda self, x_j, e: [type(part) for part in self.children()][-1] is nn.LayerNorm,
    "layer is": lambda self, x_j, e: any(layer is self for layer in LAYERS),
    "layer equals": lambda self, x_j, e: any(layer == self for layer in LAYERS),
    "layer in a list": lambda self, x_j, e: self in LAYERS,
    "layer as a key": lambda self, x_j, e: BY_LAYER.get(self, 1) == 2,
}
"""Name -> a question about a value, asked while messages are made."""


def messages_that_ask(ask):
    """A class of layers whose messages differ by the answer to a question."""

    class Asking(Layer):
        def start(self):
            self.kept, self.reference = None, None
            self.lin, self.weight = nn.Linear(CHANNELS, CHANNELS), nn.Parameter(torch.ones(CHANNELS))
            self.norm = nn.LayerNorm(CHANNELS)
            self.old = (torch.DoubleTensor,)

        def forward(self, x, edge_index, e):
            return self.propagate(edge_index, x=x, e=e)

        def message(self, x_j, e):
            scaled = self.lin(x_j) * e * self.weight
            return scaled * 2 if ask(self, x_j, e) else scaled * 100

    return Asking


def inputs():
    torch.manual_seed(0)
    x, edge_index = torch.randn(NODES, CHANNELS).requires_grad_(), torch.randint(NODES, (2, EDGES))
    e = torch.randn(EDGES, 1).requires_grad_()
    e.flag, e.other = 3, 2
    return x, edge_index, e


@pytest.mark.parametrize("question", VALUES)
def test_questions_of_messages(question, monkeypatch):
    pair, (x, edge_index, e) = twins(messages_that_ask(VALUES[question])), inputs()
    monkeypatch.setattr(sys.modules[__name__], "SEEN", {id(e)})
    monkeypatch.setattr(sys.modules[__name__], "BY_VALUE", {e: 1})
    CLASSES[:], LAYERS[:] = [type(pair[0])], pair
    BY_LAYER.clear()
    BY_LAYER.update(dict.fromkeys(pair, 2))
    for layer in pair:
        layer.__dict__["kept"], layer.__dict__["reference"] = e, weakref.ref(e)
    for _ in range(2):
        compare(pair, x, edge_index, e)


class OfParameter(Layer):
    """Decides by whether an argument is a parameter."""

    def start(self):
        self.weight = nn.Parameter(torch.full((CHANNELS,), 2.0))

    def forward(self, x, edge_index, is_parameter):
        return self.propagate(edge_index, x=x, w=self.weight if is_parameter else self.weight * 1)

    def message(self, x_j, w):
        return x_j * w * (3 if isinstance(w, nn.Parameter) else 5) * (7 if w.__class__ is nn.Parameter else 11)


def test_parameters_that_are_arguments():
    pair, (x, edge_index, _) = twins(OfParameter), inputs()
    for is_parameter in (True, False, True):
        assert compare(pair, x, edge_index, is_parameter)


FORWARDS = {
    "type": lambda self, gate: type(gate) is Tensor,
    "types": lambda self, gate: {type(value) for value in (gate,)} == {Tensor},
    "class": lambda self, gate: gate.__class__ is Tensor,
    "name": lambda self, gate: gate.__class__.__name__ == "Tensor",
    "isinstance": lambda self, gate: isinstance(gate, Tensor) and not isinstance(gate, nn.Parameter),
    "old class": lambda self, gate: isinstance(gate, torch.DoubleTensor),
    "text": lambda self, gate: "EdgeValue" not in repr(gate) + str(gate) + f"{gate}",
    "copy": lambda self, gate: copy.copy(gate).__class__ is copy.deepcopy(gate.detach()).__class__ is Tensor,
    "attributes": lambda self, gate: not hasattr(gate, "pending") and not vars(gate),
    "dispatch": lambda self, gate: factor_of(gate) == 2,
}


def forward_that_asks(ask):
    """A class whose forward asks what the values of edges are that wait."""

    class Forward(Layer):
        def forward(self, x, edge_index):
            gate = self.edge_updater(edge_index, x=x)
            self.gates = [gate]
            return self.propagate(edge_index, x=x, gate=gate * (2 if ask(self, gate) else 100))

        def edge_update(self, x_i, x_j):
            return (x_i * x_j).sum(-1, keepdim=True).sigmoid()

        def message(self, x_j, gate):
            return x_j * gate

    return Forward


@pytest.mark.parametrize("question", FORWARDS)
def test_questions_of_forwards(question):
    pair, (x, edge_index, _) = twins(forward_that_asks(FORWARDS[question])), inputs()
    for _ in range(2):
        compare(pair, x, edge_index)
    # What outlives the forward is a tensor, in lists as well.
    assert [type(layer.gates[0]) for layer in pair] == [Tensor, Tensor]
