"""The statement of attention over edges, made from the record of its score.

.. math::
    O_i = \\sum_{j \\in N(i)} D_{ij} \\, \\mathrm{softmax}_j(S_{ij}) \\, v_{ij}

The passes of all scores share one list of arguments, the ABI of the attention kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pyg_dfgnn.statements.op import Derived, Gradient, Number, Pass, Statement, Value
from pyg_dfgnn.statements.score import Score

_INPUTS = ("target", "key", "value", "target_scalars", "source_scalars", "parameter", "edge", "seed")
_COMMON = (*_INPUTS, "scale", "slope", "dropout")
FORWARD = Pass("forward", "targets", "sources", (*_COMMON, "out", "row_stats", "out_fp32", "dout_dlogit"))
TARGETS = Pass(
    "targets",
    "targets",
    "sources",
    (
        *(*_COMMON, "out", "row_stats", "grad_out", "bwd_row_stats", "grad_target", "grad_parameter_rows", "grad_edge"),
        *("grad_parameter_blocks", "dout_dlogit"),
    ),
)
SOURCES = Pass(
    "sources",
    "sources",
    "targets",
    (*_COMMON, "bwd_row_stats", "grad_out", "grad_key", "grad_value", "grad_source", "added"),
)
WEIGHTS = Pass("weights", "targets", "sources", (*_COMMON, "row_stats", "weights"))


def statement_of(score: Score, reference: Callable[..., Any], labels: Mapping[str, str]) -> Statement:
    """Return the statement of attention with a score.

    Args:
        score: The score.
        reference: Attention with this score in plain torch (:class:`~pyg_dfgnn.statements.op.Statement`).
        labels: The user's names of inputs and numbers, by role.
    """
    inputs = [
        Value(
            name,
            "edges" if name == "edge" else "whole" if name in ("parameter", "seed") else f"{side}s",
            shape,
            dtype,
            labels.get(name, ""),
            needed=name in inputs_of(score, False, False),
        )
        for name, side, shape, dtype in (
            ("target", "target", ("H", "C"), "features"),
            ("key", "source", ("H", "C"), "features"),
            ("value", "source", ("H", "C"), "features"),
            ("target_scalars", "target", ("H",), "float32"),
            ("source_scalars", "source", ("H",), "float32"),
            ("parameter", "whole", score.parameter or (), "float32"),
            ("edge", "edge", ("H", "C") if score.edge == "vector" else ("H",), _edge_dtype(score)),
            ("seed", "whole", (1,), "int64"),
        )
    ]
    norms = score.node_scalars == "inverse_norm"
    inputs = [value for value in inputs if not (norms and value.name.endswith("_scalars"))]
    derived: tuple[Derived, ...] = ()
    if norms:
        derived = (
            Derived(Value("source_scalars", "sources", ("H",), "float32"), "value"),
            Derived(Value("target_scalars", "targets", ("H",), "float32"), "target", twin="source_scalars"),
        )
    return Statement(
        name=f"attention/{score.name}",
        inputs=tuple(inputs),
        numbers=(
            Number("scale", labels.get("scale", "scale" if "scale" in score.numbers else "")),
            Number("slope", labels.get("slope", "slope" if "slope" in score.numbers else ""), example=0.2),
            Number("dropout", "dropout_p", 0.0, 1.0, 0.5),
        ),
        output=Value("out", "targets", ("H", "C")),
        saved=(
            Value("row_stats", "targets", ("H", 2), "float32", when="stats"),
            Value("out_fp32", "targets", ("H", "C"), "float32", when="exact"),
            *(
                (Value("dout_dlogit", "targets", ("H", "C"), "float32", when="dout_dlogit"),)
                if score.saves_dout_dlogit
                else ()
            ),
        ),
        forward=(FORWARD,),
        backward=(TARGETS, SOURCES),
        gradients=tuple(_gradients(score)),
        scratch=(Value("bwd_row_stats", "targets", ("H", 4), "float32"),),
        edge_pass=WEIGHTS,
        edge_value=Value("weights", "edges", ("H",), "float32"),
        derived=derived,
        exact_output="out_fp32",
        reference=reference,
    )


def inputs_of(score: Score, edge: bool, dropout: bool) -> frozenset[str]:
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
        "seed": dropout,
    }
    return frozenset(name for name, is_there in has.items() if is_there)


def _edge_dtype(score: Score) -> str:
    return "features" if score.edge == "vector" else "float32"


def _gradients(score: Score) -> list[Gradient]:
    """Return the gradients that the kernels of a score write."""
    gradients = [Gradient("value", Value("grad_value", "sources", like="value"))]
    if score.target:
        gradients.append(Gradient("target", Value("grad_target", "targets", like="target")))
    if score.key:
        gradients.append(Gradient("key", Value("grad_key", "sources", like="key")))
    if score.node_scalars == "input":
        if not score.target:
            gradients.append(Gradient("target_scalars", Value("grad_target", "targets", like="target_scalars")))
        gradients.append(Gradient("source_scalars", Value("grad_source", "sources", like="source_scalars")))
    if score.parameter == () and "parameter" in score.gradients:
        gradients.append(Gradient("parameter", Value("grad_parameter_rows", "targets", ("H",), "float32"), "all"))
    elif score.parameter is not None and "parameter" in score.gradients:
        value = Value("grad_parameter_blocks", "blocks", dtype="float32", like="parameter")
        gradients.append(Gradient("parameter", value, "rows"))
    if score.edge is not None:
        gradients.append(Gradient("edge", Value("grad_edge", "edges", like="edge"), when="edge_grad"))
    return gradients
