"""The gate in front of every fused forward: whether it takes a call, or every reason why PyG's own forward does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr import MultiAggregation
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.fallback import CPU, FEW, NO_DEVICE, report_fallback
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.nn import conv_call
from pyg_dfgnn.nn.captured_forward import run_pygs_on_part, torch_reasons
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.on_cpu import call_on_cpu
from pyg_dfgnn.nn.registry import Description, described, floating, is_described, set_propagate, shown, upstream_of
from pyg_dfgnn.nn.scripted import Scripted
from pyg_dfgnn.ops.eager import PLAIN, is_eager
from pyg_dfgnn.ops.graph import may_run_again, unmeasured_graph
from pyg_dfgnn.ops.visits import is_compiled_few, may_be_few, run_left
from pyg_dfgnn.settings import current
from pyg_dfgnn.torch_private import FakeTensor, are_transforms_active, forward_ad, has_any_global_hook, is_tracing

METHODS = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
HOOKS = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("_pre", "")
)
_STATISTICS = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
    aggr.MulAggregation: "mul",
    aggr.VarAggregation: "var",
    aggr.StdAggregation: "std",
}
_LOOKED_UP = ("MeanAggregation", "VarAggregation", "StdAggregation")
"""Aggregations whose sums PyG's `FusedAggregation` looks up by name to divide them."""
_ON_PART = "edge_index is a PartitionedEdges"
NO_MATRIX = "x is not a matrix [N, F] per node set"
_FEW_IDS = 1 << 16
"""Numbers in `edge_index` below which aggregations in PyG's forward are PyG's too."""
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_methods = attrgetter(*METHODS)
_module_hooks = itemgetter(*MODULE_HOOKS)
hooks_of = itemgetter(*HOOKS)
"""(attributes of a layer) -> its hooks of messages, of each kind."""
_overrides: dict[type, tuple[str, ...]] = {}
_answers: dict[tuple[Any, ...], tuple[str, ...]] = {}
_singles: dict[type, tuple[str, ...]] = {}
"""Class of an aggregation -> its statistics, where no option decides them."""
_kinds: dict[tuple[tuple[type, Any], ...], tuple[str, ...]] = {}
"""Classes of several aggregations, each with the option that stops gradients -> their statistics."""


def methods_of(conv_type: type[MessagePassing]) -> tuple[Any, ...]:
    """Return the functions `METHODS` of PyG's class as they are now, to tell later whether someone replaced one."""
    return _methods(conv_type)  # type: ignore[no-any-return]


def promoted_dtype(dtype: torch.dtype, other: torch.dtype, is_cuda: bool) -> torch.dtype:
    """Return the dtype that PyG's product of two factors has; on CUDA, autocast sums in float32."""
    if other is not dtype:
        dtype = torch.promote_types(dtype, other)
    if is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.promote_types(dtype, torch.float32)
    return dtype


def storage_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of what a linear layer makes of x."""
    # Meta tensors have no autocast to ask about.
    dtype, kind = x.dtype, x.device.type
    if dtype is not torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return dtype


def finalize_dtype(out: Tensor, dtype: torch.dtype, mean_of_heads: bool) -> Tensor:
    """Return what an op left, `[N, ...]`, in at least `dtype`; with `mean_of_heads` averaged over dimension 1."""
    if out.dtype is not dtype:
        out = out.to(torch.promote_types(out.dtype, dtype))
    return out.mean(dim=1) if mean_of_heads else out


def lacks_kernels(x: Tensor) -> bool:
    """Return whether a call is PyG's because of the device of its features, whatever else may be against it."""
    if x.device.type in fused_device_types or is_described():
        return False
    return current().fallback != "error"


def edges_lack_kernels(edge_index: Any) -> TypeGuard[Tensor]:
    """Return whether edges in a tensor are on a device without kernels, so that nothing else has to be asked."""
    if type(edge_index) is not Tensor or edge_index.is_cuda or torch.compiler.is_compiling():
        return False
    return lacks_kernels(edge_index)


