"""Programs of wide layers keep no features of edges."""

from math import prod

import pytest
import torch

from pyg_dfgnn.ir.domains import D, E, One, R, S, U, V
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.register_layout import MAX_SHORT
from tests.frontend.marks import compile_layer
from tests.frontend.wide import WIDE, arguments


@pytest.mark.parametrize("name", WIDE)
def test_no_buffer_has_the_features_of_an_edge(name, captured):
    """Forward and backward with gradients of all inputs."""
    layer = compile_layer(WIDE[name][0](64))
    layer(*arguments(name, torch.randn(9, 64, requires_grad=True), torch.randint(0, 9, (2, 31))))
    sizes = {One: 1, R: 1, S: 10_000, D: 10_000, U: 100_000, V: 100_000, E: 100_000}
    programs = [region.program for graph in captured for region in graph.regions]
    assert programs and all(graph.counts[0] == graph.counts[1] for graph in captured)
    for program in programs:
        lowered = lower(Passes().run(program, sizes, tuple(program.inputs)), [out for out, _ in program.outputs])
        kept = {buffer: made.shape for buffer, made in lowered.buffers.items() if made.domain is E}
        assert all(prod(shape) <= MAX_SHORT for shape in kept.values()), kept
