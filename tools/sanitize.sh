#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: sanitize.sh PYTHON [PYTEST ARGUMENTS]. Runs a program that calls the attention of csrc from several
# threads under ThreadSanitizer, then the tests of csrc under AddressSanitizer and UndefinedBehaviorSanitizer.
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
# setarch -R turns off address space randomisation, with which older ThreadSanitizers cannot map their memory.
TSAN_OPTIONS=halt_on_error=1 setarch -R "$scratch/attention"

echo "sanitize: AddressSanitizer and UndefinedBehaviorSanitizer" >&2
export CXX="$cxx -fno-omit-frame-pointer -fsanitize=address,undefined"
export REASONCACHE_CACHE_DIR="$scratch/cache"
"$python" -c 'from sglang_reasoncache import native; native._build(native._source_root())'
# The Python interpreter is not instrumented, so the sanitizers' runtimes are preloaded. Leaks
# are not reported, because the interpreter itself leaks.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1
LD_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libubsan.so)" \
    "$python" -m pytest tests/native/test_kernels.py tests/kernels/test_attention.py \
    tests/kernels/test_distance.py -k "not interpreted and not x86" "$@"
