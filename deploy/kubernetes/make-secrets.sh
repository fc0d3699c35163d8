#!/bin/sh
# Prints the Secrets that components/keys mounts, from what `hisparse-pd keygen KEYS` has made and a file of API keys, one
# a line. Each process gets only its own secret keys.
#   deploy/kubernetes/make-secrets.sh KEYS API_KEYS | kubectl apply -f -
set -eu
KEYS=${1:?the folder that hisparse-pd keygen has made} API_KEYS=${2:?a file of API keys, one a line}

secret() { # secret NAME [--from-file=...]...
    name=$1 && shift
    echo ---
    kubectl create secret generic "$name" --namespace hisparse-pd "$@" --dry-run=client --output yaml
}

secret hisparse-pd-allowed --from-file="$KEYS/allowed"
for role in gateway prefill decode; do
    set -- --from-file="$KEYS/cluster.key_secret" --from-file="$KEYS/$role.key_secret"
    [ "$role" != decode ] || set -- "$@" --from-file="$KEYS/operator.token"
    secret "hisparse-pd-$role-keys" "$@"
done
secret hisparse-pd-api-keys --from-file=api.keys="$API_KEYS"
