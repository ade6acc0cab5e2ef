#!/usr/bin/env bash
# Builds llama.cpp for a GPU from a clone. `rekindle build-gpu` does so from any installation.
exec "${BASH:-bash}" "$(dirname "${BASH_SOURCE[0]}")/../src/rekindle/cli/build-llama.sh" "$@"