# Marked constant: torch.compile runs these functions while it traces and leaves nothing of them in the graph.
@torch.compiler.assume_constant_result
def kernel_reasons(conv_type: Any, *fields: Any) -> tuple[str, ...]:
    """Return what the family of a layer has against the problem of these fields, which is asked once per problem."""
    key = conv_type._reasons_against, fields
    reasons = _answers.get(key)
    if reasons is None:
        reasons = _answers[key] = tuple(conv_type._reasons_against(conv_type._problem_type(*fields)))
    return reasons


def reasons_on_device(layer_type: Any, device: torch.device, *fields: Any) -> Sequence[str]:
    """Return why no kernel takes the problem of these fields: a device without kernels, or what the family has."""
    return kernel_reasons(layer_type, *fields) if device.type in fused_device_types else (NO_DEVICE,)


@torch.compiler.assume_constant_result
def overridden(conv_type: type[MessagePassing]) -> tuple[str, ...]:
    """Return the names of the steps of PyG's conv that the class, or a user's subclass of it, has others for."""
    names = _overrides.get(conv_type)
    if names is None:
        names = _overrides[conv_type] = tuple(_own_propagation(conv_type))
    upstream: tuple[Any, ...] = conv_type._upstream_methods  # type: ignore[attr-defined]
    methods = _methods(conv_type)
    if methods != upstream:
        names += tuple(name for name, own, pygs in zip(METHODS, methods, upstream, strict=True) if own is not pygs)
    return names


def _own_propagation(conv_type: type[MessagePassing]) -> list[str]:
    """Return which of `propagate` and `edge_updater` a user's subclass defines."""
    # PyG generates both into a class on its first instance, and keeps what was there as `_orig_...`.
    names = []
    for cls in conv_type.__mro__[: conv_type.__mro__.index(FusedConv)]:
        for name in ("propagate", "edge_updater"):
            own = cls.__dict__.get(name)
            if own is None or own is getattr(MessagePassing, name):
                continue
            if cls.__dict__.get(f"_jinja_{name}") is not own or cls.__dict__.get(f"_orig_{name}") is own:
                names.append(name)
    return names


def is_multiple(aggr_module: Any) -> bool:
    """Return whether an aggregation module combines several."""
    return type(aggr_module) not in _STATISTICS and upstream_of(type(aggr_module)) is MultiAggregation


def statistics_of(aggr_module: Any) -> tuple[str, ...]:
    """Return the statistics that one of PyG's aggregation modules computes; empty where a kernel has none of them."""
    # While torch.compile traces, a memory would be a fact to check at each call.
    remembers = not torch.compiler.is_compiling()
    single = _singles.get(type(aggr_module)) if remembers else None
    if single is not None:
        return single
    several = is_multiple(aggr_module)
    modules = aggr_module._modules["aggrs"]._modules.values() if several else (aggr_module,)
    kinds = tuple([(type(x), x._modules.get("var_aggr", x).__dict__.get("semi_grad")) for x in modules])
    if remembers and kinds in _kinds:
        return _kinds[kinds]
    found: list[Any] = [not stops and (_STATISTICS.get(x) or _STATISTICS.get(upstream_of(x))) for x, stops in kinds]
    names = tuple(found) if all(found) else ()
    if remembers and not several and kinds[0][1] is None:
        _singles[type(aggr_module)] = names
    elif remembers:
        _kinds[kinds] = names
    return names


def repetition_reasons(aggr_module: Any) -> list[str]:
    """Return what is against kernels where names repeat: PyG's fused code averages only the last of a name."""
    fused = aggr_module._modules.get("fused_aggr")
    names = fused.aggr_names if isinstance(fused, FusedAggregation) else []
    repeated = " and ".join(name for name in _LOOKED_UP if names.count(name) > 1)
    return [f"aggr has {repeated} more than once, of which PyG computes only the last"] if repeated else []


