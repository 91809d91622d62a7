"""The families that the bench measures. A new family is one module beside this one and one entry in ``FAMILIES``."""

from benchmarks.case import Case, Family, Implementation
from benchmarks.cases.attention import ATTENTION
from benchmarks.cases.relational import RELATIONAL
from benchmarks.cases.segment import SEGMENT
from pyg_dfgnn.errors import check_choice

FAMILIES: tuple[Family, ...] = (ATTENTION, SEGMENT, RELATIONAL)
FAMILY_OF: dict[str, Family] = {op: family for family in FAMILIES for op in family.case.titles}
"""Name of an operation -> its family."""
TITLES = {name: kind.title for family in FAMILIES for name, kind in family.implementations.items()}
"""Name of an implementation -> its name in tables and figures, which all families agree in."""
OURS = frozenset(name for family in FAMILIES for name, kind in family.implementations.items() if kind.is_ours)
"""The implementations that run on kernels of this package."""


def case_of(op: str, size: str) -> Case:
    """Return the case of an operation of any family; raise a ValueError where there is none, or none of such a size."""
    check_choice("ops", op, tuple(FAMILY_OF))
    return FAMILY_OF[op].case(op, str(size))


def implementation_of(op: str, name: str) -> Implementation | None:
    """The implementation of that name for an operation; None where its family has none."""
    kind = FAMILY_OF[op].implementations.get(name)
    return None if kind is None else kind()


__all__ = ["FAMILIES", "FAMILY_OF", "OURS", "TITLES", "case_of", "implementation_of"]
