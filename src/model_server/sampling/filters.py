"""Temperature, top-k, top-p, min-p, typical-p: from logits to scores."""

# Formulas as TGI's `utils/logits_process.py` (which takes them from transformers), written as thresholds so that no
# row needs more than its sorted values. `n` rows, `width` columns in the order of token ids. Every operation stays
# inside its row, and sums are of integers (see `categorical`), so a row's result does not depend on other rows.
# Scores have the row's maximum subtracted before the temperature divides them: the same distribution, which cannot
# overflow.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model_server.memory.transfer import upload
from model_server.sampling.categorical import weights
from model_server.sampling.parameters import SamplingParameters

# Top-k up to this many comes from a partial selection; beyond it, and without top-k, rows are sorted whole.
LARGEST_SELECTION = 1024
# Candidates beyond top-k that are looked at for ties, and how many are tried for top-p or min-p alone.
_TIE_MARGIN = 32
_FIRST_GUESS = 256
_SELECTION_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of a group of rows, [n, 1] each; None: off in all."""

    temperature: Tensor | None  # float32
    top_k: Tensor | None  # int64; the vocabulary's size where off
    dropped: Tensor | None  # float64: 1 - top_p; -1 where off
    min_p: Tensor | None  # float32: log of min_p; -inf where off
    typical_p: Tensor | None  # float64; 1 where off
    widest: int  # the largest top_k of the group; the vocabulary's size if a row has none
    num_candidates: int  # how many of a row's best tokens surely or probably hold all that survive

    @classmethod
    def of(cls, rows: Sequence[SamplingParameters], vocab_size: int, device: torch.device) -> Filters:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return upload(torch.tensor(values, dtype=dtype)[:, None], device)

        temperature = [row.temperature for row in rows]
        top_k = [row.largest_rank(vocab_size) for row in rows]
        dropped = [row.dropped_mass for row in rows]
        min_p = [row.log_min_p for row in rows]
        typical_p = [min(row.typical_p, 1.0) for row in rows]
        return cls(
            temperature=column(temperature, torch.float32) if any(t != 1.0 for t in temperature) else None,
            top_k=column(list(top_k), torch.int64) if any(row.top_k > 0 for row in rows) else None,
            dropped=column(dropped, torch.float64) if any(d >= 0.0 for d in dropped) else None,
            min_p=column(min_p, torch.float32) if any(row.min_p > 0.0 for row in rows) else None,
            typical_p=column(typical_p, torch.float64) if any(t < 1.0 for t in typical_p) else None,
            widest=max(top_k),
            num_candidates=max(row.top_k + _TIE_MARGIN if row.top_k > 0 else _FIRST_GUESS for row in rows),
        )

    def select(self, index: Tensor) -> Filters:
        """Take some rows."""

        def some(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[index]

        return replace(
            self,
            temperature=some(self.temperature),
            top_k=some(self.top_k),
            dropped=some(self.dropped),
            min_p=some(self.min_p),
            typical_p=some(self.typical_p),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """Rows ready for sampling; `columns` None: token ids."""

    values: Tensor  # [n, width] float32; the row's maximum is 0, -inf is never sampled
    columns: Tensor | None  # [n, width] int64, ascending token ids
    failed: Tensor  # [n] bool: no number or no candidate among the logits; the other fields mean nothing then


def shifted(logits: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `(logits - max) / temperature`, and max [n, 1]."""
    peak = logits.amax(1, keepdim=True)
    values = logits - peak
    if temperature is not None:
        values /= temperature
    return values, peak


def unusable(peak: Tensor) -> Tensor:
    """Mark rows whose largest logit is NaN or infinite."""
    return (peak - peak).squeeze(1) != 0


def filter_whole(logits: Tensor, filters: Filters, bits: int) -> Scores:
    """Filter whole rows, exactly and without waiting for the device."""
    values, peak = shifted(logits, filters.temperature)
    if filters.top_k is not None or filters.dropped is not None:
        if filters.widest <= LARGEST_SELECTION:
            ordered = values.topk(filters.widest, dim=1).values
        else:
            ordered = _descending(values)
        if filters.top_k is not None:
            threshold = ordered.gather(1, filters.top_k - 1)
            values.masked_fill_(values < threshold, -math.inf)
            ordered.masked_fill_(ordered < threshold, -math.inf)
        if filters.dropped is not None:
            total = weights(values, bits).sum(1, keepdim=True)
            lowest, num_ties = _nucleus(ordered, total, filters.dropped, bits)
            _keep_nucleus(values, lowest, num_ties)
    _later_filters(values, filters, bits)
    return Scores(values, None, unusable(peak))


