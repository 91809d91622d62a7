"""Traps for captured layers: code that edits, decides, ties, reads or asks something gives PyG's results."""

import copy
import types
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
from pyg_dfgnn.nn import messages
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import watched

pytestmark = pytest.mark.usefixtures("in_float64")
NODES, CHANNELS, EDGES = 7, 4, 15


class Layer(MessagePassing):
    """The least that a layer of a user has."""

    factor = 1.0

    def __init__(self, *args):
        super().__init__(aggr="add")
        self.start(*args)

    def start(self):
        pass

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j

    @classmethod
    def of_class(cls):
        return cls.factor


@pytest.fixture
def edge_index():
    return torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def x():
    return torch.randn(NODES, CHANNELS, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def graphs():
    """What is captured in a test whose programs the interpreter runs."""
    with messages.interpreted(), watched() as graphs:
        yield graphs


def twins(kind, *args):
    """A layer, and a copy that is accelerated."""
    layer = kind(*args)
    return layer, pyg_dfgnn.accelerate(copy.deepcopy(layer))


def compare(pair, x, *args):
    """Results and gradients are PyG's, and nothing else needs a gradient."""
    leaf, found = x[0] if isinstance(x, tuple) else x, []
    for layer in pair:
        results = layer(x, *args)
        results = results if isinstance(results, tuple) else (results,)
        outs = [out for out in results if out.requires_grad]
        leaves = [leaf for leaf in (leaf, *layer.parameters()) if leaf.requires_grad]
        total = sum((out * torch.arange(1.0, 1 + out.numel()).view_as(out)).sum() for out in outs)
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if outs else ()
        found.append((results, [out.requires_grad for out in results], grads))
    bound = {"rtol": 1e-9, "atol": 1e-11} if leaf.dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found[1], found[0], **bound, equal_nan=True)


# Edits in place, and values of edges ----------------------------------------------------------------------------------


class Updating(Layer):
    """A layer with values of edges that its forward has before `propagate`."""

    def forward(self, x, edge_index):
        gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i, x_j):
        return (x_i + x_j).sum(-1, keepdim=True).sigmoid()

    def message(self, x_j, gate):
        return x_j * gate


class EditedBetween(Updating):
    def forward(self, x, edge_index):
        x = x * 1
        gate = self.edge_updater(edge_index, x=x)
        x = F.relu(x, inplace=True)
        return self.propagate(edge_index, x=x, gate=gate)


class EditedAfter(Layer):
    def forward(self, x, edge_index):
        x = x * 1
        out = self.propagate(edge_index, x=x.detach())
        x += out
        return x

    def message(self, x_i, x_j):
        self.att = (x_i * x_j).sum(-1, keepdim=True).sigmoid()
        return x_j * self.att


class EditedElsewhere(Updating):
    """Edits by others than itself, in a forward that has a wrapper."""

    @torch.enable_grad()
    def forward(self, x, edge_index):
        x = x * 1
        gate = self.edge_updater(edge_index, x=x)
        self.edit(x)
        return self.propagate(edge_index, x=x, gate=gate)

    def double(self, x):
        x.mul_(2.0)


EDITS = {
    "view": lambda self, x: x.view(-1).mul_(2.0),
    "method": lambda self, x: self.double(x),
    "functional": lambda self, x: F.elu_(x),
    "position": lambda self, x: F.relu(x, True),
}


class EditedBuffer(Updating):
    def start(self):
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x, edge_index):
        gate = self.edge_updater(edge_index, x=x, scale=self.scale)
        with torch.no_grad():
            self.scale.mul_(2.0)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i, scale):
        return x_i.detach().sum(-1, keepdim=True) * scale


class WithoutGradients(Updating):
    def forward(self, x, edge_index):
        x = x * 2
        with torch.no_grad():
            gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)


class Previous(Layer):
    """Attention of the call before."""

    def forward(self, x, edge_index):
        self.att = None
        for _ in range(2):
            x = self.propagate(edge_index, x=x)
        return x

    def message(self, x_i, x_j):
        score = (x_i * x_j).sum(-1)
        score = score if self.att is None else score + self.att
        self.att = score
        return x_j * score.unsqueeze(-1)


FUSED, IN_PART = (Updating, EditedBetween, WithoutGradients, Previous), (EditedAfter, EditedBuffer)


@pytest.mark.parametrize("kind", FUSED + IN_PART)
def test_values_of_edges_are_those_of_when_they_were_made(kind, x, edge_index, graphs):
    pair = twins(kind)
    for _ in range(2):
        compare(pair, x, edge_index)
    assert graphs.is_fused or kind in IN_PART
    compare(pair, x, edge_index[:, :1])
    with torch.inference_mode():
        compare(pair, x * 1, edge_index)


