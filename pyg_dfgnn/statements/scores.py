"""The attention scores of the package; scores stated outside of it join them in :data:`SCORES`."""

import torch.nn.functional as F
from torch import Tensor

from pyg_dfgnn.statements.score import SCORES, EdgeOperands, Score, register
from pyg_dfgnn.statements.tuning import (
    BlockMmaTuning,
    PaperTuning,
    RowSplitTuning,
    SmemLayout,
    SmemTuning,
    Sweep,
    Unroll,
)

__all__ = [
    "ADD",
    "COSINE",
    "DOT",
    "GATV2",
    "SCORES",
    "SUPERGAT_MX",
    "SUPERGAT_SD",
    "EdgeOperands",
    "Score",
    "register",
]


def _dot_logits(o: EdgeOperands) -> Tensor:
    assert o.target is not None and o.key is not None
    key = o.key if o.edge is None else o.key + o.edge
    return (o.target * key).sum(dim=-1) * o.scale


def _cosine_logits(o: EdgeOperands) -> Tensor:
    assert o.target is not None and o.parameter is not None
    products = F.normalize(o.target, p=2.0, dim=-1) * F.normalize(o.value, p=2.0, dim=-1)
    return o.parameter * products.sum(dim=-1)


def _add_logits(o: EdgeOperands) -> Tensor:
    assert o.source_scalars is not None
    terms = o.source_scalars
    if o.target_scalars is not None:
        terms = terms + o.target_scalars
    if o.edge is not None:
        terms = terms + o.edge
    return F.leaky_relu(terms, o.slope)


def _gatv2_logits(o: EdgeOperands) -> Tensor:
    assert o.target is not None and o.parameter is not None
    hidden = o.target + o.value
    if o.edge is not None:
        hidden = hidden + o.edge
    return (F.leaky_relu(hidden, o.slope) * o.parameter).sum(dim=-1)


def _supergat_mx_logits(o: EdgeOperands) -> Tensor:
    assert o.target is not None and o.target_scalars is not None and o.source_scalars is not None
    gate = (o.target * o.value).sum(dim=-1).sigmoid()
    return F.leaky_relu((o.target_scalars + o.source_scalars) * gate, o.slope)


def _supergat_sd_logits(o: EdgeOperands) -> Tensor:
    assert o.target is not None
    return F.leaky_relu((o.target * o.value).sum(dim=-1) * o.scale, o.slope)


DOT = register(
    Score(
        name="dot",
        source="attention/scores/dot.cuh",
        reference=_dot_logits,
        target=True,
        key=True,
        edge="vector",
        edge_in_value=True,
        takes_edge_rows=True,
        numbers=("scale",),
        gradients=("target", "key", "value", "edge"),
        row_split={
            "forward": RowSplitTuning(
                work=2,
                loads=(2, 1),
                packed_loads=2,
                min_blocks={(4, 4): 7, (2, 4): 7, (2, 8): 6},
                edge_rows_min_blocks={(4, 8): 5, (2, 8): 5},
                few_rows_half_heads=True,
                swept={2: Sweep(2, True, 2, 5, 0.8, 2.0)},
            ),
            "targets": RowSplitTuning(
                work=3,
                loads=(2, 2),
                unroll=Unroll(4, 2, 2, 2),
                min_blocks={(4, 4): 7, (2, 4): 7, (4, 8): 5},
                edge_rows_min_blocks={(4, 8): 4, (2, 8): 4},
                four_loads=True,
                swept={2: Sweep(2, True, 2, 4, 0.5, 1.0)},
            ),
            "sources": RowSplitTuning(
                work=4,
                loads=(2, 1),
                packed_loads=2,
                unroll=Unroll(2, 2, 4, 1),
                min_blocks={(4, 4): 7, (2, 4): 7, (4, 8): 5, (2, 16): 4},
                edge_rows_min_blocks={(4, 8): 4},
                swept={2: Sweep(2, True, 2, 3, 0.7, 1.0)},
            ),
        },
        smem={
            "forward": SmemTuning(
                layouts=(SmemLayout(2, 2, 12, 2), SmemLayout(2, 2, 6, 4)),
                head_layouts={4: SmemLayout(1, 2, 12, 2), 2: SmemLayout(1, 4, 12, 2)},
                through_l1=True,
                lazy=True,
                instructions=0.88,
                timed=(4, 2),
                timed_heads=(4, 2),
            ),
            "targets": SmemTuning(
                layouts=(SmemLayout(2, 2, 12, 2), SmemLayout(2, 2, 6, 3)),
                head_layouts={4: SmemLayout(1, 2, 12, 2)},
                instructions=0.82,
                timed=(4, 2),
                timed_heads=(4, 2),
            ),
            "sources": SmemTuning(
                layouts=(SmemLayout(2, 1, 12, 2), SmemLayout(2, 2, 6, 2)),
                head_layouts={4: SmemLayout(1, 2, 12, 2), 2: SmemLayout(1, 1, 12, 2)},
                instructions=0.89,
                timed=(4, 2),
                timed_heads=(4, 2),
            ),
        },
        block_mma={
            "forward": BlockMmaTuning(products=2, node_tensors=4),
            "targets": BlockMmaTuning(products=3, node_tensors=5, in_pairs=True),
            "sources": BlockMmaTuning(products=4, node_tensors=6, in_pairs=True),
        },
        paper={
            "forward": PaperTuning(2, 2, 1, 2),
            "targets": PaperTuning(3, 3, 2, 2),
            "sources": PaperTuning(2, 2, 0, 1),
        },
    )
)
"""``S_ij = scale * <q_i, k_j + e_ij>``, with the values ``v_j + e_ij``."""

