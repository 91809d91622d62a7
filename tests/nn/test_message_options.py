"""Options of functions in messages: each gives PyG's numbers, whether a program has it or PyG's code runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.nn.test_message_traps import CHANNELS, NODES, Layer, compare, twins

pytestmark = pytest.mark.usefixtures("in_float64")

OPTIONS = {
    "softplus-beta": lambda self, x: F.softplus(x, beta=3.0),
    "softplus-threshold": lambda self, x: F.softplus(x, threshold=0.1),
    "gelu": lambda self, x: F.gelu(x, approximate="tanh"),
    "div": lambda self, x: torch.div(x, 0.3, rounding_mode="floor"),
    "clamp": lambda self, x: torch.clamp(x, self.vector, self.vector + 0.2),
    "sum": lambda self, x: x.sum(-1, keepdim=True, dtype=torch.float32).double(),
    "softmax": lambda self, x: F.softmax(x, dim=-1, dtype=torch.float32).double(),
    "log_softmax": lambda self, x: F.log_softmax(x, dim=-1, dtype=torch.float32).double(),
    "norm": lambda self, x: x.norm(p=3, dim=-1, keepdim=True),
    "matrix-norm": lambda self, x: torch.linalg.norm(x.view(-1, 2, 2), ord="nuc", dim=(1, 2)).view(-1, 1),
    "batch_norm": lambda self, x: F.batch_norm(x, None, None, training=True),
    "amax": lambda self, x: x.view(-1, 2, 2).amax((1, 2)).view(-1, 1),
    "steps": lambda self, x: x[:, ::2],
    "list": lambda self, x: x[:, [0, 2]],
    "numbers": lambda self, x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "repeats": lambda self, x: x.repeat_interleave(torch.tensor([1, 2, 1, 1]), dim=1),
    "index_add": lambda self, x: x.index_add(1, torch.tensor([0, 1, 2, 3]), x, alpha=2.0),
    "bilinear": lambda self, x: F.linear(x, self.vector).unsqueeze(-1),
    "and": lambda self, x: x * (x.long() & 1),
    "complex": lambda self, x: (x * 1j).abs(),
}
EMBEDDINGS = {
    "padding": {"padding_idx": 1},
    "norm": {"max_norm": 0.5},
    "scaled": {"scale_grad_by_freq": True},
    "plain": {},
}


class Optional(Layer):
    def start(self, name):
        self.name = name
        self.vector = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.4]))

    def message(self, x_j):
        return OPTIONS[self.name](self, x_j)


class Embedded(Layer):
    def start(self, options):
        self.emb = nn.Embedding(3, CHANNELS, **options)

    def forward(self, x, edge_index, edge_type):
        return self.propagate(edge_index, x=x, edge_type=edge_type)

    def message(self, x_j, edge_type):
        return x_j * self.emb(edge_type)


def inputs():
    torch.manual_seed(0)
    return torch.randn(NODES, CHANNELS).requires_grad_(), torch.randint(NODES, (2, 15))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    compare(twins(Optional, name), *inputs())


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_options_of_an_embedding(name):
    is_program = compare(twins(Embedded, EMBEDDINGS[name]), *inputs(), torch.arange(15) % 3)
    assert is_program == (name == "plain")
