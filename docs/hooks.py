"""Hooks of mkdocs: results/ is a part of the site, and each page is there as Markdown, too."""

import shutil
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def on_files(files, config):
    """Add the files of results/, and its README as the page results.md."""
    for path in sorted(RESULTS.rglob("*")):
        if path.suffix in (".csv", ".png"):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    text = (RESULTS / "README.md").read_text().replace("](../docs/", "](")
    files.append(File.generated(config, "results.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links into results/, which lies beside docs/, into links of the site."""
    return markdown.replace("](../results/README.md", "](results.md").replace("](../results/", "](results/")


def on_post_build(config):
    """Copy the Markdown of the pages, which llms.txt names."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        target = Path(config.site_dir) / path.relative_to(ROOT / "docs")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
