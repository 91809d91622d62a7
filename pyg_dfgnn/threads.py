"""How the threads of torch's operators on a CPU wait for work."""

from __future__ import annotations

import os


def let_threads_sleep() -> None:
    """Let threads of OpenMP that wait for work sleep, unless `OMP_WAIT_POLICY` says otherwise.

    Threads that spin slow each other down when processes share the cores. OpenMP reads the variable
    while torch is loaded, so a command calls this before it imports anything that imports torch.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
