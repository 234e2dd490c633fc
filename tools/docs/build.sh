#!/usr/bin/env bash
# Build the site of docs/ in build/site. A warning, a link to no page and a link to no heading fail it.
# Needs the extra "docs" (pip install -e ".[docs]"), no network and no torch. PYTHON names another Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python}
OUT=${1:-build/site}
if ! "$PYTHON" -c 'import furo, myst_parser, sphinx, sphinxcontrib.mermaid' 2>/dev/null; then
    echo 'The site needs Sphinx and its extensions: pip install -e ".[docs]"' >&2
    exit 3
fi
rm -rf "$OUT" "$OUT.doctrees"
"$PYTHON" -m sphinx --fail-on-warning --keep-going --quiet -b html -d "$OUT.doctrees" -c docs . "$OUT"
# The first page is that of docs/, as the folders of the site are those of the repository.
printf '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n' >"$OUT/index.html"
echo "$OUT/index.html"
