"""The pages of docs/ that are written from the code are what the code says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pages_are_what_the_code_says():
    pages = runpy.run_path(str(ROOT / "tools" / "docs" / "reference.py"))["render"]()
    assert set(pages) == {"reference.md", "graph-breaks.md"}
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, "run python tools/docs/reference.py"


def test_the_page_of_ddp_and_fsdp2_is_what_the_programs_say():
    text = runpy.run_path(str(ROOT / "tools" / "docs" / "conformance.py"))["render"]()
    page = ROOT / "docs" / "ddp-and-fsdp2.md"
    assert page.read_text() == text, "run python tools/docs/conformance.py"
