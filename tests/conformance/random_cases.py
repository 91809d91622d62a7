"""Random calls of layers as data that JSON holds: a layer, its options, edges in a form, a dtype and sizes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_geometric.nn as pyg
from hypothesis import strategies as st
from torch.nn import Linear, Sequential, SiLU
from torch_geometric import EdgeIndex

from pyg_dfgnn import Graph
from pyg_dfgnn.reference.zoo import EdgeList
from tests.conformance.layers import Conv, NotApplicable, op_of
from tests.nn.message_cases import Case, Inputs

Options = dict[str, Any]
BOTH = (False, True)
AGGREGATIONS = ("sum", "mean", "max", "min", "std", "var", ["mean", "max"], ["sum", "std", "min"])
EDGES = {"heads": (1, 2, 3), "concat": BOTH, "bias": BOTH, "edge_dim": (None, 1, 3)}
LOOPS = {"add_self_loops": BOTH, "negative_slope": (0.0, 0.2), "residual": BOTH, "fill_value": ("mean", "max", 0.5)}
NORMALIZED = {"add_self_loops": BOTH, "normalize": BOTH, "bias": BOTH}
RELATIONS = 3


def _mlp(width: int, out: int) -> Sequential:
    # Smooth: rounding to 16 bits would choose a side of a kink, and with it another gradient.
    return Sequential(Linear(width, 5), SiLU(), Linear(5, out))


@dataclass(frozen=True)
class Kind:
    """A class of PyG's.

    Attributes:
        options: Name of an argument -> its values.
        arguments: (features, output channels) -> the arguments before the options.
        of_edges: What a call takes beside features and edges: "edge_weight", "edge_attr" or "edge_type".
        takes_pair: Whether it takes features of two node sets.
    """

    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    arguments: Callable[[int, int], tuple[Any, ...]] = lambda width, out: (width, out)
    of_edges: str = ""
    takes_pair: bool = False


KINDS: dict[str, Kind] = {
    "GATConv": Kind({**EDGES, **LOOPS}, of_edges="edge_attr", takes_pair=True),
    "GATv2Conv": Kind({**EDGES, **LOOPS, "share_weights": BOTH}, of_edges="edge_attr", takes_pair=True),
    "TransformerConv": Kind({**EDGES, "beta": BOTH, "root_weight": BOTH}, of_edges="edge_attr", takes_pair=True),
    "AGNNConv": Kind({"add_self_loops": BOTH, "requires_grad": BOTH}, lambda *_: ()),
    "GCNConv": Kind({**NORMALIZED, "improved": BOTH}, of_edges="edge_weight"),
    "SGConv": Kind({"K": (1, 2), "add_self_loops": BOTH, "bias": BOTH}, of_edges="edge_weight"),
    "SSGConv": Kind({"K": (1, 2), "alpha": (0.1, 0.9), "add_self_loops": BOTH}, of_edges="edge_weight"),
    "TAGConv": Kind({"K": (0, 1, 3), "bias": BOTH, "normalize": BOTH}, of_edges="edge_weight"),
    "ChebConv": Kind({"K": (1, 2, 3), "normalization": ("sym", "rw"), "bias": BOTH}),
    "ARMAConv": Kind({"num_stacks": (1, 2), "num_layers": (1, 2), "bias": BOTH}, of_edges="edge_weight"),
    "APPNP": Kind({"K": (1, 3), "alpha": (0.1, 0.5), "add_self_loops": BOTH}, lambda *_: (), "edge_weight"),
    "LGConv": Kind({"normalize": BOTH}, lambda *_: (), "edge_weight"),
    "ClusterGCNConv": Kind({"diag_lambda": (0.0, 0.5), "add_self_loops": BOTH, "bias": BOTH}),
    "SAGEConv": Kind(
        {"aggr": AGGREGATIONS, "normalize": BOTH, "root_weight": BOTH, "project": BOTH, "bias": BOTH}, takes_pair=True
    ),
    "GraphConv": Kind({"aggr": AGGREGATIONS, "bias": BOTH}, of_edges="edge_weight", takes_pair=True),
    "GINConv": Kind({"eps": (0.0, 0.3), "train_eps": BOTH}, lambda w, o: (_mlp(w, o),), takes_pair=True),
    "GINEConv": Kind(
        {"eps": (0.0, 0.3), "train_eps": BOTH, "edge_dim": (2, 3)}, lambda w, o: (_mlp(w, o),), "edge_attr", True
    ),
    "ResGatedGraphConv": Kind({"root_weight": BOTH, "bias": BOTH, "edge_dim": (None, 2)}, of_edges="edge_attr"),
    "PNAConv": Kind(
        {"towers": (1, 2), "edge_dim": (None, 2), "post_layers": (1, 2)},
        lambda w, o: (w, 2 * o, ["mean", "min", "max", "std"], ["identity", "amplification"], torch.tensor([1, 3, 2])),
        "edge_attr",
    ),
    "RGCNConv": Kind(
        {"num_bases": (None, 2), "aggr": ("mean", "sum", "max"), "root_weight": BOTH, "bias": BOTH},
        lambda w, o: (w, o, RELATIONS),
        "edge_type",
    ),
    "RGATConv": Kind(
        {
            "heads": (1, 2),
            "num_bases": (None, 2),
            "concat": BOTH,
            "attention_mode": ("additive-self-attention", "multiplicative-self-attention"),
            "attention_mechanism": ("within-relation", "across-relation"),
        },
        lambda w, o: (w, o, RELATIONS),
        "edge_type",
    ),
    "FiLMConv": Kind({"aggr": ("mean", "sum", "max")}, lambda w, o: (w, o, RELATIONS), "edge_type"),
    "EdgeConv": Kind({"aggr": ("sum", "mean", "max")}, lambda w, o: (_mlp(2 * w, o),), takes_pair=True),
    "CGConv": Kind({"aggr": ("sum", "mean"), "dim": (2, 3)}, lambda w, _: (w,), "edge_attr"),
    "LEConv": Kind({"bias": BOTH}, of_edges="edge_weight"),
}
FORMS: dict[str, Callable[..., Any]] = {
    "tensor": lambda ends, *_: ends,
    "int32": lambda ends, *_: ends.int(),
    "strided": lambda ends, *_: torch.stack([ends[0], ends[0], ends[1]], 1)[:, ::2].t(),
    "EdgeIndex": lambda ends, num_src, num_dst, _: EdgeIndex(ends, sparse_size=(num_src, num_dst)),
    "Graph": lambda ends, num_src, num_dst, _: Graph.of(ends, num_src, num_dst),
}


@st.composite
def cases(draw: Any, path: str, dtypes: tuple[str, ...], most_copies: int = 1) -> dict[str, Any]:
    """Draw a call.

    Args:
        draw: Draws from a strategy.
        path: What runs it: "reference", "emulator" or "cuda".
        dtypes: Names of dtypes.
        most_copies: How many copies of the drawn graph may lie side by side.
    """
    name = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[name]
    options = {option: draw(st.sampled_from(values)) for option, values in sorted(kind.options.items())}
    is_pair = kind.takes_pair and draw(st.booleans())
    num_src = draw(st.integers(1 if is_pair else 0, 9))
    num_dst = draw(st.integers(1, num_src)) if is_pair else num_src
    ends = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1)) if num_src else st.nothing()
    pairs = draw(st.lists(ends, max_size=20)) if num_src else []
    if not options.get("normalize", True):
        # Loops come with the normalisation.
        options.pop("add_self_loops", None)
    # Of sums, the reference path has degrees in float32.
    is_wide = path != "reference" or op_of(getattr(pyg, name)) != "segment"
    return {
        "path": path,
        "conv": name,
        "options": options,
        "features": draw(st.integers(1, 9)) if name != "PNAConv" else draw(st.sampled_from((2, 4, 6))),
        "channels": draw(st.integers(1, 8)),
        "num_src": num_src,
        "num_dst": num_dst,
        "is_pair": is_pair,
        "edges": [list(pair) for pair in pairs],
        "loops": not is_pair and draw(st.booleans()),
        "repeated": draw(st.integers(1, 2)),
        "hub": draw(st.sampled_from((0, 0, 40))) if num_src else 0,
        "copies": draw(st.integers(1, most_copies)),
        "form": draw(st.sampled_from(sorted(FORMS))),
        "dtype": draw(st.sampled_from(dtypes)) if is_wide else "float32",
        "weighted": draw(st.booleans()),
        "trains": draw(st.booleans()),
    }


def graph_of(case: Options) -> EdgeList:
    """Return the graph of a case: its edges, loops, those of a hub, all of it repeated, and copies side by side."""
    num_src, num_dst = case["num_src"], case["num_dst"]
    pairs = [*case["edges"], *([node, node] for node in range(num_src) if case["loops"])]
    pairs += [[k % num_src, 0] for k in range(case["hub"])]
    one = torch.tensor(pairs * case["repeated"], dtype=torch.long).view(-1, 2).t()
    sizes = torch.tensor([[num_src], [num_dst]])
    ends = torch.cat([one + copy * sizes for copy in range(case["copies"])], dim=1).contiguous()
    return EdgeList("drawn", ends, num_src * case["copies"], num_dst * case["copies"])


class Drawn(Conv):
    """The layer of a case."""

    def __init__(self, case: Options, device: str) -> None:
        super().__init__(case["conv"], device, emulates=case["path"] == "emulator")
        self.drawn = case

    @property
    def case(self) -> Case:
        case, kind = self.drawn, KINDS[self.name]

        def make() -> torch.nn.Module:
            options = dict(case["options"])
            layer: torch.nn.Module = getattr(pyg, self.name)(
                *kind.arguments(case["features"], case["channels"]), **options
            )
            return layer.train(case["trains"])

        def call(layer: Any, given: Inputs) -> Any:
            rows = given.graph.num_src, given.graph.num_dst
            x = given.draw("x", rows[0], case["features"])
            x = (x, given.draw("x_dst", rows[1], case["features"])) if case["is_pair"] else x
            return layer(x, given.edge_index, *self._of_edges(given))

        return Case(make, call)

    def _of_edges(self, given: Inputs) -> tuple[Any, ...]:
        """Return what the call takes for each edge."""
        case, kind = self.drawn, KINDS[self.name]
        if kind.of_edges == "edge_type":
            return (torch.arange(given.graph.num_edges, device=given.device) % RELATIONS,)
        width = case["options"].get("edge_dim", case["options"].get("dim"))
        if kind.of_edges == "edge_attr" and width:
            return (given.draw("edge_attr", given.graph.num_edges, width),)
        return (given.edge_weight,) if kind.of_edges == "edge_weight" and case["weighted"] else ()


def command(case: Options) -> str:
    """Return the command that repeats a case."""
    marker = " -m cuda" if case["path"] == "cuda" else ""
    return f"python -m pytest tests/conformance/test_random.py{marker} --case '{json.dumps(case)}'"


def check(case: Options, device: str) -> None:
    """Compare outputs and gradients of a case with PyG's in float64.

    Raises:
        AssertionError: A result is further from float64 than it may be.
        NotApplicable: PyG's own layer does not take the case.
    """
    conv = Drawn(case, device)
    try:
        conv.check(graphs=[graph_of(case)], form=FORMS[case["form"]], dtype=getattr(torch, case["dtype"]))
    except AssertionError as error:
        if case["form"] == "int32" and (conv.why or not conv.launched):
            raise NotApplicable("PyTorch's operators read ids in int32 wrongly, and PyG's own code ran") from error
        raise
