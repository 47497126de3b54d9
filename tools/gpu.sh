#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs tests and benchmarks that need an NVIDIA GPU: tools/gpu.sh [PART...]. The default parts are kernels,
# servers and bench. Time limits end them within 540 s, enough on an H100 if ~/.cache and ~/.triton hold the
# compiled kernels. For the first run, which compiles them, set SECONDS_A_PART=3600, each part's time limit.
#
#   kernels             tests/kernels on the GPU, and tests that our code never makes the host wait for the GPU
#   servers             tests/server/test_cuda.py, three servers at a time
#   bench               compares our decode attention with FlashInfer's; BENCH_ARGS are further arguments of
#                       eval.bench.attention, after --device cuda
#   memcheck racecheck  tests/kernels under compute-sanitizer --tool PART, an hour each at most
#   load                replays recorded responses (TRACES=FOLDER) on stock and sharing servers, an hour at most.
#                       LOAD_ARGS, as "--only waiting,together", are further arguments of eval.bench.servers
#
# Failed tests are shown at once. If a part fails or reaches its time limit, the other parts still run. Logs
# and a summary go to build/bench/gpu. The exit status is 0 if all parts passed, 1 if a part did not pass,
# and 2 if the command line was wrong, no GPU was usable or the set-up failed.
set -u
cd "$(dirname "$0")/.." || exit 2
out=build/bench/gpu
python=.venv/bin/python

fail() {
    echo "gpu: $*" >&2
    exit 2
}

[ $# -gt 0 ] || set -- kernels servers bench
for name; do
    case $name in
    kernels | servers | bench | memcheck | racecheck) ;;
    load) [ -n "${TRACES:-}" ] || fail "load: TRACES=FOLDER must name a folder, got none" ;;
    *) fail "part must be kernels, servers, bench, memcheck, racecheck or load, got $name" ;;
    esac
done
# The GPU is looked for first, because without one the set-up would install 9 GB for nothing.
command -v nvidia-smi >/dev/null 2>&1 ||
    fail "no nvidia-smi on PATH: this needs an NVIDIA GPU and its driver"
gpus=$(nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total,memory.free \
    --format=csv,noheader 2>&1) && [ -n "$gpus" ] || fail "nvidia-smi finds no GPU: $gpus"
# With PYTHONDONTWRITEBYTECODE set, Python would keep no .pyc files and servers take twice as long to start.
unset PYTHONDONTWRITEBYTECODE
tools/setup.sh || fail "set-up failed"
"$python" -c '
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU")
found = torch.cuda.get_device_capability()
if found < (8, 0):
    sys.exit(f"compute capability {found[0]}.{found[1]}, needed is 8.0 or higher")
' || fail "nvidia-smi finds $gpus, PyTorch cannot use it"

mkdir -p "$out" || exit 2
rm -f "$out"/*.log "$out/summary.md"
{
    echo "# GPU run"
    echo
    echo "commit $(git rev-parse HEAD 2>/dev/null || echo unknown)"
    [ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || echo "with changed files"
    echo
    echo "$gpus" | sed 's/^/- /'
    echo
    echo "| part | result | seconds |"
    echo "| --- | --- | --- |"
} >"$out/summary.md"

failed=0
# tests/conftest.py writes each failure at once to descriptor 3, our stderr; pytest's output goes to a log.
exec 3>&2
export REASONCACHE_FAILURES=3 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# part NAME SECONDS COMMAND... runs COMMAND for at most SECONDS (or SECONDS_A_PART) and logs to NAME.log.
part() {
    name=$1
    limit=${SECONDS_A_PART:-$2}
    shift 2
    echo "gpu: $name, $limit s at most: $*" >&2
    began=$(date +%s)
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    took=$(($(date +%s) - began))
    counts=
    case "$*" in
    *" -m pytest "*)
        counts=$(grep -E '[0-9] (passed|failed|skipped).* in [0-9]' "$out/$name.log" | tail -n 1)
        # pytest exits with 0 even if all tests were skipped.
        case "$status $counts" in "0 "*[0-9]" passed"*) ;; "0 "*) status=none ;; esac
        ;;
    esac
    case $status in
    0) result=passed ;;
    none) result="failed: no test ran" ;;
    124 | 137) result="failed: ended after $limit s" ;;
    *) result="failed: exit status $status" ;;
    esac
    [ "$result" = passed ] || {
        failed=1
        tail -n 20 "$out/$name.log" >&2
    }
    echo "| $name | $result | $took |" >>"$out/summary.md"
    echo "gpu: $name $result, $took s, $out/$name.log $counts" >&2
}

# A pytest expression (-k) for the tests of tests/kernels that run Triton kernels on the GPU.
on_device="triton and not interpreted"

sanitized() {
    sanitizer=$(command -v compute-sanitizer ||
        ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
    if [ -z "$sanitizer" ]; then
        failed=1
        echo "| $1 | failed: compute-sanitizer is not installed | |" >>"$out/summary.md"
        return
    fi
    # PyTorch allocates each tensor separately, so that the tool finds reads past a tensor's end.
    part "$1" 3600 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        "$sanitizer" --tool "$1" --error-exitcode 86 --target-processes all \
        "$python" -m pytest -x tests/kernels -k "$on_device"
}

for name; do
    case $name in
    kernels)
        part kernels 160 "$python" -m pytest tests/kernels tests/unit/test_no_wait.py \
            -k "($on_device) or gpu" -n 8
        ;;
    # Each of the three pytest workers ends its server before it starts the next one.
    servers)
        part servers 300 env REASONCACHE_TEST_SERVERS=1 "$python" -m pytest \
            tests/server/test_cuda.py -n 3 --dist loadgroup --no-loadscope-reorder
        ;;
    # shellcheck disable=SC2086 # BENCH_ARGS and LOAD_ARGS hold several words
    bench) part bench 80 "$python" -m eval.bench.attention --device cuda ${BENCH_ARGS:-} ;;
    # shellcheck disable=SC2086
    load) part load 3600 "$python" -m eval.bench.servers gpu --traces "$TRACES" ${LOAD_ARGS:-} ;;
    *) sanitized "$name" ;;
    esac
done

for name in bench load; do
    [ ! -f "$out/$name.log" ] || sed -n '/^|/p' "$out/$name.log" >>"$out/summary.md"
done
cat "$out/summary.md"
exit "$failed"
