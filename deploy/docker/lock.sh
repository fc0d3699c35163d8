#!/bin/sh
# Writes requirements-cpu.txt and requirements-cuda13.txt: every package of an image with its version. Takes `uv`, and
# an index or folder (UV_FIND_LINKS) with the CPU build of torch. Without hashes: the CPU index of PyTorch is not
# PyPI.
set -eu
cd "$(dirname "$0")"
TORCH=2.13.0
MOONCAKE=0.3.13.post1

lock() { # lock TARGET PYTHON TORCH_VERSION MOONCAKE_PACKAGE
    printf 'torch==%s\n%s==%s\n' "$3" "$4" "$MOONCAKE" |
        uv pip compile ../../pyproject.toml --quiet --extra "$1" --constraint - --python-version "$2" \
            --python-platform x86_64-manylinux_2_28 --no-annotate --no-emit-index-url --no-emit-find-links \
            --custom-compile-command deploy/docker/lock.sh --output-file "requirements-$1.txt"
}

lock cpu 3.11 "$TORCH+cpu" mooncake-transfer-engine-non-cuda
lock cuda13 3.12 "$TORCH" mooncake-transfer-engine-cuda13
