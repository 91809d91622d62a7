"""Work for a process of its own, in a module that imports next to nothing: the process imports it again."""

import os


def exits(*_):
    os._exit(3)


def counts(end):
    yield from (number or None for number in range(end))
