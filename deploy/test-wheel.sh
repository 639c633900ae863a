#!/usr/bin/env bash
# Install the wheel into an empty environment and run a short demo from it; `make test-wheel` calls it.
#   deploy/test-wheel.sh UV [MINUTES]
set -euo pipefail
uv=$(realpath "$1") minutes=${2:-1}
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$uv" build --quiet --wheel --out-dir "$scratch" .
"$uv" venv --quiet --python '>=3.11' "$scratch/venv"
# The dependency versions of the lock file, not the newest ones.
grep -oE '^[a-z0-9._-]+==[^\\]+' requirements-dev.lock >"$scratch/tested.txt"
"$uv" pip install --quiet --python "$scratch/venv/bin/python" --constraints "$scratch/tested.txt" \
  "$(ls "$scratch"/*.whl)[demo]"
cd "$scratch"
venv/bin/slipstream version
venv/bin/slipstream demo --minutes "$minutes" --json demo.json
