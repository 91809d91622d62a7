"""Which rows of a table of parameters are tested: few that cover it, or with `--grid=full` those of the larger grid."""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Row = dict[str, Any]
Axes = dict[str, Sequence[Any]]

GRIDS = ("covering", "full")
grid = "covering"
"""One of `GRIDS`; tests/conftest.py sets it from the option before tests are collected."""


def always(row: Row) -> bool:
    return True


def covering(axes: Axes, allowed: Callable[[Row], bool] = always, pairs: Sequence[Sequence[str]] = ()) -> list[Row]:
    """Rows in which every value occurs, and every pair of values of axes that are named together.

    In the full grid every pair of values of any two axes occurs. What no allowed row has is left out.

    Args:
        axes: The values of each parameter.
        allowed: Whether a row makes sense.
        pairs: Groups of axes; the pairs of any two axes of a group are covered.
    """
    return _covered(axes, allowed, [tuple(axes)] if grid == "full" else pairs)


def product(axes: Axes, allowed: Callable[[Row], bool] = always, pairs: Sequence[Sequence[str]] = ()) -> list[Row]:
    """Rows as :func:`covering` has them; in the full grid every allowed row."""
    if grid == "full":
        return [row for _, row in _allowed(axes, allowed)]
    return _covered(axes, allowed, pairs)


def over(
    pairs: Sequence[Sequence[str]] = (), allowed: Callable[[Row], bool] = always, **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrises a test by the rows of :func:`product`."""
    rows = product(axes, allowed, pairs)
    cases = [pytest.param(*row.values(), id="-".join(map(_name, row.values()))) for row in rows]
    return pytest.mark.parametrize(tuple(axes), cases)


def extended(values: Sequence[Any], more: Sequence[Any]) -> tuple[Any, ...]:
    """Values of which each stands for others, and in the full grid those others."""
    return (*values, *more) if grid == "full" else tuple(values)


def covering_calls(
    axes: Axes, allowed: Callable[[Row], bool] = always, pairs: Sequence[Sequence[str]] = ()
) -> list[Row]:
    """Picks rows as :func:`covering` does, with or without edge features and dropout.

    The two are one axis, "call": calls with neither have kernels of their own, capped at fewer registers, and are
    covered too. The cosine score takes no edge features.

    Args:
        axes: The values of each parameter, with those of "score".
        allowed: Whether a row makes sense, which also has "edge" and "dropout".
        pairs: As for :func:`covering`.
    """

    def named(row: Row) -> Row:
        edge, dropout = row["call"]
        return {**row, "edge": edge, "dropout": dropout}

    def fits(row: Row) -> bool:
        return not (row["call"][0] and row["score"] == "cosine") and allowed(named(row))

    calls = tuple(itertools.product((False, True), repeat=2))
    return list(map(named, covering({**axes, "call": calls}, fits, pairs)))


def _allowed(axes: Axes, allowed: Callable[[Row], bool]) -> list[tuple[dict[str, int], Row]]:
    """The allowed rows, each with the places of its values on their axes."""
    found = []
    for chosen in itertools.product(*(enumerate(values) for values in axes.values())):
        row = {name: value for name, (_, value) in zip(axes, chosen, strict=True)}
        if allowed(row):
            found.append(({name: place for name, (place, _) in zip(axes, chosen, strict=True)}, row))
    return found


def _covered(axes: Axes, allowed: Callable[[Row], bool], groups: Sequence[Sequence[str]]) -> list[Row]:
    """Picks rows greedily: each has most of what is left to cover, and of those most pairs that are not seen yet."""
    bits: dict[Any, int] = {}

    def mask(places: dict[str, int], groups: Sequence[Sequence[str]]) -> int:
        # Where there are pairs of a value it occurs.
        paired = {name for group in groups if len(group) > 1 for name in group}
        parts: set[Any] = {item for item in places.items() if item[0] not in paired}
        for group in groups:
            parts.update(itertools.combinations([(name, places[name]) for name in group], 2))
        return sum(1 << bits.setdefault(part, len(bits)) for part in parts)

    rows = [(row, mask(places, groups), mask(places, [tuple(axes)])) for places, row in _allowed(axes, allowed)]
    unseen = (1 << len(bits)) - 1
    left = functools.reduce(operator.or_, (needed for _, needed, _ in rows), 0)
    chosen = []
    while left:
        row, needed, pairs = max(rows, key=lambda row: ((row[1] & left).bit_count(), (row[2] & unseen).bit_count()))
        chosen.append(row)
        left, unseen = left & ~needed, unseen & ~pairs
    return chosen


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.").replace(" ", "")
