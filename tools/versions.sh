#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/versions.sh PYTHON: for each supported SGLang version runs the contract tests and one test with a live
# server. PYTHON must have the project and its tests installed (tools/setup.sh). Each version is unpacked in
# build/sglang-VERSION and uses the packages of PYTHON, also where it asks for other versions of them.
set -eu
python=$(realpath -s "$1")
cd "$(dirname "$0")/.."
. tools/uv.sh

for version in $("$python" -c "from sglang_reasoncache import compat; print(*compat.SUPPORTED_SGLANG)"); do
    echo "versions: SGLang $version"
    unpacked=$(unpack "$python" "$version")
    export PYTHONPATH="$unpacked:$PWD"
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest tests/contract \
        "tests/server/test_sharing.py::test_what_an_operator_can_see"
done
