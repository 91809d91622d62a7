"""The gate in front of every fused forward: what sends a call down PyG's own path, and how that is reported."""

import logging
from collections.abc import Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch_geometric import EdgeIndex
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj, SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, is_torch_sparse_tensor, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr
from torch_geometric.utils.sparse import set_sparse_value

from pyg_dfgnn.dispatch.core import AttentionProblem, fused_device_types, unsupported_reasons
from pyg_dfgnn.errors import UnsupportedError, check_shape
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.ops.eager import is_eager
from pyg_dfgnn.settings import current

METHODS = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
HOOKS = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("_pre", "")
)
_methods = attrgetter(*METHODS)
# Attributes at once, from where modules keep them: each read of one costs the host more than it looks.
_facts = itemgetter("_explain", "_decomposed_layers", "node_dim", "_modules", *HOOKS)
FORMS = ("tensor", "EdgeIndex", "torch.sparse", "SparseTensor")
NO_DEVICE = "the tensors are not on a CUDA device"

logger = logging.getLogger("pyg_dfgnn")
logged: set[tuple[str, str]] = set()


class Call(NamedTuple):
    """One forward call as the gate saw it.

    Attributes:
        reasons: Why PyG's own path has to take it; empty when the fused one can.
        problem: The fields of the `AttentionProblem`; empty where the inputs do not even allow the question.
        edge_index: As the user gave it.
        form: Its form, see `form_of`.
        edge_attr: `[num_input_edges, ...]` edge features, also those that a sparse adjacency holds as values.
        num_src: Number of nodes that send.
        num_dst: Number of nodes that receive.
        self_loops: Whether self-loops are replaced by one per node.
        weights: Whether the caller wants the attention weights.
    """

    reasons: list[str]
    problem: tuple[Any, ...]
    edge_index: Adj
    form: str
    edge_attr: Tensor | None = None
    num_src: int = 0
    num_dst: int = 0
    self_loops: bool = False
    weights: bool = False


def methods_of(conv_type: type[MessagePassing]) -> tuple[Any, ...]:
    """The functions `METHODS` of PyG's class as they are now, to tell later whether someone replaced one."""
    return _methods(conv_type)  # type: ignore[no-any-return]


# Marked constant: torch.compile runs these functions while tracing and leaves nothing of them in the graph.
@torch.compiler.assume_constant_result
def log_once(conv_name: str, reasons: tuple[str, ...]) -> None:
    """Log each reason once per conv class."""
    for reason in reasons:
        if (conv_name, reason) not in logged:
            logged.add((conv_name, reason))
            logger.warning("%s takes PyG's own path: %s", conv_name, reason)


@torch.compiler.assume_constant_result
def kernel_reasons(*problem: Any) -> tuple[str, ...]:
    """What dispatch has against the problem; a device without kernels is one reason, and then the only one."""
    _, _, _, _, device, *_ = problem
    return _kernel_reasons(*problem) if device.type in fused_device_types else (NO_DEVICE,)


@cache
def _kernel_reasons(*problem: Any) -> tuple[str, ...]:
    return tuple(unsupported_reasons(AttentionProblem(*problem)))


@torch.compiler.assume_constant_result
def overrides_propagation(conv_type: type[MessagePassing]) -> bool:
    """Whether a user's subclass has a `propagate` or `edge_updater` of its own."""
    return _overrides_propagation(conv_type)  # type: ignore[arg-type]


@cache
def _overrides_propagation(conv_type: type[MessagePassing]) -> bool:
    # PyG generates both into a class on its first instance, and keeps what it found there as `_orig_...`.
    for cls in conv_type.__mro__[: conv_type.__mro__.index(FusedConv)]:
        for name in ("propagate", "edge_updater"):
            own = cls.__dict__.get(name)
            if own is None or own is getattr(MessagePassing, name):
                continue
            generated = cls.__dict__.get(f"_jinja_{name}")
            if generated is not own or cls.__dict__.get(f"_orig_{name}") is own:
                return True
    return False


