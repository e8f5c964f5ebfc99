#!/usr/bin/env bash
# Everything there is to measure on one GPU, in under eight minutes: the op tests natively, then the device's copy
# bandwidth and GEMM rate, then every op beside every provider. Writes benchmarks/results/<device>_<date>.md, .json, .png.
#
#   bash benchmarks/gpu.sh              PYTHON=... picks an environment that has torch with CUDA, triton and the peers
#   bash benchmarks/gpu.sh --smoke      the same steps without a GPU: kernels interpreted, tiny shapes, nothing kept
#
# What fails is printed where its figure would stand, and the run goes on.
set -uo pipefail
cd "$(dirname "$0")/.."

smoke=""
[[ "${1:-}" == "--smoke" ]] && smoke=1
for candidate in "${PYTHON:-}" .venv-bench/bin/python .venv/bin/python python3; do
    if [[ -n "$candidate" ]] && command -v "$candidate" >/dev/null && "$candidate" -c 'import torch' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
: "${python:?no Python with torch found; set PYTHON}"

if [[ -n "$smoke" ]]; then
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
    test_seconds=120 tests=(tests/kernels -k "triton and worked_example")
    results=$(mktemp -d)
    trap 'rm -rf "$results"' EXIT
    options=(--device cpu --smoke --only ours --only "ours, packed" --only "reference (eager)" --out "$results")
    options+=(--only "TRL selective_log_softmax_and_entropy" --only "Liger triton_grpo_loss" --budget 240)
else
    unset TRITON_INTERPRET
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { echo "error: $python sees no GPU; set PYTHON, or try --smoke" >&2; exit 1; }
    # A native kernel compiles in about a second, and the tests meet some dozens; what does not fit is left out.
    test_seconds=110 tests=(tests/kernels -k "triton or gpu" -x)
    options=(--device cuda --seconds 0.15 --budget 330)
fi

began=$SECONDS
echo "== op tests, at most $test_seconds s"
log=$(mktemp)
timeout "$test_seconds" "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" >"$log" 2>&1
status=$?
tail -n 15 "$log"
outcome=$(tail -n 1 "$log")
((status == 124)) && outcome="stopped after $test_seconds s; until then: $(grep -c '' "$log") lines without a failure"
((status == 124)) && grep -qE '^(FAILED|ERROR)|F' "$log" && outcome="stopped after $test_seconds s, with failures"
rm -f "$log"
echo "== op tests: $outcome ($((SECONDS - began)) s)"

echo "== benchmarks"
"$python" -m benchmarks.run "${options[@]}" --tests "$outcome"
code=$?
echo "== done in $((SECONDS - began)) s"
# Wrong numbers would be worth nothing: the exit status tells of both.
((status == 0 || status == 124)) && exit "$code"
exit 1
