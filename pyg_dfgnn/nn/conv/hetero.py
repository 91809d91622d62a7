"""Base class of the relational convs on dicts: one node set of all types, one graph with edge types as relations."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from pyg_dfgnn.fallback import FEW
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.hetero import joint_graph, known_joint
from pyg_dfgnn.nn import conv_call
from pyg_dfgnn.nn.conv.relational import FEWEST_RELATIONS, LISTED_NUMBERS, EdgeRows, RelationalConv, are_few_pairs
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import edge_reasons, module_reasons, reasons_on_device
from pyg_dfgnn.ops.relational import RowSet, joint_pairs_of
from pyg_dfgnn.ops.visits import is_new_outside_captures

_PAIRED_NUMBERS = 1 << 24
"""Numbers in rows of edges and of pairs from which pairs of relations with nodes of other types take much memory."""


class HeteroEdges(NamedTuple):
    """The edge sets of a call.

    Attributes:
        edge_index: Edge type -> edges.
        relations: Edge type -> number, of all edge types of the conv.
        sizes: Node type -> number of nodes, in the order in which the joint nodes lie.
        numbers: What :func:`~pyg_dfgnn.graph.hetero.joint_graph` takes beside the edges.
        graph: What it has made of these edges before; None if that is nothing.
    """

    edge_index: dict[EdgeType, Any]
    relations: Mapping[EdgeType, int]
    sizes: dict[str, int]
    numbers: tuple[int, ...] = ()
    graph: Graph | None = None


class _Numbered(NamedTuple):
    """`relations` and `numbers` of :class:`HeteroEdges`, and edge types without parameters or features at an end."""

    relations: Mapping[EdgeType, int]
    numbers: tuple[int, ...]
    unknown: tuple[EdgeType, ...]


def _numbered(
    names: tuple[EdgeType, ...], edge_types: tuple[EdgeType, ...], sizes: tuple[tuple[str, int], ...]
) -> _Numbered:
    counts = dict(sizes)
    first = dict(zip(counts, accumulate(counts.values(), initial=0)))
    relations = {name: number for number, name in enumerate(edge_types)}
    unknown = tuple(n for n in names if n not in relations or n[0] not in counts or n[-1] not in counts)
    numbers = [sum(counts.values()), len(relations)]
    for name in names if not unknown else ():
        numbers += [relations[name], first[name[0]], counts[name[0]], first[name[-1]], counts[name[-1]]]
    return _Numbered(relations, tuple(numbers), unknown)


_numbered_before = lru_cache(64)(_numbered)


class JointConv(RelationalConv):
    """A drop-in conv on dicts of features and edges.

    Its `_ask_joint(x_dict, edge_index_dict, ...)` asks the gate; the call holds :class:`HeteroEdges` in place of edges.
    """

    _few_relations = 0
    """Edge types up to which PyG's loop over them takes less of the host than the lists of new edges."""

    def _is_short(self, edge_index_dict: dict[EdgeType, Any]) -> bool:
        """Return whether PyG's loop over the edge types of a call is short."""
        return len(edge_index_dict) <= self._few_relations

    def _mapped(self, x_dict: dict[str, Any], edge_types: int) -> int:
        """Return how many numbers PyG's code writes as it maps the nodes for each edge type."""
        nodes = sum(x.size(0) for x in x_dict.values() if isinstance(x, Tensor) and x.dim() == 2)
        return 2 * self.out_channels * edge_types * nodes  # type: ignore[no-any-return]

    def _numbers_per_edge(self) -> int:
        # PyG gathers what a source sends, and weights it.
        return 3 * self.out_channels  # type: ignore[no-any-return]

    def _ask_joint(
        self,
        x_dict: dict[str, Tensor],
        edge_index_dict: dict[EdgeType, Any],
        node_types: Sequence[str],
        edge_types: Sequence[EdgeType],
        weight: Tensor,
        reasons: Sequence[str] = (),
    ) -> ConvCall:
        """Ask the gate about a call.

        Args:
            x_dict: Features by node type.
            edge_index_dict: Edges by edge type.
            node_types: Node types of the conv.
            edge_types: Edge types of the conv, whose places number the relations.
            weight: A parameter, whose dtype the features need.
            reasons: What the conv has against the fused forward.

        Returns:
            The call, with its reasons.

        Raises:
            ValueError: A `Graph` has other numbers of nodes than the features.
        """
        given = edge_index_dict.values()
        is_new = not reasons and all(type(edges) is Tensor for edges in given)
        # All sets are asked, since each is known by its visits.
        is_new = is_new and any([is_new_outside_captures(self, edges) for edges in given])
        on_pairs = is_new and self._fits_joint_pairs(x_dict, given, len(edge_types))
        is_left = is_new and not on_pairs and self._is_short(edge_index_dict)
        if is_left and self._are_few(given, LISTED_NUMBERS, self._mapped(x_dict, len(given))):
            return ConvCall(FEW, (), HeteroEdges(edge_index_dict, {}, {}), "dict")
        compiling = torch.compiler.is_compiling()
        against = [*reasons, *module_reasons(self, compiling)]
        against += self._compile_reasons((), "tensor") if compiling else []
        nodes = {name: x_dict[name] for name in node_types if name in x_dict}
        features = list(nodes.values())
        if not features or not all(isinstance(x, Tensor) and x.dim() == 2 for x in features):
            against.append("x_dict has no matrix [N, F] for each node type")
            return ConvCall(against, (), HeteroEdges(edge_index_dict, {}, {}), "dict")
        first = features[0]
        if any(x.dtype is not first.dtype or x.device != first.device for x in features):
            against.append("the features in x_dict have several dtypes or devices")
        against += self._parameter_reasons(first, weight)
        if self.flow != "source_to_target":
            against.append(f"flow is {self.flow!r}")
        sizes = {name: x.size(0) for name, x in nodes.items()}
        number = _numbered if compiling else _numbered_before
        relations, numbers, unknown = number(tuple(edge_index_dict), tuple(edge_types), tuple(sizes.items()))
        against += [f"edge type {name} has no parameters, or no features at an end" for name in unknown]
        if not edge_index_dict:
            against.append("edge_index_dict is empty")
        edge_sets = tuple(edge_index_dict.values())
        graph = None if compiling or unknown else known_joint(edge_sets, numbers)
        sets = HeteroEdges(edge_index_dict, relations, sizes, numbers, graph)
        # No graph is made of edges that something is against.
        if graph is None or graph.device != first.device:
            for edge_type in (name for name in edge_index_dict if name not in unknown):
                against += self._edge_set_reasons(sets, edge_type, first.device)
        problem = self._storage_dtype(first), first.device
        against += reasons_on_device(type(self), first.device, *problem)
        return ConvCall(against, problem, sets, "dict", by_torch=on_pairs)

    def _fits_joint_pairs(self, x_dict: dict[str, Any], edge_sets: Collection[Tensor], relations: int) -> bool:
        """Return whether operators of torch take new edges with a pair of each relation and node, of whatever type."""
        if self._width_of_pairs is None or not all(x.dtype is torch.int64 and x.dim() == 2 for x in edge_sets):
            return False
        features = x_dict.values()
        if not all(
            isinstance(x, Tensor) and x.dim() == 2 and self._storage_dtype(x) is torch.float32 for x in features
        ):
            return False
        nodes, edges = sum(x.size(0) for x in features), sum(edges.size(1) for edges in edge_sets)
        is_long = len(edge_sets) >= FEWEST_RELATIONS
        return is_long and are_few_pairs(relations, nodes, edges, self._width_of_pairs(), _PAIRED_NUMBERS)

    def _edge_set_reasons(self, sets: HeteroEdges, edge_type: EdgeType, device: torch.device) -> list[str]:
        """Return what the edges of one type have against the fused forward."""
        edge_index, sizes = sets.edge_index[edge_type], [sets.sizes[edge_type[0]], sets.sizes[edge_type[-1]]]
        form = conv_call.form_of(edge_index)
        if form not in conv_call.FORMS:
            return [f"the edges of {edge_type} are a {form}"]
        if form != "tensor" and torch.compiler.is_compiling():
            return [f"the edges of {edge_type} are a {form} while compiling"]
        reasons = edge_reasons(edge_index, form, "source_to_target", device)
        if form == "Graph":
            conv_call.check_sizes(edge_index, "source_to_target", sizes, None)
            reasons += ["a RefilledGraph in edge_index_dict"] if edge_index.is_static else []
        elif form != "tensor":
            declared = conv_call.declared_sizes(edge_index, form, "source_to_target")
            if any(have is not None and have != want for have, want in zip(declared, sizes)):
                reasons.append(f"the edges of {edge_type} are between {declared} nodes and the features of {sizes}")
        return reasons

    def _graph(self, call: ConvCall) -> EdgeRows:
        sets: HeteroEdges = call.edge_index
        edge_sets = tuple(sets.edge_index.values())
        if torch.compiler.is_compiling():
            return RowSet("joint", edge_sets, sets.numbers)
        if call.by_torch:
            return joint_pairs_of(edge_sets, sets.numbers)
        return joint_graph(edge_sets, sets.numbers) if sets.graph is None else sets.graph

    def _fall_back(self, call: ConvCall, x: Any, *args: Any, **kwargs: Any) -> Any:
        plain = {
            name: conv_call.edges_in_flow(edge_index, "source_to_target")
            if isinstance(edge_index, Graph)
            else edge_index
            for name, edge_index in call.edge_index.edge_index.items()
        }
        return super()._fall_back(call.replace(edge_index=plain), x, *args, **kwargs)
