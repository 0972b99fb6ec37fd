#!/usr/bin/env bash
# Installs perf_analyzer into .venv/perf_analyzer, and with --genai-perf also genai-perf (in a venv of its own: it pins much).
# The wheel needs glibc 2.38 (Debian 13, Ubuntu 24.04). On an older Debian the libraries of Debian 13 are unpacked beside it
# and perf_analyzer runs under their loader; nothing is installed into the system.
set -euo pipefail
cd "$(dirname "$0")/../../.."

VERSION=${PERF_ANALYZER_VERSION:-2.60.0}
GENAI_PERF_VERSION=${GENAI_PERF_VERSION:-0.0.16}
PIP_ARGS=${PIP_ARGS:-}
PYTHON=${PYTHON:-.venv/bin/python}
HOME_DIR=$PWD/.venv/perf_analyzer
LIBRARIES="libc6 libstdc++6 libgcc-s1 zlib1g libssl3t64 libzstd1"

fail() { echo "error: $*" >&2; exit 1; }

[ -x "$PYTHON" ] || fail "$PYTHON is missing: make venv"
[ "$(uname -m)" = x86_64 ] || fail "the perf_analyzer wheel is for x86_64 only; use NVIDIA's container nvcr.io/nvidia/tritonserver:<yy.mm>-py3-sdk"

rm -rf "$HOME_DIR"
mkdir -p "$HOME_DIR/bin" "$HOME_DIR/download"
# shellcheck disable=SC2086
"$PYTHON" -m pip download --disable-pip-version-check --quiet $PIP_ARGS --no-deps --only-binary=:all: \
    --platform manylinux_2_38_x86_64 --dest "$HOME_DIR/download" "perf-analyzer==$VERSION"
"$PYTHON" -m zipfile -e "$HOME_DIR"/download/perf_analyzer-*.whl "$HOME_DIR/wheel"
BINARY=$HOME_DIR/wheel/perf_analyzer/bin/perf_analyzer
chmod +x "$BINARY"

debian_13_libraries() {
    command -v apt-get > /dev/null && command -v dpkg > /dev/null ||
        fail "perf_analyzer needs glibc 2.38, this system has $(ldd --version | sed -n '1s/.* //p') and no apt-get; use NVIDIA's container nvcr.io/nvidia/tritonserver:<yy.mm>-py3-sdk"
    local state=$HOME_DIR/apt mirror
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/*$') ||
        fail "no Debian mirror among this system's apt sources; run perf_analyzer on a system with glibc 2.38"
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/debs"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" > "$state/sources.list"
    local options=(-q -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State=$state"
        -o "Dir::State::lists=$state/lists" -o "Dir::Cache=$state/cache" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update > "$state/log" 2>&1 || { cat "$state/log" >&2; fail "apt-get update for Debian 13"; }
    # shellcheck disable=SC2086
    (cd "$state/debs" && apt-get "${options[@]}" download $LIBRARIES >> "$state/log" 2>&1) ||
        { cat "$state/log" >&2; fail "apt-get download of Debian 13's libraries"; }
    for package in "$state"/debs/*.deb; do dpkg -x "$package" "$HOME_DIR/root"; done
    rm -rf "$state"
}

cat > "$HOME_DIR/bin/perf_analyzer" << 'WRAPPER'
#!/bin/sh
home=$(CDPATH= cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." && pwd)
libraries=$home/root/usr/lib/x86_64-linux-gnu
binary=$home/wheel/perf_analyzer/bin/perf_analyzer
if [ -d "$libraries" ]; then
    exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$binary" "$@"
fi
exec "$binary" "$@"
WRAPPER
chmod +x "$HOME_DIR/bin/perf_analyzer"
if ! "$BINARY" --version > /dev/null 2>&1; then
    debian_13_libraries
fi
rm -rf "$HOME_DIR/download"
"$HOME_DIR/bin/perf_analyzer" --version

if [ "${1:-}" = --genai-perf ]; then
    "$PYTHON" -m venv "$HOME_DIR/genai-perf"
    # shellcheck disable=SC2086
    "$HOME_DIR/genai-perf/bin/pip" install --disable-pip-version-check --quiet $PIP_ARGS "genai-perf==$GENAI_PERF_VERSION"
    ln -sf ../genai-perf/bin/genai-perf "$HOME_DIR/bin/genai-perf"
    "$HOME_DIR/bin/genai-perf" --version
fi
