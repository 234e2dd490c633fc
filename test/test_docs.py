"""What the pages of docs/ and the README name is there: files, messages, anchors."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Names files that its patches would add.
PAGES.remove(ROOT / "docs" / "extending" / "README.md")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
PATH = re.compile(
    r"`?((?:tools|test|dynamo_dist|inductor_passes|docs)/[\w./-]+\.(?:py|sh|md|json))`?"
)


def spoken(node):
    """The words of a string in the sources; what is filled in is "…"."""
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[\d.]*[sdrf]", "…", node.value)
    return ""


@pytest.fixture(scope="module")
def messages():
    sources = [
        p for name in ("dynamo_dist", "inductor_passes") for p in (ROOT / name).rglob("*.py")
    ]
    return [spoken(node) for path in sources for node in ast.walk(ast.parse(path.read_text()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    for target, anchor in LINK.findall(text):
        file = page.parent / target if target else page
        if not file.exists():
            missing.append(target)
        elif anchor and anchor not in anchors(file):
            missing.append(f"{target}#{anchor}")
    assert missing == []


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_messages_of_the_troubleshooting_page_are_ours(messages):
    headings = re.findall(
        r"^## `(.*)`$", (ROOT / "docs/reference/messages.md").read_text(), re.MULTILINE
    )
    assert len(headings) > 10
    wanted = {h: re.compile(".*".join(map(re.escape, h.split("…"))), re.DOTALL) for h in headings}
    assert [h for h, pattern in wanted.items() if not any(map(pattern.search, messages))] == []


def glossary():
    table = (ROOT / "docs" / "glossary.md").read_text().split("| --- | --- |\n")[1]
    return [line.strip("| ").split(" | ")[0] for line in table.splitlines()]


def test_the_glossary_has_only_words_that_are_used_in_order():
    """A word counts in any form, and as a part of a name: launches, any_part."""
    words = glossary()
    assert words == sorted(set(words), key=str.lower) and 10 < len(words) <= 20
    sources = [p for p in PAGES if p.name != "glossary.md"]
    for package in ("dynamo_dist", "inductor_passes"):
        sources += (ROOT / package).rglob("*.py")
    said = " ".join(path.read_text().lower() for path in sources)
    said = re.sub(r"[\s_]+", " ", said)
    assert [word for word in words if not re.search(rf"\b{word.lower()}", said)] == []


def test_the_page_of_all_pages_lists_each():
    index = ROOT / "docs" / "index.md"
    listed = {index, *((index.parent / to).resolve() for to, _ in LINK.findall(index.read_text()))}
    assert [str(page) for page in PAGES if page not in listed] == []


def test_pages_link_the_glossary():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md"):
        assert "glossary.md" in page.read_text(), page.name
