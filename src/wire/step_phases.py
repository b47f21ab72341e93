"""Order and labels of steps' phases (`phases_ns`) and drafts (`drafted_by_kind`, `accepted_by_kind`)."""

from __future__ import annotations

from enum import IntEnum

PHASES = (
    "idle",  # a running batch waited for the router's next call
    "inputs",  # growing, merging and laying out the batch
    "forward",  # the model; on a GPU only its launch
    "sampling",  # choosing tokens; on a GPU only its launch
    "wait",  # until the tokens are on the host
    "text",  # text, stop decisions, the answer
    "drafting",  # guessing tokens and weighing whether they pay, before the inputs
)


class DraftKind(IntEnum):
    """What guessed a drafted token. The number is its place on the wire."""

    LOOKUP = 0  # text that occurred before in the request
    GRAMMAR = 1  # what a grammar forces
    PREDICTION = 2  # the answer that the request foretells
    MODEL = 3  # a draft model


DRAFT_KINDS = tuple(kind.name.lower() for kind in DraftKind)
OTHER_DRAFTS = "other"  # the label of tokens that a shard counts without saying what guessed them

POOLING_PHASES = ("inputs", "forward", "pooling", "wait")
"""Of a step that gives vectors or scores."""
