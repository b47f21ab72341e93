"""From a drawn token to what its request is told: text, end, top tokens, prompt logprobs."""

from __future__ import annotations

import torch

from model_server.batch.results import Generation, Tokens
from model_server.batch.sequence import Sequence
from model_server.sampling.sampler import HostSampled
from model_server.text.tokenizer import Tokenizer


class Answers:
    """Puts tokens into words for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def generation(self, sequence: Sequence, host: HostSampled, index: int) -> Generation:
        """Let the sequence take the token at `index` of a step, and say so. Raises what making its text raises."""
        token_id = host.ids[index]
        text, ended = sequence.append(token_id)
        return Generation(
            request_id=sequence.id,
            tokens=Tokens([token_id], [host.logprobs[index]], [text], [token_id in self._tokenizer.special_ids]),
            prefill_tokens=self._prompt_tokens(sequence) if sequence.prefill_logprobs else None,
            top_tokens=[self._top_tokens(host.top[index])] if sequence.top_n_tokens else [],
            generated_text=ended,
        )

    def _prompt_tokens(self, sequence: Sequence) -> Tokens | None:
        """All prompt logprobs, once: those of what was in the cache already, and of the first token, are NaN."""
        parts, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        sequence.prefill_logprobs = False
        if not sequence.owned:
            return None
        known: list[float] = torch.cat(parts).tolist() if parts else []
        ids = sequence.ids[: sequence.prompt_length]
        unknown = [float("nan")] * (sequence.prompt_length - len(known))
        return Tokens(ids, unknown + known, [self._tokenizer.decode_one(i) for i in ids], [])

    def _top_tokens(self, candidates: list[tuple[int, float]]) -> Tokens:
        ids = [token_id for token_id, _ in candidates]
        return Tokens(
            ids=ids,
            logprobs=[logprob for _, logprob in candidates],
            texts=[self._tokenizer.decode_one(i) for i in ids],
            is_special=[i in self._tokenizer.special_ids for i in ids],
        )
