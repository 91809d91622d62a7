"""One op core: from the statement of an op to its checks, prepared launches and calls.

An :class:`Op` joins a statement (:mod:`pyg_dfgnn.statements.op`) with the kernels of a family. A call with arguments
like those of an earlier call finds its :class:`PreparedOp` with the graph; a first call checks its arguments, chooses
schedules and keeps them. Each group of passes compiles to one Python function that allocates, launches and returns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.core import Family
from pyg_dfgnn.errors import check_device, check_dtype, check_range, check_shape, check_tensor
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.forms import check_edge_index
from pyg_dfgnn.ops.eager import is_eager, is_plain, needs_grad
from pyg_dfgnn.ops.function import (
    INFER,
    STATS,
    TRAIN,
    EdgeValue,
    OpCall,
    ProgramName,
    apply_fused,
    ops,
    run_program,
    run_traced,
    runner_of,
    wide,
)
from pyg_dfgnn.ops.graph import may_run_again, unmeasured_graph
from pyg_dfgnn.ops.host_codegen import CallShape, count_of
from pyg_dfgnn.ops.prepared import PreparedOp, PreparedPass, plans_of, present_of, recall, remember
from pyg_dfgnn.ops.visits import COMPILED_VISITS
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.settings import Settings, current
from pyg_dfgnn.statements.op import FEATURES, Precomputed, Statement, TensorSpec

GraphLike = Graph | EdgeSet
FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_known_program = cache(ProgramName.of)
_LETTERS = {"targets": "N_dst", "sources": "N_src", "edges": "E"}


class _TracedCall(NamedTuple):
    """Facts of a traced call that its operator needs."""

    problem: Any
    heads: int
    drops: bool
    device: torch.device
    casts: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Op:
    """A statement with the kernels that run it.

    Attributes:
        statement: What the op is.
        family: Which kernels there are.
        problem: Makes the problem of a call from (inputs by name, numbers by name, heads, channels).
        prepare: Makes a :class:`PreparedPass` from (problem, direction, plan, graph, flags).
        derive: Makes the function that computes a precomputed argument from its source, of (precomputed, problem).
        optional: Returns the flags of values that the forward pass of a problem leaves beyond those that it must, from
            (problem, graph, settings); with no graph, those that it may be asked to leave while torch.compile traces.
        again: Returns, of (:class:`~pyg_dfgnn.ops.function.OpCall`, inputs by name, gradients of the outputs), the
            gradient of each input that needs one by kernels that have derivatives, or None where none do.
    """

    statement: Statement
    family: Family
    problem: Callable[[Mapping[str, Any], Mapping[str, float], int, int], Any]
    prepare: Callable[[Any, str, Any, Graph, frozenset[str]], PreparedPass]
    derive: Callable[[Precomputed, Any], Callable[[Tensor], Tensor]] | None = None
    optional: Callable[[Any, Graph | None, Settings], frozenset[str]] = lambda *_: frozenset()
    again: Callable[..., Mapping[str, Tensor] | None] = lambda *_: None

    def __post_init__(self) -> None:
        ops[self.statement.name] = self
        # Known from here on: torch.compile cannot trace the first look at a cached property.
        _ = self.statement.input_names, self.statement.values, self._value_place, self.edge_place, self._domains

    def __reduce__(self) -> tuple[Any, ...]:
        # Found by its name in any process; a copy is the op itself.
        return runner_of, (self.statement.name,)

    def shape(self, problem: Any, graph: Graph, heads: int, channels: int, present: frozenset[str]) -> CallShape:
        """Return what the functions of the op on a graph are compiled for."""
        return CallShape(
            self.statement,
            problem.device.type,
            graph.is_static or (not graph.is_measured and graph.self_loops),
            heads,
            channels,
            getattr(problem, "edge_channels", 0),
            present,
            lambda precomputed: self.derive(precomputed, problem),  # type: ignore[misc]
        )

    @cached_property
    def edge_place(self) -> int:
        """Place of the input whose gradient is computed only where it is needed."""
        places = [each.input for each in self.statement.gradients if each.when == "edge_grad"]
        return self.statement.input_names.index(places[0]) if places else 0

    def gradient_names(self, flags: frozenset[str], present: Sequence[bool]) -> list[str]:
        """Return the inputs that a variant's backward passes give a gradient of, in the order of the inputs."""
        names = self.statement.input_names
        with_gradient = {each.input for each in self.statement.gradients if not each.when or each.when in flags}
        if "shared" in flags:
            with_gradient -= {"target"}
        return [name for name, is_there in zip(names, present, strict=True) if is_there and name in with_gradient]

    def __call__(
        self,
        graph: GraphLike,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        *,
        heads: int | None = None,
        concat: bool = False,
        shared: bool = False,
        with_edge_value: bool = False,
        exact: bool = False,
    ) -> Any:
        """Run the op.

        Args:
            graph: The edges.
            tensors: The inputs in the order of the statement; None for an absent one.
            numbers: The numbers in the order of the statement.
            heads: Number of heads H of feature tensors [N, H * C]; None for tensors [N, H, C].
            concat: Return the heads side by side.
            shared: Whether target and value are one tensor, which is given as the value alone.
            with_edge_value: Also return the value per edge.
            exact: Return the output of features in 16 bits in float32, not rounded, where nothing traces and without
                a value per edge.

        Returns:
            The output, or a tuple of several; with ``with_edge_value`` also the value per edge.

        Raises:
            TypeError: An input has the wrong type or dtype.
            ValueError: A shape, device or number does not fit.
        """
        signature = self._signature(graph, tensors, numbers, heads, shared)
        known = recall(graph, signature)
        if known is None:
            graph, tensors, known = self._first_call(graph, tensors, numbers, heads, shared, signature)
            if known is None:
                if isinstance(graph, EdgeSet) and not graph.by_torch:
                    graph = Graph.resolve(*graph.key)
                out, edge_value = self.in_torch(graph, wide(tensors), numbers, heads, shared)
                out = self._finished(out, tensors, concat)
                return (out, edge_value) if with_edge_value else out
        elif known.casts:
            tensors = cast(tensors, known.casts)
        if known.drops and tensors[-1] is None:
            tensors = (*tensors[:-1], draw_seed(known.device))
        if not isinstance(known, PreparedOp):
            return self._traced(graph, tensors, numbers, known, concat, shared, with_edge_value)
        assert isinstance(graph, Graph)
        exact = exact and known.keeps_exact and not with_edge_value
        if needs_grad(tensors):
            result = apply_fused(OpCall(known, graph, numbers, concat, shared, with_edge_value, exact), *tensors)
            if not with_edge_value:
                return result
        else:
            mode = TRAIN if exact else STATS if with_edge_value else INFER
            result = known.forward(mode, concat, shared, graph)(graph, *tensors, *numbers)
            if exact:
                return result[-1]
            if not with_edge_value:
                return self._outputs(result)
        out, count = self._outputs(result), known.num_outputs
        stats = result[count : count + known.num_stats(shared)]
        run = partial(known.edge_pass(shared, graph), *tensors, *stats, *numbers)
        return out, EdgeValue.apply(run, self._edge_reference(graph, numbers, known.heads, shared), *tensors)

    def _outputs(self, results: Sequence[Tensor]) -> Any:
        """Return the output, or a tuple of several, of what a forward pass returns."""
        count = len(self.statement.outputs)
        return results[0] if count == 1 else tuple(results[:count])

    def _finished(self, out: Any, tensors: Sequence[Tensor | None], concat: bool) -> Any:
        """Return the output of :meth:`in_torch`, or a tuple of several, in the dtype of the features."""
        value = tensors[self._value_place]
        assert value is not None
        parts = [part.to(value.dtype) for part in (out if isinstance(out, tuple) else (out,))]
        return self._outputs([part.flatten(1) for part in parts] if concat else parts)

    def _edge_reference(
        self, graph: Graph, numbers: tuple[float, ...], heads: int, shared: bool
    ) -> Callable[[Sequence[Tensor | None]], Tensor]:
        """Return the value per edge in plain torch as a function of the inputs."""
        return lambda tensors: self.in_torch(graph, tensors, numbers, heads, shared)[1]

    # First calls ----------------------------------------------------------------------------------------------------

    def _signature(
        self, graph: GraphLike, tensors: Sequence[Any], numbers: Any, heads: int | None, shared: bool
    ) -> Any:
        """Return what decides whether arguments are valid and which kernels they take; None for traced calls."""
        if not is_eager_on(graph):
            return None
        signature: list[Any] = [self, numbers, heads, shared]
        if not graph.is_measured:
            return self._signature_of_any(graph, tensors, signature)
        for tensor in tensors:
            if tensor is None:
                signature.append(None)
            elif is_plain(tensor):
                signature += (tensor.shape, tensor.dtype, tensor.device)
            else:
                return None
        return tuple(signature)

    def _signature_of_any(self, graph: Graph, tensors: Sequence[Any], signature: list[Any]) -> Any:
        """Return the signature for unmeasured graphs: whether the numbers of rows fit, and no size of the graph."""
        for domain, tensor in zip(self._domains, tensors, strict=True):
            if tensor is None:
                signature.append(None)
            elif not is_plain(tensor):
                return None
            elif domain == "whole":
                signature += (tensor.shape, tensor.dtype, tensor.device)
            else:
                shape = tensor.shape
                signature += (shape[:1] == (count_of(graph, domain),), shape[1:], tensor.dtype, tensor.device)
        return tuple(signature)

    @cached_property
    def _domains(self) -> tuple[str, ...]:
        """Domain of the rows of each input."""
        return tuple(value.domain for value in self.statement.inputs)

    def _first_call(
        self,
        graph: GraphLike,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        heads: int | None,
        shared: bool,
        signature: Any,
    ) -> tuple[GraphLike, tuple[Tensor | None, ...], Any]:
        """Return the graph, the inputs as kernels take them, and the prepared op; None where no kernel runs it."""
        graph, device = check_graph(graph)
        heads, channels = self._check(graph, device, tensors, numbers, heads, shared)
        casts = self._casts(tensors)
        tensors = cast(tensors, casts)
        by_name = dict(zip(self.statement.input_names, tensors, strict=True))
        numbers_by_name = {number.name: value for number, value in zip(self.statement.numbers, numbers, strict=True)}
        problem = self.problem(by_name, numbers_by_name, heads, channels)
        if self.family.unsupported(problem) or (isinstance(graph, EdgeSet) and graph.by_torch):
            return graph, tensors, None
        if is_eager_on(graph) and all(tensor is None or is_plain(tensor) for tensor in tensors):
            prepared = self.prepared(problem, graph, heads, channels, present_of(self.statement, tensors), casts)
            if prepared.final:
                remember(graph, signature, prepared)
            return graph, tensors, prepared
        return graph, tensors, _TracedCall(problem, heads, numbers_by_name.get("dropout", 0.0) > 0.0, device)

    def prepared(
        self, problem: Any, graph: Graph, heads: int, channels: int, present: frozenset[str], casts: Any = ()
    ) -> PreparedOp:
        """Return the prepared op kept with the graph, planned on first use."""
        kind = None if graph.is_measured else graph.kind  # type: ignore[attr-defined]
        key = (self, problem, current(), present, casts, kind)
        plans: dict[Any, PreparedOp] = plans_of(graph)
        prepared = plans.get(key)
        if prepared is None:
            prepared = PreparedOp(self, problem, graph, heads, channels, present, casts)
            if prepared.final:
                plans[key] = prepared
        return prepared

    def program(
        self, program: ProgramName, graph: Graph, inputs: Sequence[Tensor | None], numbers: Sequence[float]
    ) -> Callable[..., Any]:
        """Return the function of a traced program on a graph."""
        count = len(self.statement.inputs)
        by_name = dict(zip(self.statement.input_names, inputs[:count], strict=True))
        value, edge = by_name["value"], by_name.get("edge")
        assert value is not None
        if edge is not None:
            # Not known while torch.compile traces self-loops.
            sizes = graph.num_edges, *edge.shape[1:]
            check_shape("edge", edge, sizes, f"[E={graph.num_edges}, ...]")
        channels = value[0].numel() // program.heads if value.shape[0] else value.shape[-1]
        numbers_by_name = {each.name: number for each, number in zip(self.statement.numbers, numbers, strict=True)}
        problem = self.problem(by_name, numbers_by_name, program.heads, channels)
        prepared = self.prepared(problem, graph, program.heads, channels, present_of(self.statement, inputs[:count]))
        return prepared.compiled(program.group, program.flags, graph)

    def run(
        self,
        name: str,
        anchors: Sequence[Tensor],
        sizes: Sequence[int],
        inputs: Sequence[Tensor | None],
        numbers: Sequence[float],
    ) -> list[Tensor]:
        """Run a traced program on tensors, which the registered operator was given."""
        program = _known_program(name)
        key = anchors[0], sizes[0], sizes[1], program.loops, program.transposed
        drops = any(each.name == "dropout" and number > 0 for each, number in zip(self.statement.numbers, numbers))
        # Dropout goes by the numbers of edges, which are others where self-loops were replaced on a measured graph.
        is_free = current().leaves_new and not (program.loops and drops)
        # Several layers of a compiled graph have one program.
        asked = hash(name), *key, COMPILED_VISITS, not may_run_again(False)
        graph: Any = unmeasured_graph(*asked) if is_free else None
        graph = Graph.resolve(*key) if graph is None else graph
        results = self.program(program, graph, inputs, numbers)(graph, *inputs, *numbers)
        return [result for result in results if result is not None]

    def num_outputs(self, name: str) -> int:
        """Return the number of outputs of a traced program."""
        return len(self.statement.outputs)

    def reads_outputs(self, name: str) -> bool:
        """Return whether backward reads the outputs of a traced program, and not exact ones that it keeps."""
        exact = self.statement.exact_outputs[:1]
        return not (exact and exact[0] in self.statement.kept(ProgramName.of(name).flags))

    def backward(self, name: str, present: Sequence[bool], needed: Sequence[bool]) -> tuple[str, list[int]]:
        """Return the backward program of a traced one, and the input that each of its results is the gradient of."""
        program = ProgramName.of(name).backward
        if present[self.edge_place] and needed[self.edge_place]:
            program = program._replace(flags=program.flags | {"edge_grad"})
        names = self.gradient_names(program.flags, present)
        return program.name, [self.statement.input_names.index(each) for each in names]

    def empty_results(
        self, name: str, anchors: Sequence[Tensor], sizes: Sequence[Any], inputs: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return empty results of the shapes and dtypes that the statement gives a traced program."""
        program, statement = ProgramName.of(name), self.statement
        by_name = dict(zip(statement.input_names, inputs, strict=False))
        value = by_name["value"]
        assert value is not None
        heads = program.heads
        channels = value.shape[-1] if value.dim() == 3 else value.shape[-1] // heads
        if program.group == "backward":
            present = [tensor is not None for tensor in inputs[: len(statement.inputs)]]
            names = self.gradient_names(program.flags, present)
            like: list[Any] = [by_name[each] for each in names]
            return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in like]

        def empty(stated: TensorSpec) -> Tensor:
            edges: Any = anchors[0].shape[1]
            if stated.domain == "edges" and program.loops:
                edges = torch.library.get_ctx().new_dynamic_size()
            rows = {"targets": sizes[1], "sources": sizes[0], "edges": edges}[stated.domain]
            letters = {"H": heads, "C": channels}
            edge = by_name.get("edge")
            if edge is not None:
                letters["D"] = edge.shape[-1]
            shape = [rows, *(letters.get(each, each) for each in stated.shape)]  # type: ignore[arg-type]
            if stated.name in (statement.output.name, *statement.exact_outputs[:1]) and "concat" in program.flags:
                shape = [rows, heads * channels]
            dtype = value.dtype if stated.dtype == FEATURES else getattr(torch, stated.dtype)
            return value.new_empty(shape, dtype=dtype)

        if program.group == "edge":
            assert statement.edge_value is not None
            return [empty(statement.edge_value)]
        results = (*statement.outputs, *(statement.values[name] for name in statement.kept(program.flags)))
        return [empty(value) for value in results]

    def _check(
        self,
        graph: GraphLike,
        device: torch.device,
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float],
        heads: int | None,
        shared: bool,
    ) -> tuple[int, int]:
        """Check the arguments against the statement, and return the number of heads and channels per head."""
        for value, tensor in zip(self.statement.inputs, tensors, strict=True):
            if tensor is not None or (value.needed and not (shared and value.name == "target")):
                check_tensor(value.user_name, tensor)
        sizes: dict[str, int | None] = {
            "targets": graph.num_dst,
            "sources": graph.num_src,
            "edges": num_edges(graph),
        }
        value, tensor = self.statement.inputs[self._value_place], tensors[self._value_place]
        assert tensor is not None
        check_dtype(value.user_name, tensor, FEATURE_DTYPES)
        shape = tensor.shape
        if heads is None:
            if len(shape) != 3:
                check_shape(value.user_name, tensor, (0, 0, 0), f"[N_src={sizes['sources']}, H, C]")
            heads, channels = shape[1], shape[2]
        else:
            channels = shape[-1] // heads if heads > 0 and len(shape) > 1 else 0
        letters: dict[str | int, int] = {"H": heads, "C": channels}
        for value, tensor in zip(self.statement.inputs, tensors, strict=True):
            if tensor is not None and value.dtype != "int64":
                self._check_input(value, tensor, device, sizes, letters)
        for number, value_of_number in zip(self.statement.numbers, numbers, strict=True):
            if number.label:
                check_range(number.label, value_of_number, number.low, number.high)
        return heads, channels

    @cached_property
    def _value_place(self) -> int:
        """Place of the input that tells the numbers of heads and channels."""
        return self.statement.input_names.index("value")

    def _check_input(
        self,
        value: TensorSpec,
        tensor: Tensor,
        device: torch.device,
        sizes: Mapping[str, int | None],
        letters: dict[str | int, int],
    ) -> None:
        """Check dtype, device and shape of one input."""
        name, shape = value.user_name, tensor.shape
        check_dtype(name, tensor, FEATURE_DTYPES)
        check_device(name, tensor, device)
        # The first tensor of a letter that the value does not have tells its number.
        for letter, size_of_letter in zip(value.shape, shape[1:], strict=False):
            letters.setdefault(letter, size_of_letter)
        expected = [letters.get(letter) for letter in value.shape]
        if value.domain == "whole":
            if not expected:
                if tensor.numel() != 1:
                    raise ValueError(f"'{name}' needs one element (got shape {list(shape)})")
            # PyG keeps vectors as [1, H, C].
            elif list(shape[1:] if len(shape) == len(expected) + 1 and shape[0] == 1 else shape) != expected:
                spec = ", ".join(f"{letter}={letters[letter]}" for letter in value.shape)
                raise ValueError(f"'{name}' needs shape [{spec}] (got {list(shape)})")
            return
        size = sizes[value.domain]
        is_flat = len(shape) == 2 and len(expected) == 2 and shape[1] == letters["H"] * letters["C"]
        if (size is None or len(shape) > 0 and shape[0] == size) and (is_flat or list(shape[1:]) == expected):
            return
        letter = _LETTERS[value.domain]
        # The value itself tells the numbers of heads and channels.
        known = {} if value.name == "value" else letters
        rest = [f"{each}={known[each]}" if each in known else str(each) for each in value.shape]
        spec = ", ".join([letter if size is None else f"{letter}={size}", *rest])
        raise ValueError(f"'{name}' needs shape [{spec}] (got {list(shape)})")

    def _casts(self, tensors: Sequence[Tensor | None]) -> tuple[tuple[int, torch.dtype], ...]:
        """Return which inputs are cast to what: features to their common dtype, the others to float32."""
        inputs = self.statement.inputs
        features = [t.dtype for v, t in zip(inputs, tensors, strict=True) if t is not None and v.dtype == FEATURES]
        common = features[0]
        for dtype in features[1:]:
            common = torch.promote_types(common, dtype)
        casts = []
        for place, (value, tensor) in enumerate(zip(inputs, tensors, strict=True)):
            if tensor is not None and value.dtype != "int64":
                dtype = common if value.dtype == FEATURES else torch.float32
                # In float64 everything goes to the reference as it is.
                if tensor.dtype is not dtype and not (common is torch.float64 and value.dtype != FEATURES):
                    casts.append((place, dtype))
        return tuple(casts)

    # Other ways to run an op ----------------------------------------------------------------------------------------

    def reference(
        self,
        name: str,
        anchors: Sequence[Tensor],
        sizes: Sequence[int],
        inputs: Sequence[Tensor | None],
        numbers: Sequence[float],
    ) -> Sequence[Tensor]:
        """Return the outputs of a traced program in plain torch, differentiable."""
        program = _known_program(name)
        graph = Graph.resolve(anchors[0], sizes[0], sizes[1], program.loops, program.transposed)
        out, _ = self.in_torch(graph, wide(inputs), numbers, program.heads, "shared" in program.flags)
        return (out,) if isinstance(out, Tensor) else out

    def in_torch(
        self,
        graph: GraphLike,
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float],
        heads: int | None,
        shared: bool,
    ) -> tuple[Any, Tensor]:
        """Return the output, or a tuple of several, and the value per edge in plain torch, differentiable."""
        statement = self.statement
        by_name = dict(zip(statement.input_names, tensors, strict=True))
        if heads is not None:
            for value in statement.inputs:
                tensor = by_name[value.name]
                if tensor is not None and value.shape == ("H", "C") and tensor.dim() == 2 and value.domain != "whole":
                    by_name[value.name] = tensor.reshape(tensor.shape[0], heads, tensor.shape[1] // heads)
        if shared:
            by_name["target"] = by_name["value"]
        numbers_by_name = {number.name: float(value) for number, value in zip(statement.numbers, numbers, strict=True)}
        num_dst, keep = graph.num_dst, None
        edge_index = graph.edge_index if isinstance(graph, Graph) else graph.ends()
        has_extra_target = isinstance(graph, EdgeSet) and graph.self_loops
        if has_extra_target:
            num_dst = num_dst + 1
            for domain, name in zip(self._domains, statement.input_names, strict=True):
                if domain == "targets":
                    by_name[name] = _with_row(by_name[name])
        dropout, seed = numbers_by_name.get("dropout", 0.0), by_name.pop("seed", None)
        if dropout > 0.0:
            seed = draw_seed(edge_index.device) if seed is None else seed
            edge_ids = torch.arange(edge_index.shape[1], device=edge_index.device)
            rows = by_name["value"]
            assert rows is not None
            keep = dropout_factor(edge_ids, rows.shape[1], dropout, seed)
        out, edge_value = statement.reference(edge_index, num_dst, by_name, numbers_by_name, keep)
        if has_extra_target:
            out = tuple(each[:-1] for each in out) if isinstance(out, tuple) else out[:-1]
        return out, edge_value

    def _traced(
        self,
        graph: GraphLike,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        call: _TracedCall,
        concat: bool,
        shared: bool,
        with_edge_value: bool,
    ) -> Any:
        """Run the op through the registered operator: what the forward pass leaves then does not depend on a plan."""
        anchor, num_src, num_dst, loops, transposed = graph.key
        tracked = needs_grad(tensors)
        flags = {"stats"} if tracked or with_edge_value else set()
        if tracked:
            # The output may be edited in place, even what a compiled function returns: backward has one of its own.
            flags |= {"saved", "exact"} | self.optional(call.problem, None, current())
        flags |= {name for name, is_on in (("shared", shared), ("concat", concat)) if is_on}
        # The length of a range is a constant to torch.compile, as what is in a name has to be.
        heads = len(range(call.heads))
        program = ProgramName(self.statement.name, "forward", heads, loops, transposed, frozenset(flags))
        results = run_traced(program.name, [anchor], [num_src, num_dst], numbers, tensors)
        out = self._outputs(results)
        if not with_edge_value:
            return out
        edge_flags = frozenset({"stats", "shared"} if shared else {"stats"})
        first = len(self.statement.outputs)
        stats = results[first : first + len(self.statement.kept(edge_flags))]
        program = program._replace(group="edge", flags=edge_flags)
        run = partial(run_program, program, anchor, num_src, num_dst, (*tensors, *stats), numbers)
        if torch.compiler.is_compiling():
            return out, run()[0]
        assert isinstance(graph, Graph)
        reference = self._edge_reference(graph, numbers, call.heads, shared)
        return out, EdgeValue.apply(lambda: run()[0], reference, *tensors)


def cast(tensors: tuple[Tensor | None, ...], casts: Sequence[tuple[int, torch.dtype]]) -> tuple[Tensor | None, ...]:
    """Return the inputs with some of them cast."""
    changed = list(tensors)
    for place, dtype in casts:
        changed[place] = changed[place].to(dtype)  # type: ignore[union-attr]
    return tuple(changed)


def _with_row(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor with a row of zeros appended."""
    return None if tensor is None else torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])


def check_graph(graph: GraphLike) -> tuple[GraphLike, torch.device]:
    """Return the edges, as a Graph unless torch.compile traces, and their device."""
    if isinstance(graph, Graph):
        return graph.on_this_stream(), graph.device
    if not isinstance(graph, EdgeSet):
        raise TypeError(f"'graph' needs a Graph or an EdgeSet (got {type(graph).__name__})")
    check_edge_index(graph.edge_index)
    return graph if torch.compiler.is_compiling() else Graph.resolve(*graph.key), graph.edge_index.device


def num_edges(graph: GraphLike) -> int | None:
    """Return the number of edges, unknown before tracing ends when self-loops are added."""
    if isinstance(graph, Graph):
        return graph.num_edges
    return None if graph.self_loops else graph.edge_index.shape[1]


def is_eager_on(graph: GraphLike) -> TypeGuard[Graph]:
    """Return whether nothing traces or transforms operators, and the graph is built."""
    return is_eager() and isinstance(graph, Graph)


def draw_seed(device: torch.device) -> Tensor:
    """Return a key for one call from torch's generator of the device, so that manual_seed and graph capture work."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
