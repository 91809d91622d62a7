"""Roles and formulas of docstrings, which are written for Sphinx, as the Markdown of the site."""

import re

from griffe import Extension

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|obj):`~?([^`]*)`")
INLINE = re.compile(r":math:`([^`]*)`")
# The lines of a formula are those that are further in than its head, or the rest of its line.
FORMULA = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*)?)*?)(?=\n+\1\S|\s*\Z)", flags=re.MULTILINE)


def markdown(text):
    """Return the text of a docstring as Markdown."""
    text = FORMULA.sub(lambda found: f"{found[1]}$$\n{found[1]}{' '.join(found[2].split())}\n{found[1]}$$", text)
    return ROLE.sub(r"`\1`", INLINE.sub(r"$\1$", text))


class Docstrings(Extension):
    """Changes each docstring once its object has been read."""

    def on_instance(self, *, obj, **_):
        if not obj.is_alias and obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
