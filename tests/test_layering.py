"""The laws of the layout, read from the sources: arrows point down, no circles, cores and scores apart, short files."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pyg_dfgnn
from benchmarks import CONFIGS
from pyg_dfgnn.paths import configs_dir, kernels_dir
from pyg_dfgnn.statements.scores import SCORES

PACKAGE = Path(pyg_dfgnn.__file__).parent
ROOT = PACKAGE.parent
MAX_LINES = 600
LEAVES = {"errors", "fallback", "operator", "settings", "paths", "profiling", "threads", "torch_private", "statements"}
ALLOWED = {
    "graph": set(),
    "runtime": set(),
    "dispatch": {"graph"},
    "reference": {"graph"},
    "ir": {"reference", "runtime", "graph"},
    "ops": {"dispatch", "ir", "reference", "runtime", "graph"},
    "frontend": {"ops", "ir", "graph"},
    "nn": {"frontend", "ops", "dispatch", "ir", "reference", "graph"},
    "capture": {"distributed", "nn", "frontend", "ops", "graph"},
    "utils": {"nn"},
    "__main__": {"command"},
    "models": {"nn", "ops", "graph"},
    "datasets": {"graph"},
    "distributed": {"ops", "graph"},
    "transforms": {"graph"},
    "command": {"training", "nn", "runtime", "graph"},
    "training": {"capture", "transforms", "distributed", "models", "datasets", "nn", "ops", "graph"},
}
ALLOWED["benchmarks"] = set(ALLOWED) - {"__main__"}

# Files that serve any family, so neither their imports nor their text name one. PyG's own argument
# `return_attention_weights` may be spoken of.
FAMILY = re.compile(r"relational|segment|gemm|attention(?![ _]weights)", re.IGNORECASE)
CORES = (
    "pyg_dfgnn/dispatch/core*.py",
    "pyg_dfgnn/dispatch/store.py",
    *(f"pyg_dfgnn/ops/{name}.py" for name in ("core", "eager", "function", "host_codegen", "prepared", "tuning")),
    "pyg_dfgnn/nn/gate.py",
    "pyg_dfgnn/runtime/*.py",
    *(f"benchmarks/{name}.py" for name in ("case", "graphs", "run", "tables")),
)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(path: Path) -> str:
    """The package that the relative imports of a file start from."""
    return ".".join(path.relative_to(ROOT).parent.parts)


BENCHMARKS = CONFIGS.parent
SOURCES = sorted([*PACKAGE.rglob("*.py"), *BENCHMARKS.rglob("*.py")])
MODULES = {name_of(path): path for path in SOURCES}


def modules_imported(tree: ast.AST, package: str) -> list[str]:
    """Absolute names of all imported modules, wherever in the file, also in functions and under TYPE_CHECKING."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                child = f"{module}.{alias.name}"
                modules.append(child if module == "pyg_dfgnn" or child in MODULES else module)
    return modules


def upward(tree: ast.AST, room: str, package: str) -> list[str]:
    """Imports of a file of `room` that the arrows do not allow."""
    allowed = (set() if room in LEAVES else ALLOWED[room]) | LEAVES | {room}
    refused = []
    for module in modules_imported(tree, package):
        parts = module.split(".")
        if parts[0] == "cupy" or parts[0].startswith("cupy_"):
            refused += [] if room == "runtime" else [module]
        elif parts[0] in {"tests", "train"} or (parts[0] == "benchmarks" and room != "benchmarks"):
            refused.append(module)
        elif parts[0] == "pyg_dfgnn" and len(parts) > 1 and not parts[1].startswith("_") and parts[1] not in allowed:
            refused.append(module)
    return refused


