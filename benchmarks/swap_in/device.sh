#!/bin/sh
# Everything that a CUDA device can say about the swap-in: oracle tests, compute-sanitizer's four tools, the benchmark.
# Run in the repository's root; logs, JSON and PNG go to the directory given (default: the current one).
set -u
OUT=${1:-.}
PYTHON=${PYTHON:-python3}
FEW="tests/gpu/test_swap_in.py -k few_steps"

$PYTHON -m pytest -q -n "${WORKERS:-8}" --timeout 90 tests/gpu/test_swap_in.py >"$OUT/tests.log" 2>&1
echo "oracle tests: exit code $?, $(tail -n 1 "$OUT/tests.log")"

$PYTHON - "$OUT" >"$OUT/bench.log" 2>&1 <<'END'
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.swap_in.bench import SwapInBench, run_swap_in_bench

out = Path(sys.argv[1])
run_swap_in_bench(SwapInBench(json=out / "bench-swap-in.json", png=out / "bench-swap-in.png"), Console(width=160))
END
echo "benchmark: exit code $?"

# The binding packages look for driver functions that an older driver lacks: those API errors are no finding.
sanitize() {
    compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 9 $PYTHON -m pytest -q -p no:cacheprovider $FEW >"$OUT/$1.log" 2>&1
    echo "$1: exit code $?, $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$OUT/$1.log")"
}
for tool in memcheck racecheck initcheck synccheck; do
    sanitize $tool &
done
wait
cat "$OUT/bench.log"
