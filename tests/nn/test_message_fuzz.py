"""Messages that nobody would write: random code on rows of several widths, on kernels against PyG in float64."""

import copy
import random
from math import prod

import torch
import torch.nn.functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from pyg_dfgnn import accelerate, local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import watched

NODES, EDGES = 6, 17
FUNCTIONS = (
    "torch.relu({})",
    "torch.sigmoid({})",
    "F.leaky_relu({}, 0.2)",
    "F.elu({})",
    "{}.abs()",
    "{} ** 2",
    "torch.exp(-{}.abs())",
    "{}.clamp(-1, 1)",
    "torch.sqrt({}.abs() + 1)",
    "1 / (1 + {} ** 2)",
)
PAIRS = ("{} * {}", "{} + {}", "{} - {}", "torch.maximum({}, {})", "torch.where({0} > {1}, {0}, {1} * 0.5)")


class Writer:
    """Writes a message line by line, and knows the sizes of each value's rows.

    Attributes:
        lines: The lines so far.
        sizes: Name -> sizes of its rows.
        maps: Name -> sizes of the linear layers that the lines call.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.heads, self.channels = self.random.choice([(1, 4), (2, 3), (4, 2), (3, 1), (1, 1), (2, 8)])
        self.features, self.edge = self.heads * self.channels, self.random.choice([1, 2, 3, 5])
        rows = {"x_i": self.features, "x_j": self.features, "y_i": self.edge, "y_j": self.edge, "e": self.edge}
        self.arguments = {name: (rows[name],) for name in self.random.sample(sorted(rows), self.random.randint(1, 4))}
        self.arguments.setdefault("x_j", (self.features,))
        self.sizes, self.lines, self.maps = dict(self.arguments), [], {}
        for _ in range(self.random.randint(2, 8)):
            self.step()
        result = [*self.sizes][-1]
        self.lines.append(f"out = {result}.reshape(index.numel(), -1)")
        if self.random.random() < 0.5 and prod(self.sizes[result]) in (1, self.features):
            self.lines.append("out = out * x_j")
        self.aggr = self.random.choice(["add", "mean", "max"])

    def let(self, expression, sizes):
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        self.sizes[name] = sizes

    def step(self):
        """Add a line, if what it picks fits its values."""
        x, y = (self.random.choice([*self.sizes]) for _ in range(2))
        sizes, others = self.sizes[x], self.sizes[y]
        what = self.random.choice("function pair pair sum mean norm heads concat slice map softmax".split())
        if what == "function":
            self.let(self.random.choice(FUNCTIONS).format(x), sizes)
        elif what == "pair" and len(sizes) == len(others):
            if all(1 in pair or pair[0] == pair[1] for pair in zip(sizes, others)):
                self.let(self.random.choice(PAIRS).format(x, y), tuple(map(max, sizes, others)))
        elif what in ("sum", "mean", "norm"):
            term = f"({x} + 0.1)" if what == "norm" else x
            self.let(f"{term}.{what}(dim=-1, keepdim=True)", (*sizes[:-1], 1))
        elif what == "heads" and prod(sizes) == self.features:
            self.let(f"{x}.reshape(-1, {self.heads}, {self.channels})", (self.heads, self.channels))
        elif what == "concat" and len(sizes) == len(others) == 1:
            self.let(f"torch.cat([{x}, {y}], dim=-1)", (sizes[0] + others[0],))
        elif what == "slice" and len(sizes) == 1:
            begin = self.random.randrange(sizes[0])
            end = self.random.randint(begin + 1, sizes[0])
            self.let(f"{x}[:, {begin}:{end}]", (end - begin,))
        elif what == "map" and len(sizes) == 1:
            name = f"map{len(self.maps)}"
            self.maps[name] = (*sizes, self.random.choice([1, self.edge, self.features]))
            self.let(f"self.{name}({x})", self.maps[name][1:])
        elif what == "softmax" and not any("softmax" in line for line in self.lines):
            self.let(f"softmax({x}, index, ptr, size_i)", sizes)


def layer_of(writer):
    """A layer whose message the writer has written."""
    text = "\n    ".join([f"def message(self, {', '.join(writer.arguments)}, index, ptr, size_i):", *writer.lines])
    names = {"torch": torch, "F": F, "softmax": softmax}
    exec(f"{text}\n    return out\n", names)

    class Written(MessagePassing):
        message = names["message"]

        def __init__(self):
            super().__init__(aggr=writer.aggr, node_dim=0)
            for name, sizes in writer.maps.items():
                setattr(self, name, torch.nn.Linear(*sizes))

        def forward(self, x, y, edge_index, e):
            return self.propagate(edge_index, x=x, y=y, e=e)

    return Written(), text


def trained(layer, inputs, edge_index):
    """Output and gradients of a call, in the dtype of the inputs."""
    x, y, e = leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = layer.to(x.dtype)(x, y, edge_index, e)
    weights = torch.linspace(-1, 1, out.numel()).to(out).view_as(out)
    grads = torch.autograd.grad((out * weights).sum(), [*leaves, *layer.parameters()], materialize_grads=True)
    return [out.detach(), *grads]


def check(seed):
    """Whether programs ran all; results are PyG's in float64."""
    torch.manual_seed(seed)
    writer = Writer(seed)
    plain, text = layer_of(writer)
    edge_index = torch.randint(NODES, (2, EDGES))
    rows = ((NODES, writer.features), (NODES, writer.edge), (EDGES, writer.edge))
    inputs = [torch.randn(shape) for shape in rows]
    layer = accelerate(copy.deepcopy(plain))
    with emulated_device(), local_settings(fallback="silent"), watched() as captured:
        actual = trained(layer, inputs, edge_index)
    pygs = trained(plain, inputs, edge_index)
    expected = trained(plain, [tensor.double() for tensor in inputs], edge_index)
    largest = max(float(tensor.abs().max()) for tensor in expected[1:] if tensor.numel())
    for place, (got, want, own) in enumerate(zip(actual, expected, pygs, strict=True)):
        # Softmaxes of equal numbers have gradients that vanish, of which rounding is left.
        scale = max(0.1, largest if place else float(want.abs().max()))
        error, allowed = float((got - want).abs().max()), max(2e-6 * scale, 4 * float((own - want).abs().max()))
        assert error <= allowed, f"{error} of result {place}, seed {seed}:\n{text}"
    return captured.is_fused


@needs_compiler
def test_random_messages(request):
    seeds = range(300) if request.config.getoption("--grid") == "full" else range(32, 48)
    ran = [check(seed) for seed in seeds]
    assert sum(ran) > 0.75 * len(seeds)