def test_edits_that_are_not_where_the_values_are_made(x, edge_index, graphs):
    for name, edit in EDITS.items():
        compare(twins(type(f"EditedBy{name}", (EditedElsewhere,), {"edit": edit})), x, edge_index)
    assert len(graphs) == len(EDITS)


class Keeping(Layer):
    """Returns values of edges that only move those of nodes, and reads weights that get no gradient."""

    def start(self):
        self.lin, self.other = nn.Linear(CHANNELS, 1), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, h=self.other(x)), *self.kept

    def message(self, x_i, x_j, h_j):
        pairs = x_j.view(-1, 2, 2)
        self.kept = x_j.sum(-1), self.lin(x_j).squeeze(-1), x_j[:, 0], x_i.sum(-1), pairs.sum(-1), pairs
        return x_j * h_j.detach().sigmoid()


@pytest.mark.parametrize("on", [messages.interpreted, emulated_device], ids=["interpreted", "kernels"])
def test_values_of_edges_and_what_an_output_does_not_depend_on(on, x, edge_index):
    pair = [layer.float() for layer in twins(Keeping)]
    with on(), watched() as graphs:
        compare(pair, x.detach().float().requires_grad_(), edge_index)
        compare(pair, x.detach().float(), edge_index)
    assert graphs.programs and not graphs.left


# Which tensors are one ------------------------------------------------------------------------------------------------


class Passing(Layer):
    """Gives tensors by names, of which several may be one; has maps that may be tied, and what may be None."""

    names = "aa"

    def start(self, is_tied):
        self.a, self.b = (nn.Parameter(torch.arange(1.0, 1 + CHANNELS) * sign) for sign in (1, -1))
        self.register_buffer("mask", None)
        self.left = nn.Linear(CHANNELS, CHANNELS, bias=False)
        self.right = self.left if is_tied else nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, edge_index):
        u, v = (getattr(self, name) if name in "ab" else self.a * 1 for name in self.names)
        return self.propagate(edge_index, x=x, u=u, v=v)

    def message(self, x_i, x_j, u, v):
        out = (self.right(x_i) * u + self.left(x_j) * v + self.a) * (3 if isinstance(u, nn.Parameter) else 5)
        return out if self.mask is None else out * 2.0


def changed(pair, **values):
    for layer, name in product(pair, values):
        setattr(layer, name, values[name])
    return pair


def test_tensors_are_tied_set_and_taken_away(x, edge_index, graphs):
    for is_tied in (True, False, True):
        compare(twins(Passing, is_tied), x, edge_index)
    pair = twins(Passing, True)
    for names in ("ab", "ba", "bb", "cb", "aa"):
        compare(changed(pair, names=names), x, edge_index)
    for mask, bias in ((torch.ones(1), None), (None, nn.Parameter(torch.ones(CHANNELS))), (None, None)):
        changed([layer.left for layer in pair], bias=bias)
        compare(changed(pair, mask=mask), x, edge_index)
    compare(changed(pair, right=nn.Linear(CHANNELS, CHANNELS)), x, edge_index)
    assert graphs.is_fused


# Numbers of rows ------------------------------------------------------------------------------------------------------


def decided(x_j, size, n):
    edges = x_j.size(0)
    found = [size[0] == size[1], edges > 1, edges == x_j.shape[1], n == edges, len(x_j) > 1, n - 6, n % 2 == 0]
    found += [min(n, 3) == 3, x_j.numel() < 8, edges * 2 == 2 * edges != 0, edges & 1, edges > 1.5, float(edges) > 1]
    return [*found, x_j.sum(-1, keepdim=True).squeeze().dim() == 1]


def number_of(answers):
    """Answers as one number."""
    return sum(2.0**k for k, answer in enumerate(answers) if answer)


def test_decisions_by_numbers_of_rows(x, edge_index, graphs):
    class Deciding(Layer):
        def message(self, x_j, size, size_i):
            return x_j * (1 + number_of(decided(x_j, size, size_i)))

    pair = twins(Deciding)
    for nodes, sources, edges in ((7, 7, 15), (7, 7, 7), (7, 5, 4), (6, 6, 4), (6, 6, 1), (7, 5, 15)):
        features = x[:nodes] if sources == nodes else (x[:nodes], x[:sources])
        compare(pair, features, edge_index[:, :edges].contiguous() % 5)
    assert graphs[0].counts == (2, 2)


