"""Conditions under which layers have to give PyG's results, each as a function that runs one layer under it."""

import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

import pyg_dfgnn
from pyg_dfgnn import Graph
from pyg_dfgnn.reference.zoo import ZOO, edges
from tests.conformance.hetero import check_to_hetero
from tests.conformance.layers import (
    PLAIN,
    SIMPLE,
    Conv,
    Given,
    NotApplicable,
    assert_right,
    op_of,
    parameters_of,
    results_of,
    said,
)
from tests.conformance.processes import check_in_processes
from tests.nn.message_cases import loss_of, outputs_of, tensors_of, weights_of
from tests.nn.parity import adjacency, sparse_tensor

Condition = Callable[[Conv], None]
CONDITIONS: dict[str, Condition] = {}
"""Name -> function of a layer that raises where results are not PyG's, and `NotApplicable` where it makes no sense."""


def condition(name: str) -> Callable[[Condition], Condition]:
    def register(function: Condition) -> Condition:
        CONDITIONS[name] = function
        return function

    return register


@condition("eager")
def eager(conv: Conv) -> None:
    """A second call with the same edges, whose graph is known."""

    def again(layer: torch.nn.Module, given: Given) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            layer(*args, **kwargs)
            return layer(*args, **kwargs)

        return call

    conv.check(again)


@condition("new graph per step")
def new_graph(conv: Conv) -> None:
    pyg_dfgnn.settings(check_ids="later")
    conv.check(graphs=[PLAIN, ZOO["self-loops"](), ZOO["duplicates"]()])


@condition("compile")
def compiled(conv: Conv) -> None:
    torch._dynamo.reset()
    if conv.device == "cpu":
        conv.check(lambda layer, _: torch.compile(layer, backend="aot_eager"))
        return

    def inductor(layer: torch.nn.Module, _: Given) -> Callable[..., Any]:
        return torch.compile(layer)

    # TorchInductor rounds in its own way, and negative zeros become angles of half a turn: PyG's layer as well.
    conv.check(inductor, of_pyg=inductor)


@condition("CUDA graph")
def cuda_graph(conv: Conv) -> None:
    """A captured step of forward and backward is replayed with other numbers in the same places."""
    if conv.device == "cpu":
        raise NotApplicable("CUDA graphs need a GPU")
    pygs, own = conv.layer(), pyg_dfgnn.accelerate(conv.layer())
    given = Given(PLAIN, torch.float32, conv.device, torch.float32, None, False)
    try:
        weights = weights_of(outputs_of(pygs, conv.case, given))
    except Exception as error:
        raise NotApplicable(f"PyG's own layer raises {said(error)}") from error
    drawn = given.leaves
    fixed = Fixed(given, drawn)

    def step(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        outs = tensors_of(conv.case.call(layer, fixed))
        leaves = drawn | parameters_of(layer)
        grads = torch.autograd.grad(loss_of(outs, weights), list(leaves.values()), allow_unused=True)
        found = {f"out {k}": out.detach() for k, out in enumerate(outs)}
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            found[f"grad {name}"] = torch.zeros_like(leaf) if grad is None else grad
        return found

    def captured(layer: torch.nn.Module) -> tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(layer)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What waits is an error before CUDA sees it: one within CUDA would leave PyTorch's random numbers of no use.
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                found = step(layer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return graph, found

    try:
        with conv.seen(own):
            graph, found = captured(own)
    except Exception as ours:
        try:
            captured(pygs)
        except Exception as error:
            raise NotApplicable(f"PyG's own layer raises {said(error)}") from ours
        raise
    with torch.no_grad():
        for leaf in drawn.values():
            leaf.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    wide = Fixed(given, {name: leaf.detach().double().requires_grad_() for name, leaf in drawn.items()})
    expected = results_of(conv.layer().double(), conv.case, wide)
    assert_right(found, expected, results_of(pygs, conv.case, fixed), torch.float32, op_of(type(pygs)))


class Fixed(Given):
    """Inputs that are the same tensors in each call."""

    def __init__(self, given: Given, drawn: dict[str, torch.Tensor]) -> None:
        super().__init__(given.graph, next(iter(drawn.values())).dtype, given.device, given.held, None, given.is_pair)
        self.drawn, self.types = drawn, super().edge_type

    @property
    def edge_type(self) -> torch.Tensor:
        return self.types

    def draw(self, name: str, *shape: int, positive: bool = False) -> torch.Tensor:
        self.leaves[name] = self.drawn[name]
        return self.leaves[name]


@condition("autocast")
def autocast(conv: Conv) -> None:
    def cast(layer: torch.nn.Module, given: Given) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(conv.device, dtype=torch.bfloat16):
                return layer(*args, **kwargs)

        return call

    conv.check(cast, of_pyg=cast, bound=torch.bfloat16)


@condition("DDP")
def ddp(conv: Conv) -> None:
    check_in_processes(conv, "ddp")


@condition("partitioned")
def partitioned(conv: Conv) -> None:
    check_in_processes(conv, "partitioned")


@condition("explain")
def explain(conv: Conv) -> None:
    """A mask of an explainer, and its gradient."""

    def masked(layer: torch.nn.Module, given: Given) -> Callable[..., Any]:
        mask = given.draw("mask", given.graph.num_edges)

        def call(*args: Any, **kwargs: Any) -> Any:
            set_masks(layer, mask, given.edge_index)
            try:
                return layer(*args, **kwargs)
            finally:
                clear_masks(layer)

        return call

    conv.check(masked, of_pyg=masked, exact=masked)


CONDITIONS["to_hetero"] = check_to_hetero


@condition("checkpoint")
def checkpointed(conv: Conv) -> None:
    conv.check(lambda layer, _: lambda *args, **kwargs: checkpoint(layer, *args, use_reentrant=False, **kwargs))


@condition("export")
def exported(conv: Conv) -> None:
    """The program of `torch.export`, saved and loaded."""

    def export(layer: torch.nn.Module, given: Given) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            file = io.BytesIO()
            torch.export.save(torch.export.export(layer, args, kwargs), file)
            file.seek(0)
            return torch.export.load(file).module()(*args, **kwargs)

        return call

    with torch.no_grad():
        conv.check(export, order=0)


@condition("save and load")
def saved(conv: Conv) -> None:
    """A pickled layer, one that torch has saved, and the state of a layer in a new one, ours and PyG's."""

    def by_state(layer: torch.nn.Module, given: Given) -> torch.nn.Module:
        other = conv.case.make().to(layer_device(layer))
        other.load_state_dict(layer.state_dict())
        other = pyg_dfgnn.accelerate(other)
        other.load_state_dict(layer.state_dict())
        return other

    def by_torch(layer: torch.nn.Module, given: Given) -> torch.nn.Module:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)  # type: ignore[no-any-return]

    for wrap in (lambda layer, _: pickle.loads(pickle.dumps(layer)), by_torch, by_state):
        conv.check(wrap)


def layer_device(layer: torch.nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))


