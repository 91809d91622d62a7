"""The specialised modules that stand for the generated kernels, and a program that has every pointwise function."""

from dataclasses import replace

import torch

from pyg_dfgnn.dispatch.relational import constants_of, spec_of
from pyg_dfgnn.ir import D, E, S, relational, sum_to
from pyg_dfgnn.ir.codegen import generate
from pyg_dfgnn.ir.layers import hgt, rgat, rgcn_mean
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import optimise
from pyg_dfgnn.ir.program import Builder, Program
from pyg_dfgnn.ops.relational.traversal import problem_of
from pyg_dfgnn.statements.spec import Spec
from tests.covering import extended
from tests.ir.cases import edge_maps, gaussians, joined_heads, many_gaussians, queries, rows_named, thirds


@relational
def functions(x: S, e: E):
    """A sum of every pointwise function, and of what only gradients have."""
    y = x.apply("softplus") + e * e
    out = (y + 1.0).apply("log") + (y + 0.5).apply("sqrt") + y**3 - 2.0 / (y * y + 1.0)
    for name in "sigmoid tanh gelu silu softplus elu relu abs exp sin cos erf neg sign heaviside".split():
        out = out + (x - e).apply(name)
    inside = 0.9 * (x - e).apply("tanh")
    for name in "atan asinh sinh cosh asin acos atanh expm1 log1p floor round".split():
        out = out + inside.apply(name)
    out = out + (y + 1.5).apply("acosh") + x.apply("atan2", e) + (3.0 * x).apply("remainder", e * e + 0.5)
    for name in ("eq", "greater", "maximum"):
        out = out + x.apply(name, e)
    for exponent in (-2, -1, -0.5, 0, 0.5, 1, 2, 2.5):
        out = out + (y + 0.5).apply("pow", attrs=(exponent,))
    positive = x.apply("greater", e)
    out = out + positive.apply("where", x * e, e - x) + x.apply("clamp", attrs=(-0.5, 0.5))
    return sum_to(D, out + x.apply("in_range", attrs=(-0.1, 1.0)) + (x / e).apply("leaky_relu", attrs=(0.2,)))


def rgat_of(heads: int, channels: int, features: int) -> Program:
    """RGAT with additive attention across relations; it also returns the attention."""
    width, traced = heads * channels, rgat(heads, "additive-self-attention", "across-relation")
    return traced.program(x=(features,), xd=(features,), weight=(features, width), q=(width, heads), k=(width, heads))


def without_attention(program: Program) -> Program:
    """The program that only returns `out`."""
    return replace(program, outputs=tuple(output for output in program.outputs if output[0] == "out"))


def hgt_of(heads: int, channels: int, features: int) -> Program:
    """HGT."""
    width, weight = heads * channels, (features, heads * channels)
    typed = {f"{kind}{name}": shape for name in "kqv" for kind, shape in (("w", weight), ("b", (width,)))}
    by_head = {"key": (heads, channels, channels), "value": (heads, channels, channels), "scale": (heads,)}
    return hgt(heads).program(x=(features,), xd=(features,), **typed, **by_head)


def dropped(heads: int, channels: int) -> Program:
    """A sum of the sources, of which dropout takes numbers, channels and heads."""
    builder = Builder()
    product = builder.input("x", S, (heads, channels))
    for shape in ((heads, channels), (channels,), (heads, 1)):
        keep = builder.emit("dropout_mask", builder.seed(), attrs=(E, shape, 0.5, len(shape)))
        product = builder.emit("mul", product, keep)
    return builder.build("dropped", {"out": builder.emit("sum", product, attrs=(D, E))})


def maps_of(heads: int, channels: int, near: int, features: int) -> Program:
    """Maps of rows of edges of so many numbers, computed and given."""
    width = heads * channels
    short = {"pos": (near,), "posd": (near,), "edge": (features,), "w": (features, width), "wp": (near, width)}
    return edge_maps.program(x=(width,), xd=(width,), **short, gate=(width, heads))


def gaussians_of(kernels: int, channels: int, size: int) -> Program:
    """Sources weighted by Gaussians of so many coordinates."""
    return gaussians.program(x=(kernels * channels,), edge=(size,), mu=(kernels, size), sigma=(kernels, size))


def many_gaussians_of(features: int, channels: int, kernels: int, size: int) -> Program:
    """Gaussians for each pair of a feature and a channel."""
    shape = features, channels, kernels
    return many_gaussians.program(x=(features,), edge=(size,), mu=(*shape, size), sigma=(*shape, size), g=shape)


def thirds_of(width: int) -> Program:
    """Messages of numbers and vectors, each of a third of a row of an edge."""
    return thirds.program(x=(3 * width,), vectors=(3, width), edge=(3 * width,), unit=(3,))


PROGRAMS = (
    (rgcn_mean.program(x=(131,), weight=(131, 70)), torch.float16),
    (rgat_of(4, 16, 64), torch.float32),
    (hgt_of(8, 16, 64), torch.bfloat16),
    (functions.program(x=(4,), e=(4,)), torch.float32),
    (maps_of(4, 32, 3, 12), torch.float32),
    (joined_heads.program(x=(512,), xd=(8,), gate=(8, 64)), torch.bfloat16),
    (dropped(3, 7), torch.bfloat16),
    (queries.program(q=(16,), k=(16,), x=(128,)), torch.float16),
    (gaussians_of(2, 64, 8), torch.float32),
    (many_gaussians_of(6, 4, 2, 3), torch.bfloat16),
    (thirds_of(64), torch.float32),
)
# The same layers in other sizes and dtypes.
MORE_PROGRAMS = (
    (without_attention(rgat_of(3, 7, 5)), torch.bfloat16),
    (without_attention(rgat_of(4, 16, 64)), torch.float32),
    (hgt_of(1, 128, 64), torch.float32),
    (maps_of(1, 64, 3, 16), torch.float16),
    (dropped(4, 16), torch.float32),
    (gaussians_of(25, 64, 2), torch.bfloat16),
    (gaussians_of(2, 64, 16), torch.float32),
    (thirds_of(128), torch.bfloat16),
    (thirds_of(17), torch.float16),
)


def relational_specs() -> list[Spec]:
    """The kernels of the layers with their gradients, edges and rows in turn side by side in a warp."""
    specs = []
    for program, dtype in extended(PROGRAMS, MORE_PROGRAMS):
        joint = optimise(program, rows_named("dense").sizes, wrt=program.features)[-1].program
        lowered = lower(joint, dict(program.outputs))
        exact = {buffer.name for buffer in lowered.buffers.values() if buffer.is_exact}
        steps = [step for step in (*lowered.forward, *lowered.backward) if step.kind in ("traversal", "map")]
        for number, step in enumerate(steps):
            problem = problem_of(generate(step, exact), lowered.compares, dtype, torch.device("cuda"))
            specs.append(spec_of(problem, constants_of(problem, wide=number % 2 == 0)))
    return specs
