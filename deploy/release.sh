#!/usr/bin/env bash
# Build source archive, wheel and SBOM of the current commit into dist/; `make release` calls it.
#   deploy/release.sh BIN UV        BIN: the folder with twine and cyclonedx-py
# The version is that of a tag at this commit, v1.2.3, else that of pyproject.toml.
set -euo pipefail
bin=$(realpath "$1") uv=$(realpath "$2")
cd "$(dirname "$0")/.."
[ -z "$(git status --porcelain)" ] || { echo "there are uncommitted changes: commit them first" >&2; exit 2; }
source_dir=$(mktemp -d)
trap 'rm -rf "$source_dir"' EXIT
git archive HEAD | tar -x -C "$source_dir"
if tag=$(git describe --tags --exact-match --match 'v[0-9]*' 2>/dev/null); then
  sed -i "0,/^version = .*/s//version = \"${tag#v}\"/" "$source_dir/pyproject.toml"
fi
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$source_dir/pyproject.toml" | head -n 1)
rm -rf dist
"$uv" build --quiet --out-dir dist "$source_dir"
PYTHONWARNINGS=ignore "$bin/cyclonedx-py" requirements "$source_dir/requirements.lock" --pyproject "$source_dir/pyproject.toml" \
  --output-reproducible --output-format JSON --output-file "dist/slipstream_spec-$version.cdx.json"
"$bin/twine" check --strict dist/*.whl dist/*.tar.gz
ls -l dist
