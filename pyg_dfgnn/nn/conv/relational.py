"""Base class of the relational convs: the question to the gate, the graph with its relations, the run of a program."""

import inspect
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.fallback import CPU, FEW, NO_DEVICE, is_told_of_cpu
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import DensePairs
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.nn import conv_call
from pyg_dfgnn.nn.conv.aggregation import is_matrix, values_of
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import FusedConv, edges_lack_kernels, is_multiple
from pyg_dfgnn.nn.registry import Description
from pyg_dfgnn.nn.relational_program import RelationalProblem, dtype_reasons, explain, reasons_of_problem, run
from pyg_dfgnn.ops.relational import MOST_NUMBERS, RowSet, index_space_of, pairs_of
from pyg_dfgnn.ops.visits import MEASURED_NUMBERS, is_new_outside_captures, is_refilled, may_be_few, may_be_left

EdgeRows: TypeAlias = Graph | DensePairs | RowSet
"""The edges of a call as a program takes them."""
_FEW_NUMBERS = 1 << 24
"""Numbers in rows of edges of one relation up to which PyG's code takes less of the host than a program."""
FEW_RELATIONS = 8
"""Relations up to which PyG's loop takes less of the host than the lists of new edges, where pairs are too many."""
LISTED_NUMBERS = 2 * MEASURED_NUMBERS
"""Numbers that PyG's code writes for all edges from which it takes longer than lists of new edges."""
_LOOPED_NUMBERS = 1 << 25
"""Numbers in rows of edges and pairs from which PyG's loop takes so much less memory that it has the new edges."""
FEWEST_RELATIONS = 4
"""Relations below which PyG's loop takes less of the host than operators on all pairs."""
_PAIRS_PER_EDGE = 16


def are_few_pairs(relations: int, nodes: int, edges: int, width: int, most: int) -> bool:
    """Return whether all pairs of relations and nodes, with two rows for each edge, hold fewer numbers than `most`.

    Of few edges between many nodes most pairs would be rows for nothing.
    """
    pairs = relations * nodes
    return pairs <= _PAIRS_PER_EDGE * edges and (pairs + 2 * edges) * width < most


