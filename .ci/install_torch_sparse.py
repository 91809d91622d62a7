"""Install torch_scatter and torch_sparse, built from source once per torch version and kept in pip's cache folder."""

import os
import subprocess
import sys
from pathlib import Path

import torch

PACKAGES = ("torch_scatter==2.1.2", "torch_sparse==0.6.18")


def pip(*args: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.strip()


# The extension builder calls ninja by name; without it the build takes several times longer.
environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
tag = f"torch-{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}"
wheels = Path(pip("cache", "dir")) / "pyg_dfgnn" / tag

pip("install", "--quiet", "--quiet", "ninja", "scipy", "setuptools", "wheel")
for package in PACKAGES:
    name, version = package.split("==")
    found = list(wheels.glob(f"{name}-{version}-*.whl"))
    if not found:
        print(f"building {package} for torch {torch.__version__}: many minutes, once", flush=True)
        # The build must see the installed torch; pip's own wheel cache would not tell torch versions apart.
        pip(
            "wheel",
            "--quiet",
            "--no-build-isolation",
            "--no-deps",
            "--no-cache-dir",
            "--wheel-dir",
            str(wheels),
            package,
        )
        found = list(wheels.glob(f"{name}-{version}-*.whl"))
    pip("install", "--quiet", "--quiet", "--no-deps", "--no-index", str(found[0]))