@torch.compiler.assume_constant_result
def replaced_methods(conv_type: type[MessagePassing]) -> tuple[str, ...]:
    """The functions of PyG's class that the class or a user's subclass now has others for."""
    upstream = conv_type._upstream_methods  # type: ignore[attr-defined]
    own = _methods(conv_type)
    return tuple(name for name, mine, theirs in zip(METHODS, own, upstream, strict=True) if mine is not theirs)


def form_of(edge_index: Any) -> str:
    """`"tensor"`, `"EdgeIndex"`, `"torch.sparse"`, `"SparseTensor"`, or the name of a type that PyG does not take."""
    if isinstance(edge_index, Tensor):
        if isinstance(edge_index, EdgeIndex):
            return "EdgeIndex"
        return "tensor" if edge_index.layout is torch.strided else "torch.sparse"
    return "SparseTensor" if isinstance(edge_index, SparseTensor) else type(edge_index).__name__


def weights_dtype(features: Tensor, other: Tensor) -> torch.dtype:
    """The dtype of PyG's attention weights from these factors of a logit."""
    return weights_dtype_of(features.dtype, other.dtype, features.is_cuda)


def weights_dtype_of(dtype: torch.dtype, other: torch.dtype, is_cuda: bool) -> torch.dtype:
    """The same by the dtypes of the factors: on CUDA, autocast sums in float32."""
    if other is not dtype:
        dtype = torch.promote_types(dtype, other)
    if is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.promote_types(dtype, torch.float32)
    return dtype


def adjacency_features(edge_index: Adj) -> Tensor | None:
    """The values of a sparse adjacency that PyG takes as edge features: those with channels."""
    if isinstance(edge_index, Tensor) and edge_index.layout is torch.strided:
        return None
    if isinstance(edge_index, SparseTensor):
        values = edge_index.coo()[2]
    elif is_torch_sparse_tensor(edge_index):
        values = edge_index._values() if edge_index.layout == torch.sparse_coo else edge_index.values()
    else:
        return None
    return values if values is not None and values.dim() > 1 else None


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2


SCRIPTED = "torch.jit.script puts PyG's own class in its place"


def report(name: str, reasons: list[str]) -> None:
    """Tell the user, as `settings(fallback=...)` asks, why a call of a layer of this name is PyG's own.

    That tensors are on the CPU is no news, and an error only where there is a GPU for them.
    """
    fallback = current().fallback
    wanted = fallback == "error" and torch.cuda.is_available()
    told = [reason for reason in reasons if wanted or reason != NO_DEVICE]
    if not told or fallback == "silent":
        return
    if fallback == "error":
        raise UnsupportedError(told, what=f"the fused {name}")
    log_once(name, tuple(told))


