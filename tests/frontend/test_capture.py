"""What else is done with layers: sizes, modes, hooks, copies, autocast, transforms, torch.compile around them."""

import copy
import pickle
import threading

import pytest
import torch
import torch_geometric
from torch.func import functional_call, grad, vmap
from torch_geometric.nn import GATConv, SAGEConv
from torch_geometric.utils import add_self_loops, degree

from pyg_dfgnn.frontend.derived import EdgeDerived
from pyg_dfgnn.nn.registry import MARK
from tests.frontend.layers import Sum
from tests.frontend.marks import compile_layer, release_layer
from tests.nn.message_users import NodeGatedGCN, Temperature

NODES, EDGES, CHANNELS = 23, 71, 8


class Net(torch.nn.Module):
    """Two layers of one class and size."""

    def __init__(self):
        super().__init__()
        self.first, self.second = NodeGatedGCN(CHANNELS), NodeGatedGCN(CHANNELS)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.fixture
def x():
    return torch.randn(NODES, CHANNELS, dtype=torch.float64)


@pytest.fixture
def edge_index():
    return torch.randint(0, NODES, (2, EDGES))


@pytest.fixture
def nets():
    """A captured net, and a copy that is not."""
    net = Net().double()
    own = copy.deepcopy(net)
    compile_layer(net.first)
    compile_layer(net.second)
    return net, own


def assert_equal(net, own, *args, tolerance=1e-9):
    torch.testing.assert_close(net(*args), own(*args), rtol=tolerance, atol=tolerance)


def test_layers_of_one_class_and_size_share_a_graph(nets, x, edge_index, captured):
    assert_equal(*nets, x.requires_grad_(), edge_index)
    assert len(captured) == 1


def test_any_number_of_sizes_of_one_class_stays_captured(edge_index, captured):
    sizes = range(8, 32, 2)
    layers = [compile_layer(NodeGatedGCN(size).double()) for size in sizes]
    for _ in range(2):
        for size, layer in zip(sizes, layers):
            layer(torch.randn(NODES, size, dtype=torch.float64), edge_index)
    assert len(captured) == len(sizes) and all(graph.regions for graph in captured)


def test_other_numbers_of_nodes_and_edges_compile_nothing_anew(captured):
    layer = compile_layer(NodeGatedGCN(CHANNELS).double())
    for nodes, edges in ((40, 40), (41, 90), (50, 50), (8, 16), (2, 2)):
        x, edge_index = torch.randn(nodes, CHANNELS).double(), torch.randint(0, nodes, (2, edges))
        assert_equal(layer, release_layer(copy.deepcopy(layer)), x, edge_index)
    assert len(captured) == 1


def test_learnt_features_are_captured_for_any_number_of_nodes(captured):
    layer = compile_layer(NodeGatedGCN(CHANNELS).double())
    own = release_layer(copy.deepcopy(layer))
    for nodes in (40, 41, 8):
        table, edge_index = torch.nn.Parameter(torch.randn(nodes, CHANNELS).double()), torch.randint(0, nodes, (2, 70))
        gradients = [torch.autograd.grad(each(table, edge_index).sum(), table) for each in (layer, own)]
        torch.testing.assert_close(*gradients)
    assert len(captured) == 1 and captured[0].regions


class OwnEdges(Sum):
    """Edges in a buffer, as layers on one mesh have them."""

    def __init__(self, edge_index, table=None):
        super().__init__()
        self.register_buffer("mesh", edge_index)
        self.table = table

    def forward(self, x):
        return self.propagate(self.mesh, x=x if self.table is None else x + self.table)


def test_edges_in_a_buffer_are_captured_for_any_number_of_them(captured):
    for nodes, edges in ((NODES, EDGES), (NODES + 5, EDGES + 9)):
        layer = OwnEdges(torch.randint(nodes, (2, edges))).double()
        own = copy.deepcopy(layer)
        compile_layer(layer)
        x = torch.randn(nodes, CHANNELS).double()
        torch.testing.assert_close(layer(x), own(x))
    assert [graph.counts for graph in captured] == [(2, 2)] * len(captured)


class Unread(Sum):
    """A layer that sorts rows for nothing."""

    def message(self, x_i, x_j):
        x_j.sort(-1)
        return x_j * x_i