def circle(imports: dict[str, set[str]]) -> set[str]:
    """Modules that reach themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            fresh = imports.get(waiting.pop(), set()) - seen
            seen |= fresh
            waiting += fresh
        return seen

    return {name for name in imports if name in reached(name)}


def compares_score(tree: ast.AST) -> bool:
    """Whether a name of a score is compared with anything but the name of an aggregation, as GATConv's 'add' is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            constants = [c.value for o in operands for c in ast.walk(o) if isinstance(c, ast.Constant)]
            others = [ast.unparse(o) for o in operands if not isinstance(o, ast.Constant)]
            if any(isinstance(c, str) and c in SCORES for c in constants) and not any("aggr" in o for o in others):
                return True
        elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant) and node.value.value in SCORES:
            return True
    return False


def compares_score_in_cuda(text: str) -> bool:
    return re.search(r"\bSCORE\b", re.sub(r"//.*|/\*.*?\*/", "", text)) is not None


def is_of_score(path: Path) -> bool:
    """Whether a file belongs to one score, or is the table of all of them."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "scores" in parts or parts[-1] in SCORES


def private_names(tree: ast.AST) -> list[str]:
    """Names of torch that begin with an underscore, imported or read off a module of torch."""
    imported, names = {"torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            imported |= {alias.asname or alias.name for alias in node.names if alias.name.islower()}
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in imported:
            names.append(ast.unparse(node))
    return [name for name in names if any(re.match("_(?!_)", part) for part in name.split("."))]


def test_private_names_of_torch_are_in_one_file():
    found = {relative(path): private_names(parsed(path)) for path in SOURCES if path.stem != "torch_private"}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("import torch._dynamo", 1),
        ("from torch.utils._pytree import tree_map", 1),
        ("from torch.nn.modules.module import _has_any_global_hook", 1),
        ("from torch.autograd import forward_ad\nlevel = forward_ad._current_level", 1),
        ("import torch\ntracing = torch._C._is_tracing()", 2),
        ("import torch\nversion = torch.__version__", 0),
        ("from torch import Tensor\nself._version = Tensor.shape", 0),
    ],
)
def test_private_name_of_torch_is_seen(line, count):
    assert len(private_names(ast.parse(line))) == count


def test_arrows_point_down():
    offenders = []
    for path in SOURCES:
        root, *inside = path.relative_to(ROOT).with_suffix("").parts
        room = root if root == "benchmarks" else inside[0]
        if room == "__init__":
            continue
        assert room in ALLOWED or room in LEAVES, f"'{room}' is no room whose arrows are written down"
        offenders += [f"{relative(path)} imports {m}" for m in upward(parsed(path), room, package_of(path))]
    assert offenders == []


@pytest.mark.parametrize(
    "line, room, package",
    [
        ("from pyg_dfgnn.nn import GATConv", "graph", "pyg_dfgnn.graph"),
        ("from pyg_dfgnn import ops", "dispatch", "pyg_dfgnn.dispatch"),
        ("def f():\n    from ..runtime import launch", "nn", "pyg_dfgnn.nn"),
        ("import benchmarks.timing", "training", "pyg_dfgnn.training"),
        ("from tests.emu import Kernel", "benchmarks", "benchmarks"),
        ("import cupy", "ops", "pyg_dfgnn.ops"),
        ("from pyg_dfgnn.graph import Graph", "errors", "pyg_dfgnn"),
    ],
)
def test_upward_arrow_is_seen(line, room, package):
    assert len(upward(ast.parse(line), room, package)) == 1


@pytest.mark.parametrize("room", [*ALLOWED, "statements"])
def test_no_circle_inside_a_room(room):
    prefix = room if room == "benchmarks" else f"pyg_dfgnn.{room}"
    inside = {name: path for name, path in MODULES.items() if name == prefix or name.startswith(f"{prefix}.")}
    imports = {
        name: {module for module in modules_imported(parsed(path), package_of(path)) if module in inside}
        for name, path in inside.items()
    }
    assert sorted(circle(imports)) == []


def test_circle_is_seen():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": {"e"}}
    assert circle(imports) == {"b", "c", "e"}
    line = "if TYPE_CHECKING:\n    from pyg_dfgnn.graph import Graph\ndef f():\n    from pyg_dfgnn.graph import cache"
    assert modules_imported(ast.parse(line), "pyg_dfgnn.graph") == ["pyg_dfgnn.graph", "pyg_dfgnn.graph.cache"]


def test_no_core_imports_attention():
    found = {
        relative(path)
        for pattern in CORES
        for path in ROOT.glob(pattern)
        if any("attention" in module.split(".") for module in modules_imported(parsed(path), package_of(path)))
    }
    assert sorted(found) == []


def test_no_core_of_the_package_names_a_family():
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for pattern in CORES
        if pattern.startswith("pyg_dfgnn")
        for path in ROOT.glob(pattern)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FAMILY.search(line)
    ]
    assert found == []
    assert all(list(ROOT.glob(pattern)) for pattern in CORES)


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("if family == 'attention':", True),
        ("class SegmentProblem:", True),
        ("return_attention_weights=True", False),
        ('reasons.append("attention weights")', False),
        ("def program(heads): ...", False),
    ],
)
def test_family_in_a_core_is_seen(line, seen):
    assert bool(FAMILY.search(line)) == seen


def test_no_config_of_the_package_names_the_benchmarks():
    """A config imports what it names, as code does."""
    files = [*configs_dir().rglob("*.yaml")]
    assert files and not [path for path in files if re.search(r"\bbenchmarks\b", path.read_text())]


def test_only_its_own_files_compare_a_score():
    found = {relative(path) for path in SOURCES if not is_of_score(path) and compares_score(parsed(path))}
    found |= {
        relative(path)
        for path in kernels_dir().rglob("*.cu*")
        if not is_of_score(path) and compares_score_in_cuda(path.read_text())
    }
    assert sorted(found) == []


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ('x = score == "dot"', True),
        ('x = problem.score in ("add", "gatv2")', True),
        ('x = (direction, score) != ("targets", "dot")', True),
        ('match score:\n    case "cosine":\n        pass', True),
        ('x = conv.aggr == "add"', False),
        ('x = {"dot": 1}[score]', False),
    ],
)
def test_comparison_with_a_score_is_seen(line, seen):
    assert compares_score(ast.parse(line)) == seen


def test_comparison_with_a_score_is_seen_in_cuda():
    assert compares_score_in_cuda("#if SCORE == SCORE_ADD")
    assert not compares_score_in_cuda("// SCORE is a constant\nSUMS_SCORE")


def test_files_are_short():
    folders = (PACKAGE, BENCHMARKS, kernels_dir(), ROOT / "tests")
    files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".h")}
    found = {relative(path) for path in files if len(path.read_text().splitlines()) > MAX_LINES}
    assert sorted(found) == []


FIRST_STEPS = """
import sys

