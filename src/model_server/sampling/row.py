"""What the sampler keeps of one request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model_server.sampling.grammars.masks import GrammarState
from model_server.sampling.parameters import SamplingParameters


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One request's sampling state, through all batches."""

    parameters: SamplingParameters
    num_prompt: int
    max_new_tokens: int
    top_n_tokens: int = 0
    num_generated: int = 0
    grammar: GrammarState | None = None
    end_ids: frozenset[int] = frozenset()  # tokens that end a text
    # Ids so far, on the device, at least num_prompt + num_generated of them; only for rows with penalties.
    history: Tensor | None = None
    # Where the last id is; only for watermarked rows.
    last_ids: Tensor | None = None
    last_index: int = 0

    @property
    def why_failed(self) -> str:
        if self.grammar is None:
            return "the model's scores for this request are not numbers"
        return self.grammar.error or "no token fits the grammar, or the model's scores for it are not numbers"

    def last_id(self) -> int:
        """Return the newest token, waiting if need be."""
        assert self.last_ids is not None
        return int(self.last_ids[self.last_index])