COSINE = register(
    Score(
        name="cosine",
        source="attention/scores/cosine.cuh",
        reference=_cosine_logits,
        target=True,
        node_scalars="inverse_norm",
        parameter=(),
        gradients=("target", "value", "parameter"),
        is_target_value=True,
        row_split={
            "forward": RowSplitTuning(
                work=2,
                loads=(2, 1),
                min_blocks={(4, 4): 7, (2, 4): 7, (4, 8): 6, (2, 8): 4},
                paired_min_blocks={(2, 8): 5},
                four_loads=True,
                swept={4: Sweep(2, True, 2, 7, 1.1, 2.0)},
            ),
            "targets": RowSplitTuning(
                work=3,
                loads=(4, 2),
                unroll=Unroll(2, 2, 2, 2),
                min_blocks={(4, 4): 7, (2, 4): 7, (4, 8): 6},
                whole_heads="swept",
                swept={4: Sweep(4, True, 2, 4, 0.8, 1.0)},
            ),
            "sources": RowSplitTuning(
                work=4,
                loads=(2, 2),
                unroll=Unroll(2, 2, 2, 2),
                min_blocks={(4, 4): 7, (2, 4): 7, (4, 8): 5, (2, 16): 3},
                four_loads=True,
                whole_heads="swept",
                swept={4: Sweep(2, False, 2, 5, 0.33, 0.5)},
            ),
        },
        smem={
            "forward": SmemTuning(
                layouts=(SmemLayout(4, 1, 6, 4), SmemLayout(2, 2, 6, 3)),
                head_layouts={4: SmemLayout(1, 2, 8, 4), 2: SmemLayout(1, 2, 12, 2)},
                through_l1=True,
                instructions=0.8,
                timed=(4, 2),
            ),
            "targets": SmemTuning(
                layouts=(SmemLayout(4, 1, 9, 2), SmemLayout(2, 1, 6, 3)),
                head_layouts={4: SmemLayout(1, 2, 12, 2), 2: SmemLayout(1, 1, 12, 2)},
                instructions=0.9,
                timed=(4, 2),
            ),
            "sources": SmemTuning(
                layouts=(SmemLayout(4, 2, 6, 2), SmemLayout(2, 2, 6, 2)),
                head_layouts={4: SmemLayout(1, 2, 12, 2), 2: SmemLayout(1, 1, 9, 2)},
                instructions=0.89,
                timed=(4, 2),
                timed_narrow=True,
            ),
        },
        block_mma={
            "forward": BlockMmaTuning(products=2, node_tensors=2),
            "targets": BlockMmaTuning(products=3, node_tensors=4, in_pairs=True),
            "sources": BlockMmaTuning(products=4, node_tensors=5),
        },
        paper={
            "forward": PaperTuning(2, 2, 1, 2),
            "targets": PaperTuning(2, 3, 2, 2),
            "sources": PaperTuning(2, 2, 0, 1),
        },
    )
)
"""``S_ij = beta * <x_i, x_j> / (|x_i| |x_j|)``, with the values ``x_j``."""

