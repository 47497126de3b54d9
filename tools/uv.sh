# SPDX-License-Identifier: Apache-2.0
#
# For the scripts beside this file, which source it in the root of the checkout: finds a Python and uv, unpacks SGLang.
# PYTHON=/path/to/python selects the interpreter. uv is fetched into .tools when it is not on PATH.

fail() {
    echo "$(basename "$0" .sh): $*" >&2
    exit 1
}

supported() {
    # "python3" may be a version manager's shim, which is on PATH but fails when run.
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not a Python from 3.11 to 3.13" \
            "($("$PYTHON" --version 2>&1 | tail -n 1))"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.13 python; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "needs a Python from 3.11 to 3.13 on PATH; python3 is" \
        "$(python3 --version 2>&1 | tail -n 1). Install one, or set PYTHON=/path/to/python3.11"
}

find_uv() {
    if uv --version >/dev/null 2>&1; then
        echo uv
        return
    fi
    tool=$(pwd)/.tools/uv
    if ! "$tool/bin/uv" --version >/dev/null 2>&1; then
        echo "$(basename "$0" .sh): fetching uv into .tools" >&2
        rm -rf "$tool"
        "$1" -m venv "$tool" >&2 || fail "$1 cannot create a virtual environment." \
            "Install its venv module (Debian, Ubuntu: python3-venv), or put uv on PATH"
        "$tool/bin/python" -m pip install --quiet --disable-pip-version-check uv >&2 ||
            fail "could not install uv from the package registry"
    fi
    echo "$tool/bin/uv"
}

unpack() {
    # Unpacks SGLang of version $2 for the Python $1, without the packages that it asks for. Prints the folder.
    unpacked=$PWD/build/sglang-$2
    if [ ! -d "$unpacked" ]; then
        uv=$(find_uv "$1")
        rm -rf "$unpacked.part"
        "$uv" pip install --quiet --no-deps --python "$1" --target "$unpacked.part" "sglang==$2" >&2
        mv "$unpacked.part" "$unpacked"
    fi
    PYTHONPATH="$unpacked" "$1" -c "import sys, sglang; sys.exit(not sglang.__file__.startswith(sys.argv[1]))" \
        "$unpacked" >&2 || fail "$1 imports another SGLang than $unpacked"
    echo "$unpacked"
}
