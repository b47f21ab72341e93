"""Runs steps of a pooled model, from items to numbers on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.pooling.batch import FlatBatch
from model_server.pooling.heads import ScoreHead
from model_server.pooling.items import Item, Kind, Result, StepResult
from model_server.pooling.model import PooledModel
from model_server.pooling.modules import Stage, normalized, vector
from model_server.pooling.plan import PoolingPlan

_NOT_FINITE = "the model gives numbers that are not finite for this text"
# Ids of texts of the warm-up: every vocabulary has them.
_WARM_UP_ID = 0


class PoolingRunner:
    """One rank's part, on the device thread."""

    def __init__(
        self,
        model: PooledModel,
        plan: PoolingPlan,
        device: torch.device,
        *,
        stages: Sequence[tuple[str, Stage]] = (),
        dimensions: int,
        head: ScoreHead | None = None,
        sparse: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        # Of the last vector, or of the scores.
        self.dimensions = dimensions
        self.max_length = 0  # of a text; the warm-up sets it
        self._device = device
        # Behind the pooling, by module kinds.
        self._stages = list(stages)
        # What the last module does is for each request to say.
        self._ends_normalized = bool(self._stages) and self._stages[-1][0] == "Normalize"
        if self._ends_normalized:
            self._stages.pop()
        self._head = head
        self._sparse = sparse

    def warm_up(self, max_batch_tokens: int, asked: int | None) -> int:
        """Run a step of `max_batch_tokens`, on a GPU also of the longest text; return its length."""
        limits = (asked, self.plan.max_length, self.model.max_positions)
        known = [limit for limit in limits if limit is not None]
        self.max_length = min(known) if known else max_batch_tokens
        if self.max_length < 1:
            raise StartupError("the model can compute no text: its positions end before the first token")
        self.model.set_longest(self.max_length)
        tokens = max_batch_tokens if self._device.type == "cpu" else max(max_batch_tokens, self.max_length)
        items: list[Item] = []
        while tokens > 0:
            length = min(tokens, self.max_length)
            items.append(self._trial(len(items), length))
            tokens -= length
        result = self.run(items)
        failed = next((one.error for one in result.results if one.error is not None), None)
        if failed is not None and failed != _NOT_FINITE:
            raise StartupError(f"the model cannot compute a text of {self.max_length} tokens: {failed}")
        return self.max_length

    def _trial(self, number: int, length: int) -> Item:
        kind = Kind.SCORES if self._head is not None else Kind.SPARSE if self._sparse is not None else Kind.POOLED
        return Item(id=number, input_ids=np.full(length, _WARM_UP_ID, dtype=np.uint32), kind=kind)

    def run(self, items: Sequence[Item]) -> StepResult:
        """Run one step; errors belong to items."""
        began = time.perf_counter_ns()
        refused = {item.id: fault for item in items if (fault := self._fault(item)) is not None}
        sent = [item for item in items if item.id not in refused]
        results = {number: Result(id=number, error=fault) for number, fault in refused.items()}
        inputs = forward = pooled = began
        if sent:
            batch = FlatBatch.of(sent, self._device, typed=self.model.typed)
            inputs = time.perf_counter_ns()
            hidden = self.model.hidden(batch)
            forward = time.perf_counter_ns()
            numbers = self._numbers(sent, batch, hidden)
            pooled = time.perf_counter_ns()
            for item, tensor in zip(sent, numbers, strict=True):
                results[item.id] = _result(item, tensor)
        ended = time.perf_counter_ns()
        return StepResult(
            results=tuple(results[item.id] for item in items),
            forward_ns=forward - inputs,
            total_ns=ended - began,
            phases_ns=(inputs - began, forward - inputs, pooled - forward, ended - pooled),
        )

    def _fault(self, item: Item) -> str | None:
        length = len(item.input_ids)
        if length == 0:
            return "a text without tokens"
        if length > self.max_length:
            return f"a text of {length} tokens: at most {self.max_length} are computed"
        largest = int(item.input_ids.max())
        if largest >= self.model.vocab_size:
            return f"token id {largest} is not in the vocabulary of {self.model.vocab_size}"
        if item.kind is Kind.SCORES and self._head is None:
            return "this model gives no scores"
        if item.kind is Kind.SPARSE and self._sparse is None:
            return "this model gives no sparse vectors"
        if item.kind is Kind.POOLED and (self._head is not None or self._sparse is not None):
            return "this model gives no dense vectors"
        if item.dimensions > self.dimensions:
            return f"{item.dimensions} dimensions of {self.dimensions}"
        return None

    def _numbers(self, items: Sequence[Item], batch: FlatBatch, hidden: Tensor) -> list[Tensor]:
        """Return each item's numbers [rows, columns] float32 on the host."""
        texts = batch.rows(hidden)
        found: list[Tensor | None] = [None] * len(items)
        pooled = [i for i, item in enumerate(items) if item.kind is Kind.POOLED]
        if pooled:
            for i, row in zip(
                pooled, self._vectors([items[i] for i in pooled], [texts[i] for i in pooled]), strict=True
            ):
                found[i] = row
        scored = [i for i, item in enumerate(items) if item.kind is Kind.SCORES]
        if scored:
            assert self._head is not None
            scores = self._head([texts[i] for i in scored]).float().cpu()
            for i, row in zip(scored, scores, strict=True):
                found[i] = row
        for i, item in enumerate(items):
            if item.kind is Kind.TOKENS:
                found[i] = texts[i].float().cpu()
            elif item.kind is Kind.SPARSE:
                assert self._sparse is not None
                found[i] = self._sparse(texts[i]).float().cpu()
        return [tensor for tensor in found if tensor is not None]

    def _vectors(self, items: Sequence[Item], texts: Sequence[Tensor]) -> list[Tensor]:
        skipped = [0 if self.plan.include_prompt else item.prompt_tokens for item in items]
        rows = [vector(text, self.plan.modes, prompt) for text, prompt in zip(texts, skipped, strict=True)]
        vectors = torch.stack(rows)
        for _, stage in self._stages:
            vectors = stage(vectors)
        vectors = vectors.cpu()
        found = []
        for item, row in zip(items, vectors, strict=True):
            kept = row[: item.dimensions] if item.dimensions else row
            found.append(normalized(kept.unsqueeze(0))[0] if item.normalize else kept)
        return found


def _result(item: Item, tensor: Tensor) -> Result:
    values = tensor.numpy()
    if not np.isfinite(values).all():
        return Result(id=item.id, error=_NOT_FINITE)
    if item.kind is Kind.SPARSE:
        indices = np.nonzero(values)[0]
        kept = np.ascontiguousarray(values[indices], dtype="<f4")
        return Result(id=item.id, values=kept.tobytes(), rows=1, columns=len(kept), indices=tuple(indices.tolist()))
    rows, columns = values.shape if values.ndim == 2 else (1, len(values))
    numbers = np.ascontiguousarray(values, dtype="<f4")
    return Result(id=item.id, values=numbers.tobytes(), rows=rows, columns=columns)
