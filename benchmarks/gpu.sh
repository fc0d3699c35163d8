#!/bin/sh
# Everything that a CUDA device can say: tests/gpu, compute-sanitizer's four tools, and the benchmarks that need a device.
# Run in the repository's root: sh benchmarks/gpu.sh DIRECTORY [STEP...]; without steps, all of them. Logs, JSON and PNG go
# to the directory; the tables and one line per step come last. Exit code 1 if a step failed.
set -u
OUT=${1:?usage: gpu.sh DIRECTORY [tests|sanitizer|swap-in|top-k|fp8|attention|small-kernels|decode|overlap|passkey...]}
shift
PYTHON=${PYTHON:-python3}
SUMMARY=$OUT/summary
mkdir -p "$OUT"
: >"$SUMMARY"

step() { # NAME COMMAND...: run it into NAME.log, and note how it went
    name=$1
    shift
    begun=$(date +%s)
    "$@" >"$OUT/$name.log" 2>&1
    code=$?
    echo "$name: exit code $code, $(($(date +%s) - begun)) s, $(grep -E '[0-9] passed|(ERROR|RACECHECK) SUMMARY' "$OUT/$name.log" | tail -n 1)" >>"$SUMMARY"
}

# The binding packages look for driver functions that an older driver lacks: those API errors are no finding.
sanitize() {
    step "$1" compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 9 \
        $PYTHON -m pytest -q -p no:cacheprovider tests/gpu/test_swap_in.py tests/gpu/test_top_k.py -k "few_steps or apart"
}

for name in "${@:-all}"; do
    case $name in
        all | tests | sanitizer | swap-in | top-k | fp8 | attention | small-kernels | decode | overlap | passkey) ;;
        *) echo "gpu.sh: no step is called $name" >&2 && exit 2 ;;
    esac
done
for name in "${@:-all}"; do
    case $name in all | tests)
        step tests $PYTHON -m pytest -q -p no:cacheprovider -n "${WORKERS:-8}" --dist load -m "" tests/gpu ;;
    esac
    case $name in all | sanitizer)
        for tool in memcheck racecheck initcheck synccheck; do sanitize $tool & done
        wait ;;
    esac
    case $name in all | swap-in)
        step swap-in $PYTHON -c "from cli.main import main; main()" bench swap-in \
            --json "$OUT/bench-swap-in.json" --png "$OUT/bench-swap-in.png"
        for queries in 2 3 4; do
            step swap-in-$queries $PYTHON -c "from cli.main import main; main()" bench swap-in --queries $queries \
                --json "$OUT/bench-swap-in-$queries.json" --png "$OUT/bench-swap-in-$queries.png"
        done ;;
    esac
    case $name in all | top-k) step top-k $PYTHON -m benchmarks.top_k ;; esac
    case $name in all | attention) step attention $PYTHON -m benchmarks.attention ;; esac
    case $name in all | fp8) step fp8 $PYTHON -m benchmarks.fp8 ;; esac
    case $name in all | small-kernels) step small-kernels $PYTHON -m benchmarks.small_kernels ;; esac
    case $name in all | decode)
        step decode $PYTHON -c "from cli.main import main; main()" bench decode --rank-of 8 \
            --json "$OUT/bench-decode.json" --png "$OUT/bench-decode.png" ;;
    esac
    case $name in all | overlap) step overlap $PYTHON -m benchmarks.overlap --json "$OUT/bench-overlap.json" ;; esac
    # Two nodes share one device.
    case $name in all | passkey)
        step passkey $PYTHON -m benchmarks.passkey --count 100 --concurrency 16 \
            --variant 'float32=--dtype float32' --variant 'bfloat16=--dtype bfloat16' \
            --variant 'all resident=--dtype bfloat16 --hisparse-config {"device_buffer_size":8256}' \
            -- --device cuda --mem-fraction-static 0.2 --max-running-requests 16 ;;
    esac
done

test -f "$OUT/tests.log" && grep -E '^(FAILED|ERROR) ' "$OUT/tests.log"
for name in swap-in top-k fp8 attention small-kernels decode overlap passkey; do
    test -f "$OUT/$name.log" && tail -n 45 "$OUT/$name.log"
done
cat "$SUMMARY"
! grep -qv 'exit code 0' "$SUMMARY"
