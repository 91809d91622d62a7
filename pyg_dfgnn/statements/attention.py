"""The statement of attention over edges, made from the record of its score.

.. math::
    O_i = \\sum_{j \\in N(i)} D_{ij} \\, \\mathrm{softmax}_j(S_{ij}) \\, v_{ij}

The passes of all scores share one list of arguments, the ABI of the attention kernels.

Edges may have rows a [E, D] that all heads share, as further channels of the score and of the values:

.. math::
    S_{ij} = S([q_i, q'_i], [k_j, a_{ij}]), \\quad
    A_i = \\sum_{j \\in N(i)} D_{ij} \\, \\mathrm{softmax}_j(S_{ij}) \\, a_{ij}
"""

from collections.abc import Callable, Mapping
from typing import Any

from pyg_dfgnn.statements.op import Gradient, Number, Pass, Precomputed, Statement, TensorSpec
from pyg_dfgnn.statements.score import Score

_INPUTS = ("target", "key", "value", "target_scalars", "source_scalars", "parameter", "edge", "seed")
_COMMON = (*_INPUTS, "scale", "slope", "dropout")
_ROWS_FORWARD = ("edge_target", "edge_out", "edge_out_fp32")
FORWARD = Pass(
    "forward", "targets", "sources", (*_COMMON, "out", "row_stats", "out_fp32", "dout_dlogit", *_ROWS_FORWARD)
)
TARGETS = Pass(
    "targets",
    "targets",
    "sources",
    (
        *(*_COMMON, "out", "row_stats", "grad_out", "bwd_row_stats", "grad_target", "grad_parameter_rows", "grad_edge"),
        *("grad_parameter_blocks", "edge_target", "edge_out", "grad_edge_out", "grad_edge_target", "dout_dlogit"),
    ),
)
SOURCES = Pass(
    "sources",
    "sources",
    "targets",
    (
        *(*_COMMON, "bwd_row_stats", "grad_out", "grad_key", "grad_value", "grad_source", "added"),
        *("edge_target", "grad_edge_out"),
    ),
)
WEIGHTS = Pass("weights", "targets", "sources", (*_COMMON, "row_stats", "weights", "edge_target"))


def statement_of(
    score: Score, reference: Callable[..., Any], labels: Mapping[str, str], edge_rows: bool = False
) -> Statement:
    """Return the statement of attention with a score.

    Args:
        score: The score.
        reference: Attention with this score in plain torch (:class:`~pyg_dfgnn.statements.op.Statement`).
        labels: The user's names of inputs and numbers, by role.
        edge_rows: Whether edges have rows that all heads share.
    """
    edge_shape: tuple[str, ...] = ("D",) if edge_rows else ("H", "C") if score.edge == "vector" else ("H",)
    inputs = [
        TensorSpec(
            name,
            "edges" if name == "edge" else "whole" if name in ("parameter", "seed") else f"{side}s",
            shape,
            dtype,
            labels.get(name, ""),
            needed=name in inputs_of(score, edge_rows, False, edge_rows),
        )
        for name, side, shape, dtype in (
            ("target", "target", ("H", "C"), "features"),
            ("key", "source", ("H", "C"), "features"),
            ("value", "source", ("H", "C"), "features"),
            ("target_scalars", "target", ("H",), "float32"),
            ("source_scalars", "source", ("H",), "float32"),
            ("parameter", "whole", score.parameter or (), "float32"),
            ("edge", "edge", edge_shape, _edge_dtype(score)),
            *((("edge_target", "target", ("H", "D"), "features"),) if edge_rows else ()),
            ("seed", "whole", (1,), "int64"),
        )
    ]
    norms = score.node_scalars == "inverse_norm"
    inputs = [value for value in inputs if not (norms and value.name.endswith("_scalars"))]
    precomputed: tuple[Precomputed, ...] = ()
    if norms:
        precomputed = (
            Precomputed(TensorSpec("source_scalars", "sources", ("H",), "float32"), "value"),
            Precomputed(TensorSpec("target_scalars", "targets", ("H",), "float32"), "target", same_as="source_scalars"),
        )
    return Statement(
        name=f"attention/{score.name}" + ("/edge_rows" if edge_rows else ""),
        inputs=tuple(inputs),
        numbers=(
            Number("scale", labels.get("scale", "scale" if "scale" in score.numbers else "")),
            Number("slope", labels.get("slope", "slope" if "slope" in score.numbers else ""), example=0.2),
            Number("dropout", "dropout_p", 0.0, 1.0, 0.5),
        ),
        output=TensorSpec("out", "targets", ("H", "C")),
        extra_outputs=(TensorSpec("edge_out", "targets", ("H", "D")),) if edge_rows else (),
        saved=(
            TensorSpec("row_stats", "targets", ("H", 2), "float32", when="stats"),
            *(
                (TensorSpec("dout_dlogit", "targets", ("H", "C"), "float32", when="dout_dlogit"),)
                if score.saves_dout_dlogit
                else ()
            ),
            TensorSpec("out_fp32", "targets", ("H", "C"), "float32", when="exact"),
            *((TensorSpec("edge_out_fp32", "targets", ("H", "D"), "float32", when="exact"),) if edge_rows else ()),
        ),
        forward=(FORWARD,),
        backward=(TARGETS, SOURCES),
        gradients=tuple(_gradients(score, edge_rows)),
        scratch=(TensorSpec("bwd_row_stats", "targets", ("H", 4), "float32"),),
        edge_pass=WEIGHTS,
        edge_value=TensorSpec("weights", "edges", ("H",), "float32"),
        precomputed=precomputed,
        exact_outputs=("out_fp32", "edge_out_fp32") if edge_rows else ("out_fp32",),
        reference=reference,
    )


