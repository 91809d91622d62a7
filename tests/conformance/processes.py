"""Layers in two processes that talk through gloo: shares of a batch, and parts of one graph."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
import torch_geometric.typing
from torch.nn.parallel import DistributedDataParallel

import pyg_dfgnn
from pyg_dfgnn.distributed import Group, partition, wrap
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.reference.zoo import ZOO, EdgeList
from tests.conformance.layers import PLAIN, Conv, Given, NotApplicable, Results, assert_right, op_of, results_of, said
from tests.nn.message_cases import loss_of, outputs_of
from tests.processes import launch

SIZE = 2


class Local(Given):
    """One process's rows of the inputs of a graph whose nodes are spread."""

    def __init__(self, graph: EdgeList, part: Any) -> None:
        super().__init__(graph, torch.float32, "cpu", torch.float32, lambda *_: part, False)
        self.part = part

    @property
    def back(self) -> Any:
        raise NotApplicable("it takes the edges both ways round")

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) not in (self.graph.num_edges, self.graph.num_src):
            raise NotApplicable("it takes edges of its own")
        return rows[self.part.edge_ids] if len(rows) == self.graph.num_edges else self.part.local(rows)

    def draw(self, name: str, *shape: int, positive: bool = False) -> torch.Tensor:
        every = super().draw(name, *shape, positive=positive)
        self.leaves[name] = self._own(every.detach()).requires_grad_()
        return self.leaves[name]

    @property
    def node_type(self) -> torch.Tensor:
        return self._own(super().node_type)

    @property
    def edge_type(self) -> torch.Tensor:
        return self._own(super().edge_type)


def given_of(graph: EdgeList, dtype: torch.dtype) -> Given:
    return Given(graph, dtype, "cpu", torch.float32, None, False)


def of_shares(conv: Conv, is_pygs: bool) -> None:
    """Each process has a graph of its own; gradients of parameters are the mean over both."""
    group = Group.of_environment("cpu")
    graphs = [PLAIN, ZOO["self-loops"]()]

    def mean(dtype: torch.dtype) -> Results:
        layer = conv.layer(dtype)
        every = [results_of(layer, conv.case, given_of(graph, dtype)) for graph in graphs]
        names = [f"grad {name}" for name, _ in layer.named_parameters()]
        return every[group.rank] | {name: sum(each[name] for each in every) / SIZE for name in names}

    layer = conv.layer() if is_pygs else pyg_dfgnn.accelerate(conv.layer())
    parameters = dict(layer.named_parameters())
    if not parameters:
        raise NotApplicable("it has no parameters")
    given = given_of(graphs[group.rank], torch.float32)
    parallel = DistributedDataParallel(layer, find_unused_parameters=True)
    with conv.seen(layer):
        found = backward_of(parallel, conv, given, parameters)
    assert_right(found, mean(torch.float64), mean(torch.float32), torch.float32, op_of(type(conv.layer())))


def backward_of(called: Any, conv: Conv, given: Given, parameters: dict[str, torch.Tensor]) -> Results:
    """Return outputs and the gradients that `backward` leaves, which is what the hooks of processes see."""
    outs = outputs_of(called, conv.case, given)
    loss_of(outs).backward()
    leaves = given.leaves | parameters
    grads = {f"grad {n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in leaves.items()}
    return {**{f"out {k}": out.detach() for k, out in enumerate(outs)}, **grads}


def of_parts(conv: Conv, is_pygs: bool) -> None:
    """The nodes of one graph are spread over both."""
    group, graph = Group.of_environment("cpu"), PLAIN
    part = partition(graph.edge_index, graph.num_src, group)
    layer = pyg_dfgnn.accelerate(conv.layer())
    parameters = dict(layer.named_parameters())
    local, called = Local(graph, part), wrap(layer, group)
    with conv.seen(layer):
        outs = outputs_of(called, conv.case, local)
        if any(len(out) != part.num_nodes for out in outs):
            raise NotApplicable("its outputs are not rows of nodes")
        # The loss is a sum over nodes whose weights all processes draw alike; DDP takes the mean of gradients.
        generator = torch.Generator().manual_seed(6)
        weights = [torch.randn(graph.num_src, *out.shape[1:], dtype=torch.float64, generator=generator) for out in outs]
        loss = sum((out * part.local(rows)).sum() for out, rows in zip(outs, weights, strict=True))
        loss.backward()
    found = {f"out {k}": out.detach() for k, out in enumerate(outs)}
    for name, leaf in local.leaves.items():
        found[f"grad {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    for name, leaf in parameters.items():
        found[f"grad {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * group.size

    def whole(dtype: torch.dtype) -> Results:
        results = results_of(conv.layer(dtype), conv.case, given_of(graph, dtype))
        of_nodes = {*(f"out {k}" for k in range(len(outs))), *(f"grad {name}" for name in local.leaves)}
        return {name: local._own(rows) if name in of_nodes else rows for name, rows in results.items()}

    assert_right(found, whole(torch.float64), whole(torch.float32), torch.float32, op_of(type(conv.layer())))


def _work(kind: str, name: str, is_pygs: bool, folder: str) -> None:
    conv = Conv(name, "cpu")
    torch_geometric.typing.WITH_TORCH_SCATTER = False
    pyg_dfgnn.settings(fallback="log", check_ids="now", deterministic=True)
    said_by = {}
    try:
        {"ddp": of_shares, "partitioned": of_parts}[kind](conv, is_pygs)
    except NotApplicable as error:
        said_by["reason"] = str(error)
    except UnsupportedError as error:
        said_by["reason"] = said(error)
    except TypeError as error:
        # Layers that `wrap` refuses by name.
        if not str(error).startswith("'model' needs"):
            raise
        said_by["reason"] = str(error)
    said_by |= {"launched": conv.launched, "why": list(conv.why)}
    (Path(folder) / f"{Group.of_environment('cpu').rank}.json").write_text(json.dumps(said_by))


def check_in_processes(conv: Conv, kind: str) -> None:
    """Run a layer in two processes."""
    if conv.device != "cpu":
        raise NotApplicable("two processes talk through gloo, on CPUs")
    try:
        results_of(conv.layer(), conv.case, given_of(PLAIN, torch.float32))
    except Exception as error:
        raise NotApplicable(f"PyG's own layer raises {said(error)}") from error
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(SIZE, _work, kind, conv.name, False, folder)
        except torch.multiprocessing.ProcessRaisedException as ours:
            if kind == "ddp" and "AssertionError" not in str(ours):
                try:
                    launch(SIZE, _work, kind, conv.name, True, folder)
                except torch.multiprocessing.ProcessRaisedException as error:
                    last = str(error).strip().splitlines()[-1]
                    raise NotApplicable(f"PyG's own layer raises {last[:120]}") from ours
            raise
        for path in sorted(Path(folder).glob("*.json")):
            seen = json.loads(path.read_text())
            if "reason" in seen:
                raise NotApplicable(seen["reason"])
            conv.launched += seen["launched"]
            conv.why.update(dict.fromkeys(seen["why"]))
