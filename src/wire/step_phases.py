"""Where a shard's step spends its time: the order of `phases_ns` on the wire, and the labels of the metric."""

from __future__ import annotations

PHASES = (
    "idle",  # a running batch waited for the router's next call
    "inputs",  # growing, merging and laying out the batch
    "forward",  # the model; on a GPU only its launch
    "sampling",  # choosing tokens; on a GPU only its launch
    "wait",  # until the tokens are on the host
    "text",  # text, stop decisions, the answer
)
