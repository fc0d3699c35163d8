#!/bin/bash
# Runs the steps of the cpu image on a clean Debian in a folder, and then the demo and a gateway as its user, on a
# read-only root: what can be tried of the image where there is no Docker. Takes root, debootstrap and some 2 GB for
# each release of Debian. The packages are those that the image pins, the interpreter is the release's own: Python 3.11
# of bookworm (Debian 12), which is the image's, and 3.13 of trixie (Debian 13). Not part of the tests: it takes a few
# minutes and the network. deploy/README.md says what was seen.
#   try-on-clean-root.sh FOLDER [RELEASE...]     bookworm and trixie unless given; the root of each is FOLDER/RELEASE
# Settings of pip in the environment hold inside too; folders in PIP_FIND_LINKS are mounted. TORCH_CPU_INDEX: where the
# CPU build of torch is, if not in PyTorch's own index; empty if pip finds it without.
set -euo pipefail
FOLDER=$(realpath -m "${1:?give a folder for the roots}")
REPOSITORY=$(cd "$(dirname "$0")/../.." && pwd)

say() { printf '\n>> %s\n' "$*"; }

if [ "${IN_NAMESPACE:-}" != 1 ]; then
    shift
    [ $# -gt 0 ] || set -- bookworm trixie
    mkdir -p "$FOLDER"
    for release in "$@"; do
        root=$FOLDER/$release
        if [ ! -e "$root/etc/debian_version" ]; then
            say "a clean $release, with what the python base has: $root"
            debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$release" "$root" >"$root.log"
        fi
        # Mounts and processes of what follows end with it.
        IN_NAMESPACE=1 unshare --mount --mount-proc --pid --fork --kill-child "$0" "$root"
    done
    say "tried: $*"
    exit
fi

ROOT=$FOLDER
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"
for device in null zero urandom random; do
    touch "$ROOT/dev/$device" && mount --bind "/dev/$device" "$ROOT/dev/$device"
done
cp /etc/resolv.conf "$ROOT/etc/resolv.conf"
cp /etc/ssl/certs/ca-certificates.crt "$ROOT/etc/ssl/certs/ca-certificates.crt"
for folder in ${PIP_FIND_LINKS:-}; do
    mkdir -p "$ROOT$folder" && mount --bind -o ro "$folder" "$ROOT$folder"
done

mapfile -t PIP_SETTINGS < <(env | grep '^PIP_')
inside() {
    chroot "$ROOT" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "${PIP_SETTINGS[@]}" \
        TORCH_CPU_INDEX="${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}" "$@"
}

say "COPY"
rm -rf "$ROOT/steps" "$ROOT/src" "$ROOT/opt/hisparse-pd"
mkdir -p "$ROOT/steps" "$ROOT/src"
cp "$REPOSITORY"/deploy/docker/{image.sh,healthcheck.py,requirements-cpu.txt} "$ROOT/steps"
mapfile -t WANTED < <(sed -n 's/^!//p' "$REPOSITORY/deploy/docker/Dockerfile.dockerignore")
git -C "$REPOSITORY" ls-files --cached --others --exclude-standard -- "${WANTED[@]}" |
    tar -C "$REPOSITORY" -cf - -T - | tar -C "$ROOT/src" -xf -

say "RUN"
inside /steps/image.sh system cpu
inside /steps/image.sh python cpu
inside /steps/image.sh app /src
inside id hisparse >/dev/null 2>&1 || inside /steps/image.sh user

say "as the image's user, without capabilities, on a read-only root"
mount -o remount,bind,ro "$ROOT"
for folder in tmp cache; do
    mount -t tmpfs -o mode=1777 tmpfs "$ROOT/$folder"
done
AS_USER=(chroot "$ROOT" env -i PATH=/opt/hisparse-pd/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 HOME=/cache
    XDG_CACHE_HOME=/cache HF_HUB_OFFLINE=1 setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs
    --bounding-set=-all --inh-caps=-all sh -c 'cd /cache && exec "$@"' sh)
"${AS_USER[@]}" sh -c 'id && if touch /opt/x 2>/dev/null; then echo "the root is writable" && exit 1; fi'
"${AS_USER[@]}" python -m benchmarks.demo

say "a gateway as process 1: its health check, and its end by SIGTERM"
"${AS_USER[@]}" hisparse-pd tiny-model /cache/model
# shellcheck disable=SC2016  # for the inner shell to expand
unshare --pid --fork sh -c 'mount -t proc proc "$0/proc" && exec "$@"' "$ROOT" \
    "${AS_USER[@]}" hisparse-pd gateway --model-path /cache/model &
namespace=$!
healthy() { "${AS_USER[@]}" python /steps/healthcheck.py; }
for _ in $(seq 60); do
    sleep 0.5
    healthy 2>/dev/null && break
done
healthy
kill "$(cat "/proc/$namespace/task/$namespace/children")"
wait $namespace
say "all of it works with $("${AS_USER[@]}" python --version) of Debian $(cat "$ROOT/etc/debian_version")"
