"""The pages of docs/reference that come from the code are what the code says."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pages_are_what_the_code_says():
    pages = runpy.run_path(str(ROOT / "tools" / "docs" / "reference.py"))["render"]()
    assert {"options.md", "passes.md", "python-api.md", "graph-breaks.md"} < set(pages)
    for name, text in pages.items():
        page = ROOT / "docs" / "reference" / name
        assert page.read_text() == text, "run python tools/docs/reference.py"


def test_no_heading_of_a_generated_page_occurs_twice():
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        found = re.findall(r"^##+ .*$", page.read_text(), re.MULTILINE)
        assert len(found) == len(set(found)), page.name


def test_the_page_of_ddp_and_fsdp2_is_what_the_programs_say():
    text = runpy.run_path(str(ROOT / "tools" / "docs" / "conformance.py"))["render"]()
    page = ROOT / "docs" / "reference" / "ddp-and-fsdp2.md"
    assert page.read_text() == text, "run python tools/docs/conformance.py"