def _type_reasons(edge_type: Tensor | None) -> list[str]:
    """Return what is wrong with the relations of edges, one integer for each."""
    if edge_type is None:
        return ["edge_type is missing"]
    if edge_type.dtype in (torch.int64, torch.int32) and edge_type.dim() == 1:
        return []
    return [f"edge_type is no int64 or int32 vector ({edge_type.dtype}, {list(edge_type.shape)})"]


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
    _width_of_pairs: Any = None
    """A method: how many numbers the row of an edge or of a pair has; None where pairs without edges mean something."""
    # Loops over relations break a graph; what is no loop has a rule of its own.
    _is_compiled_few = staticmethod(lambda edge_index, width: False)
    _is_fused = False
    """Whether torch.compile makes a few kernels of PyG's code for new edges."""
    _are_values_types = True
    """Whether the values of a sparse adjacency are relations."""

    def _problem_fields(self, x: Tensor | None = None) -> tuple[Any, ...]:
        return ()

    def _program(self, call: ConvCall, graph: EdgeRows, *args: Any, **kwargs: Any) -> tuple[Layer, dict[str, Tensor]]:
        raise NotImplementedError

    def _planned(self, problem: Any, call: ConvCall, *args: Any, **kwargs: Any) -> tuple[Graph, Any]:
        graph = self._graph(call)
        assert isinstance(graph, Graph)
        layer, inputs = self._program(call, graph, *args, **kwargs)
        return graph, explain(layer, index_space_of(graph), inputs, self._outputs(call))

    def _is_one_of_few(self, edge_index: Any) -> bool:
        """Return whether there is one relation, with few edges."""
        if self.num_relations != 1 or not may_be_left(edge_index):
            return False
        return edge_index.size(-1) * getattr(self, self._loop_width) < _FEW_NUMBERS  # type: ignore[no-any-return]

    def _are_few(self, edge_sets: Collection[Any], most: int, beside: int = 0) -> bool:
        """Return whether PyG's code takes new edges in less time than their lists are made in.

        Args:
            edge_sets: The edges of the call; lists are made of all of them where one set is new.
            most: Numbers that it writes from which it takes longer.
            beside: Numbers that it writes beside those for each edge.
        """
        return sum(edges.size(-1) for edges in edge_sets) * int(self._numbers_per_edge()) + beside < most

    def _loops(self) -> bool:
        """Return whether PyG's code is a loop over relations, which waits for the device in each."""
        return bool(self._loop_width)

    def _is_compiled(self, edge_index: Any) -> bool:
        """Return whether torch.compile makes a few kernels of PyG's code, whether the edges are new or not."""
        if not self._is_fused or self._loops() or not torch.compiler.is_compiling():
            return False
        return type(edge_index) is Tensor and may_be_few(edge_index) and self._are_few((edge_index,), LISTED_NUMBERS)

    def _fits_pairs(self, nodes: tuple[Tensor | None, Tensor | None], edge_index: Any, edge_type: OptTensor) -> bool:
        """Return whether operators of torch take new edges with a pair of each node and relation."""
        if self._width_of_pairs is None or edge_type is None or edge_index.dtype is not torch.int64:
            return False
        ends: tuple[Any, ...] = nodes
        if not all(isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point() for x in ends):
            return False
        if edge_index.dim() != 2 or any(self._storage_dtype(x) is not torch.float32 for x in ends):
            return False
        sizes = [x.size(0) for x in ends]
        # A loop holds the edges of one relation at a time.
        most = _LOOPED_NUMBERS if self._loops() else MOST_NUMBERS
        return are_few_pairs(self._count_relations(), sum(sizes), edge_index.size(1), self._width_of_pairs(), most)

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
        if edges_lack_kernels(edge_index):
            wrong = conv_call.id_reasons(edge_index)
            if typed and edge_index.layout is torch.strided:
                wrong += _type_reasons(edge_type)
            known = not wrong and is_told_of_cpu()
            return ConvCall(CPU if known else [NO_DEVICE, *wrong], (), edge_index, "tensor", edge_type=edge_type)
        is_new = not reasons and self._numbers_per_edge is not None and is_new_outside_captures(self, edge_index)
        loops = self._loops()
        is_pygs = is_new and not loops and self._are_few((edge_index,), MEASURED_NUMBERS)
        # The edges of a captured step are new in each batch, and it cannot wait.
        is_refill = not reasons and is_refilled() and type(edge_index) is Tensor
        may_pair = typed and (is_refill or (is_new and (not loops or self._count_relations() >= FEWEST_RELATIONS)))
        on_pairs = may_pair and not is_pygs and self._fits_pairs(nodes, edge_index, edge_type)
        is_pygs = is_pygs or (is_new and not on_pairs and self._are_few((edge_index,), LISTED_NUMBERS))
        if is_pygs or self._is_compiled(edge_index):
            return ConvCall(FEW, (), edge_index, "tensor", edge_type=edge_type)
        against = [*reasons, *self._parameter_reasons(nodes[0], weight)]
        form = conv_call.form_of(edge_index)
        if form in conv_call.FORMS and form not in self._forms:
            against.append(f"edge_index is a {form} tensor" if form == "torch.sparse" else f"edge_index is a {form}")
        elif not typed:
            edge_type = None
        elif self._are_values_types and is_matrix(form) and edge_type is None:
            edge_type = values_of(edge_index)
        if edge_type is not None:
            against += _type_reasons(edge_type)
        elif typed and (form != "Graph" or edge_index.relation is None):
            against += _type_reasons(None)
        if form == "Graph" and edge_index.is_static:
            against.append("a RefilledGraph has no relations")
        call = self._gate((), nodes, edge_index, reasons=against, **options)
        return call.replace(edge_type=edge_type, by_torch=on_pairs)

    def _parameter_reasons(self, x: Tensor | None, weight: Tensor) -> list[str]:
        """Return what the aggregation and the dtypes of features and parameters have against the fused forward."""
        reasons = ["several aggregations"] if is_multiple(self.aggr_module) else []
        return [*reasons, *dtype_reasons(x, weight)] if isinstance(x, Tensor) else reasons

    def _compile_reasons(self, tensors: Sequence[Tensor | None], form: str, *_: Any) -> list[str]:
        return [] if form == "tensor" else [f"a {form} while compiling"]

    def _count_relations(self) -> int:
        return self._integer(self.num_relations, "num_relations")

    def _graph(self, call: ConvCall) -> EdgeRows:
        """Return the graph of a call without reasons, with its relations, or what stands for it.

        While torch.compile traces, that is what names the graph; of edges that are new all pairs.

        Raises:
            ValueError: Relations are out of range, or a `Graph` has another number of them.
        """
        edge_index, edge_type, num_relations = call.edge_index, call.edge_type, self._count_relations()
        sizes = call.num_src, call.num_dst
        if torch.compiler.is_compiling():
            transposed = self.flow != "source_to_target"
            assert edge_type is not None
            return RowSet("relations", (edge_index, edge_type), (*sizes, num_relations), transposed)
        if call.by_torch:
            assert edge_type is not None
            return pairs_of(edge_index, edge_type, (*sizes, num_relations), self.flow != "source_to_target")
        if call.form in ("tensor", "EdgeIndex"):
            edge_index = edge_index if call.form == "tensor" else edge_index.as_tensor()
            transposed = self.flow != "source_to_target"
            return Graph.resolve(edge_index, edge_type, *sizes, False, transposed, num_relations)
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

    def _run(self, call: ConvCall, graph: EdgeRows, layer: Layer, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of a program, in PyG's dtype."""
        rows = index_space_of(graph) if isinstance(graph, Graph) else graph
        return run(layer, rows, inputs, call.problem[0], self._outputs(call))

    def _types_for_pyg(self, call: ConvCall, edge_type: OptTensor) -> OptTensor:
        """Return the relations as PyG's forward takes them, which a `Graph` may hold."""
        if call.form == "Graph" and edge_type is None and call.edge_index.relation is not None:
            return call.edge_index.relation.long()
        return edge_type
