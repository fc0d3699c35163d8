#!/bin/sh
# Makes a virtual environment with everything that the service and its tests need, on Debian and Ubuntu.
# PYTHON: the interpreter to use (3.11, 3.12 or 3.13). VENV: where the environment goes.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_VERSION=2.13.0
LEAST_DRIVER=580 # of CUDA 13
APT_UPDATED=

say() { printf '>> %s\n' "$*"; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

apt_install() {
    if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; then
        say "neither root nor sudo is at hand; as root, run: apt-get install $*"
        exit 2
    fi
    say "installing $* with apt-get"
    [ -n "$APT_UPDATED" ] || as_root apt-get update -qq
    APT_UPDATED=yes
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# A container image of Debian has no Python.
[ "$PYTHON" != python3 ] || command -v python3 >/dev/null || apt_install python3 python3-venv
if ! "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    say "Python 3.11, 3.12 or 3.13 is needed, $("$PYTHON" --version 2>&1) found; set PYTHON=/path/to/python3.13"
    exit 2
fi
EXTRA=cpu
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    EXTRA=cuda13
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
    if [ "${driver%%.*}" -lt $LEAST_DRIVER ]; then
        say "torch and Mooncake are built for CUDA 13: NVIDIA driver $LEAST_DRIVER or later is needed, $driver found"
        exit 2
    fi
fi
WANTED=
# Mooncake is linked against these, also where it only uses TCP.
for library in libibverbs.so.1:libibverbs1 libmlx5.so.1:ibverbs-providers libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do
    PATH=$PATH:/sbin ldconfig -p | grep -q "${library%:*}" || WANTED="$WANTED ${library#*:}"
done
"$PYTHON" -c 'import ensurepip' 2>/dev/null || WANTED="$WANTED python3-venv"
# Triton compiles its launchers when they are first used, with a C compiler and Python's headers.
if [ $EXTRA = cuda13 ]; then
    command -v cc >/dev/null || WANTED="$WANTED gcc libc6-dev"
    headers='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))'
    "$PYTHON" -c "$headers" ||
        WANTED="$WANTED $("$PYTHON" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"
fi
# shellcheck disable=SC2086  # a list of names
[ -z "$WANTED" ] || apt_install $WANTED
# Only tests need these: for networks of their own, which take root, for systemd units, and for kernels run on the CPU.
for tool in ip:iproute2 nft:nftables unshare:util-linux systemd-analyze:systemd g++:g++ debootstrap:debootstrap; do
    if [ "$(id -u)" -eq 0 ] && ! command -v "${tool%:*}" >/dev/null; then
        apt_install "${tool#*:}" || say "no ${tool%:*} to be had: tests that need it are skipped"
    fi
done

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
PIP="$VENV/bin/pip --disable-pip-version-check"

if [ $EXTRA = cpu ]; then
    say "no NVIDIA GPU: installing torch $TORCH_VERSION for CPU"
    # The CPU build lies in an index of its own unless the package index in use offers it.
    $PIP install -q "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
        $PIP install -q "torch==$TORCH_VERSION" --index-url https://download.pytorch.org/whl/cpu || {
        say "the CPU build is not to be had here; PyPI's build has CUDA and takes gigabytes, but serves too:"
        say "$VENV/bin/pip install torch==$TORCH_VERSION, and then this script again"
        exit 1
    }
fi
say "installing hisparse-pd[$EXTRA,dev]"
# Python would find the entry points of an earlier version there.
rm -rf hisparse_pd.egg-info
$PIP install -q -e ".[$EXTRA,dev]"
# torch first, as in the service: it loads the CUDA libraries of its wheels, which Mooncake is linked against.
"$VENV/bin/python" -c 'import torch, mooncake.engine' || {
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
