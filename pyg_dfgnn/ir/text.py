"""Programs as text that they are read from again, in whatever process: what names a program to torch's tracers."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pyg_dfgnn.ir.domains import Domain
from pyg_dfgnn.ir.program import Program, Value


def text_of(program: Program) -> str:
    """Return a program as text, without line breaks."""
    values = [[v.op, v.args, v.attrs, v.domain, v.shape] for v in program.values]
    return json.dumps([program.name, values, program.outputs], default=_encoded, separators=(",", ":"))


@cache
def program_of(text: str) -> Program:
    """Return the program that a text of :func:`text_of` describes; one object for one text."""
    name, values, outputs = _frozen(json.loads(text, object_hook=lambda domain: Domain(domain["domain"])))
    return Program(name, tuple(Value(*fields) for fields in values), outputs)


def _encoded(domain: Any) -> dict[str, str]:
    if not isinstance(domain, Domain):
        raise TypeError(f"'program' needs attributes of numbers, names and domains (got {type(domain).__name__})")
    return {"domain": domain.value}


def _frozen(value: Any) -> Any:
    """Return the lists in a value as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
