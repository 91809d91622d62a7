"""Measurements of the library, beside PyG and other packages; no part of the wheel, and imported by nothing in it."""

import os
import sys
from pathlib import Path

if sys.argv[:1] == ["-m"]:
    # Read while torch is loaded: see pyg_dfgnn.threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CONFIGS = Path(__file__).resolve().parent / "configs"
"""The folder of the Hydra configs of the measurements."""
