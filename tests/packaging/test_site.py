"""The documentation site: every page has a place in it, every link leads somewhere, every public name is described."""

import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import pyg_dfgnn

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
GENERATED = {"results.md"}
"""Pages that docs/hooks.py makes of files outside of docs/."""
CONFIG = (ROOT / "mkdocs.yml").read_text()
PUBLIC = {
    "pyg_dfgnn": {"__version__"},
    "pyg_dfgnn.capture": set(),
    "pyg_dfgnn.datasets": set(),
    "pyg_dfgnn.distributed": set(),
    "pyg_dfgnn.graph": set(),
    # One table on another page describes the domains.
    "pyg_dfgnn.ir": set("R S D U V E".split()) | {"One", "Td", "Ts"},
    "pyg_dfgnn.models": set(),
    # PyG's own class.
    "pyg_dfgnn.nn": {"Linear"},
    "pyg_dfgnn.ops": set(),
    "pyg_dfgnn.ops.relational": set(),
    "pyg_dfgnn.transforms": set(),
    "pyg_dfgnn.utils": set(),
}
"""Public module -> its names that the reference leaves out."""


def slug(heading):
    """Return the anchor of a heading, on GitHub and on the site."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words))


def anchors(path):
    """Return the anchors of a Markdown file."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}


def test_navigation_names_every_page_once():
    navigation = CONFIG.partition("\nnav:\n")[2].partition("\n\n")[0]
    named = re.findall(r"([\w/]+\.md)$", navigation, flags=re.MULTILINE)
    assert sorted(named) == sorted(PAGES | GENERATED)


def test_llms_txt_names_every_page_once():
    assert sorted(re.findall(r"\]\(([\w/]+\.md)\)", (DOCS / "llms.txt").read_text())) == sorted(PAGES)


OTHERS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md", "results/cora_gat/README.md"]


@pytest.mark.parametrize("name", sorted([*OTHERS, *(f"docs/{page}" for page in PAGES)]))
def test_relative_links_and_their_anchors_lead_somewhere(name):
    path = ROOT / name
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if file.startswith("https://"):
            continue
        target = path if not file else path.parent / file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        # The site has docs/ and results/ alone.
        is_inside = target.resolve().is_relative_to(DOCS) or target.resolve().is_relative_to(ROOT / "results")
        assert is_inside or not name.startswith("docs/"), link


def test_first_page_of_the_reference_names_what_the_package_has():
    page = (DOCS / "api" / "index.md").read_text()
    assert set(pyg_dfgnn.__all__) - PUBLIC["pyg_dfgnn"] <= set(re.findall(r"(?:heading: |`)pyg_dfgnn\.(\w+)", page))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; any warning of mkdocs is an error."""
    needed = ("mkdocs", "material", "mkdocstrings_handlers")
    if missing := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"the extra 'docs' is not installed: no {missing[0]}")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("module", PUBLIC)
def test_reference_describes_every_public_name(site, module):
    described = set()
    for page in (site / "api").rglob("index.html"):
        described.update(re.findall(r'id="(pyg_dfgnn[\w.]*)"', page.read_text()))
    names = importlib.import_module(module)
    for name in set(names.__all__) - PUBLIC[module]:
        value = getattr(names, name)
        # A name that several modules have is described where it is defined, or where users import it from.
        defined = f"{getattr(value, '__module__', module)}.{name}"
        places = {f"{module}.{name}", defined, *(f"{public}.{name}" for public in PUBLIC)}
        assert places & described, name


def test_roles_of_docstrings_are_markdown(site):
    pages = "".join(page.read_text() for page in (site / "api").rglob("index.html"))
    assert re.findall(r":(?:class|func|meth|mod|data|math|attr):|\.\. math", pages) == []
    assert r"\(S_{ij} = \beta \cos(x_i, x_j)\)" in pages


def test_sections_of_results_are_one_item(site):
    """A description of several lines is not cut into an item per line."""
    pages = "".join(page.read_text() for page in (site / "api").rglob("index.html"))
    sections = re.findall(r"Returns:</span>.*?</ul>", pages, flags=re.DOTALL)
    assert sections and {section.count("<li ") for section in sections} == {1}


def test_site_has_rows_figures_and_markdown(site):
    for name in ("results/loops.csv", "results/bench/nvidia-h200/fig11.png", "install.md", "llms.txt"):
        assert (site / name).stat().st_size > 0
    assert not list(site.rglob("*.py"))
