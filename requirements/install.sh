#!/usr/bin/env bash
# Create a virtual environment that holds exactly what a lock file lists.
#   PYTHON=python3.11 TORCH_INDEX=<url> requirements/install.sh requirements/cpu.lock .venv
set -euo pipefail

lock=$1
venv=$2
python=${PYTHON:-python3.11}
log=$venv/install.log

fail() {
    echo "setup: $*" >&2
    exit 1
}

pip_install() {
    "$venv/bin/pip" install --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$@" >>"$log" 2>&1 || {
        tail -n 30 "$log" >&2
        fail "pip install failed; all that it said is in $log"
    }
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1) ||
    fail "cannot run '$python'. Install Python 3.11, or name it: make setup PYTHON=/path/to/python3.11"
[ "$version" = 3.11 ] ||
    fail "'$python' is Python $version, the lock is for 3.11. Name another: make setup PYTHON=/path/to/python3.11"
command -v cc >/dev/null ||
    fail "no C compiler (cc) is there. pycosat, which reasoning-gym imports, has no wheel and is built from C."

echo "== setup: creating $venv with Python $version"
"$python" -m venv --clear "$venv"

echo "== setup: installing torch"
# shellcheck disable=SC2046  # one word a package
pip_install $(grep -E '^(setuptools|torch)==' "$lock")
"$venv/bin/python" -c '
import importlib.metadata, sys
sys.exit(any(name.startswith(("nvidia-", "cuda-")) for name in importlib.metadata.requires("torch") or []))
' || fail "pip chose a CUDA build of torch, but this environment is for the CPU." \
    "Name an index that holds CPU wheels of torch: make setup TORCH_INDEX=<url>"

echo "== setup: installing $(grep -c == "$lock") pinned packages (some minutes; log in $log)"
pip_install --no-build-isolation --use-pep517 -r "$lock"
