"""The page in a headless browser: no complaint, no network, zoom, search, light and dark
pictures.
"""

import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from dynamo_dist.diagnostics import merge_ranks, render_html


def browser():
    """A Chromium on the path, or one that playwright has installed; None without."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    cache = Path(
        os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or "~/.cache/ms-playwright"
    ).expanduser()
    return next(map(str, sorted(cache.glob("chromium*/*/*chrome*"), reverse=True)), None)


BROWSER = browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="there is no Chromium, of the system or playwright's"
    ),
]
# Types, clicks and then writes what came of it where --dump-dom shows it.
ACTS = """<script>
document.querySelector("[data-step=in]").click();
const input = document.querySelector("input[type=search]");
input.value = "no such thing";
input.dispatchEvent(new Event("input"));
setTimeout(() => document.body.dataset.found = [
  document.querySelector(".range").textContent,
  document.querySelector(".shown").textContent,
  document.querySelectorAll("tbody tr[hidden]").length,
].join("; "), 500);
</script>"""


def look(page, folder, *flags):
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=600,400",
            "--virtual-time-budget=2000",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.fixture
def page(report, tmp_path):
    path = tmp_path / "report.html"
    merged = merge_ranks([report(rank=0, world_size=2), report(rank=1, world_size=2, breaks=())])
    path.write_text(render_html(merged), encoding="utf-8")
    return path


def test_the_page_runs_zooms_and_filters_without_complaint(page, tmp_path):
    page.write_text(page.read_text().replace("</body>", ACTS + "</body>"), encoding="utf-8")
    done = look(page, tmp_path, "--dump-dom")
    assert 'class="js"' in done.stdout
    assert "CONSOLE" not in done.stderr
    # The script draws the axis anew, in pixels where the template had percents.
    assert re.search(r'<g class="axis"><text x="[\d.-]+" y="68"', done.stdout)
    # The timeline is 230 us long; one step in shows the middle half.
    assert 'data-found="57.5 µs to 172.5 µs; 0 of 1; 1"' in done.stdout


def test_pictures_in_light_and_dark(page, tmp_path):
    brightness = {}
    for scheme, number in (("dark", 0), ("light", 1)):
        picture = tmp_path / f"{scheme}.png"
        look(
            page,
            tmp_path,
            f"--blink-settings=preferredColorScheme={number}",
            f"--screenshot={picture}",
        )
        rows = pixels(picture)
        assert len(rows) == 400 and len(rows[0]) >= 600 * 3
        assert len({bytes(row) for row in rows}) > 100  # something is drawn
        brightness[scheme] = sum(map(sum, rows)) / sum(map(len, rows))
    assert brightness["dark"] < 90 < 160 < brightness["light"]


def pixels(path):
    """The rows of an RGB or RGBA picture; the file's form: w3.org/TR/png."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    at, data, header = 8, b"", b""
    while at < len(content):
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        chunk = content[at + 8 : at + 8 + size]
        header = chunk if kind == b"IHDR" else header
        data += chunk if kind == b"IDAT" else b""
        at += size + 12
    width, height, depth, colour = struct.unpack(">IIBB", header[:10])
    assert depth == 8 and colour in (2, 6)
    step = 3 if colour == 2 else 4
    raw, stride = zlib.decompress(data), width * step + 1
    rows, before = [], bytearray(width * step)
    for y in range(height):
        method, row = raw[y * stride], bytearray(raw[y * stride + 1 : (y + 1) * stride])
        for x in range(len(row)):
            left = row[x - step] if x >= step else 0
            above, corner = before[x], before[x - step] if x >= step else 0
            row[x] = (row[x] + predicted(method, left, above, corner)) & 255
        rows.append(row)
        before = row
    return rows


def predicted(method, left, above, corner):
    if method == 4:
        guess = left + above - corner
        return min((left, above, corner), key=lambda value: abs(guess - value))
    return (0, left, above, (left + above) // 2)[method]