ADD = register(
    Score(
        name="add",
        source="attention/scores/add.cuh",
        reference=_add_logits,
        node_scalars="input",
        edge="scalar",
        numbers=("slope",),
        gradients=("value", "target_scalars", "source_scalars", "edge"),
        saves_dout_dlogit=True,
        has_factors=True,
        row_split={
            "forward": RowSplitTuning(
                work=1,
                loads=(4, 1),
                min_blocks={(4, 4): 8, (2, 4): 8, (4, 8): 6, (2, 8): 8},
                saved_min_blocks={(4, 4): 8, (2, 4): 8, (4, 8): 6, (2, 8): 6},
                whole_heads="packed",
                few_rows_half_heads=True,
                swept={4: Sweep(2, True, 2, 6, 1.1, 2.0)},
            ),
            "targets": RowSplitTuning(
                work=2,
                loads=(2, 2),
                unroll=Unroll(4, 2, 2, 2),
                min_blocks={(4, 4): 8, (2, 4): 8, (4, 8): 6, (2, 8): 7},
            ),
            "sources": RowSplitTuning(
                work=2,
                loads=(4, 2),
                unroll=Unroll(2, 2, 2, 2),
                min_blocks={(4, 4): 8, (2, 4): 8, (4, 8): 6, (2, 16): 4},
                whole_heads="packed",
            ),
        },
        smem={
            "forward": SmemTuning(
                layouts=(SmemLayout(4, 2, 6, 3), SmemLayout(2, 2, 6, 4)),
                head_layouts={4: SmemLayout(1, 4, 12, 2)},
                instructions=0.84,
                timed=(4,),
                timed_narrow=True,
            ),
            "targets": SmemTuning(
                layouts=(SmemLayout(2, 2, 12, 2), SmemLayout(2, 2, 6, 4)),
                head_layouts={4: SmemLayout(1, 4, 12, 2)},
                instructions=0.82,
                timed=(4,),
            ),
            "sources": SmemTuning(
                layouts=(SmemLayout(4, 1, 6, 4), SmemLayout(1, 2, 12, 2)),
                head_layouts={4: SmemLayout(2, 2, 12, 2)},
                instructions=0.7,
                two_loads=1.68,
                timed=(4,),
            ),
        },
        block_mma={
            "forward": BlockMmaTuning(products=1, node_tensors=2),
            "targets": BlockMmaTuning(products=1, node_tensors=3),
            "sources": BlockMmaTuning(products=2, node_tensors=3),
        },
        paper={
            "forward": PaperTuning(1, 1, 0, 1),
            "targets": PaperTuning(1, 1, 1, 1),
            "sources": PaperTuning(1, 1, 0, 1),
        },
    )
)
"""``S_ij = leaky_relu(l_i + r_j + t_ij)``, with scalars per node and edge."""

GATV2 = register(
    Score(
        name="gatv2",
        source="attention/scores/gatv2.cuh",
        reference=_gatv2_logits,
        target=True,
        edge="vector",
        parameter=("H", "C"),
        numbers=("slope",),
        gradients=("target", "value", "parameter", "edge"),
        row_split={
            "forward": RowSplitTuning(loads=(2, 1), min_blocks={(4, 4): 7, (2, 4): 7, (2, 8): 5}),
            "targets": RowSplitTuning(loads=(2, 1)),
            "sources": RowSplitTuning(loads=(2, 1)),
        },
        smem={
            "forward": SmemTuning(
                layouts=(SmemLayout(2, 2, 12, 2), SmemLayout(1, 2, 12, 2)),
                head_layouts={4: SmemLayout(1, 2, 12, 2)},
                narrow_layout=SmemLayout(2, 2, 12, 2),
                instructions=0.95,
                timed=(4,),
                timed_narrow=True,
            ),
            "targets": SmemTuning(
                layouts=(SmemLayout(1, 1, 12, 2), SmemLayout(1, 1, 8, 2)), instructions=1.05, timed=(4,)
            ),
            "sources": SmemTuning(
                layouts=(SmemLayout(2, 1, 12, 2), SmemLayout(1, 1, 12, 2)),
                head_layouts={4: SmemLayout(1, 2, 12, 2)},
                instructions=0.97,
                timed=(4,),
            ),
        },
    )
)
"""``S_ij = <a, leaky_relu(l_i + r_j + e_ij)>``, with the values ``r_j``."""

SUPERGAT_MX = register(
    Score(
        name="supergat_mx",
        source="attention/scores/supergat_mx.cuh",
        reference=_supergat_mx_logits,
        target=True,
        node_scalars="input",
        numbers=("slope",),
        gradients=("target", "value", "target_scalars", "source_scalars"),
    )
)
"""``S_ij = leaky_relu((l_i + r_j) sigmoid(<x_i, x_j>))``, with scalars per node and the values ``x_j``."""

SUPERGAT_SD = register(
    Score(
        name="supergat_sd",
        source="attention/scores/supergat_sd.cuh",
        reference=_supergat_sd_logits,
        target=True,
        numbers=("scale", "slope"),
        gradients=("target", "value"),
    )
)
"""``S_ij = leaky_relu(scale * <x_i, x_j>)``, with the values ``x_j``."""
