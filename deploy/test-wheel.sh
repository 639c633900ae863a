#!/usr/bin/env bash
# Install the wheel into an empty environment and run a short demo from it; `make test-wheel` calls it.
#   deploy/test-wheel.sh UV [MINUTES]
set -euo pipefail
uv=$(realpath "$1") minutes=${2:-1}
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$uv" build --quiet --wheel --out-dir "$scratch" .
# The dependency versions of the lock file, not the newest ones; the wheel stands for the published one.
grep -oE '^[a-z0-9._-]+==[^\\]+' requirements-dev.lock >"$scratch/tested.txt"
echo "slipstream-spec @ file://$(ls "$scratch"/*.whl)" >>"$scratch/tested.txt"
# Elsewhere: in the repository uv would read pyproject.toml, which users of the wheel do not have.
cd "$scratch"
# With pip, as of `python -m venv`.
"$uv" venv --quiet --seed --python '>=3.11' venv
export VIRTUAL_ENV=$scratch/venv PATH=$scratch/venv/bin:$PATH
pip() { "$uv" pip "$@" --quiet --constraints "$scratch/tested.txt"; }
pip install 'slipstream-spec[demo]'
slipstream version
slipstream demo --minutes "$minutes" --json demo.json
