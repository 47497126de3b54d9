#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs an NVIDIA GPU: set-up, kernel tests on the device, compute-sanitizer
# where it is installed, servers on CUDA, and the benchmark's GPU tables. Logs, a summary and
# the figures go to build/bench. A part that fails does not keep the next from running; exit
# status 0 if all passed, 1 if one did not, 2 where there is no GPU to run on.
#
# SECONDS_A_PART (default 3600) bounds each part. BENCH_ARGS goes to eval.bench.attention.
set -u
cd "$(dirname "$0")/.." || exit 2
out=build/bench/gpu
python=.venv/bin/python
limit=${SECONDS_A_PART:-3600}

fail() {
    echo "gpu: $*" >&2
    exit 2
}

# Before 9 GB are installed for nothing.
command -v nvidia-smi >/dev/null 2>&1 ||
    fail "no nvidia-smi on PATH: this needs an NVIDIA GPU and its driver"
gpus=$(nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total,memory.free \
    --format=csv,noheader 2>&1) && [ -n "$gpus" ] || fail "nvidia-smi finds no GPU: $gpus"
# Compiled modules go into .venv; without them every server start is twice as slow.
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

# part NAME COMMAND...: runs it with its output in NAME.log.
part() {
    name=$1
    shift
    echo "gpu: $name: $*" >&2
    began=$(date +%s)
    timeout --kill-after=30 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    took=$(($(date +%s) - began))
    # pytest is content with tests that were all skipped.
    case "$status $*" in
    "0 "*" -m pytest "*) grep -Eq '[0-9] passed' "$out/$name.log" || status=none ;;
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
    echo "gpu: $name $result, $took s, $out/$name.log" >&2
}

part kernels "$python" -m pytest tests/kernels

# What runs interpreted or is only compiled has nothing for it to look at.
sanitizer=$(command -v compute-sanitizer ||
    ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        # Memory of its own for each tensor, so that reading past one shows.
        part "$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
            "$sanitizer" --tool "$tool" --error-exitcode 86 --target-processes all \
            "$python" -m pytest -x tests/kernels -k "triton and not interpreted and not compile and not captured_graph"
    done
else
    echo "| compute-sanitizer | not run: not installed | |" >>"$out/summary.md"
    echo "gpu: compute-sanitizer is not installed, its part is left out" >&2
fi

part server "$python" -m pytest tests/server/test_cuda.py
# shellcheck disable=SC2086 # BENCH_ARGS holds several
part bench "$python" -m eval.bench.attention --growth ${BENCH_ARGS:-}

sed -n '/^|/p' "$out/bench.log" >>"$out/summary.md"
cat "$out/summary.md"
exit "$failed"
