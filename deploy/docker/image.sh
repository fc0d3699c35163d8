#!/bin/sh
# The steps of the images, for the Dockerfile to run one by one and for try-on-clean-root.sh to run without Docker.
#   image.sh system build|cpu|cuda13   Debian packages
#   image.sh python TARGET             an environment in $VENV with the packages of requirements-TARGET.txt
#   image.sh app SOURCE                hisparse-pd itself, built from its source
#   image.sh user                      the user that everything runs as, and the folders that it may write to
set -eu
HERE=$(dirname "$(readlink -f "$0")")
VENV=${VENV:-/opt/hisparse-pd}
TORCH_CPU_INDEX=${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}
USER_ID=10001

system() {
    # Mooncake is linked against verbs, mlx5 (in ibverbs-providers), numa and curl, also where it only uses TCP.
    mooncake="libibverbs1 ibverbs-providers libnuma1 libcurl4"
    case $1 in
        build) packages="python3 python3-venv" ;;
        cpu) packages=$mooncake ;;
        # Triton compiles its launchers when they are first used, with a C compiler and Python's headers.
        cuda13) packages="$mooncake python3 gcc libc6-dev libpython3-dev" ;;
        *) echo "image.sh system: build, cpu or cuda13, not $1" >&2 && exit 2 ;;
    esac
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    apt-get install -y -qq --no-install-recommends $packages
    rm -rf /var/lib/apt/lists/*
}

python_packages() {
    python3 -m venv "$VENV"
    case $1 in
        # The CPU build of torch is not on PyPI. Empty where the index in use offers it.
        cpu) index=${TORCH_CPU_INDEX:+--extra-index-url=$TORCH_CPU_INDEX} ;;
        *) index= ;;
    esac
    # shellcheck disable=SC2086  # a word or nothing
    "$VENV/bin/pip" install --no-cache-dir --no-deps $index --requirement "$HERE/requirements-$1.txt"
}

app() {
    # With the pinned setuptools, hence without isolation. What the lock lacks is an error, which the check finds.
    "$VENV/bin/pip" install --no-cache-dir --no-deps --no-build-isolation "$1"
    "$VENV/bin/pip" check
    # Mooncake loads its libraries here: one that the system lacks should fail the build, not the start. libcuda.so.1
    # comes with the driver, so the CUDA build cannot be loaded before it runs on a GPU machine.
    "$VENV/bin/pip" show -q mooncake-transfer-engine-cuda13 2>/dev/null ||
        "$VENV/bin/python" -c 'import mooncake.engine'
}

user() {
    groupadd --gid $USER_ID hisparse
    useradd --uid $USER_ID --gid $USER_ID --no-create-home --home-dir /cache --shell /usr/sbin/nologin hisparse
    install -d -o $USER_ID -g $USER_ID /cache /model /keys
}

case ${1:-} in
    system) system "$2" ;;
    python) python_packages "$2" ;;
    app) app "$2" ;;
    user) user ;;
    *) sed -n '2,6s/^# //p' "$0" >&2 && exit 2 ;;
esac
