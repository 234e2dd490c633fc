#!/usr/bin/env bash
# The main checks, in ten minutes: fast tests, main paths on real ranks, ruff, mypy, codespell. Arguments go to pytest.
#
#   --all         the other slow tests too
#   --rest        these alone: what .ci/run adds
#   --setup-only  make the environment and end
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/env.sh
ensure_env
what=main
case ${1:-} in
    --setup-only)
        say "ready: . $VENV/bin/activate"
        exit
        ;;
    --all | --rest)
        what=${1#--}
        shift
        ;;
esac
fresh_run
# Tests' processes are more than cores: with two threads each, OpenMP's wait for one another most of the time.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Kernels that several tests build are built once.
if command -v g++ >/dev/null; then
    export DYNAMO_DIST_BUILT=${DYNAMO_DIST_BUILT:-$RUN_DIR/built} PATH=$PWD/tools/ci:$PATH
fi

SELECTED=$#
failed=()
summaries=()

# Runs one step whatever became of the ones before it, so that one run shows everything.
step() {
    local name=$1 start=$SECONDS status=0
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    "$@" </dev/null || status=$?
    printf '== %s: %s after %d s\n' "$name" "$( ((status)) && echo "FAILED ($status)" || echo ok)" $((SECONDS - start))
    ((status == 0)) || failed+=("$name")
}

tests() {
    local name=$1 marker=$2 log=$RUN_DIR/$1.log status=0
    shift 2
    python -m pytest -m "$marker" -n 2 --dist loadfile --durations=20 --durations-min=1 -o faulthandler_timeout=300 "$@" 2>&1 |
        tee "$log" || status=$?
    summaries+=("$name tests:" "$(grep -E '^=+ .* in [0-9.]+s.*=+$' "$log" | tail -n 1)")
    # A selection such as -k may leave one of the two steps without a test: that is no failure.
    if ((status == 5 && SELECTED > 0)); then return 0; fi
    return "$status"
}

# Two processes, a file of tests to one of them: fixtures that start ranks are made once. Each step lists its slowest twenty.
# Slow files go in the order of test/slow_files.json, the longest first.
if [[ $what != rest ]]; then
    step "fast tests" tests fast "not slow" "$@"
    step "main paths" tests main "slow and main and not sweep" --no-loadscope-reorder "$@"
    step "ruff check" ruff check .
    step "ruff format" ruff format --check .
    step "mypy" mypy
    step "codespell" codespell
fi
if [[ $what != main ]]; then
    step "other slow tests" tests rest "slow and not main and not sweep" --no-loadscope-reorder "$@"
fi

printf '\n'
printf '%s\n' "${summaries[@]}"
if ((${#failed[@]})); then
    printf 'FAILED: %s (%d s in all)\n' "$(IFS=,; echo "${failed[*]}")" "$SECONDS"
    exit 1
fi
printf 'all passed in %d s\n' "$SECONDS"