import pyg_dfgnn

assert pyg_dfgnn.__version__ and callable(pyg_dfgnn.settings) and "torch_geometric" not in sys.modules
# Subpackages are attributes as soon as the package is imported, not only where something else has imported them.
pyg_dfgnn.nn.GATConv, pyg_dfgnn.utils.scatter, pyg_dfgnn.transforms.Reorder, pyg_dfgnn.capture.Capacity
pyg_dfgnn.ops, pyg_dfgnn.ir.relational, pyg_dfgnn.errors
from pyg_dfgnn import Graph, accelerate, describe_plan

import pyg_dfgnn.runtime.bridge, pyg_dfgnn.runtime.compiler, pyg_dfgnn.runtime.launcher
import torch
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.core import explain

problem = AttentionProblem("dot", 2, 4, torch.float32, torch.device("cpu"), False, False, True)
FAMILY.unsupported(problem), explain(FAMILY, problem, Graph.of(torch.tensor([[0, 1], [1, 0]]), 2), True)
assert callable(pyg_dfgnn.settings) and not [name for name in sys.modules if name.startswith("cupy")]
"""


def test_import_is_light_and_needs_no_cupy():
    """Nor do the choice of kernels and the launcher, before a launch."""
    subprocess.run([sys.executable, "-c", FIRST_STEPS], cwd=ROOT, check=True)
