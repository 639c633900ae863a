#!/usr/bin/env bash
# The wheel in an empty environment, and a short demo from it; `make test-wheel` calls it.
#   deploy/test-wheel.sh UV [MINUTES]
set -euo pipefail
uv=$(realpath "$1") minutes=${2:-1}
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$uv" build --quiet --wheel --out-dir "$scratch" .
"$uv" venv --quiet --python '>=3.11' "$scratch/venv"
# What the code was tested with.
"$uv" pip install --quiet --python "$scratch/venv/bin/python" --constraints <(grep -oE '^[a-z0-9._-]+==[^ ;]+' requirements-dev.lock) \
  "$(ls "$scratch"/*.whl)[demo]"
cd "$scratch"
venv/bin/slipstream version
venv/bin/slipstream demo --minutes "$minutes" --json demo.json
echo "the wheel serves and learns: $(grep -o '"failed": [0-9]*' demo.json | head -n 1)"