def is_plain_layer(layer: torch.nn.Module, kinds: Sequence[type]) -> bool:
    """Return whether the layer is of these classes, and calling it is a product with its weight and nothing else."""
    if type(layer) not in kinds or has_any_global_hook():
        return False
    attributes = layer.__dict__
    return keeps_weight(attributes["_parameters"]) and "forward" not in attributes and not has_hooks(layer)


def keeps_weight(parameters: Any) -> bool:
    """Return whether a layer's weight and bias are parameters: pruning, norms and replicas keep them elsewhere."""
    weight = parameters.get("weight")
    return type(weight) in PLAIN and weight.layout is torch.strided and "bias" in parameters


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks are registered that run when the module is called."""
    attributes = module.__dict__
    # torch.compile cannot trace `itemgetter`.
    return any(map(attributes.get, MODULE_HOOKS) if torch.compiler.is_compiling() else _module_hooks(attributes))


def module_reasons(conv: "FusedConv", compiling: bool) -> list[str]:
    """Return what the state of a conv, and of torch around it, has against the fused forward.

    Args:
        conv: The conv.
        compiling: Whether torch.compile traces.
    """
    # Read from where modules keep them: an attribute of a module costs the host more.
    own = conv.__dict__
    reasons = []
    if own["_explain"]:
        reasons.append("an explainer is attached")
    # torch.compile cannot trace `itemgetter`.
    if any(map(own.__getitem__, HOOKS) if compiling else hooks_of(own)):
        reasons.append("message passing hooks are registered")
    replaced = overridden(type(conv))
    if compiling or not own.keys().isdisjoint(METHODS):
        replaced += tuple(name for name in METHODS if name in own)
    if replaced:
        reasons.append(f"'{', '.join(replaced)}' is overridden")
    if own["_decomposed_layers"] != 1:
        reasons.append(f"decomposed_layers is {own['_decomposed_layers']}")
    module, fused = own["_modules"]["aggr_module"], conv._fused_statistics
    nested = compiling or module._modules
    if any(map(has_hooks, module.modules())) if nested else any(_module_hooks(module.__dict__)):
        reasons.append("the aggregation module has hooks")
    if conv._scaler is not None and upstream_of(type(module)) is conv._scaler:
        module = module.aggr
    statistics = statistics_of(module)
    if not statistics or not fused.issuperset(statistics):
        reasons.append(f"aggr is {conv.aggr!r}, fused is {', '.join(sorted(fused))}")
    if nested:
        reasons += repetition_reasons(module)
    if own["node_dim"] != conv._node_dim:
        reasons.append(f"node_dim is {own['node_dim']}")
    return reasons + (export_reasons() if compiling else transform_reasons())


def only_reduces(conv: MessagePassing) -> bool:
    """Return whether PyG's propagation of a conv is its message and its aggregation, and nothing hooks into it."""
    if not is_eager() or is_tracing() or has_any_global_hook():
        return False
    own = conv.__dict__
    if own["_explain"] or own["_decomposed_layers"] != 1 or any(hooks_of(own)) or not own.keys().isdisjoint(METHODS):
        return False
    return not overridden(type(conv)) and not any(_module_hooks(own["_modules"]["aggr_module"].__dict__))


def transform_reasons() -> list[str]:
    """Return what transforms around a call have against fused kernels."""
    reasons = []
    if is_tracing():
        reasons.append("TorchScript")
    if are_transforms_active():
        reasons.append("a torch.func transform is active")
    if forward_ad._current_level >= 0:
        reasons.append("forward-mode differentiation is active")
    return reasons


def export_reasons() -> list[str]:
    """Return what an export has against kernels while it traces a call."""
    is_onnx = torch.onnx.is_in_onnx_export()
    return ["torch.onnx exports the call, and ONNX has no operators for kernels"] if is_onnx else []


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2


