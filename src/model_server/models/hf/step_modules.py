"""Parts of a transformers decoder that count positions along a sequence, made to know a step's flattened rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from model_server.attention.backend import DistanceBias


class StepModules:
    """Position embeddings and T5's biases of one decoder; outside of a step (`now` is None) they are its own."""

    def __init__(self, decoder: nn.Module, max_positions: int | None, padding: int, rank: int) -> None:
        self._rank = rank
        self.now: Tensor | None = None  # [n] int64 positions of a step's rows
        self._decoder = decoder
        self._embedding = getattr(decoder, "embed_positions", None)
        if isinstance(self._embedding, nn.Module):
            decoder.embed_positions = _Positions(
                self._embedding, self, max_positions, padding, next(decoder.parameters())
            )  # fmt: skip
        # By the ids of attention modules; the first one's is the other layers', too, that have none of their own.
        self._tables: dict[int, Tensor] = {}  # [heads of all ranks, distances]
        self._biases: dict[int, DistanceBias] = {}  # by the ids of tables, of this rank's heads
        self._biased = [one for one in decoder.modules() if hasattr(one, "relative_attention_bias")]
        for module in self._biased:
            self._tables[id(module)] = _bias_table(module)
            module.compute_bias = self._instead_of(module.compute_bias)

    def bias_of(self, module: nn.Module, num_heads: int) -> DistanceBias | None:
        """Return the biases that an attention module adds to this rank's heads; None: they are not known."""
        table = self._tables.get(id(module), next(iter(self._tables.values()), None))
        if table is None:
            return None
        if id(table) not in self._biases:
            self._biases[id(table)] = DistanceBias(table[self._rank * num_heads :][:num_heads].contiguous())
        return self._biases[id(table)]

    def give_back(self) -> None:
        """Undo the changes of the decoder."""
        if isinstance(self._embedding, nn.Module):
            self._decoder.embed_positions = self._embedding
        for module in self._biased:
            del module.compute_bias

    def _instead_of(self, compute: Any) -> Any:
        def compute_bias(*arguments: Any, **options: Any) -> Tensor:
            # Our attention has the tables.
            return compute(*arguments, **options) if self.now is None else torch.zeros(1, 1, 1, 1)

        return compute_bias


class _Positions(nn.Module):
    """Looks up the positions of a step's rows; else as the module within."""

    def __init__(
        self, within: nn.Module, steps: StepModules, max_positions: int | None, padding: int, like: Tensor
    ) -> None:
        super().__init__()
        self.within = within
        self._steps = steps
        self._padding = padding
        self._num_positions = max_positions or 0
        self._like = like.data  # a tensor of the decoder
        self._table: Tensor | None = None
        self._of_padding: Tensor | None = None

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        positions = self._steps.now
        if positions is None:
            return self.within(*arguments, **options)  # type: ignore[no-any-return]
        if self._table is None:
            self._table = self._positions_of((self._padding + 1) % 2 if self._padding < 2 else 0, self._num_positions)
            self._of_padding = self._positions_of(self._padding, 1) if self._reads_ids else None
        found = self._table.index_select(0, positions).unsqueeze(0)
        if self._of_padding is None:
            return found
        given = inspect.signature(self.within.forward).bind(*arguments, **options).arguments
        return torch.where((given["input_ids"] == self._padding).unsqueeze(-1), self._of_padding, found)

    @property
    def _reads_ids(self) -> bool:
        """Whether padding tokens have a position of their own, as in M2M100."""
        accepted = inspect.signature(self.within.forward).parameters
        return "input_ids" in accepted and "inputs_embeds" in accepted

    def _positions_of(self, token: int, count: int) -> Tensor:
        """Return the embeddings [count, hidden] of a text of equal tokens."""
        first = next(iter(inspect.signature(self.within.forward).parameters))
        ids = torch.full((1, count), token, dtype=torch.int64, device=self._like.device)
        text = {"input_ids_shape": ids.shape, "inputs_embeds": self._like.new_zeros(1, count, 1)}
        found = self.within(text.get(first, ids))
        return found.reshape(count, -1)  # type: ignore[no-any-return]


def _bias_table(module: Any) -> Tensor:
    """Return T5's biases [heads, distances] by how far back a key is; farther ones have the last."""
    count = int(module.relative_attention_max_distance) + 1
    biases = module.compute_bias(1, count, past_seen_tokens=count - 1)  # of the last query, over keys from the first
    return biases[0, :, 0].flip(-1).float().contiguous()  # type: ignore[no-any-return]
