"""The record of a module to compile, and the assembly of its source.

Constants become a prologue, includes are inlined, and original line numbers are kept.

An include names a file of the kernels folder, or a text that the caller injects under that name.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pyg_dfgnn.paths import kernels_dir

_ENTRY = re.compile(r'(extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?)(\w+)(?=\()')
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')

Constants = tuple[tuple[str, int], ...]
Texts = tuple[tuple[str, str], ...]
"""Injected texts by the name that includes them."""
HOPPER = ("-arch=sm_90a",)
"""Options for what only compute capability 9.0 has. NVRTC takes the 90 that CuPy adds as part of it."""


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


@dataclass(frozen=True)
class Spec:
    """One specialised module.

    Attributes:
        path: Source file.
        constants: Its constants.
        options: Options of its own.
        texts: Texts that it includes by name.
        label: Name of the program that its texts are generated from, which profilers show with the kernels; empty for
            hand-written kernels.
    """

    path: str
    constants: Constants
    options: tuple[str, ...] = ()
    texts: Texts = ()
    label: str = ""

    @property
    def name(self) -> str:
        """Readable name that spells every parameter, and a digest of each injected text."""
        parts = [self.path, *(f"{name}{value}" for name, value in self.constants), *self.options]
        parts += [f"{name}:{hashlib.sha256(text.encode()).hexdigest()[:8]}" for name, text in self.texts]
        return "-".join(parts)

    @property
    def source(self) -> str:
        return assemble(self.path, self.constants, self.texts)

    @property
    def compiled_source(self) -> str:
        """Text with the names that kernels have on a device, see :meth:`symbol`."""
        return _ENTRY.sub(lambda match: match[1] + self.symbol(match[2]), self.source) if self.label else self.source

    def symbol(self, entry: str) -> str:
        """Return the name of an entry point on a device."""
        return f"{entry}_of_{re.sub(r'[^0-9A-Za-z_]', '_', self.label)}" if self.label else entry
