"""What the relational convs on dicts share: one node set of all types, one graph with edge types as relations."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.joint import Part, joint_graph
from pyg_dfgnn.nn import edges
from pyg_dfgnn.nn.conv.relational import RelationalConv
from pyg_dfgnn.nn.gate import edge_reasons, module_reasons, reasons_on_device
from pyg_dfgnn.ops.relational import RowSet

EdgeTypes = Sequence[tuple[str, str, str]]


class Sets(NamedTuple):
    """The edge sets of a call.

    Attributes:
        edge_index: Edge type -> edges.
        relations: Edge type -> number, of all edge types of the conv.
        sizes: Node type -> number of nodes, in the order in which the joint nodes lie.
    """

    edge_index: dict[tuple[str, str, str], Any]
    relations: dict[tuple[str, str, str], int]
    sizes: dict[str, int]


class JointConv(RelationalConv):
    """A drop-in conv on dicts of features and edges.

    Its `_joint(x_dict, edge_index_dict, ...)` asks the gate; the call holds :class:`Sets` in place of edges.
    """

    def _ask_joint(
        self,
        x_dict: dict[str, Tensor],
        edge_index_dict: dict[tuple[str, str, str], Any],
        node_types: Sequence[str],
        edge_types: EdgeTypes,
        weight: Tensor,
        reasons: Sequence[str] = (),
    ) -> edges.Call:
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
        compiling = torch.compiler.is_compiling()
        against = [*reasons, *module_reasons(self, compiling)]
        against += self._compile_reasons((), "tensor") if compiling else []
        nodes = {name: x_dict[name] for name in node_types if name in x_dict}
        features = list(nodes.values())
        if not features or not all(isinstance(x, Tensor) and x.dim() == 2 for x in features):
            against.append("x_dict has no matrix [N, F] for each node type")
            return edges.Call(against, (), Sets(edge_index_dict, {}, {}), "dict")
        first = features[0]
        if any(x.dtype is not first.dtype or x.device != first.device for x in features):
            against.append("the features in x_dict have several dtypes or devices")
        against += self._parameter_reasons(first, weight)
        if self.flow != "source_to_target":
            against.append(f"flow is {self.flow!r}")
        sets = Sets(
            edge_index_dict,
            {name: number for number, name in enumerate(edge_types)},
            {name: x.size(0) for name, x in nodes.items()},
        )
        if not edge_index_dict:
            against.append("edge_index_dict is empty")
        for edge_type, edge_index in edge_index_dict.items():
            against += self._edge_set_reasons(sets, edge_type, edge_index, first.device)
        problem = self._storage_dtype(first), first.device
        against += reasons_on_device(type(self), first.device, *problem)
        return edges.Call(against, problem, sets, "dict")

    def _edge_set_reasons(
        self, sets: Sets, edge_type: tuple[str, str, str], edge_index: Any, device: torch.device
    ) -> list[str]:
        """Return what the edges of one type have against the fused forward."""
        source, target = edge_type[0], edge_type[-1]
        if edge_type not in sets.relations or source not in sets.sizes or target not in sets.sizes:
            return [f"edge type {edge_type} has no parameters, or no features at an end"]
        form, sizes = edges.form_of(edge_index), [sets.sizes[source], sets.sizes[target]]
        if form not in edges.FORMS:
            return [f"the edges of {edge_type} are a {form}"]
        if form != "tensor" and torch.compiler.is_compiling():
            return [f"the edges of {edge_type} are a {form} while compiling"]
        reasons = edge_reasons(edge_index, form, "source_to_target", device)
        if form == "Graph":
            edges.check_sizes(edge_index, "source_to_target", sizes, None)
            reasons += ["a StaticGraph in edge_index_dict"] if edge_index.is_static else []
        elif form != "tensor":
            declared = edges.declared_sizes(edge_index, form, "source_to_target")
            if any(have is not None and have != want for have, want in zip(declared, sizes)):
                reasons.append(f"the edges of {edge_type} are between {declared} nodes and the features of {sizes}")
        return reasons

    def _graph(self, call: edges.Call) -> Graph | RowSet:
        edge_index, relations, sizes = call.edge_index
        first = dict(zip(sizes, accumulate(sizes.values(), initial=0)))
        num_nodes, num_relations = sum(sizes.values()), len(relations)
        if torch.compiler.is_compiling():
            numbers = [num_nodes, num_relations]
            for name in edge_index:
                numbers += [relations[name], first[name[0]], sizes[name[0]], first[name[-1]], sizes[name[-1]]]
            return RowSet("joint", tuple(edge_index.values()), tuple(numbers))
        parts = [
            Part(index, relations[name], *((first[node], sizes[node]) for node in (name[0], name[-1])))
            for name, index in edge_index.items()
        ]
        return joint_graph(parts, num_nodes, num_relations)

    def _fall_back(self, call: edges.Call, x: Any, *args: Any, **kwargs: Any) -> Any:
        plain = {
            name: edges.rows_of(edge_index, "source_to_target") if isinstance(edge_index, Graph) else edge_index
            for name, edge_index in call.edge_index.edge_index.items()
        }
        return super()._fall_back(call._replace(edge_index=plain), x, *args, **kwargs)