def edge_reasons(edge_index: Any, form: str, flow: str, device: torch.device) -> list[str]:
    """Return what the edges have against the fused forward of a conv of this flow, whose features are on `device`."""
    reasons = []
    edge_device = edge_index.device() if form == "SparseTensor" else edge_index.device
    if edge_device != device:
        reasons.append(f"edge_index is on {edge_device} and x on {device}")
    if form == "Graph":
        return reasons
    if form in ("tensor", "EdgeIndex"):
        if edge_index.dtype not in (torch.int64, torch.int32) or edge_index.dim() != 2 or edge_index.size(0) != 2:
            reasons += conv_call.id_reasons(edge_index)
        return reasons
    if flow != "source_to_target":
        reasons.append("flow='target_to_source' with a sparse adjacency")
    if form == "torch.sparse":
        if edge_index.layout not in (torch.sparse_coo, torch.sparse_csr):
            reasons.append(f"the sparse layout {edge_index.layout}")
        elif edge_index.layout == torch.sparse_coo and not edge_index.is_coalesced():
            reasons.append("a COO adjacency that is not coalesced")
    return reasons


class FusedConv(Scripted, MessagePassing):
    """Base class of the drop-in convs: the gate, PyG's own path, and the edges in the order of the fused ops.

    A drop-in subclasses PyG's conv under the same name, adds no parameter and overrides `forward` only. Its `_call`
    asks the gate first; with any reason the forward is PyG's own.
    """

    # Instantiating PyG's class replaces its `propagate` by a generated one that ignores `explain`, and a subclass would
    # take that for the original. These two lines put the originals in front of it.
    propagate = MessagePassing.propagate
    edge_updater = MessagePassing.edge_updater

    _upstream_methods: tuple[Any, ...]
    """The functions of PyG's class that the fused path stands for."""
    _node_dim = 0
    """The node dimension that PyG's forward assumes."""
    _fused_statistics = frozenset({"sum"})
    """Statistics that the messages may be aggregated to, by the names that :func:`statistics_of` returns."""
    _scaler: type | None = None
    """PyG's class of a module around the aggregation that the fused path stands for too."""
    _problem_type: Callable[..., Any]
    """Makes the problem of the family of kernels from `_problem_fields`, then the dtype, the device, whether there are
    edge features and whether dropout is active."""
    _reasons_against: Callable[[Any], Sequence[str]]
    """Returns every reason why no kernel of the family can run a problem; empty when one can."""

    def _problem_fields(self, x: Tensor | None = None) -> tuple[Any, ...]:
        """Return the first fields of the problem for features `x`; None where only the module is known."""
        raise NotImplementedError

    def _plan(self, problem: Any, graph: Graph) -> Any:
        """Return the kernels that would run for a problem on a graph; `str` shows why."""
        raise NotImplementedError

    def _standing_reasons(self, like: Tensor | None = None) -> list[str]:
        """Return what is against the fused forward whatever the call; without features, by a parameter, or `like`."""
        like = floating(self) if like is None else like
        tensor = torch.empty(0) if like is None else like
        problem = self._problem_type(*self._problem_fields(), tensor.dtype, tensor.device, False, False)
        return [*module_reasons(self, False), *self._reasons_against(problem)]

    def _describe(self, device: torch.device | None, *args: Any, **kwargs: Any) -> Description:
        """Return what a forward call with these arguments would run; see :func:`pyg_dfgnn.describe_plan`."""
        with described():
            call = self._call(*args, **kwargs)
        if not call.problem:
            return Description(shown(self), tuple(call.reasons))
        problem = self._problem_type(*call.problem)
        if device is not None:
            problem = replace(problem, device=device)
        # On a device without kernels a call is not told of other reasons, which would be no news there.
        own = [reason for reason in call.reasons if reason != NO_DEVICE]
        reasons = tuple(dict.fromkeys([*own, *self._reasons_against(problem)]))
        if reasons:
            return Description(shown(self), reasons, problem)
        try:
            # The plan is that of edges which have come often enough to be measured.
            with described():
                problem, call = self._as_run(problem, call, *args, **kwargs)
                graph, plan = self._planned(problem, call, *args, **kwargs)
        except UnsupportedError as error:
            return Description(shown(self), tuple(error.reasons), problem)
        sizes = f"{graph.num_src} sources, {graph.num_dst} targets, {graph.num_edges} edges"
        return Description(shown(self), (), problem, plan, sizes, graph.describe_bytes())

    def _as_run(self, problem: Any, call: ConvCall, *args: Any, **kwargs: Any) -> tuple[Any, ConvCall]:
        """Return the problem and the call of a description as the forward takes them on these edges."""
        return problem, call

    def _planned(self, problem: Any, call: ConvCall, *args: Any, **kwargs: Any) -> tuple[Graph, Any]:
        """Return the graph of a call without reasons, and what :meth:`_plan` says of it.

        Raises:
            UnsupportedError: On this graph something has no kernel.
        """
        options = getattr(self, "fill_value", None), getattr(self, "edge_dim", None)
        graph, _, _ = self._edges(call, *options, measured=True)
        assert isinstance(graph, Graph)
        return graph, self._plan(problem, graph)

    def _call(self, *args: Any, **kwargs: Any) -> ConvCall:
        """Return the gate's view of a forward call with these arguments."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> torch.nn.Module:
        twin = super().__prepare_scriptable__()
        if twin is not self:
            set_propagate(twin)
        return twin

    def _gate(
        self,
        question: tuple[Any, ...],
        nodes: tuple[Tensor | None, Tensor | None],
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        *,
        size: Sequence[int | None] | None = None,
        lin_edge: torch.nn.Module | None = None,
        dropout: float = 0.0,
        self_loops: bool = False,
        weights: bool = False,
        one_way: bool = False,
        reasons: Sequence[str] = (),
    ) -> ConvCall:
        """Collect every reason to leave this call to PyG.

        Args:
            question: What `_problem_fields` returns.
            nodes: Features `[N, F]` of the nodes that row 0 and row 1 of `edge_index` point to.
            edge_index: Any form that PyG takes, or a `Graph`.
            edge_attr: `[E, edge_dim]`.
            size: Declared numbers of nodes, as `nodes`.
            lin_edge: The transformation of the edge features, None where the conv takes none.
            dropout: Probability that a weight is dropped in training.
            self_loops: Whether the conv replaces self-loops.
            weights: Whether the caller wants the attention weights.
            one_way: Whether PyG's conv sends from `nodes[0]` in either flow.
            reasons: What the conv itself has against the fused forward.

        Returns:
            The call, with its reasons.

        Raises:
            TypeError: The edges are of a distributed graph.
            ValueError: A `Graph` has other numbers of nodes than x or `size`.
        """
        is_plain = type(edge_index) is Tensor and edge_index.layout is torch.strided
        if is_plain and not edge_index.is_cuda and "cpu" not in fused_device_types:
            if not getattr(nodes[0], "is_cuda", False) and (call := call_on_cpu(edge_index)) is not None:
                return call
        compiling = torch.compiler.is_compiling()
        form = "tensor" if is_plain else conv_call.form_of(edge_index)
        first, second = nodes
        x = first if first is not None else second
        if not _is_matrix(x) or not (second is x or second is None or _is_matrix(second)):
            return ConvCall([*reasons, NO_MATRIX], (), edge_index, form)
        assert x is not None
        is_few = False
        if compiling and is_plain:
            is_few = self._is_compiled_few(edge_index, max(x.size(1), self._numbers_per_edge_of(question)))
        if is_few and not self_loops:
            # Each further question is a guard, checked in every compiled call.
            return ConvCall(FEW, (), edge_index, form)
        if is_plain and not compiling and lacks_kernels(x):
            return ConvCall([NO_DEVICE, *conv_call.id_reasons(edge_index)], (), edge_index, form)
        against = [*reasons, *module_reasons(self, compiling)]
        if form == "PartitionedGraph":
            raise TypeError(f"'edge_index' needs a model that pyg_dfgnn.distributed.wrap has returned (got a {form})")
        if form not in conv_call.FORMS:
            against.append(f"edge_index is a {form}")
            return ConvCall(against, (), edge_index, form)
        if not compiling and isinstance(x, FakeTensor):
            against.append("x is a FakeTensor")
        device, flow = x.device, self.flow
        against += edge_reasons(edge_index, form, flow, device)

        sizes = [None if first is None else first.size(0), None if second is None else second.size(0)]
        if size is not None and not compiling:
            size = conv_call.as_sizes(size)
        if form == "Graph":
            conv_call.check_sizes(edge_index, flow, sizes, size)
        if form != "tensor":
            size = conv_call.declared_sizes(edge_index, form, flow)
        if size is not None:
            for dim in (0, 1):
                if sizes[dim] is None:
                    sizes[dim] = size[dim]
                elif size[dim] is not None and size[dim] != sizes[dim]:
                    against.append(f"x has {sizes[dim]} nodes on side {dim} and the adjacency {size[dim]}")
        if form == "EdgeIndex" and self_loops and second is None and sizes[0] != sizes[1]:
            # PyG makes a square adjacency of it as it adds loops.
            against.append("self-loops with an EdgeIndex between two node sets and x of one")
        source, target = (0, 1) if flow == "source_to_target" else (1, 0)
        if source == 1 and one_way and sizes[0] != sizes[1]:
            # PyG sends from nodes[0] along row 1 then, and sizes the result by nodes[0].
            against.append("flow='target_to_source' between two node sets")
        num_src = sizes[source] if sizes[source] is not None else sizes[target]
        num_dst = sizes[target] if sizes[target] is not None else sizes[source]

        if form in ("torch.sparse", "SparseTensor") and lin_edge is not None:
            if edge_attr is None:
                edge_attr = conv_call.adjacency_features(edge_index)
            elif self_loops:
                against.append("edge_attr and self-loops with a sparse adjacency")
            if self_loops and form == "SparseTensor":
                against.append("edge_dim and self-loops with a SparseTensor")
        if compiling:
            # With few edges the rows of new self-loops need no number from the device.
            lacks_loops = edge_attr is not None and not is_few
            against += self._compile_reasons((*nodes, edge_attr), form, self_loops, lacks_loops, weights)
        edge_attr = None if lin_edge is None else edge_attr
        if edge_attr is not None:
            rows = edge_attr.size(0) if edge_attr.dim() else 0
            if edge_attr.dim() > 2 or rows == 1 != conv_call.num_edges(edge_index):
                against.append("edge_attr is to be broadcast")
        drops = False
        # A branch: with dynamic=True, torch.compile has no value for what a comparison of floats gives.
        if self.training and dropout > 0.0:
            drops = True
        problem = *question, self._storage_dtype(x), device, edge_attr is not None, drops
        # Not through `reasons_on_device`: each function that a call enters costs the host.
        against += kernel_reasons(type(self), *problem) if device.type in fused_device_types else (NO_DEVICE,)
        ends = num_src or 0, num_dst or 0
        return ConvCall(against, problem, edge_index, form, edge_attr, *ends, self_loops, weights, by_torch=is_few)

    _is_compiled_few: Callable[[Any, int], bool] = staticmethod(is_compiled_few)
    """Returns whether torch.compile makes few kernels of PyG's code for edges and rows of so many numbers."""
    _numbers_per_edge_of: Callable[[Any], int] = staticmethod(lambda question: 0)
    """Returns how many numbers an edge sends, of what `_problem_fields` returns."""

    def _compile_reasons(
        self, tensors: Sequence[Tensor | None], form: str, self_loops: bool, lacks_loops: bool, weights: bool
    ) -> list[str]:
        """Return what speaks against the fused forward only while torch.compile traces."""
        reasons = []
        needs_grad = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (*tensors, *self.parameters())
        )
        if weights and needs_grad:
            reasons.append("attention weights with gradients while compiling")
        if form != "tensor":
            reasons.append(f"a {form} while compiling")
        if self_loops and (weights or lacks_loops):
            reasons.append("self-loops with edge features or attention weights while compiling")
        return reasons

    _storage_dtype: Callable[[Tensor], torch.dtype] = staticmethod(storage_dtype)
    """Returns the dtype of the node features behind the linear layers."""

    def _fall_back(self, call: ConvCall, x: Any, *args: Any, before: Sequence[Any] = (), **kwargs: Any) -> Any:
        """Report the reasons of a call and return what PyG's forward makes of it.

        Args:
            call: A call with reasons.
            x: The features, as the user passed them.
            args: The arguments of the forward after `edge_index`.
            before: Those between `x` and `edge_index`.
            kwargs: Further ones.
        """
        edge_index, is_left = call.edge_index, call.reasons is FEW
        if call.reasons is CPU and call.form == "tensor":
            # Users have been told.
            return run_left(super().forward, x, *before, edge_index, *args, **kwargs)
        if call.form == "PartitionedEdges":
            against = [*torch_reasons(), *(each for each in call.reasons if each != _ON_PART)]
            given = (x, *before, edge_index, *args), kwargs, edge_index
            return run_pygs_on_part(self, super().forward, *given, against)
        report_fallback(type(self).__name__, call.reasons)
        if not is_left and call.form == "tensor":
            is_left = call.reasons[0] is NO_DEVICE or (may_be_few(edge_index) and edge_index.numel() < _FEW_IDS)
        if is_left:
            return run_left(super().forward, x, *before, edge_index, *args, **kwargs)
        if call.form == "Graph":
            if "size" in kwargs and not isinstance(x, Tensor):
                # PyG cannot tell from a tensor of edges how many nodes there are on a side without features.
                kwargs["size"] = conv_call.declared_sizes(edge_index, "Graph", self.flow)
            edge_index = conv_call.edges_in_flow(edge_index, self.flow)
        return super().forward(x, *before, edge_index, *args, **kwargs)

    def _edges(
        self,
        call: ConvCall,
        fill_value: float | Tensor | str | None = None,
        edge_dim: int | None = None,
        measured: bool = False,
    ) -> tuple[Graph | EdgeSet, Tensor | None, Any]:
        """Return the edges of a call without reasons for the fused ops; see :func:`pyg_dfgnn.nn.conv_call.resolve`.

        With `measured` the graph is one whose every fact can be asked for.
        """
        is_plain = call.form == "tensor" and call.edge_attr is None and not call.weights
        if not is_plain or torch.compiler.is_compiling():
            new = None if measured else self._new_edges(call)
            return conv_call.resolve(call, self.flow, fill_value, edge_dim, new)
        edge_index = call.edge_index
        key = edge_index, call.num_src, call.num_dst, call.self_loops, self.flow != "source_to_target"
        graph = Graph.known(*key)
        if graph is None or not graph.is_measured:
            new = None if measured else self._new_edges(call)
            graph = Graph.resolve(*key) if new is None else new
        return graph, None, edge_index

    def _new_edges(self, call: ConvCall) -> Graph | None:
        """Return the graph of edges that are too new to be measured; None where they are not, or where it cannot do."""
        if call.form != "tensor" or call.weights or torch.compiler.is_compiling():
            return None
        if not current().leaves_new:
            return None
        transposed = self.flow != "source_to_target"
        key = call.edge_index, call.num_src, call.num_dst, bool(call.self_loops), transposed
        return unmeasured_graph(id(self), *key, counts=not may_run_again(self.training))