def test_numbers_that_differ_from_call_to_call(x, edge_index, graphs):
    class Heated(Layer):
        def forward(self, x, edge_index, heat, table):
            return self.propagate(edge_index, x=x, heat=heat, table=table)

        def message(self, x_j, heat, table):
            return (x_j @ table.t() @ table) * heat

    pair, tables = twins(Heated), [torch.randn(rows, CHANNELS) for rows in range(20, 30)]
    for table in tables:
        compare(pair, x, edge_index, 3.0, table)
    assert len(graphs) == 1 and graphs.programs
    for heat, table in enumerate(tables):
        compare(pair, x, edge_index, float(heat), table)
    compare(pair, x, edge_index, 3.0, tables[3])


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Reversing(Layer):
    def message(self, x_j):
        return Reversed.apply(x_j) * x_j


class Plain(Layer):
    """Not :class:`Layer` itself: PyG would take what it generates for that for subclasses without a source."""


class Updated(Layer):
    def update(self, out):
        return out


def test_functions_with_a_backward_of_their_own_and_updates_of_an_instance(x, edge_index, graphs):
    compare(twins(Reversing), x, edge_index)
    for kind in (Plain, Updated):
        pair = twins(kind)
        for layer in pair:
            layer.update = lambda out: 3 * out
        compare(pair, x, edge_index)
    assert graphs.is_fused


def test_code_without_a_file(x, edge_index, graphs):
    def message(self, x_j):
        return x_j * x_j.sigmoid()

    for source in ("<stdin>", "<string>", "<ipython-input-3-abc>"):
        code = message.__code__.replace(co_filename=source)
        body = {"message": types.FunctionType(code, globals(), "message"), "__module__": __name__}
        compare(twins(type("Typed", (Layer,), body)), x, edge_index)
    assert graphs.is_fused and len(graphs) == 3


# Functions ------------------------------------------------------------------------------------------------------------


class Calling(Layer):
    def start(self, functions):
        self.functions = functions
        self.slopes = nn.Parameter(torch.tensor([0.1, 2.0]))
        self.vector = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.4]))

    def message(self, x_i, x_j):
        return torch.cat(self.functions(self, x_i, x_j), dim=-1)


def in_programs(layer, y, x):
    pairs, row = x.view(-1, 2, 2), x.detach()
    found = [x.clamp(layer.vector, layer.vector + 0.2), x * torch.tensor([1.0, 2.0, 3.0, 4.0]), ((y > 0) + (x > 0)) * x]
    found += [x * torch.linalg.norm(pairs, dim=(1, 2)).view(-1, 1), F.prelu(pairs, layer.slopes).flatten(1)]
    found += [torch.log1p(1e-12 * x.abs()) * 1e12 + torch.log1p(x.abs()), F.threshold(row / row, 0.5, 7.0)]
    return [*found, F.selu(x), F.elu(x, 2.0), F.relu6(x), F.hardtanh(x), x.clamp(0.0, 6.0)]


def more_in_programs(layer, y, x):
    inside, positive, pairs = 0.9 * x.tanh(), x * x + 0.1, x.view(-1, 2, 2)
    found = [torch.acos(inside), inside.asin(), torch.atan(x), x.arctan(), torch.asinh(x), torch.acosh(positive + 1.0)]
    found += [torch.atanh(inside), torch.sinh(inside), inside.cosh(), torch.expm1(1e-9 * x) * 1e9, torch.log2(positive)]
    found += [torch.atan2(y, x.abs() + 0.1), torch.arctan2(x, -positive), positive.log10(), torch.sgn(x) * y]
    found += [torch.remainder(x, 0.7), (x + torch.pi) % (2 * torch.pi) - torch.pi, x % -positive, torch.floor(x) * y]
    found += [x.round() * y, (x * 0.5).ceil() * y, torch.trunc(x) * y, x.frac(), torch.isnan(x) * y, torch.deg2rad(x)]
    found += [F.softplus(x, beta=3.0), F.gelu(x, approximate="tanh"), F.hardswish(x), F.tanhshrink(x), F.glu(x)]
    found += [
        F.softmin(x, dim=-1),
        torch.logsumexp(x, -1, keepdim=True),
        x.masked_fill(x < 9, -torch.inf).logsumexp([1], True),
    ]
    found += [
        x.std(-1, keepdim=True),
        torch.var(x, 1, unbiased=False, keepdim=True),
        x.var((1,), correction=0)[:, None],
    ]
    found += [torch.zeros_like(x).mul(x).std(-1, keepdim=True), x.amin(-1, keepdim=True), torch.max(x, y), x.min(y)]
    found += [torch.einsum("ec,ec->e", x, y).unsqueeze(-1), torch.einsum("ehc,c->eh", pairs, layer.vector[:2])]
    return [
        *found,
        torch.einsum("eh, ehc -> ech", y[:, :2], pairs).flatten(1),
        torch.einsum("ea,eb->eab", x, y).sum(-1),
    ]


