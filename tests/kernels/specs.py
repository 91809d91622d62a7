"""The specialised modules that stand for all of them."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from pyg_dfgnn.dispatch import segment, segment_gemm
from pyg_dfgnn.dispatch.attention import smem
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.attention.row_split import (
    node_constants,
    pass_constants,
    plan_pass,
    swept_constants,
    with_whole_heads,
)
from pyg_dfgnn.dispatch.gemm import (
    MAX_LAYERS,
    WeightGrad,
    strips_of,
)
from pyg_dfgnn.dispatch.segment import SegmentProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.graph import spec_of as spec_of_edges
from pyg_dfgnn.ops.masked_norm import spec_of as spec_of_norm
from pyg_dfgnn.statements.scores import SCORES
from pyg_dfgnn.statements.segment import MESSAGES, STATS
from pyg_dfgnn.statements.spec import HOPPER, Spec
from tests.covering import Row, covering, covering_calls
from tests.kernels.block_mma_specs import block_mma_specs
from tests.kernels.paper_specs import paper_specs
from tests.kernels.relational_specs import relational_specs
from tests.ops.problems import SCORES as FOUR

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Heads and channels: one lane per row, odd widths, several loads per lane, several heads per lane, groups of heads.
SHAPES = ((1, 1), (3, 7), (8, 16), (8, 40), (1, 128), (4, 64), (2, 131), (1, 512))


# The direction of the pass that a source runs, on which its constants depend.
DIRECTION_OF = {
    "forward": "forward",
    "weights": "forward",
    "backward_targets": "targets",
    "backward_sources": "sources",
}


def problem(row: Row) -> AttentionProblem:
    heads, channels = row["shape"]
    device = torch.device("cuda")
    return AttentionProblem(row["score"], heads, channels, row["dtype"], device, row["edge"], row["dropout"])


def spec_of(stem: str, score: str, constants: Mapping[str, int]) -> Spec:
    """The module of an attention kernel."""
    return Spec(f"attention/{stem}.cu", tuple(constants.items()), texts=SCORES[score].texts)


def attention_specs() -> list[Spec]:
    """A covering set of constants for each source of the attention kernels."""
    axes = {"score": FOUR, "dtype": DTYPES, "wide": (False, True), "shape": SHAPES}
    dout_dlogit = covering({**axes, "score": ["add"], "edge": [False], "dropout": (False, True)})
    # Layouts that no other row has: three loads of a lane, and eight blocks on a multiprocessor.
    plain = {"score": "add", "dtype": torch.float32, "wide": False, "edge": False, "dropout": False}
    rows = covering_calls(axes) + [{**plain, "shape": shape} for shape in ((8, 40), (3, 7))]
    passes = [(stem, direction, row) for stem, direction in DIRECTION_OF.items() for row in rows]
    passes += [("forward", "dout_dlogit", row) for row in dout_dlogit]
    return [
        spec_of(stem, row["score"], pass_constants(problem(row), direction, row["wide"]))
        for stem, direction, row in passes
    ]


def in_mode(mode, problem, direction, wide):
    """The constants of a pass as it is planned for rows of even length, of uneven length, and of a small graph."""
    constants = pass_constants(problem, direction, wide)
    if mode == "ordered":
        return {**constants, "ORDERED": 1}
    return constants if mode == "light" else {**constants, "JOINED": 1, "WARPS": 8, "MIN_BLOCKS": 1}


def block_specs() -> list[Spec]:
    """The row kernels whose thread blocks work together, and those that take rows in another order."""
    axes = {
        "score": FOUR,
        "dtype": DTYPES,
        "shape": ((1, 128), (8, 16), (2, 20)),
        "mode": ("joined", "ordered", "smem"),
        "wide": (False, True),
    }
    specs = []
    # The score that reads least has most warps beside what it holds in shared memory.
    least = {"score": "add", "dtype": torch.float16, "shape": (1, 128), "mode": "smem", "wide": False}
    for row in [*covering_calls(axes), {**least, "edge": False, "dropout": False}]:
        for stem, direction in DIRECTION_OF.items():
            constants = in_mode(row["mode"], problem(row), direction, row["wide"])
            if row["mode"] == "smem":
                constants = smem.constants_of(problem(row), direction)
            if row["mode"] == "smem" and stem == "weights":
                continue
            specs.append(spec_of(stem, row["score"], constants))
    for row in covering({**axes, "mode": ["swept"], "edge": [False], "dropout": [False]}):
        specs += [
            spec_of(stem, row["score"], swept_constants(problem(row), direction)[0])
            for stem, direction in DIRECTION_OF.items()
        ]
    return specs


def norm_specs() -> list[Spec]:
    """The forward passes of the cosine score that find the norms of what they read."""
    axes = {
        "score": ["cosine"],
        "dtype": DTYPES,
        "shape": (*SHAPES, (20, 64)),
        "mode": ("light", "joined", "ordered"),
        "wide": (False, True),
        "edge": [False],
        "dropout": (False, True),
    }
    return [
        spec_of(
            "forward",
            row["score"],
            {**in_mode(row["mode"], problem(row), "forward", row["wide"]), "NORMS": 1, "MIN_BLOCKS": 1},
        )
        for row in covering(axes)
    ]


def small_graph() -> Graph:
    """Few rows, of which one is so long that it is taken in chunks."""
    return Graph.of(torch.stack([torch.arange(256), torch.arange(256).where(torch.arange(256) > 200, 0)]), 256)


def narrow_specs() -> list[Spec]:
    """The row kernels of 8 heads of 16 in layouts that no other shape has."""
    cases = []
    for dtype in (torch.float16, torch.bfloat16):
        axes = {"shape": (8, 16), "dtype": dtype, "edge": False, "dropout": False}
        add, cosine = (problem({**axes, "score": score}) for score in ("add", "cosine"))
        for stem, direction in DIRECTION_OF.items():
            packed = pass_constants(add, direction, wide=False)
            whole = with_whole_heads(add, direction, packed, "packed")
            cases += [(stem, "add", whole)] if whole != packed else []
            cases.append((stem, "cosine", swept_constants(cosine, direction)[0]))
    dot = problem({"shape": (8, 16), "dtype": torch.float32, "edge": False, "dropout": False, "score": "dot"})
    joined = plan_pass(dot, "forward", small_graph()).constants
    assert joined["JOINED"] and joined["HEAD_SLOTS"] == 4
    gatv2 = problem({"shape": (8, 16), "dtype": torch.float32, "edge": False, "dropout": False, "score": "gatv2"})
    cases += [("forward", "dot", joined), ("weights", "dot", joined)]
    cases.append(("forward", "gatv2", smem.constants_of(gatv2, "forward")))
    return [spec_of(*case) for case in cases]


def node_specs() -> list[Spec]:
    """The kernels that read nodes and no edges."""
    rows = covering({"shape": SHAPES, "dtype": DTYPES})
    return [
        Spec(
            f"attention/{stem}.cu", tuple(node_constants(*row["shape"], row["dtype"], stem.startswith("back")).items())
        )
        for stem in ("norm", "terms", "backward_nodes")
        for row in rows
    ]


def gemm_specs() -> list[Spec]:
    """The GEMMs of linear layers: sizes that fill their places, that do not, and wide ones, of many rows and more."""
    widths = ((128, 128), (68, 100), (500, 128), (160, 80), (128, 512))
    specs = []
    for row in covering({"width": widths, "rows": (1 << 14, 1 << 20), "layers": range(1, MAX_LAYERS + 1)}):
        sizes, device = (row["rows"], *row["width"]), torch.device("cpu")
        strips = [strips_of(backward, row["layers"], *sizes, device) for backward in (False, True)]
        specs += [Spec("gemm/forward_strips.cu", plan.constants, HOPPER) for plan in strips if plan is not None]
        specs.append(Spec("gemm/weight_grad.cu", WeightGrad(row["layers"], *row["width"]).constants, HOPPER))
    return specs


def segment_specs() -> list[Spec]:
    """A covering set of constants for each source of the aggregation kernels."""
    axes = {
        "message": MESSAGES,
        "stats": (("sum",), ("max",), ("std", "min"), ("mul",), STATS),
        "dtype": DTYPES,
        "channels": (1, 16, 131, 256, 512),
        "wide": (False, True),
        "scaled": (False, True),
        "self_loops": (False, True),
    }
    specs = []

    def fits(row: Row) -> bool:
        """Gates are summed only, sums of copies have self-loops, and several statistics take fewer channels."""
        is_summed = row["stats"] == ("sum",) or row["message"] != "gate" and not row["self_loops"]
        if row["self_loops"] and row["message"] != "copy":
            return False
        return is_summed and row["channels"] <= segment.max_channels(row["stats"])

    for row in covering(axes, fits):
        what, scaled = (row["message"], row["stats"], row["channels"], row["dtype"]), (row["scaled"],) * 2
        # The largest layer of the edges that lanes hold.
        numbers = segment.LAYER_NUMBERS // segment.lane_numbers(row["channels"], row["dtype"].itemsize)
        layer = numbers if MESSAGES[row["message"]].edge == "row" else 0
        problem = SegmentProblem(*what, torch.device("cuda"), *scaled, row["self_loops"], layer)
        directions = ["forward", "sources"] + ["targets"] * (MESSAGES[row["message"]].target or problem.has_moments)
        for direction in directions + ["args"] * (row["stats"] != ("sum",)):
            constants = segment.constants_of(problem, direction, row["wide"])
            specs += segment.specs_of(problem, direction, SimpleNamespace(constants=constants))
    return specs


def segment_gemm_specs() -> list[Spec]:
    """Products by type: wide and narrow tiles, odd rows, a weight that is not held, heads together."""
    axes = {
        "product": segment_gemm.PRODUCTS,
        "sizes": ((64, 64), (70, 3), (8, 96), (520, 40)),
        "dtype": (*DTYPES, "tf32"),
        "fold": segment_gemm.FOLDS,
        "exact": (False, True),
    }
    specs = []
    fits = {"outer": lambda row: not row["exact"]}
    every = [("product", "dtype"), ("dtype", "exact")]
    for row in covering(axes, lambda row: fits.get(row["product"], lambda row: row["fold"] != "rows")(row), every):
        dtype, tf32 = (torch.float32, True) if row["dtype"] == "tf32" else (row["dtype"], False)
        sizes = (*row["sizes"], 8, row["fold"], dtype, torch.device("cuda"), tf32)
        problem = segment_gemm.SegmentGemmProblem(row["product"], *sizes, row["exact"])
        specs += segment_gemm.specs_of(problem, segment_gemm.plan_of(problem, 1 << 17, 100))
    return specs


def edge_rows_specs() -> list[Spec]:
    """The row kernels with rows of edges that all heads share: narrow ones, odd ones, several loads of a lane."""
    axes = {
        "dtype": DTYPES,
        "shape": ((8, 16), (1, 128), (4, 64), (3, 7), (40, 4)),
        "edge_channels": (3, 8, 16, 64),
        "mode": ("light", "joined", "ordered", "smem"),
        "wide": (False, True),
        "dropout": (False, True),
    }
    found = []
    for row in covering({**axes, "score": ["dot"], "edge": [True]}):
        posed = replace(problem(row), edge_channels=row["edge_channels"])
        for stem, direction in DIRECTION_OF.items():
            if row["mode"] != "smem":
                found.append(spec_of(stem, "dot", in_mode(row["mode"], posed, direction, row["wide"])))
            elif stem != "weights":
                found.append(spec_of(stem, "dot", smem.constants_of(posed, direction)))
    return found


def all_specs() -> list[Spec]:
    rows = attention_specs() + block_specs() + norm_specs() + narrow_specs() + node_specs()
    rows += edge_rows_specs() + segment_gemm_specs() + relational_specs()
    rows += [spec_of_edges(*flags) for flags in product((False, True), repeat=3)]
    rows += [spec_of_norm(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    return rows + paper_specs() + block_mma_specs() + gemm_specs() + segment_specs()


def label(spec: Spec) -> str:
    """Short name of a module: what was asked for, not every constant that follows from it."""
    c = dict(spec.constants)
    if spec.path.startswith("segment/"):
        message = Path(spec.texts[0][1].strip('"')).stem
        options = [name.lower() for name in (*(stat.upper() for stat in STATS), "ARGS") if c[name]]
        size = f"C{c['CHANNELS']}", str(DTYPES[c["STORAGE"]]).removeprefix("torch."), f"slots{c['EDGE_SLOTS']}"
        return "-".join([spec.path[:-3], message, *options, *size])
    if spec.path.startswith(("gemm/", "relational/", "graph/", "norm/")):
        return "-".join([spec.path[:-3], *(f"{name.lower()}{value}" for name, value in spec.constants)])
    options = [score.name for score in SCORES.values() if score.texts == spec.texts]
    options += [f"H{c['HEADS']}", f"C{c['CHANNELS']}", str(DTYPES[c["STORAGE"]]).removeprefix("torch.")]
    options += [
        name.lower()
        for name in (
            "EDGE",
            "EDGE_CHANNELS",
            "DROPOUT",
            "DOUT_DLOGIT",
            "ORDERED",
            "JOINED",
            "SMEM",
            "NORMS",
            "SPLIT",
            "LISTED",
        )
        if c.get(name)
    ]
    width = f"slots{c['EDGE_SLOTS']}" if "EDGE_SLOTS" in c else f"warps{c['WARPS']}"
    return "-".join([Path(spec.path).stem, *options, width])