def test_what_nothing_reads_is_not_computed(x, edge_index, captured):
    layer = compile_layer(Unread().double())
    assert_equal(layer, Unread().double(), x, edge_index, None)
    with torch.profiler.profile() as profile:
        layer(x, edge_index, None)
    assert all(event.key != "aten::sort" for event in profile.key_averages())
    assert captured[0].counts == (3, 3) and not captured[0].reasons


def test_single_node_that_is_fixed_is_named(captured):
    table = torch.nn.Parameter(torch.randn(1, CHANNELS).double())
    layer = compile_layer(OwnEdges(torch.zeros(2, EDGES, dtype=torch.int64), table).double())
    layer(torch.randn(1, CHANNELS).double())
    assert captured[0].counts == (2, 0)
    assert captured[0].reasons == ("1 nodes or edges are fixed in the layer, as a number or a parameter of it",)


@pytest.mark.parametrize("nodes, edges", [(5, 0), (1, 4), (5, 1), (1, 1)])
def test_few_rows_are_right(nodes, edges):
    layer = compile_layer(NodeGatedGCN(CHANNELS).double())
    x, edge_index = torch.randn(nodes, CHANNELS).double(), torch.randint(0, nodes, (2, edges))
    assert_equal(layer, release_layer(copy.deepcopy(layer)), x, edge_index)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_are_captured_and_have_their_own_parameters(nets, x, edge_index, again, captured):
    net, own = again(nets[0]), copy.deepcopy(nets[1])
    with torch.no_grad():
        for parameter in (*net.parameters(), *own.parameters()):
            parameter.mul_(2)
    assert_equal(net, own, x.requires_grad_(), edge_index)
    assert_equal(*nets, x, edge_index)
    assert len(captured) == 1


def triple(*args):
    return args[-1] * 3


@pytest.mark.parametrize(
    "register",
    [
        lambda net: net.first.register_forward_hook(triple),
        lambda net: net.first.a.register_forward_hook(triple),
        lambda net: net.first.register_message_forward_hook(triple),
        lambda net: net.first.register_aggregate_forward_hook(triple),
    ],
)
def test_hooks_run_as_long_as_they_are_there(nets, x, edge_index, register):
    assert_equal(*nets, x, edge_index)
    handles = [register(net) for net in nets]
    assert_equal(*nets, x, edge_index)
    for handle in handles:
        handle.remove()
    assert_equal(*nets, x, edge_index)


def test_backward_hook_runs(nets, x, edge_index):
    calls = []
    nets[0].first.register_full_backward_hook(lambda *args: calls.append(args))
    nets[0](x.requires_grad_(), edge_index).sum().backward()
    assert len(calls) == 1


def test_changed_attributes_and_modes_are_seen(edge_index, captured):
    layer = GATConv(CHANNELS, 4, heads=2, dropout=0.5, add_self_loops=False).double()
    own = copy.deepcopy(layer)
    compile_layer(layer)
    x = torch.randn(NODES, CHANNELS).double()
    for each in (layer, own):
        each.eval()
    assert_equal(layer, own, x, edge_index)
    layer.negative_slope = own.negative_slope = 0.7
    assert_equal(layer, own, x, edge_index)
    layer.train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(layer(x, edge_index))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert len(captured) == 3 and all(graph.counts[0] == graph.counts[1] for graph in captured)


def test_returned_attention_is_an_output_of_the_region(edge_index, captured):
    layer = GATConv(CHANNELS, 4, heads=2).double()
    own = copy.deepcopy(layer)
    compile_layer(layer)
    x = torch.randn(NODES, CHANNELS).double()
    actual, expected = (each(x, edge_index, return_attention_weights=True) for each in (layer, own))
    torch.testing.assert_close(actual, expected)
    assert len(captured[0].regions) == 1


def test_pairs_of_nodes_and_the_other_flow(edge_index, captured):
    layer = SAGEConv((CHANNELS, 4), 6).double()
    own = copy.deepcopy(layer)
    sources, targets = torch.randn(NODES + 3, CHANNELS).double(), torch.randn(NODES, 4).double()
    assert_equal(compile_layer(layer), own, (sources, targets), edge_index)
    layer = NodeGatedGCN(CHANNELS).double()
    layer.flow = "target_to_source"
    assert_equal(compile_layer(layer), release_layer(copy.deepcopy(layer)), sources, edge_index)
    assert all(graph.counts[0] == graph.counts[1] for graph in captured)