def filter_selected(logits: Tensor, filters: Filters, bits: int) -> tuple[Scores, Tensor]:
    """Filter each row's best candidates; return also for which rows they were enough.

    Either all rows have top-k, or none has and all have top-p or min-p. Candidates are enough if what is kept ends
    above the smallest one.
    """
    selected, ids = largest(logits, min(filters.num_candidates, logits.shape[1]))
    peak = selected[:, :1]
    ordered = selected - peak
    if filters.temperature is not None:
        ordered /= filters.temperature
    floor = ordered[:, -1:].clone()
    columns, order = ids.sort(dim=1)
    values = ordered.gather(1, order)

    if filters.top_k is None:
        bound = torch.full_like(floor, -math.inf)
    else:
        bound = ordered.gather(1, filters.top_k.clamp(max=ordered.shape[1]) - 1)
        values.masked_fill_(values < bound, -math.inf)
        ordered.masked_fill_(ordered < bound, -math.inf)
    if filters.dropped is not None:
        # Without top-k the mass of the whole row counts.
        counted = ordered if filters.top_k is not None else shifted(logits, filters.temperature)[0]
        total = weights(counted, bits).sum(1, keepdim=True)
        lowest, num_ties = _nucleus(ordered, total, filters.dropped, bits)
        _keep_nucleus(values, lowest, num_ties)
        if filters.top_k is None:
            bound = torch.maximum(bound, lowest)
    if filters.min_p is not None and filters.top_k is None:
        bound = torch.maximum(bound, filters.min_p)
    failed = unusable(peak)
    enough = (bound > floor).squeeze(1) | failed
    if ordered.shape[1] == logits.shape[1]:
        enough = torch.ones_like(enough)
    _later_filters(values, filters, bits)
    return Scores(values, columns, failed), enough


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's `count` largest values, descending, and ids."""
    # Wide rows go by blocks first: the `count` blocks of largest maximum hold `count` values that nothing outside them
    # exceeds.
    width = logits.shape[1]
    num_blocks = width // _SELECTION_BLOCK
    if 4 * count > num_blocks:
        best = logits.topk(count, dim=1)
        return best.values, best.indices
    body = num_blocks * _SELECTION_BLOCK
    maxima = logits[:, :body].reshape(-1, num_blocks, _SELECTION_BLOCK).amax(2)
    blocks = maxima.topk(count, dim=1, sorted=False).indices
    ids = (blocks[:, :, None] * _SELECTION_BLOCK + torch.arange(_SELECTION_BLOCK, device=logits.device)).flatten(1)
    if body < width:
        tail = torch.arange(body, width, device=logits.device).expand(len(logits), -1)
        ids = torch.cat([ids, tail], dim=1)
    best = logits.gather(1, ids).topk(count, dim=1)
    return best.values, ids.gather(1, best.indices)


def _descending(values: Tensor) -> Tensor:
    """Sort rows, on CPUs by NumPy, three times as fast as torch."""
    if values.is_cpu:
        return torch.from_numpy(-np.sort(-values.numpy(), axis=1))
    return values.sort(dim=1, descending=True).values


def _nucleus(ordered: Tensor, total: Tensor, dropped: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return top-p's lowest kept value and number of kept ties, [n, 1]; -inf where off.

    Args:
        ordered: [n, count], the largest values, descending.
        total: [n, 1], the mass of all candidates.
    """
    # Sorted ascending, entries whose cumulative mass stays within 1 - p go, and the largest always stays; here from the
    # other end: an entry stays if the mass of everything above it leaves more than 1 - p. More values than `ordered`
    # has may tie with its last.
    mass = weights(ordered, bits)
    cumulative = mass.cumsum(1)
    limit = (dropped.clamp(min=0) * total).floor().to(torch.int64)
    kept = (total - (cumulative - mass) > limit) & (ordered > -math.inf)
    num_kept = kept.sum(1, keepdim=True).clamp_(min=1)
    lowest = ordered.gather(1, num_kept - 1)
    above = (ordered > lowest).sum(1, keepdim=True)
    smallest = mass.gather(1, num_kept - 1).clamp_(min=1)
    more = (total - limit - cumulative[:, -1:] + smallest - 1).div(smallest, rounding_mode="floor").clamp_(min=0)
    return lowest.masked_fill_(dropped < 0, -math.inf), num_kept - above + more


def _keep_nucleus(values: Tensor, lowest: Tensor, num_ties: Tensor) -> None:
    """Drop values below `lowest`, and all except its last `num_ties` ties, as a stable ascending sort does."""
    tie = values == lowest
    num_later = tie.sum(1, keepdim=True) - tie.cumsum(1)
    beyond = tie & (num_later >= num_ties) & (lowest > -math.inf)
    values.masked_fill_((values < lowest) | beyond, -math.inf)


def _later_filters(values: Tensor, filters: Filters, bits: int) -> None:
    if filters.min_p is not None:
        values.masked_fill_(values < filters.min_p, -math.inf)
    if filters.typical_p is not None:
        _keep_typical(values, filters.typical_p, bits)


def _keep_typical(values: Tensor, typical_p: Tensor, bits: int) -> None:
    """Keep what is nearest to the entropy, up to the mass (Meister et al. 2022)."""
    mass = weights(values, bits)
    total = mass.sum(1, keepdim=True)
    logprobs = values.double() - (total.double().log() - bits * math.log(2.0))
    entropy = -(logprobs.exp() * logprobs).nan_to_num_(nan=0.0).sum(1, keepdim=True)
    distance = (-logprobs - entropy).abs().float()
    ordered, order = distance.sort(dim=1)
    cumulative = mass.gather(1, order).cumsum(1)
    last = (cumulative < typical_p * total).sum(1, keepdim=True).clamp_(max=values.shape[1] - 1)
    cut = ordered.gather(1, last)
    values.masked_fill_((distance > cut) & (typical_p < 1.0), -math.inf)