@condition("EdgeIndex")
def edge_index(conv: Conv) -> None:
    conv.check(form=lambda ends, num_src, num_dst, _: EdgeIndex(ends, sparse_size=(num_src, num_dst)))


@condition("torch.sparse")
def torch_sparse(conv: Conv) -> None:
    def form(ends: torch.Tensor, num_src: int, num_dst: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.ones(ends.size(1), dtype=dtype)
        return adjacency(in_order(ends).cpu(), "csr", num_src, num_dst, values).to(ends.device)

    conv.check(graphs=[SIMPLE], form=form, pygs_form=form)


@condition("SparseTensor")
def sparse(conv: Conv) -> None:
    def form(ends: torch.Tensor, num_src: int, num_dst: int, dtype: torch.dtype) -> Any:
        return sparse_tensor(in_order(ends), num_src, num_dst)

    conv.check(graphs=[SIMPLE], form=form, pygs_form=form)


def in_order(ends: torch.Tensor) -> torch.Tensor:
    """Edges in the order of their targets, as a sparse matrix has them."""
    return ends[:, torch.argsort(ends[1] * (int(ends[0].max()) + 1) + ends[0])]


@condition("Graph")
def graph(conv: Conv) -> None:
    conv.check(form=lambda ends, num_src, num_dst, _: Graph.of(ends, num_src, num_dst))


@condition("bfloat16")
def bfloat16(conv: Conv) -> None:
    conv.check(dtype=torch.bfloat16)


@condition("float16")
def float16(conv: Conv) -> None:
    conv.check(dtype=torch.float16)


@condition("bipartite")
def bipartite(conv: Conv) -> None:
    conv.check(is_pair=True, graphs=[ZOO["bipartite-wide"]()])


@condition("second derivative")
def second_derivative(conv: Conv) -> None:
    conv.check(order=2)


@condition("threads")
def threads(conv: Conv) -> None:
    """Four threads call one layer, each with edges of its own."""
    graphs = [PLAIN, SIMPLE, ZOO["self-loops"](), ZOO["duplicates"]()]
    own, start = pyg_dfgnn.accelerate(conv.layer()), Barrier(len(graphs))

    def given(graph: Any, dtype: torch.dtype) -> Given:
        return Given(graph, dtype, conv.device, torch.float32, None, False)

    def of_pyg(graph: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        try:
            return results_of(conv.layer(dtype), conv.case, given(graph, dtype))
        except Exception as error:
            raise NotApplicable(f"PyG's own layer raises {said(error)}") from error

    def work(graph: Any) -> list[Any]:
        start.wait()
        return [results_of(own, conv.case, given(graph, torch.float32)) for _ in range(2)]

    expected = [(of_pyg(graph, torch.float64), of_pyg(graph, torch.float32)) for graph in graphs]
    with conv.seen(own), ThreadPoolExecutor(len(graphs)) as pool:
        found = list(pool.map(work, graphs))
    for (exact, beside), results in zip(expected, found, strict=True):
        for actual in results:
            assert_right(actual, exact, beside, torch.float32, op_of(type(conv.layer())))


@condition("no gradient")
def no_gradient(conv: Conv) -> None:
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            conv.check(order=0)


@condition("batch of one")
def one(conv: Conv) -> None:
    conv.check(graphs=[ZOO["one-loop"](), edges("pair", [(0, 1)], 2)])


@condition("empty")
def empty(conv: Conv) -> None:
    conv.check(graphs=[ZOO["no-edges"](), ZOO["no-nodes"]()])
