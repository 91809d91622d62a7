"""What tests of relational convs share: hetero graphs, and the comparison of all results with PyG's."""

import pytest
import torch
from torch import Tensor

from pyg_dfgnn.datasets.files import SEARCH
from pyg_dfgnn.reference.tolerances import elementwise, tolerance


def named(value, name="out"):
    """The tensors of nested tuples, lists and dicts by their place."""
    if isinstance(value, Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    return {key: tensor for place, part in items for key, tensor in named(part, f"{name}.{place}").items()}


def copied(value):
    """Features that collect gradients of their own; all else as it is."""
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    is_feature = isinstance(value, Tensor) and value.layout is torch.strided and value.is_floating_point()
    return value.detach().clone().requires_grad_() if is_feature else value


def cast(value, dtype):
    """The value with its features in a dtype."""
    if isinstance(value, dict):
        return {key: cast(part, dtype) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def results_of(conv, *args, **kwargs):
    """Outputs and, for random gradients of them, the gradients of all features and parameters."""
    args, kwargs = copied(args), copied(kwargs)
    outputs = named(conv(*args, **kwargs))
    differentiable = {name: out for name, out in outputs.items() if out.requires_grad}
    inputs = {name: t for name, t in named((args, kwargs), "input").items() if t.requires_grad}
    inputs |= {name: parameter for name, parameter in conv.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(3)
    upstream = [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in differentiable.values()
    ]
    grads = torch.autograd.grad(list(differentiable.values()), list(inputs.values()), upstream, allow_unused=True)
    zeros = {f"d_{name}": torch.zeros_like(tensor) for name, tensor in inputs.items()}
    computed = {f"d_{name}": grad for name, grad in zip(inputs, grads, strict=True) if grad is not None}
    return {**{name: out.detach() for name, out in outputs.items()}, **zeros, **computed}


def assert_same(convs, *args, **kwargs):
    """The fused branch of our conv equals PyG's in float64, in outputs and all gradients."""
    call = convs[0]._call(*args, **kwargs)
    assert list(call.reasons) == []
    actual, expected = (results_of(conv, *args, **kwargs) for conv in convs)
    assert list(actual) == list(expected)
    for name, want in expected.items():
        torch.testing.assert_close(
            actual[name], want, **elementwise("float64"), msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_near(actual, expected, dtype, factor=1):
    """No result is further from float64 than `factor` times the bound, by the norm of the largest of its direction."""
    for direction, is_gradient in (("forward", False), ("backward", True)):
        bound = factor * tolerance(dtype, direction, "relational").relative
        names = [name for name in expected if name.startswith("d_") == is_gradient]
        size = max(expected[name].norm().item() for name in names)
        for name in names:
            difference = (actual[name].double() - expected[name]).norm().item()
            assert difference <= bound * size, (name, difference / size, bound)


NODES = {"a": (10, 6), "b": (7, 5), "c": (4, 8), "d": (3, 2)}
"""Node type -> number of nodes, and of features."""
WIDTHS = {name: width for name, (_, width) in NODES.items()}
EDGE_TYPES = [("a", "r", "b"), ("b", "s", "a"), ("b", "t", "b"), ("c", "u", "a"), ("a", "v", "b"), ("d", "w", "c")]
"""No edge leads to `d`; those of the last two types are none, and those of a hub."""
METADATA = (list(NODES), EDGE_TYPES)


def hetero(generator=None, width=None):
    """Features, of one width or of several, and edges of a small graph with duplicates and nodes without edges."""
    generator = generator or torch.Generator().manual_seed(2)
    sizes = {name: (size, width or own) for name, (size, own) in NODES.items()}
    x_dict = {name: torch.randn(size, dtype=torch.float64, generator=generator) for name, size in sizes.items()}
    edges = {}
    for i, (source, relation, target) in enumerate(EDGE_TYPES):
        count = 0 if i == 4 else 20
        ends = [torch.randint(max(NODES[node][0] - 1, 1), (count,), generator=generator) for node in (source, target)]
        edges[source, relation, target] = torch.stack(ends)
    edges["d", "w", "c"][1] = 2
    return x_dict, edges


def real(read, *args, **kwargs):
    """The graph of a task on real data; the test is skipped, with what is missing, where there are no files."""
    try:
        return read(*args, search=SEARCH, **kwargs).splits["train"][0]
    except FileNotFoundError as error:
        pytest.skip(str(error).splitlines()[0])
