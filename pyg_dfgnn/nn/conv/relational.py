"""Base class of the relational convs: the question to the gate, the graph with its relations, the run of a program."""

import inspect
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.fallback import FEW, NO_DEVICE
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.nn import conv_call
from pyg_dfgnn.nn.conv.aggregation import is_matrix, values_of
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import FusedConv, edges_lack_kernels, is_multiple
from pyg_dfgnn.nn.registry import Description
from pyg_dfgnn.nn.relational_program import RelationalProblem, dtype_reasons, explain, reasons_of_problem, run
from pyg_dfgnn.ops.relational import RowSet, index_space_of
from pyg_dfgnn.ops.visits import MEASURED_NUMBERS, is_new, is_new_outside_captures, may_be_left, may_not_wait

_FEW_NUMBERS = 1 << 24
"""Numbers in rows of edges of one relation up to which PyG's code takes less of the host than a program."""
FEW_RELATIONS = 8
"""Relations up to which PyG's loop takes less of the host than the lists of new edges."""
_LISTED_NUMBERS = 2 * MEASURED_NUMBERS
"""Numbers that PyG's code writes for all edges from which it takes longer than lists of new edges."""


class RelationalConv(FusedConv):
    """A drop-in conv on a program of :mod:`pyg_dfgnn.ir.layers`.

    Its `_program(call, graph, *arguments of forward)` returns the layer of :func:`pyg_dfgnn.ir.layers.layer_of` and its
    inputs. While torch.compile traces, a :class:`~pyg_dfgnn.ops.relational.RowSet` stands for the graph.
    """

    _problem_type = staticmethod(lambda dtype, device, *_: RelationalProblem(dtype, device))
    _reasons_against = staticmethod(reasons_of_problem)
    _forms: tuple[str, ...] = ("tensor", "EdgeIndex", "SparseTensor", "Graph")
    """Forms of edges that PyG's conv takes, and a `Graph`."""
    _loop_width = ""
    """The attribute with the numbers in the rows that PyG's loop over the relations writes; empty where it has none."""
    _numbers_per_edge: Any = None
    """A method: how many numbers PyG's code writes for each edge; None where kernels take new edges at once."""
    _are_values_types = True
    """Whether the values of a sparse adjacency are relations."""

    def _problem_fields(self, x: Tensor | None = None) -> tuple[Any, ...]:
        return ()

    def _program(
        self, call: ConvCall, graph: Graph | RowSet, *args: Any, **kwargs: Any
    ) -> tuple[Layer, dict[str, Tensor]]:
        raise NotImplementedError

    def _planned(self, problem: Any, call: ConvCall, *args: Any, **kwargs: Any) -> tuple[Graph, Any]:
        graph = self._graph(call)
        assert isinstance(graph, Graph)
        layer, inputs = self._program(call, graph, *args, **kwargs)
        return graph, explain(layer, index_space_of(graph), inputs, self._outputs(call))

    def _is_looped(self, edge_index: Any) -> bool:
        """Return whether PyG's loop over the relations takes a call in less time."""
        # PyG's loop waits for the device.
        if self.num_relations > FEW_RELATIONS or may_not_wait(edge_index):
            return False
        if self._is_one_of_few(edge_index):
            return True
        return is_new(self, edge_index) and edge_index.size(-1) * getattr(self, self._loop_width) < MEASURED_NUMBERS

    def _is_one_of_few(self, edge_index: Any) -> bool:
        """Return whether there is one relation, with few edges."""
        if self.num_relations != 1 or not may_be_left(edge_index):
            return False
        return edge_index.size(-1) * getattr(self, self._loop_width) < _FEW_NUMBERS  # type: ignore[no-any-return]

    def _are_few(self, edge_sets: Collection[Any], beside: int = 0) -> bool:
        """Return whether PyG's code takes new edges in less time than their lists are made in.

        Args:
            edge_sets: The edges of the call; lists are made of all of them where one set is new.
            beside: Numbers that PyG's code writes beside those for each edge.
        """
        if self._numbers_per_edge is None or not all(type(edges) is Tensor for edges in edge_sets):
            return False
        # PyG's code may wait for the device.
        if not any([is_new_outside_captures(self, edges) for edges in edge_sets]):
            return False
        numbers = sum(edges.size(-1) for edges in edge_sets) * int(self._numbers_per_edge()) + beside
        return numbers < _LISTED_NUMBERS

    def _describe(self, device: torch.device | None, *args: Any, **kwargs: Any) -> Description:
        description = super()._describe(device, *args, **kwargs)
        if description.reasons or not self._loop_width:
            return description
        arguments = inspect.signature(self.forward).bind(*args, **kwargs).arguments
        if not self._is_one_of_few(arguments["edge_index"]):
            return description
        return Description(description.layer, FEW, description.problem)

    def _outputs(self, call: ConvCall) -> Sequence[str] | None:
        """Return which outputs of the program a call reads; None for all."""
        return None

    def _check_support(
        self,
        nodes: tuple[Tensor | None, Tensor | None],
        edge_index: Adj | Graph,
        edge_type: OptTensor,
        weight: Tensor,
        reasons: Sequence[str] = (),
        *,
        typed: bool = True,
        **options: Any,
    ) -> ConvCall:
        """Ask the gate about a call.

        Args:
            nodes: Features of the nodes that row 0 and row 1 of `edge_index` point to.
            edge_index: Any form that PyG's conv takes, or a `Graph`.
            edge_type: Relation of each edge; None where the edges have it.
            weight: A parameter, whose dtype the features need.
            reasons: What the conv has against the fused forward.
            typed: Whether the conv reads the relations.
            options: Further arguments of the gate.

        Returns:
            The call, with its reasons.
        """
        if not reasons and self._are_few((edge_index,)):
            return ConvCall(FEW, (), edge_index, "tensor", edge_type=edge_type)
        if edges_lack_kernels(edge_index):
            return ConvCall([NO_DEVICE], (), edge_index, "tensor", edge_type=edge_type)
        against = [*reasons, *self._parameter_reasons(nodes[0], weight)]
        form = conv_call.form_of(edge_index)
        if form in conv_call.FORMS and form not in self._forms:
            against.append(f"edge_index is a {form} tensor" if form == "torch.sparse" else f"edge_index is a {form}")
        elif not typed:
            edge_type = None
        elif self._are_values_types and is_matrix(form) and edge_type is None:
            edge_type = values_of(edge_index)
        if edge_type is not None:
            if edge_type.dtype not in (torch.int64, torch.int32) or edge_type.dim() != 1:
                against.append(f"edge_type is no int64 or int32 vector ({edge_type.dtype}, {list(edge_type.shape)})")
        elif typed and (form != "Graph" or edge_index.relation is None):
            against.append("edge_type is missing")
        if form == "Graph" and edge_index.is_static:
            against.append("a RefilledGraph has no relations")
        call = self._gate((), nodes, edge_index, reasons=against, **options)
        return call.replace(edge_type=edge_type)

    def _parameter_reasons(self, x: Tensor | None, weight: Tensor) -> list[str]:
        """Return what the aggregation and the dtypes of features and parameters have against the fused forward."""
        reasons = ["several aggregations"] if is_multiple(self.aggr_module) else []
        return [*reasons, *dtype_reasons(x, weight)] if isinstance(x, Tensor) else reasons

    def _compile_reasons(self, tensors: Sequence[Tensor | None], form: str, *_: Any) -> list[str]:
        return [] if form == "tensor" else [f"a {form} while compiling"]

    def _count_relations(self) -> int:
        return self._integer(self.num_relations, "num_relations")

    def _graph(self, call: ConvCall) -> Graph | RowSet:
        """Return the graph of a call without reasons, with its relations; while torch.compile traces, what names it.

        Raises:
            ValueError: Relations are out of range, or a `Graph` has another number of them.
        """
        edge_index, edge_type, num_relations = call.edge_index, call.edge_type, self._count_relations()
        sizes = call.num_src, call.num_dst
        if torch.compiler.is_compiling():
            transposed = self.flow != "source_to_target"
            assert edge_type is not None
            return RowSet("relations", (edge_index, edge_type), (*sizes, num_relations), transposed)
        if call.form in ("tensor", "EdgeIndex"):
            return Graph.of(edge_index, *sizes, flow=self.flow, edge_type=edge_type, num_relations=num_relations)
        graph: Graph = edge_index if call.form == "Graph" else Graph.of(edge_index, *sizes)
        if edge_type is not None:
            return Graph.of(graph.edge_index, *sizes, edge_type=edge_type, num_relations=num_relations)
        if graph.num_relations != num_relations:
            raise ValueError(
                f"'edge_index' needs a Graph with num_relations={num_relations} (got {graph.num_relations})"
            )
        return graph.on_this_stream()

    def _static_number(self, module: torch.nn.Module, name: str) -> float:
        """Return a number of this module or of one of its parts, a constant to torch.compile, also with dynamic=True.

        Args:
            module: The module that has the number.
            name: Where the number is, from this module on.
        """
        number: float = getattr(module, name.rpartition(".")[2])
        if not torch.compiler.is_compiling():
            return number
        constant = self._constant(name)
        # The comparison compiles another number anew.
        if number != constant:
            raise AssertionError(name)
        return constant

    def _integer(self, number: int, name: str) -> int:
        """Return a number of this module as an int: PyG's constructors take other integers too.

        Args:
            number: The number.
            name: Where it is, from this module on.
        """
        return number if type(number) is int else int(self._constant(name))

    @torch.compiler.assume_constant_result
    def _constant(self, name: str) -> float:
        return float(attrgetter(name)(self))

    def _run(self, call: ConvCall, graph: Graph | RowSet, layer: Layer, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of a program, in PyG's dtype."""
        rows = graph if isinstance(graph, RowSet) else index_space_of(graph)
        return run(layer, rows, inputs, call.problem[0], self._outputs(call))

    def _types_for_pyg(self, call: ConvCall, edge_type: OptTensor) -> OptTensor:
        """Return the relations as PyG's forward takes them, which a `Graph` may hold."""
        if call.form == "Graph" and edge_type is None and call.edge_index.relation is not None:
            return call.edge_index.relation.long()
        return edge_type
