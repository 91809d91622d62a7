"""The record of an attention score: operands, CUDA struct, formula in plain torch, tuning; the registry of scores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from pyg_dfgnn.statements.op import DIRECTIONS
from pyg_dfgnn.statements.tuning import (
    BlockMmaTuning,
    PaperTuning,
    RowSplitTuning,
    SmemTuning,
    Unroll,
)


class EdgeOperands(NamedTuple):
    """The operands of a score at every edge; None for what a score does not take.

    ``target``, ``key``, ``value`` and a vector ``edge`` are [E, H, C]; node scalars and a scalar ``edge`` are [E, H];
    ``parameter`` has the shape that the record states.
    """

    target: Tensor | None
    key: Tensor | None
    value: Tensor
    target_scalars: Tensor | None
    source_scalars: Tensor | None
    parameter: Tensor | float | None
    edge: Tensor | None
    scale: float
    slope: float


_DEFAULT_UNROLL = {
    "forward": Unroll(4, 2, 4, 2),
    "targets": Unroll(2, 2, 2, 1),
    "sources": Unroll(2, 2, 2, 1),
}
_VECTOR_WORK = {"forward": 4, "targets": 6, "sources": 6}
_SCALAR_WORK = {"forward": 1, "targets": 2, "sources": 2}


@dataclass(frozen=True, eq=False)
class Score:
    """An attention score ``S_ij`` as data. ``O_i = sum_j softmax_j(S_ij) D_ij v_ij`` is common to all scores.

    Attributes:
        name: Name in the registry :data:`~pyg_dfgnn.statements.scores.SCORES`.
        source: CUDA text of ``struct Score`` (see ``kernels/attention/inputs.cuh``), or its path under ``kernels/``,
            which ends in ``.cuh``.
        reference: The logits [E, H] in plain torch, which autograd can differentiate.
        target: Whether the score reads a vector of the target, [N_dst, H, C].
        key: Whether the score reads a vector of the source other than the value, [N_src, H, C].
        node_scalars: Numbers per node and head, [N_dst, H] and [N_src, H] in float32: "input" for the user's own,
            "inverse_norm" for inverse norms of the target vector and the value, None for no numbers.
        edge: What the score reads of an edge: a "vector" [E, H, C], a "scalar" [E, H], or None.
        edge_in_value: Whether the edge vector is added to the value too.
        takes_edge_rows: Whether edges may have rows [E, D] that all heads share, as further channels of the target's
            and the source's vectors and of the value: for a score that is linear in both vectors.
        parameter: Shape of a learned parameter: () for one number, ("H", "C") for a vector per head, or None.
        numbers: Which of the numbers "scale" and "slope" the score reads.
        gradients: Operands that get a gradient, by their names in :class:`EdgeOperands`.
        is_target_value: Whether target and value are one tensor where sources and targets are the same nodes.
        saves_dout_dlogit: Whether the forward pass can leave the derivative of the output in the target's scalars,
            [N_dst, H, C] in float32, from which the backward pass over targets is a dot product per node. It gives no
            gradient of edge scalars.
        has_factors: Whether `block_mma` can make the weights of factors of the nodes.
        row_split: How `row_split` runs each direction; a direction that is missing runs with defaults.
        smem: How `smem` runs each direction; a direction that is missing runs with defaults.
        block_mma: What `block_mma` does in each direction; empty for a score that is no matrix product.
        paper: What `smmf` and `pmf` do in each direction; empty for a score that they cannot run.
    """

    name: str
    source: str
    reference: Callable[[EdgeOperands], Tensor]
    target: bool = False
    key: bool = False
    node_scalars: str | None = None
    edge: str | None = None
    edge_in_value: bool = False
    takes_edge_rows: bool = False
    parameter: tuple[str, ...] | None = None
    numbers: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ("value",)
    is_target_value: bool = False
    saves_dout_dlogit: bool = False
    has_factors: bool = False
    row_split: Mapping[str, RowSplitTuning] = field(default_factory=dict, repr=False)
    smem: Mapping[str, SmemTuning] = field(default_factory=dict, repr=False)
    block_mma: Mapping[str, BlockMmaTuning] = field(default_factory=dict, repr=False)
    paper: Mapping[str, PaperTuning] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("row_split", "smem", "block_mma", "paper"):
            tuning = getattr(self, name)
            wrong = set(tuning) - set(DIRECTIONS)
            if wrong:
                raise ValueError(f"'{name}' needs keys of {', '.join(DIRECTIONS)} (got {', '.join(sorted(wrong))})")
            object.__setattr__(self, name, MappingProxyType(dict(tuning)))
        for name, known in (
            ("node_scalars", (None, "input", "inverse_norm")),
            ("edge", (None, "vector", "scalar")),
            ("parameter", (None, (), ("H", "C"))),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name!r} needs one of {known} (got {getattr(self, name)!r})")
        if self.edge_in_value and self.edge != "vector":
            raise ValueError(f"'edge_in_value' needs edge='vector' (got edge={self.edge!r})")
        if self.takes_edge_rows and not (self.target and self.key and self.parameter is None):
            raise ValueError("'takes_edge_rows' needs vectors of target and source, and no parameter")
        if self.parameter == () and self.node_scalars != "inverse_norm":
            raise ValueError("'parameter' of shape () needs node_scalars='inverse_norm', whose logit it multiplies")
        unknown = set(self.gradients) - {*EdgeOperands._fields[:7]}
        if unknown:
            raise ValueError(f"'gradients' needs names of operands (got {', '.join(sorted(unknown))})")

    def __reduce__(self) -> tuple[Any, ...]:
        says = _fields_of(self)
        return _restored, ({name: dict(v) if isinstance(v, MappingProxyType) else v for name, v in says.items()},)

    def __deepcopy__(self, _: dict[int, Any]) -> "Score":
        return self

    def __copy__(self) -> "Score":
        return self

    @property
    def texts(self) -> tuple[tuple[str, str], ...]:
        """The text that the kernels include as "score.cuh", with its name: what a module of this score injects."""
        is_path = self.source.endswith(".cuh")
        return (("score.cuh", f'#include "{self.source}"' if is_path else self.source),)

    def constants(self, edge: bool, edge_rows: bool = False) -> dict[str, int]:
        """The operands as the kernels' constants, see ``kernels/attention/inputs.cuh``.

        Args:
            edge: Whether there are edge features.
            edge_rows: Whether these are rows that all heads share.
        """
        return {
            "HAS_TARGET_VECTOR": int(self.target),
            "HAS_KEY": int(self.key),
            "NODE_SCALARS": (None, "input", "inverse_norm").index(self.node_scalars),
            "EDGE": 3 if edge_rows else (None, "vector", "scalar").index(self.edge) if edge else 0,
            "EDGE_IN_VALUE": int(edge and self.edge_in_value and not edge_rows),
            "PARAMETER": (None, (), ("H", "C")).index(self.parameter),
            "TARGET_IS_VALUE": int(self.is_target_value),
        }

    def row_split_tuning(self, direction: str) -> RowSplitTuning:
        """How `row_split` runs a direction."""
        return self.row_split.get(direction, _UNTUNED_ROWS)

    def smem_tuning(self, direction: str) -> SmemTuning:
        """How `smem` runs a direction."""
        return self.smem.get(direction, _UNTUNED_SMEM)

    def unroll(self, direction: str) -> Unroll:
        """Edges that a slot of `row_split` keeps in flight."""
        tuned = self.row_split_tuning(direction).unroll
        return _DEFAULT_UNROLL[direction] if tuned is None else tuned

    def work(self, direction: str) -> int:
        """Multiply-adds per feature of an edge in `row_split`."""
        tuned = self.row_split_tuning(direction).work
        return (_VECTOR_WORK if self.target else _SCALAR_WORK)[direction] if tuned is None else tuned

    def head_sums(self, direction: str) -> int:
        """Sums over the lanes of a head, for one edge: the score's product, and in backward <dO, v>."""
        return int(self.target) + int(direction != "forward")

    def gathers(self, direction: str) -> int:
        """Feature rows gathered per edge: value and key, or in the pass over sources dO and the target's vector."""
        return 1 + int(self.target if direction == "sources" else self.key)

    def node_tensors(self, direction: str) -> int:
        """Tensors [N, H, C] that a pass reads and writes: vectors, output, and in backward the gradients."""
        vectors = 1 + int(self.key) + int(self.target and not self.is_target_value)
        if direction == "forward":
            return vectors + 1
        if direction == "targets":
            return vectors + 2 + int(self.target)
        return vectors + 2 + int(self.key) + int(self.is_target_value)

    def state_channels(self, direction: str, channels: int, edge_channels: int = 0) -> int:
        """Numbers per head, in float32, of the state of one row or chunk in `row_split`.

        Args:
            direction: A direction, "weights", or "dout_dlogit" for the forward pass that leaves dout_dlogit.
            channels: Features per head.
            edge_channels: Channels of an edge's row that all heads share.
        """
        if direction == "dout_dlogit":
            return 2 * channels + 3
        if direction in ("forward", "weights"):
            return channels + 2 + edge_channels
        scalars = int(self.node_scalars == "input")
        if direction == "targets":
            return channels * int(self.target) + scalars + 3 * int(self.parameter == ()) + edge_channels
        return channels * (2 if self.key or self.node_scalars == "inverse_norm" else 1) + scalars


_UNTUNED_ROWS = RowSplitTuning()
_UNTUNED_SMEM = SmemTuning()


_scores: dict[str, Score] = {}
SCORES: Mapping[str, Score] = MappingProxyType(_scores)
"""Every score by its name."""


def register(score: Score) -> Score:
    """Add a score to :data:`SCORES`, so that operators find it by its name.

    Args:
        score: The record.

    Returns:
        The record, or the one that has its name and says the same.

    Raises:
        ValueError: Another record, which says something else, has this name.
    """
    known = _scores.setdefault(score.name, score)
    if known is not score and _fields_of(known) != _fields_of(score):
        need = "a name that no other score has: a changed score needs another name or a new process"
        raise ValueError(f"'score' needs {need} (got {score.name!r})")
    return known


def _fields_of(score: Score) -> dict[str, Any]:
    """Return what a record says, by field."""
    return {each.name: getattr(score, each.name) for each in fields(score)}


def _restored(says: Mapping[str, Any]) -> Score:
    """Return the record of a pickle: the registered one of its name where both say the same."""
    score = Score(**says)
    known = _scores.get(score.name)
    return known if known is not None and _fields_of(known) == _fields_of(score) else score
