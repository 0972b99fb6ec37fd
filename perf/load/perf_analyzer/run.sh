#!/usr/bin/env bash
# Sweeps the number of requests in flight over gRPC streams with perf_analyzer, against a server that runs already:
#   perf/load/perf_analyzer/run.sh                                        make serve runs in another terminal
#   CONCURRENCY="1 4" REQUESTS=100 URL=127.0.0.1:9001 perf/load/perf_analyzer/run.sh --genai-perf
# Or starts the demo server itself, on free ports, and stops it at the end:
#   perf/load/perf_analyzer/run.sh --serve
# --genai-perf adds runs of genai-perf, which writes the prompts' tensors itself.
# Bounded: REQUESTS requests and TIMEOUT_S seconds per step of the sweep.
set -euo pipefail
cd "$(dirname "$0")/../../.."

PYTHON=${PYTHON:-.venv/bin/python}
URL=${URL:-127.0.0.1:8001}
MODEL=${MODEL:-tokenrouter}
CONCURRENCY=${CONCURRENCY:-1 2 4 8 16}
REQUESTS=${REQUESTS:-200}
MAX_TOKENS=${MAX_TOKENS:-160}
FIELDS=${FIELDS:-"{}"}
TIMEOUT_S=${TIMEOUT_S:-120}
OUT=${OUT:-perf/results/perf_analyzer}
TOKENIZER=${TOKENIZER:-model_repository/small/1}
GENAI_TOKENS=${GENAI_TOKENS:-64}

fail() { echo "error: $*" >&2; exit 1; }

find_tool() {
    local tool=.venv/perf_analyzer/bin/$1
    [ -x "$tool" ] || tool=$(command -v "$1") ||
        fail "$1 is neither in .venv/perf_analyzer nor on PATH. perf/load/perf_analyzer/install.sh $2 gets it (on glibc 2.38
or newer, pip install perf-analyzer does too; NVIDIA's container tritonserver:<yy.mm>-py3-sdk has it)"
    realpath "$tool"
}

serve=no genai=no
for argument; do
    case $argument in
        --serve) serve=yes ;;
        --genai-perf) genai=yes ;;
        -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        *) fail "unknown argument $argument; --serve, --genai-perf" ;;
    esac
done
PERF_ANALYZER=${PERF_ANALYZER:-$(find_tool perf_analyzer "")}
if [ $genai = yes ]; then GENAI_PERF=${GENAI_PERF:-$(find_tool genai-perf --genai-perf)}; fi
if [ $serve = yes ]; then
    # Runs this script again beside a server of its own.
    arguments=()
    if [ $genai = yes ]; then arguments=(--genai-perf); fi
    exec "$PYTHON" -m perf.load.beside_server -- "$0" "${arguments[@]}"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m perf.load.perf_analyzer.inputs --output "$work/inputs.json" --max-tokens "$MAX_TOKENS" --fields "$FIELDS"
for concurrency in $CONCURRENCY; do
    echo "perf_analyzer: $concurrency in flight, $REQUESTS requests"
    timeout "$TIMEOUT_S" "$PERF_ANALYZER" -m "$MODEL" -u "$URL" -i grpc --streaming --async \
        --input-data "$work/inputs.json" --concurrency-range "$concurrency" --request-count "$REQUESTS" \
        --warmup-request-count "$concurrency" -f "$work/concurrency_$concurrency.csv" \
        --profile-export-file "$work/concurrency_$concurrency.json" > "$work/log" 2>&1 ||
        { cat "$work/log" >&2; fail "perf_analyzer at $concurrency in flight (timed out after $TIMEOUT_S s if the code is 124): $?"; }
    grep -E '^ +(Throughput|Response Throughput|Avg latency)' "$work/log"
done
mkdir -p "$OUT"
"$PYTHON" -m perf.load.perf_analyzer.summary "$work" --csv "$OUT/sweep.csv"
first=yes
for concurrency in $CONCURRENCY; do  # perf_analyzer's own figures
    if [ $first = yes ]; then head -n 1 "$work/concurrency_$concurrency.csv"; first=no; fi
    sed -n 2p "$work/concurrency_$concurrency.csv"
done > "$OUT/perf_analyzer.csv"

if [ $genai = yes ]; then
    "$PYTHON" -m perf.load.perf_analyzer.inputs --format genai-perf --output "$work/prompts.jsonl"
    for concurrency in $CONCURRENCY; do
        echo "genai-perf: $concurrency in flight, $REQUESTS requests"
        PATH=$(dirname "$PERF_ANALYZER"):$PATH HF_HUB_OFFLINE=1 timeout "$TIMEOUT_S" "$GENAI_PERF" profile -m "$MODEL" \
            --backend tensorrtllm --endpoint-type kserve --streaming -u "$URL" --tokenizer "$TOKENIZER" \
            --input-file "$work/prompts.jsonl" --output-tokens-mean "$GENAI_TOKENS" --output-tokens-mean-deterministic \
            --concurrency "$concurrency" --request-count "$REQUESTS" --artifact-dir "$work/genai-$concurrency" \
            > "$work/log" 2>&1 || { cat "$work/log" >&2; fail "genai-perf at $concurrency in flight"; }
        cp "$work/genai-$concurrency"/*/profile_export_genai_perf.csv "$OUT/genai_perf_$concurrency.csv"
        grep -E '^"?(Time To First|Inter Token|Output Token Throughput|Request Latency|Metric)' "$OUT/genai_perf_$concurrency.csv" || true
    done
fi
echo "written: $OUT"
