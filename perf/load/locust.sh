#!/usr/bin/env bash
# Runs the load tests of perf/load/locustfile.py against a server that runs already (make serve), and writes one table:
#   perf/load/locust.sh
# Beside a server of its own, on free ports:
#   .venv/bin/python -m perf.load.beside_server -- perf/load/locust.sh
# Bounded: SECONDS_EACH seconds per run.
set -euo pipefail
cd "$(dirname "$0")/../.."

LOCUST=${LOCUST:-.venv/bin/locust}
URL=${URL:-127.0.0.1:8001}
HTTP_URL=${HTTP_URL:-127.0.0.1:8000}
SECONDS_EACH=${SECONDS_EACH:-15}
USERS=${USERS:-1 4 16}
RATES=${RATES:-5 20}
OUT=${OUT:-perf/results/locust.csv}

log=$(mktemp)
trap 'rm -f "$log" "$log.csv"' EXIT

one() { # user class, options ...
    local user=$1
    shift
    echo "locust: $user $*"
    "$LOCUST" -f perf/load/locustfile.py --headless --only-summary --run-time "${SECONDS_EACH}s" --stop-timeout 30s \
        --url "$URL" --http-url "$HTTP_URL" --summary "$log.csv" "$@" "$user" > "$log" 2>&1 ||
        { cat "$log" >&2; exit 1; }
    sed -n '/┌/,/└/p' "$log"
}

for user in GrpcStreamUser HttpStreamUser; do
    for users in $USERS; do one "$user" --users "$users" --spawn-rate "$users"; done
    for rate in $RATES; do one "$user" --users 1 --arrival-rate "$rate"; done
done
mkdir -p "$(dirname "$OUT")"
cp "$log.csv" "$OUT"
echo "written: $OUT"
