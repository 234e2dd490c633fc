"""Configure Sphinx: the site is the Markdown of this repository, as a repository host shows it.

``bash tools/docs/build.sh`` builds it. The source folder is the repository's root, so that links
between README, CONTRIBUTING and docs/ are the same files here and there.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
_metadata = configparser.ConfigParser()
_metadata.read(ROOT / "setup.cfg")

project = "dynamo-dist"
author = "the dynamo-dist contributors"
version = release = _metadata["metadata"]["version"]

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**", "tools/bench/results/matrix.md"]
exclude_patterns = [".*", "build", "dynamo_dist", "inductor_passes", "test", "**/*.png"]

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nitpicky = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"dynamo-dist {release}"
html_show_sourcelink = False
html_copy_source = False
# A diagram is text in the page; a browser draws it.
mermaid_output_format = "raw"
mermaid_height = "auto"

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_ENTRY = re.compile(r"^- \[.+?\]\((.+?)\.md\)", re.MULTILINE)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the tables of contents that Sphinx asks for to the page of all pages.

    They are made of its lists, so that the page stays plain Markdown on a repository host.
    """
    if page != root_doc:
        return
    sections = _SECTION.split(source[0])[1:]
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        pages = "\n".join(_ENTRY.findall(text))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {name}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Connect the hook above."""
    app.connect("source-read", add_contents)