class FusedConv(MessagePassing):
    """What the drop-in convs share: the gate, and the edges in the order of the fused ops.

    A drop-in subclasses PyG's conv under the same name, adds no parameter and overrides `forward` only. Its `_call`
    asks the gate first; with any reason the forward is PyG's own.
    """

    # Instantiating PyG's class replaces its `propagate` by a generated one that ignores `explain`, and a subclass would
    # take that for the original. These two lines put the originals in front of it.
    propagate = MessagePassing.propagate
    edge_updater = MessagePassing.edge_updater

    _upstream_methods: tuple[Any, ...]
    """The functions of PyG's class that the fused path stands for."""

    def __prepare_scriptable__(self) -> MessagePassing:
        """TorchScript compiles PyG's own class: `torch.jit.script` puts one in place of this conv, same parameters."""
        if FusedConv not in type(self).__bases__:
            return self
        upstream = type(self).__bases__[-1]
        self._report([SCRIPTED])
        twin: MessagePassing = object.__new__(upstream)
        twin.__dict__.update(self.__dict__)
        MessagePassing._set_jittable_templates(twin)
        return twin

    def _gate(
        self,
        score: str,
        nodes: tuple[Tensor | None, Tensor | None],
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        *,
        heads: int,
        channels: int,
        size: tuple[int, int] | None = None,
        lin_edge: torch.nn.Module | None = None,
        dropout: float = 0.0,
        self_loops: bool = False,
        weights: bool = False,
        node_dim: int = 0,
        reasons: Sequence[str] = (),
    ) -> Call:
        """Collect every reason to leave this call to PyG.

        Args:
            score: The score of the fused op.
            nodes: Features `[N, F]` of the nodes that row 0 and row 1 of `edge_index` point to.
            edge_index: Any form that PyG takes.
            edge_attr: `[E, edge_dim]`.
            heads: Number of heads H.
            channels: Channels per head C.
            size: Declared numbers of nodes, as `nodes`.
            lin_edge: The transformation of the edge features, None where the conv takes none.
            dropout: Probability that a weight is dropped in training.
            self_loops: Whether the conv replaces self-loops.
            weights: Whether the caller wants the attention weights.
            node_dim: The node dimension that the conv's own forward assumes.
            reasons: What the conv itself has found.

        Returns:
            The call, with its reasons.
        """
        form, compiling = form_of(edge_index), torch.compiler.is_compiling()
        found = [*reasons, *self._module_reasons(node_dim, compiling)]
        first, second = nodes
        x = first if first is not None else second
        if x is None or not (_is_matrix(x) and (second is x or second is None or _is_matrix(second))):
            found.append("x is not a matrix [N, F] per node set")
            return Call(found, (), edge_index, form)
        if form == "PartitionedGraph":
            raise TypeError(f"'edge_index' needs a model that pyg_dfgnn.distributed.wrap has returned (got a {form})")
        if form not in FORMS:
            found.append(f"edge_index is a {form}")
            return Call(found, (), edge_index, form)
        if not compiling and isinstance(x, FakeTensor):
            found.append("x is a FakeTensor")
        device = x.device
        found += self._edge_index_reasons(edge_index, form, device)

        sizes = [None if first is None else first.size(0), None if second is None else second.size(0)]
        if form == "EdgeIndex":
            size = (edge_index.num_rows, edge_index.num_cols)
        elif form != "tensor":
            size = (edge_index.size(1), edge_index.size(0))
        if size is not None:
            for dim in (0, 1):
                if sizes[dim] is None:
                    sizes[dim] = size[dim]
                elif size[dim] is not None and size[dim] != sizes[dim]:
                    found.append(f"x has {sizes[dim]} nodes on side {dim} and the adjacency {size[dim]}")
        if form == "EdgeIndex" and self_loops and second is None and sizes[0] != sizes[1]:
            # PyG makes a square adjacency of it as it adds loops.
            found.append("self-loops with an EdgeIndex between two node sets and x of one")
        source, target = (0, 1) if self.flow == "source_to_target" else (1, 0)
        if source == 1 and score in ("add", "gatv2") and sizes[0] != sizes[1]:
            # PyG sends from nodes[0] along row 1 then, and sizes the result by nodes[0].
            found.append("flow='target_to_source' between two node sets")
        num_src = sizes[source] if sizes[source] is not None else sizes[target]
        num_dst = sizes[target] if sizes[target] is not None else sizes[source]

        if form in ("torch.sparse", "SparseTensor") and lin_edge is not None:
            if edge_attr is None:
                edge_attr = adjacency_features(edge_index)
            elif self_loops:
                found.append("edge_attr and self-loops with a sparse adjacency")
            if edge_attr is not None and self_loops and form == "SparseTensor":
                found.append("edge features and self-loops with a SparseTensor")
        if compiling and weights and self._may_need_grad(*nodes, edge_attr):
            found.append("attention weights with gradients while compiling")
        if compiling and form != "tensor":
            found.append(f"a {form} while compiling")
        if compiling and self_loops and (weights or edge_attr is not None):
            found.append("self-loops with edge features or attention weights while compiling")

        edge = edge_attr is not None and lin_edge is not None
        if edge_attr is not None and edge:
            rows = edge_attr.size(0) if edge_attr.dim() else 0
            if edge_attr.dim() > 2 or rows == 1 != num_edges(edge_index):
                found.append("edge_attr is to be broadcast")
        dropped = dropout > 0.0 and self.training
        dtype = self._storage_dtype(x)
        problem = (score, heads, channels, dtype, device, edge, dropped, torch.is_grad_enabled())
        found += kernel_reasons(*problem)
        edge_attr = edge_attr if edge else None
        return Call(found, problem, edge_index, form, edge_attr, num_src or 0, num_dst or 0, self_loops, weights)

    def _edges(
        self, call: Call, fill_value: float | Tensor | str | None = None, edge_dim: int | None = None
    ) -> tuple[Graph | EdgeSet, Tensor | None, Adj]:
        """The edges of a call for the fused ops.

        Args:
            call: A call without reasons.
            fill_value: How the features of self-loops are made, as PyG's convs define it.
            edge_dim: The width of `call.edge_attr`, None or -1 for any.

        Returns:
            The graph, the edge features in the order of its `edge_index`, and the adjacency that PyG would return
            with the attention weights.
        """
        edge_index, edge_attr, self_loops = call.edge_index, call.edge_attr, call.self_loops
        if edge_attr is not None:
            edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
            width: int | str = "edge_dim" if edge_dim is None or edge_dim < 0 else edge_dim
            check_shape("edge_attr", edge_attr, (num_edges(edge_index), width), f"[E, edge_dim={width}]")

        if (
            self_loops
            and call.form != "tensor"
            and (call.weights or (edge_attr is not None and call.form != "EdgeIndex"))
        ):
            # PyG hands out an adjacency of the same kind with the loops in it, in an order of its own.
            if call.form == "SparseTensor":
                edge_index = torch_sparse.set_diag(edge_index)
            else:
                given = edge_attr if call.form == "EdgeIndex" else None
                edge_index, given = remove_self_loops(edge_index, given)
                # Values that are no edge features make room for the weights: reduce nothing into the loops.
                fill_value = 1.0 if edge_attr is None else fill_value
                edge_index, given = add_self_loops(
                    edge_index, given, fill_value=fill_value, num_nodes=min(call.num_src, call.num_dst)
                )
                if edge_attr is not None:
                    edge_attr = given if call.form == "EdgeIndex" else adjacency_features(edge_index)
            self_loops = False

        if torch.compiler.is_compiling():
            transposed = self.flow == "target_to_source"
            return EdgeSet(edge_index, call.num_src, call.num_dst, self_loops, transposed), edge_attr, edge_index

        if call.form == "tensor":
            transposed = self.flow != "source_to_target"
            graph = Graph.resolve(edge_index, call.num_src, call.num_dst, self_loops, transposed)
        else:
            graph = Graph.of(edge_index, call.num_src, call.num_dst, flow=self.flow, self_loops=self_loops)
        if self_loops and edge_attr is not None:
            assert graph.kept is not None
            plain = edge_index.as_tensor() if call.form == "EdgeIndex" else edge_index
            edge_attr = edge_attr.index_select(0, graph.kept)
            # A reduction sums at row 1, which may have more nodes than there are loops.
            loop_attr = compute_loop_attr(
                plain.index_select(1, graph.kept).long(), edge_attr, max(call.num_src, call.num_dst), False, fill_value
            )
            edge_attr = torch.cat([edge_attr, loop_attr[: min(call.num_src, call.num_dst)]])
        if self_loops and call.weights:
            edge_index = graph.edge_index.flip(0) if self.flow == "target_to_source" else graph.edge_index.clone()
        return graph, edge_attr, edge_index

    def _settle(self, attended: Tensor, dtype: torch.dtype) -> Tensor:
        """The output of the op in at least this dtype; its heads are averaged here if the op has left them apart."""
        if attended.dtype is not dtype:
            attended = attended.to(torch.promote_types(attended.dtype, dtype))
        return attended if self.concat else attended.mean(dim=1)

    def _finish(
        self, attended: Tensor, alpha: Tensor | None, dtype: torch.dtype, res: Tensor | None, adjacency: Adj
    ) -> Any:
        """What `GATConv` and `GATv2Conv` return.

        Args:
            attended: What the fused op returned.
            alpha: The attention weights, if the caller wants them.
            dtype: Of the attention weights.
            res: The residual, if the conv has one.
            adjacency: To be returned with the weights.
        """
        out = self._settle(attended, dtype)
        if res is not None:
            out = out + res
        # Every read of a parameter is a search for it.
        bias = self.bias
        if bias is not None:
            out = out + bias
        return out if alpha is None else with_weights(out, adjacency, alpha.to(dtype))

    def _report(self, reasons: list[str]) -> None:
        report(type(self).__name__, reasons)

    def _is_untouched(self, node_dim: int) -> bool:
        """Whether the module gives the gate no reason, found in few steps; an eager call has none but these."""
        own, kind = self.__dict__, type(self)
        explain, decomposed, dim, modules, *hooks = _facts(own)
        return (
            not explain
            and decomposed == 1
            and dim == node_dim
            and not any(hooks)
            and type(modules["aggr_module"]) is SumAggregation
            and own.keys().isdisjoint(METHODS)
            and _methods(kind) == self._upstream_methods
            and not _overrides_propagation(kind)  # type: ignore[arg-type]
        )

    def _module_reasons(self, node_dim: int, compiling: bool) -> list[str]:
        reasons: list[str] = []
        if not compiling and is_eager() and self._is_untouched(node_dim) and not torch.jit.is_tracing():
            return reasons
        if self.explain:
            reasons.append("an explainer is attached")
        if any(getattr(self, name) for name in HOOKS):
            reasons.append("message passing hooks are registered")
        replaced = [*replaced_methods(type(self)), *[name for name in METHODS if name in self.__dict__]]
        if replaced:
            reasons.append(f"'{', '.join(replaced)}' is overridden")
        if overrides_propagation(type(self)):
            reasons.append("'propagate' or 'edge_updater' is overridden")
        if self.decomposed_layers != 1:
            reasons.append(f"decomposed_layers is {self.decomposed_layers}")
        if type(self._modules["aggr_module"]) is not SumAggregation:
            reasons.append(f"aggr is {self.aggr!r}, only the sum is fused")
        if self.node_dim != node_dim:
            reasons.append(f"node_dim is {self.node_dim}")
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            reasons.append("TorchScript")
        if not compiling and torch._C._are_functorch_transforms_active():
            reasons.append("a torch.func transform is active")
        if not compiling and forward_ad._current_level >= 0:
            reasons.append("forward-mode differentiation is active")
        return reasons

    def _edge_index_reasons(self, edge_index: Any, form: str, device: torch.device) -> list[str]:
        found = []
        where = edge_index.device() if form == "SparseTensor" else edge_index.device
        if where != device:
            found.append(f"edge_index is on {where} and x on {device}")
        if form in ("tensor", "EdgeIndex"):
            if edge_index.dtype not in (torch.int64, torch.int32) or edge_index.dim() != 2 or edge_index.size(0) != 2:
                given = f"{edge_index.dtype}, {list(edge_index.shape)}"
                found.append(f"edge_index is no int64 or int32 tensor of shape [2, E] ({given})")
            return found
        if self.flow != "source_to_target":
            found.append("flow='target_to_source' with a sparse adjacency")
        if form == "torch.sparse":
            if edge_index.layout not in (torch.sparse_coo, torch.sparse_csr):
                found.append(f"the sparse layout {edge_index.layout}")
            elif edge_index.layout == torch.sparse_coo and not edge_index.is_coalesced():
                found.append("a COO adjacency that is not coalesced")
        return found

    def _storage_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the node features behind the linear layers."""
        # Meta tensors have no autocast to ask about.
        dtype, kind = x.dtype, x.device.type
        if dtype is not torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return dtype

    def _may_need_grad(self, *tensors: Tensor | None) -> bool:
        if not torch.is_grad_enabled():
            return False
        return any(t is not None and t.requires_grad for t in (*tensors, *self.parameters()))


def with_weights(out: Tensor, adjacency: Adj, alpha: Tensor) -> tuple[Any, ...]:
    """What GATConv and GATv2Conv return when the attention weights are asked for, by the kind of adjacency."""
    if isinstance(adjacency, SparseTensor):
        return out, adjacency.set_value(alpha, layout="coo")
    if is_torch_sparse_tensor(adjacency):
        return out, (set_sparse_value(adjacency, alpha), alpha)
    return out, (adjacency, alpha)


def num_edges(edge_index: Adj) -> int:
    """Number of edges of any form of `edge_index`."""
    if isinstance(edge_index, SparseTensor):
        return edge_index.nnz()
    return edge_index._nnz() if is_torch_sparse_tensor(edge_index) else edge_index.size(1)
