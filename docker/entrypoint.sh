#!/bin/sh
# Finds places that this user may write to, then becomes the launcher: same process, so that it gets the signals.
set -eu

scratch=${TMPDIR:-/tmp}

say() {
    printf 'entrypoint: %s\n' "$*" >&2
}

can_write() {
    mkdir -p "$1" 2>/dev/null && [ -w "$1" ]
}

# Models. A bind mount that docker has just made belongs to root.
HF_HOME=${HF_HOME:-/data}
if [ -z "${HF_HUB_CACHE:-}${HUGGINGFACE_HUB_CACHE:-}" ] && ! can_write "$HF_HOME"; then
    if [ -d "$HF_HOME/hub" ]; then
        say "$HF_HOME cannot be written by user $(id -u): models in it are served, none can be downloaded"
    else
        say "$HF_HOME cannot be written by user $(id -u) (chown it, or run with --user): models are downloaded to" \
            "$scratch/huggingface and lost with the container"
        HF_HOME=$scratch/huggingface
    fi
fi
export HF_HOME

# Kernels that Triton has compiled: made again where they are missing.
if [ -z "${XDG_CACHE_HOME:-}" ]; then
    XDG_CACHE_HOME=$HF_HOME/cache
    can_write "$XDG_CACHE_HOME" || XDG_CACHE_HOME=$scratch/cache
fi
export XDG_CACHE_HOME
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$XDG_CACHE_HOME/triton}"

# Triton asks the linker's cache for the driver, which only root could refresh; some hosts mount it elsewhere.
if [ -z "${TRITON_LIBCUDA_PATH:-}" ] && [ -e /usr/local/nvidia/lib64/libcuda.so.1 ]; then
    export TRITON_LIBCUDA_PATH=/usr/local/nvidia/lib64
fi

exec launcher "$@"