def beside_programs(layer, y, x):
    pairs, single = x.view(-1, 2, 2), torch.float32
    found = [
        F.softplus(x, threshold=0.1),
        x.max(-1, keepdim=True)[0],
        x[:, ::2],
        torch.einsum("ehc,hd->ecd", pairs, pairs[0]),
    ]
    found[-1] = found[-1].flatten(1)
    found += [x[:, [0, 2]], torch.div(x, 0.3, rounding_mode="floor"), x.sum(-1, keepdim=True, dtype=single).double()]
    found += [F.softmax(x, dim=-1, dtype=single).double(), F.log_softmax(x, dim=-1, dtype=single).double()]
    found += [x.norm(p=3, dim=-1, keepdim=True), torch.linalg.norm(pairs, ord="nuc", dim=(1, 2)).view(-1, 1)]
    found += [F.batch_norm(x, None, None, training=True), pairs.amax((1, 2)).view(-1, 1)]
    found += [x.index_add(1, torch.tensor([0, 1, 2, 3]), x, alpha=2.0), F.linear(x, layer.vector).unsqueeze(-1)]
    return found


def beside_graphs(layer, y, x):
    found = [x.repeat_interleave(torch.tensor([1, 2, 1, 1]), dim=1), x * (x.long() & 1), (x * 1j).abs()]
    return [*found, x * torch.linalg.norm(x.view(-1, 2, 2), 2, dim=(1, 2)).view(-1, 1)]


@pytest.mark.parametrize("functions", [in_programs, more_in_programs, beside_programs, beside_graphs])
def test_functions_and_their_options(functions, x, edge_index, graphs):
    nodes, kinks = torch.arange(NODES), torch.tensor([0.0, 6.0, -1.0, 1.0, 3.0, -3.0, 0.5])
    features = x.detach().index_put((nodes, nodes % CHANNELS), kinks).requires_grad_()
    compare(twins(Calling, functions), features, edge_index)
    assert graphs.is_fused == (functions in (in_programs, more_in_programs))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_options_of_an_embedding(options, x, edge_index, graphs):
    class Embedded(Layer):
        def start(self):
            self.emb = nn.Embedding(3, CHANNELS, **options)

        def forward(self, x, edge_index, edge_type):
            return self.propagate(edge_index, x=x, edge_type=edge_type)

        def message(self, x_j, edge_type):
            return x_j * self.emb(edge_type)

    compare(twins(Embedded), x, edge_index, torch.arange(EDGES) % 3)
    assert graphs.is_fused


# Modules of TorchScript -----------------------------------------------------------------------------------------------


class Inner(nn.Module):
    """Has a submodule, a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS))
        self.register_buffer("shift", torch.ones(CHANNELS))

    def forward(self, x):
        return torch.relu(self.lin(x)) + self.shift


class Scripted(Layer):
    def start(self, make, asks):
        inner = Inner().train(make != "freeze")
        inner = torch.jit.trace(inner, torch.randn(NODES, CHANNELS)) if make == "trace" else torch.jit.script(inner)
        self.inner = torch.jit.freeze(inner) if make == "freeze" else inner
        self.asks, self.lin = asks, nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(self.inner(x)))

    def message(self, x_j):
        if not self.asks:
            return x_j.tanh()
        try:
            out = self.inner(x_j) + sum(p.sum() for p in self.inner.parameters())
        except Exception:
            out = 100 * x_j
        if hasattr(self.inner, "shift"):
            out = out @ getattr(self.inner.lin, "0").weight * self.inner.shift * (2 if self.inner.training else 1)
        return out * len(list(self.inner.children())) * len(list(self.modules()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ["script", "trace", "freeze"])
def test_modules_of_torchscript(make, x, edge_index):
    for asks in (False, True):
        results = []
        with messages.interpreted(), watched() as graphs:
            for prepare in (nn.Module.train, pyg_dfgnn.accelerate):
                torch.manual_seed(0)
                layer = prepare(Scripted(make, asks))
                # In training the statistics of a norm move, which outputs do not show.
                results.append(([layer(x, edge_index) for _ in range(2)], layer.state_dict()))
            torch.testing.assert_close(*results)
            assert asks or graphs.is_fused
            assert str(pyg_dfgnn.report(layer)) and str(pyg_dfgnn.describe_plan(layer, x, edge_index))
