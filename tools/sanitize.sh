#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests of the native code under AddressSanitizer and UndefinedBehaviorSanitizer,
# and its thread hand-over under ThreadSanitizer. Usage: sanitize.sh PYTHON [PYTEST ARGUMENTS]
set -eu
cd "$(dirname "$0")/.."
python=$1
shift
cxx=${CXX:-c++}

echo "sanitize: ThreadSanitizer" >&2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck disable=SC2086 # CXX may hold options
$cxx -std=c++17 -O1 -g -fsanitize=thread -pthread -Icsrc \
    tests/native/attention_threads.cpp csrc/attention/*.cpp csrc/pool/*.cpp -o "$scratch/attention"
# Address space randomisation leaves ThreadSanitizer of older compilers no room.
TSAN_OPTIONS=halt_on_error=1 setarch -R "$scratch/attention"

echo "sanitize: AddressSanitizer and UndefinedBehaviorSanitizer" >&2
flags=$("$python" -c '
from sglang_reasoncache import native
source = native._source_hash(native._source_root())
print(*native._FLAGS, f"-DREASONCACHE_SOURCE=\"{source}\"")')
export REASONCACHE_NATIVE_LIBRARY="$scratch/libreasoncache.so"
# shellcheck disable=SC2086 # two lists of options
$cxx $flags -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -Icsrc -shared \
    csrc/*.cpp csrc/*/*.cpp -o "$REASONCACHE_NATIVE_LIBRARY"
# The interpreter is not instrumented, so the runtimes are loaded before it; its own
# leaks are not ours.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1
LD_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libubsan.so)" \
    "$python" -m pytest tests/native/test_kernels.py tests/kernels/test_attention.py \
    tests/kernels/test_distance.py -k "not interpreted and not x86" "$@"
