#!/bin/sh
# Makes environments with other projects' clients of the API, for `make test-clients`: about 3 GB.
# They want versions of the same packages that exclude each other, so each has its own.
# PYTHON: the interpreter to use. CLIENTS: where the environments go. OPEN_RESPONSES: the repository of its suite, or a
# directory with a clone of it.
set -eu
PYTHON=${PYTHON:-python3}
CLIENTS=${CLIENTS:-.venv-clients}
TORCH_VERSION=2.13.0
OPEN_RESPONSES=${OPEN_RESPONSES:-https://github.com/openresponses/openresponses}
OPEN_RESPONSES_COMMIT=92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c

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
in_env agents anthropic openai instructor
# pydantic-ai calls a type of Anthropic's client that is a union since its version 2, and so cannot be called.
in_env pydantic_ai "pydantic-ai-slim[openai,anthropic]" "anthropic<2"
in_env aiperf aiperf
# guidellm needs torch, but no GPU.
in_env guidellm "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
    in_env guidellm "torch==$TORCH_VERSION" --index-url https://download.pytorch.org/whl/cpu
in_env guidellm guidellm
# Of the tokenizer's library it needs no torch.
in_env lm-eval "lm-eval[api]" transformers

# Open Responses' suite is no package: it is run from its repository, by node.
open_responses() {
    printf '>> getting the suite of %s\n' "$OPEN_RESPONSES"
    [ -d "$1/suite" ] || git clone -q "$OPEN_RESPONSES" "$1/suite" &&
        git -C "$1/suite" checkout -q "$OPEN_RESPONSES_COMMIT" && npm install --silent --prefix "$1" zod@3 tsx
}
open_responses "$CLIENTS/open-responses" || printf '>> no suite of Open Responses: its test is skipped\n'
