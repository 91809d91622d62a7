"""Assembly of kernel source: constants as a prologue, includes inlined, original line numbers kept.

An include names a file of the kernels folder, or a text that the caller injects under that name.
"""

import re
from collections.abc import Mapping
from functools import cache

from pyg_dfgnn.paths import kernels_dir

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')

Constants = tuple[tuple[str, int], ...]
Texts = tuple[tuple[str, str], ...]
"""Injected texts by the name that includes them."""


@cache
def _read(path: str) -> str:
    return (kernels_dir() / path).read_text(encoding="utf-8")


def _inline(path: str, texts: Mapping[str, str], seen: set[str]) -> list[str]:
    seen.add(path)
    lines = [f'#line 1 "{path}"']
    text = texts[path] if path in texts else _read(path)
    for number, line in enumerate(text.splitlines(), start=1):
        match = _INCLUDE.match(line)
        if match is None:
            lines.append(line)
        elif match.group(1) not in seen:
            lines += [*_inline(match.group(1), texts, seen), f'#line {number + 1} "{path}"']
        else:
            # Keeps the numbers of the lines that follow.
            lines.append("")
    return lines


@cache
def assemble(path: str, constants: Constants | None = None, texts: Texts = ()) -> str:
    """Return the complete CUDA text of one specialised module.

    Args:
        path: Source file relative to the kernels folder, e.g. ``"attention/forward.cu"``.
        constants: ``((name, value), ...)``; each becomes a ``#define`` before the text.
        texts: ``((name, text), ...)``; ``#include "name"`` stands for the text, whose includes are inlined too.

    Returns:
        One header-free translation unit. Included files appear once, where first included, so that a cache keyed by
        this text sees every change of a header.

    Raises:
        FileNotFoundError: An include names neither an injected text nor a file.
    """
    prologue = [f"#define {name} {value}" for name, value in constants or ()]
    return "\n".join([*prologue, *_inline(path, dict(texts), set())]) + "\n"
