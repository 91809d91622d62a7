"""Run a short suite on the oldest and the newest release of torch and PyTorch Geometric, each in its own environment.

The oldest releases are those that pyproject.toml admits, the newest those that pip finds. A pair that cannot be
installed here is skipped, as a line says. The environments are made side by side, in a temporary folder.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/test_command.py::test_info_names_versions_and_says_what_is_not_there",
    "tests/test_command.py::test_layers_of_the_doctor_run_kernels",
    "tests/nn/test_parity.py::test_every_option",
    "tests/nn/test_parity.py::test_which_flags_ask_for_weights",
    "tests/nn/test_export.py::test_exports_are_told_from_compilations",
    "tests/nn/test_drop_in.py::test_compile_on_the_cpu[GATConv-False]",
    "tests/nn/test_messages.py::test_captured_forwards_equal_pyg[SAGEConv]",
    "tests/nn/test_messages.py::test_captured_forwards_equal_pyg[user-Temperature]",
    "tests/frontend/test_whole.py",
    "tests/capture/test_capture_step.py::test_a_step_on_a_cpu_is_the_loop_by_hand",
    "tests/capture/test_capture_step.py::test_batches_of_a_loader",
)
INSTALL_S, TEST_S = 180, 170
DISK_BYTES = 20 * 2**30
"""Bytes that two builds of torch for CUDA take."""
SHOWN = "import torch, torch_geometric as pyg; print(f'torch {torch.__version__}, torch_geometric {pyg.__version__}')"


def pairs() -> dict[str, list[str]]:
    """Return the requirements of the oldest and of the newest pair."""
    text = (ROOT / "pyproject.toml").read_text()
    oldest = [f"{name}=={low}.*" for name, low in re.findall(r'"(torch|torch_geometric)>=([\d.]+)"', text)]
    return {"oldest": oldest, "newest": ["torch", "torch_geometric"]}


def run(name: str, requirements: list[str], wheel: Path, folder: Path) -> bool:
    """Install a pair and run the suite; return whether nothing failed."""
    start = time.monotonic()
    python = folder / name / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        subprocess.run(
            # A cache of these wheels would be gigabytes more to write.
            [*pip, "install", "--no-compile", "--no-cache-dir", *requirements, f"{wheel}[test]"],
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        print(f"{name} pair: skipped, {' '.join(requirements)} took longer than {INSTALL_S} s to install", flush=True)
        return True
    except subprocess.CalledProcessError as error:
        if "conflicting dependencies" in error.stderr:
            print(f"{name} pair: {' '.join(requirements)} cannot be installed\n{error.stderr}", flush=True)
            return False
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        print(f"{name} pair: skipped, {' '.join(requirements)} cannot be had here ({last[0]})", flush=True)
        return True
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    shown = subprocess.run([python, "-c", SHOWN], check=True, capture_output=True, text=True).stdout.strip()
    installed = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not cuda and not sparse", *TESTS]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_S)
    except subprocess.TimeoutExpired as error:
        print(f"{name} pair: {shown}: the tests took longer than {TEST_S} s\n{error.output}", flush=True)
        return False
    # Triton may print lines of its own behind the summary.
    summary = re.findall(r"^\d+ passed.*", done.stdout, re.MULTILINE)
    text = summary[-1] if summary and not done.returncode else done.stdout + done.stderr
    times = f"{installed - start:.0f} s to install, {time.monotonic() - installed:.0f} s of tests"
    print(f"{name} pair: {shown}, {times}: {text}", flush=True)
    return done.returncode == 0


def main() -> int:
    """Return 1 where a test has failed."""
    with tempfile.TemporaryDirectory(prefix="pyg_dfgnn_versions_") as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < DISK_BYTES:
            print(f"oldest and newest pair: skipped, {folder} has less than {DISK_BYTES >> 30} GiB free")
            return 0
        # A copy, because a build leaves files beside the sources.
        source = folder / "source"
        for part in ("pyg_dfgnn", "kernels", "configs"):
            shutil.copytree(ROOT / part, source / part)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, source)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
        subprocess.run(build, check=True)
        (wheel,) = folder.glob("*.whl")
        with ThreadPoolExecutor() as threads:
            passed = threads.map(lambda pair: run(*pair, wheel, folder), pairs().items())
            return 0 if all([*passed]) else 1


if __name__ == "__main__":
    sys.exit(main())