def test_autocast_gives_the_dtype_and_numbers_of_torch(x, edge_index, captured):
    layer = NodeGatedGCN(CHANNELS)
    own = copy.deepcopy(layer)
    compile_layer(layer)
    x = x.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = layer(x, edge_index), own(x, edge_index)
    assert actual.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)
    gradients = [torch.autograd.grad(out.float().sum(), x)[0] for out in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)
    assert_equal(layer, own, x, edge_index, tolerance=1e-5)
    assert len(captured) == 2 and all(graph.counts[0] == graph.counts[1] for graph in captured)


def test_second_derivatives_are_those_of_pyg(x, edge_index):
    layer = Temperature(CHANNELS).double()
    own = copy.deepcopy(layer)
    results = []
    for each in (compile_layer(layer), own):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(each(leaf, edge_index).pow(2).sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.pow(2).sum(), [leaf, *each.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


def test_compile_around_a_captured_layer_takes_pygs_code(nets, x, edge_index, captured):
    net, own = nets
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_equal(compiled, own, x, edge_index)
    assert not captured


def test_transforms_and_modes_of_autograd(nets, x, edge_index):
    net, own = nets
    parameters = {name: parameter.detach() * 2 for name, parameter in net.named_parameters()}
    actual, expected = (functional_call(each, parameters, (x, edge_index)) for each in nets)
    torch.testing.assert_close(actual, expected)
    batch = torch.stack([x, x * 2])
    torch.testing.assert_close(*(vmap(lambda rows, each=each: each(rows, edge_index))(batch) for each in nets))
    torch.testing.assert_close(*(grad(lambda rows, each=each: each(rows, edge_index).sum())(x) for each in nets))
    with torch.no_grad():
        assert_equal(net, own, x, edge_index)
    with torch.inference_mode():
        assert_equal(net, own, x, edge_index)


def test_threads_may_call_layers_of_one_size(x, edge_index):
    layers = [compile_layer(NodeGatedGCN(CHANNELS).double()) for _ in range(4)]
    expected = [release_layer(copy.deepcopy(layer))(x, edge_index) for layer in layers]
    results = {}
    threads = [threading.Thread(target=lambda k=k: results.update({k: layers[k](x, edge_index)})) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, want in enumerate(expected):
        torch.testing.assert_close(results[k], want)


def test_export_takes_pygs_code(nets, x, edge_index):
    net, own = nets
    torch.testing.assert_close(torch.export.export(net, (x, edge_index)).module()(x, edge_index), own(x, edge_index))


def test_reason_names_the_line_of_the_user(captured):
    from tests.frontend.layers import ComputesWithSizes

    layer = compile_layer(ComputesWithSizes().double())
    layer(torch.randn(NODES, 8).double(), torch.randint(0, NODES, (2, EDGES)), None)
    (reason,) = captured[0].reasons
    assert "frontend/layers.py" in reason and "x_j / size_i" in reason


def test_released_layer_runs_its_own_code(x, edge_index, captured):
    layer = compile_layer(NodeGatedGCN(CHANNELS).double())
    release_layer(layer)(x, edge_index)
    assert not captured and MARK not in layer.__dict__


class Normed(Sum):
    """A sum over edges with self-loops, scaled by degrees: what depends on the edges alone takes most of it."""

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        scale = degree(edge_index[1], x.size(0), x.dtype).pow(-0.5)
        return self.propagate(edge_index, x=x, edge=scale[edge_index[0]] * scale[edge_index[1]])

    def message(self, x_j, edge):
        return edge.view(-1, 1) * x_j


def test_what_depends_on_edges_alone_is_computed_once_for_edges_that_stay(x, edge_index, captured, monkeypatch):
    computed = []
    run = EdgeDerived._made
    monkeypatch.setattr(EdgeDerived, "_made", lambda self, args: computed.append(args) or run(self, args))
    layer, own = compile_layer(Normed().double()), Normed().double()
    for _ in range(3):
        assert_equal(layer, own, x, edge_index)
    assert len(computed) == 1 and captured[0].derived and captured[0].counts == (2, 2)
    edge_index[0, :5] = edge_index[1, :5]
    assert_equal(layer, own, x, edge_index)
    assert_equal(layer, own, x, edge_index.flip(0))
    assert len(computed) == 3
    assert_equal(layer, own, torch.cat([x, x]), edge_index)
    assert len(computed) == 4 and len(captured) == 1


class OwnNorm(torch_geometric.nn.SSGConv):
    """A layer whose forward adds self-loops to weighted edges, which it selects by masks, and norms them."""


@pytest.mark.parametrize("learns", [False, True])
def test_masks_of_edges_that_stay_are_counted_once(x, edge_index, learns):
    layer = compile_layer(OwnNorm(CHANNELS, CHANNELS, alpha=0.1, K=2).double())
    own = release_layer(copy.deepcopy(layer))
    edge_index[:, 3] = edge_index[0, 3]
    for turn in range(3):
        weight = torch.rand(EDGES, dtype=torch.float64, requires_grad=learns)
        leaves = [each for each in (weight, *layer.parameters()) if each.requires_grad]
        with torch.profiler.profile() as profile:
            out = layer(x, edge_index, weight)
            gradients = torch.autograd.grad(out.sin().sum(), leaves)
        waits = sum(event.count for event in profile.key_averages() if event.key == "aten::nonzero")
        assert (waits > 0) == (turn == 0)
        want = own(x, edge_index, weight)
        leaves = [each for each in (weight, *own.parameters()) if each.requires_grad]
        torch.testing.assert_close([out, *gradients], [want, *torch.autograd.grad(want.sin().sum(), leaves)])


class Selected(Normed):
    """Masks that select themselves, rows that are set with a leading size of 1, and a pair of one tensor."""

    def forward(self, x, edge_index):
        mask = edge_index[0] != edge_index[1]
        weight = torch.ones(edge_index.size(1), 3, dtype=torch.float64)
        weight[edge_index[0, :2]] = torch.full((1, 1, 3), 2.0, dtype=torch.float64)
        edge = weight[:, 0][mask] * mask[mask]
        return self.propagate(edge_index[:, mask], x=x[0] if x[0] is x[1] else -x[0], edge=edge)


def test_masks_of_masks_rows_of_one_and_pairs_of_one(edge_index):
    edge_index[:, 3] = edge_index[0, 3]
    layer, own = compile_layer(Selected().double()), Selected().double()
    for features in (torch.randn(EDGES, CHANNELS).double(), torch.nn.Parameter(torch.randn(EDGES, CHANNELS).double())):
        for edges in (edge_index, edge_index[:, :40]):
            torch.testing.assert_close(layer((features, features), edges), own((features, features), edges))


class Edited(Normed):
    """A layer whose user edits what it has made of the edges."""

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(edge_index, x=x, edge=x.new_ones(edge_index.size(1))), edge_index


def test_edits_of_what_was_derived_are_seen(x, edge_index):
    layer, own = compile_layer(Edited().double()), Edited().double()
    for _ in range(3):
        out, loops = layer(x, edge_index)
        torch.testing.assert_close((out, loops), own(x, edge_index))
        loops.zero_()


class Median(Sum):
    """A reduction that writes to a part of a tensor by `out=`, as PyG's quantiles do."""

    def __init__(self):
        super().__init__()
        self.aggr_module = torch_geometric.nn.aggr.MedianAggregation()


class Split(Sum):
    """Edits of a tensor by `out=` and by several results."""

    def message(self, x_j):
        low, high = torch.empty_like(x_j), torch.empty(x_j.shape, dtype=torch.int64)
        torch.sort(x_j, dim=-1, out=(low, high))
        scaled = torch.zeros_like(x_j)
        torch.mul(low, 2.0, out=scaled)
        return scaled + high


@pytest.mark.parametrize("kind", [Median, Split])
def test_what_out_writes_to_is_read(kind, x, edge_index, captured):
    layer, own = compile_layer(kind().double()), kind().double()
    with torch.no_grad():
        for edges in (edge_index, edge_index[:, :50]):
            assert_equal(layer, own, x, edges, None)
    assert captured
