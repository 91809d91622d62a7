"""Gradients of attention by a program of the IR, where they are differentiated again."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyg_dfgnn.ir.attention import LOGITS, attention
from pyg_dfgnn.ir.program import SEED
from pyg_dfgnn.ops.function import OpCall
from pyg_dfgnn.ops.relational.program import gradients
from pyg_dfgnn.statements.score import Score


def gradients_again(score: Score, call: OpCall, inputs: Mapping[str, Any], *grads: Tensor) -> dict[str, Tensor] | None:
    """Return the gradient of each input that needs one, or None (:attr:`pyg_dfgnn.ops.core.Op.again`)."""
    if score.name not in LOGITS:
        return None
    heads, channels, (scale, slope, dropout) = call.prepared.heads, call.prepared.channels, call.numbers
    features = {name: tensor.float() for name, tensor in inputs.items() if tensor is not None and name != "seed"}
    for name in features.keys() & {"target", "key", "value"}:
        features[name] = features[name].reshape(-1, heads, channels)
    if "parameter" in features:
        features["parameter"] = features["parameter"].reshape((heads, channels) if score.parameter else (1,))
    if call.shared:
        features["target"] = features["value"]
    # Not in the program, so that a scale that changes makes no other one.
    factor = scale if "scale" in score.numbers else 1.0
    scaled = features.keys() & {"target", "edge_target"}
    features |= {name: features[name] * factor for name in scaled}
    if dropout:
        features[SEED] = inputs["seed"]
    widths = channels, call.prepared.problem.edge_channels
    named = zip(("out", "edge_out"), grads, widths, strict=False)
    out = {name: grad.reshape(-1, heads, width).float() for name, grad, width in named}
    grad_inputs = gradients(attention(score.name, score.edge_in_value, slope, dropout), call.graph, features, out)
    if grad_inputs is None:
        return None
    grad_inputs |= {name: grad_inputs[name] * factor for name in grad_inputs.keys() & scaled}
    if call.shared and "target" in grad_inputs:
        grad_inputs["value"] = grad_inputs["value"] + grad_inputs.pop("target")
    return {name: grad_inputs[name].reshape(inputs[name].shape).to(inputs[name].dtype) for name in grad_inputs}