def inputs_of(score: Score, edge: bool, dropout: bool, edge_rows: bool = False) -> frozenset[str]:
    """Return the inputs that a call with a score has, with edge inputs or not, with dropout or not."""
    scalars = score.node_scalars == "input"
    has = {
        "target": score.target,
        "key": score.key,
        "value": True,
        "target_scalars": scalars,
        "source_scalars": scalars,
        "parameter": score.parameter is not None,
        "edge": edge,
        "edge_target": edge_rows,
        "seed": dropout,
    }
    return frozenset(name for name, is_there in has.items() if is_there)


def _edge_dtype(score: Score) -> str:
    return "features" if score.edge == "vector" else "float32"


def _gradients(score: Score, edge_rows: bool) -> list[Gradient]:
    """Return the gradients that the kernels of a score write."""
    gradients = [Gradient("value", TensorSpec("grad_value", "sources", like="value"))]
    if score.target:
        gradients.append(Gradient("target", TensorSpec("grad_target", "targets", like="target")))
    if score.key:
        gradients.append(Gradient("key", TensorSpec("grad_key", "sources", like="key")))
    if score.node_scalars == "input":
        name = "grad_parameter_rows" if score.target else "grad_target"
        gradients.append(Gradient("target_scalars", TensorSpec(name, "targets", like="target_scalars")))
        gradients.append(Gradient("source_scalars", TensorSpec("grad_source", "sources", like="source_scalars")))
    if score.parameter == () and "parameter" in score.gradients:
        gradients.append(Gradient("parameter", TensorSpec("grad_parameter_rows", "targets", ("H",), "float32"), "all"))
    elif score.parameter is not None and "parameter" in score.gradients:
        value = TensorSpec("grad_parameter_blocks", "blocks", dtype="float32", like="parameter")
        gradients.append(Gradient("parameter", value, "rows"))
    if edge_rows:
        gradients.append(Gradient("edge", TensorSpec("grad_edge", "edges", ("G", "D")), "groups", when="edge_grad"))
        gradients.append(Gradient("edge_target", TensorSpec("grad_edge_target", "targets", like="edge_target")))
    elif score.edge is not None:
        gradients.append(Gradient("edge", TensorSpec("grad_edge", "edges", like="edge"), when="edge_grad"))
    return gradients
