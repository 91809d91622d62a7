"""What traced code asks of values that only the values themselves could answer, and not what stands for them.

While a layer is traced, symbols stand for tensors, counts for numbers of rows and a shadow for the layer. They answer
`isinstance` and `__class__` as what they stand for; `type`, `is` and `id` look past any answer.
"""

from __future__ import annotations

import builtins
import dis
import enum
import types
from collections.abc import Iterator, Sequence
from typing import Any

from pyg_dfgnn.ir.torch_front import Symbol, is_of_libraries

UNANSWERED = frozenset({"id", "dir", "type"})
"""Builtin functions that tell a stand-in from what it stands for."""
TENSOR_TYPES = frozenset(f"{kind}Tensor" for kind in "Half Float Double BFloat16 Byte Char Short Int Long Bool".split())
"""Names of classes such as `torch.FloatTensor`, which ask a tensor for its device."""
_OWN = frozenset(Symbol.__annotations__) | {"sizes", "row", "of", "__dict__"}
"""Attributes that a symbol has and a tensor has not, or not so."""
_OF_EDGES = frozenset({"pending", "value", "is_current", "of"})
"""Attributes that values of edges have while they wait, and tensors have not."""
_NAMES_OF_CLASSES = frozenset({"__name__", "__qualname__", "__module__"})
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_NAMED = (*_ATTRIBUTES, "LOAD_GLOBAL", "LOAD_NAME")
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "COPY_FREE_VARS", "RESUME"})


def stand_in_reasons(function: types.FunctionType, codes: Sequence[types.CodeType], is_method: bool) -> Iterator[str]:
    """Yield why code may take a stand-in for something else than what it stands for.

    Args:
        function: A user's function.
        codes: Its code, and that of the functions in it.
        is_method: Whether its first argument is the layer or a part of it.
    """
    name = function.__qualname__
    for code in codes:
        own = code.co_varnames[0] if is_method and code is function.__code__ and code.co_argcount else None
        steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
        for place, step in enumerate(steps):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in UNANSWERED:
                if step.argval not in function.__globals__ and not _asks_own_class(steps[place:], own):
                    yield f"{name} asks for the {step.argval} of a value"
            elif step.opname == "IS_OP" and not _is_fixed(steps[:place], function.__globals__):
                yield f"{name} asks whether values are one object"
            elif step.opname in _NAMED and step.argval in TENSOR_TYPES:
                yield f"{name} asks for '{step.argval}'"
            elif step.opname in _ATTRIBUTES and step.argval in _OWN:
                root = steps[_root(steps, place)]
                if step.argval == "__dict__" or not (root.opname == "LOAD_GLOBAL" or _is_own(root, own)):
                    yield f"{name} asks a value for '{step.argval}'"


def asks_kinds(function: types.FunctionType, seen: set[types.CodeType] | None = None) -> bool:
    """Return whether a user's function asks for the kinds of values, or one of users that it names does."""
    code, seen = function.__code__, set() if seen is None else seen
    if code in seen or is_of_libraries(code.co_filename):
        return False
    seen.add(code)
    names, strings = set[str](), set[str]()
    for each in codes_in(code):
        strings.update(text for text in each.co_consts if isinstance(text, str))
        for step in dis.get_instructions(each):
            if step.opname in _NAMED and step.argval in TENSOR_TYPES:
                return True
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(step.argval)
    builtin = names - function.__globals__.keys()
    if builtin & {*UNANSWERED, "vars"} or (builtin & {"getattr", "hasattr"} and strings & _OF_EDGES):
        return True
    found = [function.__globals__.get(name) for name in names]
    # A cell that has no value yet has no contents either.
    found += [getattr(cell, "cell_contents", None) for cell in function.__closure__ or ()]
    return any(isinstance(other, types.FunctionType) and asks_kinds(other, seen) for other in found)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def own_names(strings: set[str]) -> list[str]:
    """Return which names, as code passes them to `getattr` or `hasattr`, a symbol has and a tensor has not."""
    return sorted(strings & _OWN)


def _is_own(step: dis.Instruction, own: str | None) -> bool:
    return own is not None and step.opname.startswith("LOAD_FAST") and step.argval == own


def _asks_own_class(steps: Sequence[dis.Instruction], own: str | None) -> bool:
    """Return whether steps are `type(self).name`, of which only the name is used."""
    if len(steps) < 4 or steps[0].argval != "type" or not _is_own(steps[1], own):
        return False
    name, is_called = steps[3].argval, steps[2].opname.startswith("CALL") and steps[2].arg == 1
    is_plain = isinstance(name, str) and (not name.startswith("__") or name in _NAMES_OF_CLASSES) and name != "mro"
    return is_called and steps[3].opname in _ATTRIBUTES and is_plain


def _root(steps: Sequence[dis.Instruction], place: int) -> int:
    """Return the place of what a chain of attributes that ends at a place is taken from."""
    while place > 0 and steps[place].opname in _ATTRIBUTES:
        place -= 1
    return place


def _is_fixed(steps: Sequence[dis.Instruction], names: dict[str, Any]) -> bool:
    """Return whether steps load a constant last, or a class, function, enum or bare object that a global names."""
    last = steps[-1] if steps else None
    if last is None or last.opname in ("LOAD_CONST", "RETURN_CONST"):
        return last is not None
    root = _root(steps, len(steps) - 1)
    if steps[root].opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
        return False
    value = names.get(steps[root].argval, getattr(builtins, str(steps[root].argval), None))
    for step in steps[root + 1 :]:
        value = getattr(value, step.argval, None)
    is_plain = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum))
    return is_plain or type(value) is object
