#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Creates .venv with the pinned SGLang, this project (editable) and its test
# tools. Needs a Python from 3.11 to 3.13 and a package registry, nothing else:
# uv is fetched into .tools when it is not on PATH. Does nothing if .venv was made
# from the present pyproject.toml and constraints.txt. A .venv that is a symbolic link is
# never changed, only checked: its Python must be able to import the needed packages.
#
# PYTHON=/path/to/python selects the interpreter. With the argument
# "constraints", the script renews constraints.txt instead.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
venv=$root/.venv
stamp=$venv/.reasoncache-setup

. tools/uv.sh

if [ "${1:-}" = constraints ]; then
    python=$(find_python)
    uv=$(find_uv "$python")
    pins=$("$uv" pip compile --quiet --python "$python" --python-version 3.11 \
        --extra server --extra dev --extra real-model --extra compiler --no-annotate --no-header \
        --no-emit-index-url --no-emit-find-links pyproject.toml)
    {
        echo "# The exact versions the tests ran with; no locations, any registry serves them."
        echo "# Renew with: make constraints"
        echo "$pins"
    } >constraints.txt
    exit 0
fi

# The stamp includes the path, because after the checkout is moved or copied, the scripts
# and the editable install in .venv still point to the old place.
wanted="$root ${PYTHON:-} $(cat pyproject.toml constraints.txt tools/setup.sh tools/uv.sh | cksum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/python" ]; then
    exit 0
fi
if [ -L "$venv" ]; then
    needed="import flashinfer, sglang, torch, triton, sglang_reasoncache"
    error=$("$venv/bin/python" -c "$needed" 2>&1 >/dev/null) && exit 0
    fail ".venv is a link to $(readlink "$venv"), in which \"$needed\" fails" \
        "($(echo "$error" | tail -n 1)). Mend that environment, or remove the link" \
        "(rm $venv), then set-up makes an environment of its own"
fi

python=$(find_python)
uv=$(find_uv "$python")
echo "setup: installing SGLang and this project into .venv (about 9 GB; once)" >&2
rm -f "$stamp"
# On a slow line, the download of a wheel of a gigabyte can exceed uv's default timeout of 30 s.
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-600}"
# If another project's environment is active, the install must not go there.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME || true
extras=server,dev,real-model
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    extras=$extras,compiler
"$uv" venv --quiet --no-project --clear --no-python-downloads --python "$python" "$venv"
"$uv" pip install --quiet --python "$venv/bin/python" \
    --constraint constraints.txt --editable ".[$extras]"
echo "$wanted" >"$stamp"
echo "setup: done" >&2
