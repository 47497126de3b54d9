#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds sdist and wheel in dist/, checks both, and checks what the wheel installs in an empty virtual
# environment. Uploads nothing. PYTHON=/path/to/python selects the interpreter.
set -eu
cd "$(dirname "$0")/.."
. tools/uv.sh
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME || true

python=$(find_python)
uv=$(find_uv "$python")
rm -rf dist
"$uv" build --quiet --python "$python" --out-dir dist
"$uv" tool run --quiet --python "$python" twine check --strict dist/*.whl dist/*.tar.gz

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$uv" venv --quiet --no-project --python "$python" "$scratch/venv"
"$uv" pip install --quiet --python "$scratch/venv/bin/python" --no-deps dist/*.whl
# Now the dependencies.
"$uv" pip install --quiet --python "$scratch/venv/bin/python" dist/*.whl
git ls-files sglang_reasoncache csrc >"$scratch/tracked"
# With -I the checkout cannot be imported.
"$scratch/venv/bin/python" -I tools/check_wheel.py "$scratch/tracked" pyproject.toml
ls "$PWD"/dist/*.whl "$PWD"/dist/*.tar.gz
