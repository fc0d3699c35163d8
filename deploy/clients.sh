#!/bin/sh
# Makes environments with other projects' clients of the API, for `make test-clients`: about 3 GB.
# They want versions of the same packages that exclude each other, so each has its own.
# PYTHON: the interpreter to use. CLIENTS: where the environments go.
set -eu
PYTHON=${PYTHON:-python3}
CLIENTS=${CLIENTS:-.venv-clients}
TORCH_VERSION=2.13.0

# in_env NAME PACKAGE...
in_env() {
    name=$1
    shift
    [ -x "$CLIENTS/$name/bin/python" ] || "$PYTHON" -m venv "$CLIENTS/$name"
    printf '>> installing %s in %s\n' "$*" "$CLIENTS/$name"
    "$CLIENTS/$name/bin/pip" --disable-pip-version-check install -q "$@"
}

# litellm needs mcp, and does not say so.
in_env litellm litellm mcp
in_env langchain langchain-openai
in_env agents "pydantic-ai-slim[openai,anthropic]" instructor
in_env aiperf aiperf
# guidellm needs torch, but no GPU.
in_env guidellm "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
    in_env guidellm "torch==$TORCH_VERSION" --index-url https://download.pytorch.org/whl/cpu
in_env guidellm guidellm
# Of the tokenizer's library it needs no torch.
in_env lm-eval "lm-eval[api]" transformers
