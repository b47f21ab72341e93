#!/bin/sh
# SageMaker's variables in the launcher's names, then the ordinary entry point: same process, so that it gets the signals.
set -eu

if [ -z "${HF_MODEL_ID:-}" ]; then
    echo "HF_MODEL_ID must be set" >&2
    exit 1
fi
export MODEL_ID="$HF_MODEL_ID"
[ -z "${HF_MODEL_REVISION:-}" ] || export REVISION="$HF_MODEL_REVISION"
[ -z "${HF_MODEL_QUANTIZE:-}" ] || export QUANTIZE="$HF_MODEL_QUANTIZE"
[ -z "${HF_MODEL_TRUST_REMOTE_CODE:-}" ] || export TRUST_REMOTE_CODE="$HF_MODEL_TRUST_REMOTE_CODE"
# An instance without a GPU says 0; the launcher then serves on the CPU by itself.
[ "${SM_NUM_GPUS:-0}" = 0 ] || export NUM_SHARD="$SM_NUM_GPUS"

# SageMaker starts every image with this word.
[ "${1:-}" != serve ] || shift

exec "$(dirname "$0")/entrypoint.sh" --port 8080 "$@"
