#!/bin/sh
# Makes a virtual environment with everything that the service and its tests need, on Debian and Ubuntu.
# PYTHON: the interpreter to use (3.11, 3.12 or 3.13). VENV: where the environment goes.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_VERSION=2.13.0

say() { printf '>> %s\n' "$*"; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

apt_install() {
    say "installing $* with apt-get"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

if ! "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    say "Python 3.11, 3.12 or 3.13 is needed, $("$PYTHON" --version 2>&1) found; set PYTHON=/path/to/python3.13"
    exit 2
fi
# Mooncake is linked against these, also where it only uses TCP.
for library in libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do
    if ! PATH=$PATH:/sbin ldconfig -p | grep -q "${library%:*}"; then
        apt_install "${library#*:}"
    fi
done
# Only tests need these: for networks of their own, which take root, for systemd units, and for kernels run on the CPU.
for tool in ip:iproute2 nft:nftables unshare:util-linux systemd-analyze:systemd g++:g++; do
    if [ "$(id -u)" -eq 0 ] && ! command -v "${tool%:*}" >/dev/null; then
        apt_install "${tool#*:}" || say "no ${tool%:*} to be had: tests that need it are skipped"
    fi
done
if ! "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
    apt_install python3-venv
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
PIP="$VENV/bin/pip --disable-pip-version-check"

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    case "$(nvidia-smi | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')" in
        12) EXTRA=cuda12 ;;
        *) EXTRA=cuda13 ;;
    esac
    say "NVIDIA GPU found: installing with the extra $EXTRA"
else
    EXTRA=cpu
    say "no NVIDIA GPU: installing torch $TORCH_VERSION for CPU"
    # The CPU build lies in an index of its own unless the package index in use offers it.
    $PIP install -q "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
        $PIP install -q "torch==$TORCH_VERSION" --index-url https://download.pytorch.org/whl/cpu
fi
say "installing hisparse-pd[$EXTRA,dev]"
# Python would find the entry points of an earlier version there.
rm -rf hisparse_pd.egg-info
$PIP install -q -e ".[$EXTRA,dev]"
"$VENV/bin/python" -c 'import mooncake.engine' || {
    say "Mooncake does not load; see the message above"
    exit 1
}
# promtool tests the alert rules. Debian 13 has a package of that name. Before, it was part of the server's, which would
# start a server when installed, so only the program is taken out.
fetch_promtool() {
    as_root apt-get update -qq && { apt-get download -qq promtool || apt-get download -qq prometheus; } &&
        dpkg-deb -x prom*.deb . && install -m 755 usr/bin/promtool "$1"
}
if ! command -v promtool >/dev/null && [ ! -x "$VENV/bin/promtool" ]; then
    say "fetching promtool"
    BIN=$(cd "$VENV/bin" && pwd)
    UNPACKED=$(mktemp -d)
    (cd "$UNPACKED" && fetch_promtool "$BIN" 2>/dev/null) || say "no promtool to be had: its tests will be skipped"
    rm -r "$UNPACKED"
fi
say "ready: $VENV"
