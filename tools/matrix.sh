#!/usr/bin/env bash
# The fast tests and the program corpus on several versions of torch, and a table of what passes.
#
#   tools/matrix.sh [--python VERSION=INTERPRETER]... [--results FOLDER] [--only tests|corpus] VERSION...
#
# For each version a virtual environment is made in a temporary folder and removed afterwards, one at a
# time: wheels with CUDA libraries take about 5 GB. --python names an interpreter that has a version
# already; it is used as it is and kept. Results: matrix_VERSION.json for each version, and matrix.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/env.sh

NEEDED_GB=8
RESULTS=tools/bench/results
ONLY=()
declare -A GIVEN=()
VERSIONS=()
while (($#)); do
    case $1 in
        --python) GIVEN[${2%%=*}]=${2#*=}; shift 2 ;;
        --results) RESULTS=$2; shift 2 ;;
        --only) ONLY=(--only "$2"); shift 2 ;;
        -*) die "unknown option $1: see the head of $0" ;;
        *) VERSIONS+=("$1"); shift ;;
    esac
done
((${#VERSIONS[@]})) || die "name at least one version of torch, for example: $0 2.13.0"

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
mkdir -p "$RESULTS"

# Makes $SCRATCH/venv with torch $1 and this package; what fails is said and the version left out.
environment() {
    local free
    free=$(df --output=avail -BG "$SCRATCH" | tail -n 1 | tr -dc 0-9)
    ((free >= NEEDED_GB)) || die "torch $1 needs up to $NEEDED_GB GB in $SCRATCH, and $free GB are free: set TMPDIR to another disk."
    "$(find_python)" -m venv "$SCRATCH/venv" >&2 &&
        quietly "installing torch $1" "$SCRATCH/venv/bin/python" -m pip install --no-cache-dir "torch==$1" &&
        quietly "installing dynamo_dist" "$SCRATCH/venv/bin/python" -m pip install --no-cache-dir -e ".[test]" &&
        install_triton "$SCRATCH/venv/bin/python"
}

failed=()
for version in "${VERSIONS[@]}"; do
    python=${GIVEN[$version]:-$SCRATCH/venv/bin/python}
    if [[ -z ${GIVEN[$version]:-} ]] && ! environment "$version"; then
        failed+=("$version")
        rm -rf "$SCRATCH/venv"
        continue
    fi
    say "== torch $version: $python"
    "$python" tools/matrix.py one "$version" --results "$RESULTS" "${ONLY[@]}" || failed+=("$version")
    rm -rf "$SCRATCH/venv"
done
"${python:?}" tools/matrix.py table --results "$RESULTS"
((${#failed[@]} == 0)) || { say "not all as it should be: ${failed[*]}"; exit 1; }
