"""Programs as text: what is read from it is equal to the program, and one object for one text."""

import pytest

from pyg_dfgnn.ir.domains import D, Domain, E, S
from pyg_dfgnn.ir.layers import LAYERS, film, heat_nodes, hgt_attention, layer_of, rgat, rgcn_mean
from pyg_dfgnn.ir.passes import optimise
from pyg_dfgnn.ir.program import Builder
from pyg_dfgnn.ir.text import program_of, text_of

PROGRAMS = {
    "rgcn": rgcn_mean.program(x=(6,), weight=(6, 4)),
    "rgat": rgat(2, "additive-self-attention", "within-relation", 0.1).program(
        x=(6,), xd=(6,), weight=(6, 8), q=(8, 2), k=(8, 2)
    ),
    "hgt": hgt_attention.program(k=(2, 4), q=(2, 4), v=(2, 4), key=(2, 4, 4), value=(2, 4, 4), scale=(2,)),
    "heat": heat_nodes(1 / 3).program(x=(4,), xd=(4,), on_edge=(2,), source=(4, 2), target=(4, 2), types=(2,)),
    "film": film("max", "leaky_relu", 1e-7).program(
        x=(6,), xd=(6,), weight=(6, 4), gamma=(6, 4), gamma_bias=(4,), beta=(6, 4), beta_bias=(4,)
    ),
}
SIZES = dict(zip(Domain, (1, 3, 2, 2, 9, 9, 20, 20, 40), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("passes", [False, True], ids=["traced", "with gradients"])
def test_a_program_is_read_from_its_text(name, passes):
    program = PROGRAMS[name]
    if passes:
        program = optimise(program, SIZES, wrt=tuple(program.inputs))[-1].program
    text = text_of(program)
    assert program_of(text) == program and program_of(str(text)) is program_of(text) and "\n" not in text


def test_what_is_no_number_name_or_domain_is_refused():
    builder = Builder()
    x = builder.input("x", S, (4,))
    out = builder.emit("sum", builder.emit("mul", x, builder.emit("const", attrs=(2j,))), attrs=(D, E))
    with pytest.raises(TypeError, match=r"'program' needs attributes of numbers, names and domains \(got complex\)"):
        text_of(builder.build("odd", {"out": out}))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_found_by_name(name):
    arguments = {"rgat": (2, "additive-self-attention", "across-relation"), "rgcn_rows": ("mean",)}
    arguments |= {"heat_nodes": (0.2,), "han_nodes": (0.2,), "film": ("mean", None)}
    layer = (name, *arguments.get(name, ()))
    assert layer_of(layer).__name__ == name and layer_of(layer) is layer_of(layer)
