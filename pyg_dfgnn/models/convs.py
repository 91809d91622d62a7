"""Where models take their convolutions and linear layers from."""

from __future__ import annotations

from typing import Any


def find_conv(convs: Any, name: str) -> Any:
    """The convolution, or linear layer, of this name.

    Args:
        convs: Namespace that may hold it, such as `torch_geometric.nn`.
        name: Such as "GATConv".

    Raises:
        ValueError: The namespace lacks it.
    """
    if not hasattr(convs, name):
        given = getattr(convs, "__name__", convs)
        raise ValueError(f"'convs' needs a namespace with {name}, as torch_geometric.nn has (got {given})")
    return getattr(convs, name)
