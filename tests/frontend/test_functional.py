"""What captured code does to its tensors: edits in every form, aliases, names, modes and sizes give PyG's numbers."""

import copy
import gc
import logging
import threading
import weakref

import pytest
import torch
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, degree

from tests.frontend.marks import compile_layer

NODES, EDGES, CHANNELS = 11, 37, 4


class Plain(MessagePassing):
    """A sum of sources, which the layers below change."""

    def __init__(self):
        super().__init__("add")
        self.lin = torch.nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j):
        return x_j


class NameUsedAgain(Plain):
    def forward(self, x, edge_index, e):
        before, e0 = x, e
        x, e = self.lin(x), e.sort(-1).values
        return self.propagate(edge_index, before=before, x=x, e=e, e0=e0)

    def message(self, before_j, x_j, e, e0):
        return (before_j - x_j) * e + e0


class NameOfAnEnd(Plain):
    def forward(self, x, edge_index, x_j):
        return self.propagate(edge_index, x=x, w=x_j)

    def message(self, x_j, w):
        return x_j * w


class EditOfAParameterWithoutGradient(Plain):
    def forward(self, x, edge_index, e):
        with torch.no_grad():
            weight = self.lin.weight.clamp_(min=0)
        return self.propagate(edge_index, x=x @ weight, e=e)


class SameTensorWithoutGradient(Plain):
    def forward(self, x, edge_index, e):
        with torch.no_grad():
            same = x.contiguous()
        return self.propagate(edge_index, x=same, e=e)


class EditOfAMask(Plain):
    def message(self, x_i, x_j):
        mask = x_j > 0
        keep = mask
        mask &= x_i > 0
        return x_j * keep


class EditOfAList(Plain):
    def message(self, x_i, x_j):
        first, second = x_i * 1, x_j * 1
        torch._foreach_mul_([first, second], 3.0)
        return first * second


class EditByAnEmbedding(Plain):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(CHANNELS, CHANNELS, max_norm=0.3)

    def forward(self, x, edge_index, e):
        self.table(edge_index[0, :4] % CHANNELS)
        return self.propagate(edge_index, x=x, e=e) @ self.table.weight


class EditByOut(Plain):
    def message(self, x_i, x_j):
        with torch.no_grad():
            y = x_i * x_j
            torch.tanh(y, out=y)
        return y * x_j


class EditOfTheShape(Plain):
    def message(self, x_i, x_j):
        score = (x_i * x_j).sum(-1)
        score.unsqueeze_(-1)
        return score * x_j


class EditToTruths(Plain):
    def message(self, x_j):
        positive = x_j.detach().clone()
        positive.gt_(0)
        return x_j * (1 - positive).sort(-1).values


class MoreRowsThanNodes(Plain):
    def forward(self, x, edge_index, e):
        row, col = edge_index
        return x.new_zeros(x.size(0) + 1, CHANNELS).index_add(0, col, x[row] * x[col])[:-1]


class FillByName(Plain):
    def forward(self, x, edge_index, e):
        filled = x.new_full((x.size(0), CHANNELS), fill_value=2.0)
        return self.propagate(edge_index, x=x, e=e) + filled.cumsum(0)


class ReducesByKeywords(Plain):
    def aggregate(self, inputs, index, dim_size):
        places = index.view(-1, 1).expand_as(inputs)
        return inputs.new_zeros(dim_size, CHANNELS).scatter_add_(dim=0, index=places, src=inputs)


class EditOfAViewOfSums(Plain):
    def forward(self, x, edge_index, e):
        out = self.propagate(edge_index, x=x, e=e).view(-1, CHANNELS)
        out += self.lin(x)
        out.mul_(2)
        return out


class EditOfAViewThatTheSumsShow(Plain):
    def forward(self, x, edge_index, e):
        out = self.propagate(edge_index, x=x, e=e)
        flat = out.view(-1)
        flat += 1.0
        return out * flat.view(-1, CHANNELS)


class EditOfASumAfterItsView(Plain):
    def forward(self, x, edge_index, e):
        out = self.propagate(edge_index, x=x, e=e)
        flat = out.view(-1)
        out += self.lin(x)
        return flat.view(-1, CHANNELS) * x


class EditOfOnePart(Plain):
    def forward(self, x, edge_index, e):
        first, second = self.propagate(edge_index, x=x, e=e).chunk(2, dim=1)
        return second * torch.cat([first, second], dim=1)[:, :2] + first.sum()

    def aggregate(self, inputs, index, dim_size):
        out = inputs.new_zeros(dim_size, CHANNELS).index_add_(0, index, inputs)
        out[:, :1] += 1
        return out


LAYERS = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Plain)]


def results(layer, x, edge_index, e):
    x, e = x.clone().requires_grad_(), e.clone().requires_grad_()
    out = layer(x, edge_index, e)
    return [out, *torch.autograd.grad(out.pow(2).sum(), [x, e, *layer.parameters()], allow_unused=True)]


@pytest.mark.parametrize("kind", LAYERS)
def test_numbers_and_gradients_are_pygs(kind, captured):
    torch.manual_seed(0)
    layer = kind().double()
    own = copy.deepcopy(layer)
    compile_layer(layer)
    x, edge_index = torch.randn(NODES, CHANNELS).double(), torch.randint(0, NODES, (2, EDGES))
    e = torch.randn(EDGES, CHANNELS).double()
    for _ in range(2):
        torch.testing.assert_close(results(layer, x, edge_index, e), results(own, x, edge_index, e))
    torch.testing.assert_close(layer.state_dict(), own.state_dict())
    assert captured


@pytest.mark.parametrize(("kind", "fused"), [(EditOfAViewOfSums, 2), (EditOfAViewThatTheSumsShow, 0)])
def test_sums_are_fused_where_an_edit_of_their_view_shows_in_nothing_else(kind, fused, captured):
    layer = compile_layer(kind().double())
    layer(torch.randn(NODES, CHANNELS).double(), torch.randint(0, NODES, (2, EDGES)), None)
    assert [graph.counts[1] for graph in captured] == [fused]


class Returned(Plain):
    def forward(self, x, edge_index, e):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        count = degree(edge_index[1], x.size(0), x.dtype)
        return self.propagate(edge_index, x=x, e=count[edge_index[0]]), count, count.view(-1, 1)

    def message(self, x_j, e):
        return e.view(-1, 1) * x_j


def test_an_edit_of_what_was_returned_does_not_reach_other_calls():
    layer = compile_layer(Returned().double())
    x, edge_index = torch.randn(NODES, CHANNELS).double(), torch.randint(0, NODES, (2, EDGES))
    first = layer(x, edge_index, None)
    before = [each.clone() for each in first]
    for each in layer(x, edge_index, None):
        each.detach().zero_()
    torch.testing.assert_close(list(first), before)


def test_a_layer_is_not_kept_alive():
    layer = compile_layer(Plain().double())
    layer(torch.randn(NODES, CHANNELS).double(), torch.randint(0, NODES, (2, EDGES)), None)
    known = weakref.ref(layer)
    del layer
    gc.collect()
    assert known() is None


def test_the_loggers_of_torch_stay_as_they_are():
    edge_index = torch.randint(0, NODES, (2, EDGES))
    layers = [compile_layer(type(f"Plain{k}", (Plain,), {})()) for k in range(4)]
    calls = [threading.Thread(target=layer, args=(torch.randn(NODES, CHANNELS), edge_index, None)) for layer in layers]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert logging.getLogger("torch._dynamo.convert_frame").level == logging.NOTSET
