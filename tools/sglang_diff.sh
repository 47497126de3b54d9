#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/sglang_diff.sh PYTHON OLD NEW [--full]: prints which of SGLang's functions and classes that we hook, override,
# import or call by super() are gone in version NEW or differ from version OLD, and which fields of ServerArgs
# came or went. With --full it also prints how they differ. OLD must be a version that this checkout supports.
# PYTHON must have the project and its tests installed (tools/setup.sh).
set -eu
[ $# -ge 3 ] || { echo "usage: make sglang-diff OLD=VERSION NEW=VERSION [DIFF_ARGS=--full]" >&2; exit 2; }
python=$(realpath -s "$1")
old=$2
new=$3
shift 3
cd "$(dirname "$0")/.."
. tools/uv.sh

dump() {
    unpacked=$(unpack "$python" "$1")
    PYTHONPATH="$unpacked:$PWD" "$python" -W ignore -m tools.sglang_diff dump "build/sglang-$1.json" $2
}

dump "$old" ""
dump "$new" "build/sglang-$old.json"
"$python" -m tools.sglang_diff compare "build/sglang-$old.json" "build/sglang-$new.json" "$@"
