# Sourced by demo.sh and test.sh: one virtual environment, made once and reused.
#
# VENV    where it is            (default: .venv in the checkout)
# PYTHON  the interpreter for it (default: the first of python3.11, 3.12, 3.13, python3 that fits)
#
# Everything printed here goes to stderr: the scripts' stdout may be JSON.

TORCH_VERSION=2.13.0

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

# Runs a command with its output in a log, a sign of life every 10 s, and the log's end on failure.
quietly() {
    local what=$1 log pid status=0 start=$SECONDS
    shift
    log=$(mktemp)
    say "$what ..."
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if (( (SECONDS - start) % 10 == 9 )); then
            say "  $what: $((SECONDS - start)) s. $(tail -n 1 "$log" | cut -c1-100)"
        fi
    done
    wait "$pid" || status=$?
    trap - INT TERM
    if ((status)); then
        tail -n 25 "$log" >&2
    else
        say "  done in $((SECONDS - start)) s"
    fi
    rm -f "$log"
    return "$status"
}

# torch 2.13 has wheels for these; 3.14 and later are not tried here.
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        fits "$PYTHON" || die "PYTHON=$PYTHON does not run as Python 3.11, 3.12 or 3.13."
        command -v "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 was found. The package needs one: install it (for example" \
        "'apt-get install python3.11 python3.11-venv') or name one with PYTHON=/path/to/python."
}

make_venv() {
    local python
    python=$(find_python)
    say "making $VENV with $python ($("$python" --version))"
    "$python" -m venv "$VENV" >&2 || {
        rm -rf "$VENV"
        die "'$python -m venv' failed. On Debian and Ubuntu the module is a package of its own:" \
            "'apt-get install python3-venv'; or point VENV at an environment that exists."
    }
}

# A CPU build saves gigabytes where no GPU is: pip's own settings (PIP_INDEX_URL) choose the index.
install_torch() {
    quietly "installing torch $TORCH_VERSION" \
        "$VENV/bin/python" -m pip install "torch==$TORCH_VERSION" ||
        die "torch $TORCH_VERSION could not be installed: see above. Any torch from 2.13 to 2.15" \
            "that is in $VENV already is used as it is."
}

# The triton that goes with the torch of an interpreter, where it has none: builds for CPUs bring none, and tests of
# kernels need one. An extra could only name one for all versions of torch.
install_triton() {
    local python=$1 wanted
    [[ $(uname -s) == Linux ]] || return 0
    wanted=$("$python" - <<'EOP'
import importlib.metadata, importlib.util

if importlib.util.find_spec("triton") is None:
    version = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    known = {(2, 11): "3.6", (2, 12): "3.7", (2, 13): "3.7", (2, 14): "3.8", (2, 15): "3.9"}
    print(f"triton=={known[version]}.*")
EOP
    ) || die "no triton is known for the torch of $python."
    [[ -z $wanted ]] || quietly "installing $wanted" "$python" -m pip install "$wanted"
}

# What an installed environment depends on: change any of it and pip runs again.
env_key() {
    { pwd; cat setup.cfg setup.py; "$VENV/bin/python" -c 'import sys; print(sys.version, sys.prefix)'; } |
        "$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

has_torch() {
    "$VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
}

ensure_env() {
    VENV=${VENV:-$PWD/.venv}
    case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
    local stamp=$VENV/.dynamo_dist_key
    if [[ ! -x $VENV/bin/python ]] || ! fits "$VENV/bin/python"; then
        # Only an environment that this script made may be replaced.
        if [[ -e $VENV && ! -f $stamp ]]; then
            die "$VENV exists, but is no virtual environment with Python 3.11 to 3.13 that works." \
                "Remove it, or set VENV to another place."
        fi
        rm -rf "$VENV"
        make_venv
    fi
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$(env_key)" ]]; then
        has_torch || install_torch
        quietly "installing dynamo_dist and what it needs" \
            "$VENV/bin/python" -m pip install -e ".[demo,test]" ||
            die "the packages could not be installed into $VENV: see above."
        install_triton "$VENV/bin/python" || die "triton could not be installed into $VENV: see above."
        env_key >"$stamp"
    fi
    export VENV PATH="$VENV/bin:$PATH"
    unset PYTHONPATH PYTHONHOME
}

# A compile cache for this run alone, and one thread for each of the two ranks that share two cores.
fresh_run() {
    RUN_DIR=$(mktemp -d)
    trap 'rm -rf "$RUN_DIR"' EXIT
    export TORCHINDUCTOR_CACHE_DIR=$RUN_DIR/inductor OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}
