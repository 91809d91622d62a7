"""Arrows point down: which room of the package may import which other, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pyg_dfgnn

PACKAGE = Path(pyg_dfgnn.__file__).parent
LEAVES = {"errors", "settings", "paths", "threads"}
ALLOWED = {
    "graph": set(),
    "runtime": set(),
    "dispatch": {"graph"},
    "reference": {"graph"},
    "ops": {"dispatch", "reference", "runtime", "graph"},
    "nn": {"ops", "dispatch", "reference", "graph"},
    "models": {"nn", "ops", "graph"},
    "datasets": {"graph"},
    "distributed": {"graph"},
    "training": {"distributed", "models", "datasets", "nn", "ops", "graph"},
    "bench": {"training", "models", "datasets", "nn", "ops", "dispatch", "reference", "runtime", "graph"},
}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def modules_imported(tree: ast.AST, package: str) -> list[str]:
    """Absolute names of all imported modules, wherever in the file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names] if module == "pyg_dfgnn" else [module]
    return found


def upward(source: str, room: str, package: str) -> list[str]:
    """Imports of `source`, a file of `room`, that the arrows do not allow."""
    allowed = (set() if room in LEAVES else ALLOWED[room]) | LEAVES | {room}
    refused = []
    for module in modules_imported(ast.parse(source), package):
        parts = module.split(".")
        if parts[0] == "cupy" or parts[0].startswith("cupy_"):
            refused += [] if room == "runtime" else [module]
        elif parts[0] in {"tests", "train"}:
            refused.append(module)
        elif parts[0] == "pyg_dfgnn" and len(parts) > 1 and not parts[1].startswith("_") and parts[1] not in allowed:
            refused.append(module)
    return refused


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        pytest.skip("the package root names what users import")
    package = ".".join(["pyg_dfgnn", *parts[:-1]])
    assert parts[0] in ALLOWED or parts[0] in LEAVES, f"'{parts[0]}' is not a room that has its arrows written down"
    assert upward(path.read_text(), parts[0], package) == []


@pytest.mark.parametrize(
    "line, room, package",
    [
        ("from pyg_dfgnn.nn import GATConv", "graph", "pyg_dfgnn.graph"),
        ("from pyg_dfgnn import ops", "dispatch", "pyg_dfgnn.dispatch"),
        ("def f():\n    from ..runtime import launch", "nn", "pyg_dfgnn.nn"),
        ("import pyg_dfgnn.bench.timing", "training", "pyg_dfgnn.training"),
        ("from tests.zoo import zoo", "bench", "pyg_dfgnn.bench"),
        ("import cupy", "ops", "pyg_dfgnn.ops"),
        ("from pyg_dfgnn.graph import Graph", "errors", "pyg_dfgnn"),
    ],
)
def test_upward_arrow_is_seen(line, room, package):
    assert len(upward(line, room, package)) == 1


def test_import_needs_no_cupy():
    code = "import sys, pyg_dfgnn, pyg_dfgnn.graph, pyg_dfgnn.ops, pyg_dfgnn.nn; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True)


def test_only_the_configs_of_the_bench_name_it():
    """A config imports what it names, as code does."""
    configs = PACKAGE.parent / "configs"
    own = {configs / "table2.yaml", *(configs / "bench").rglob("*.yaml")}
    others = set(configs.rglob("*.yaml")) - own
    assert others and not [path for path in others if "pyg_dfgnn.bench" in path.read_text()]
