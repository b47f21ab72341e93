"""From a step's logits to a token per row, in the order of TGI's `HeterogeneousNextTokenChooser`."""

# In the order of TGI's `HeterogeneousNextTokenChooser` (`utils/tokens.py`): watermark, repetition, frequency,
# OpenAI's penalties and biases, grammar masks (`_adjust`), temperature, top-k, top-p, min-p, typical-p, choice,
# log-softmax of what is left.
#
# Rows are sorted once per batch composition into groups that take the same path (`groups`); all rows of a group are
# computed at once. A row's path follows from its own parameters alone. Where kernels can run, they take most rows
# (`kernel_rows`), all kinds in the same few launches.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_server.cpp import library
from model_server.cpp.greedy import greedy
from model_server.kernels.availability import usable
from model_server.memory.transfer import Staging, download, upload
from model_server.sampling.categorical import sample_columns, weight_bits, weights
from model_server.sampling.filters import Scores, filter_selected, filter_whole, shifted, unusable
from model_server.sampling.grammars.masks import GrammarState
from model_server.sampling.groups import Group, GroupKind, RowGroups
from model_server.sampling.kernel_rows import KernelRows
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.penalties import Watermark
from model_server.sampling.places import PlaceGroups, Places
from model_server.sampling.row import SamplingRow
from model_server.sampling.top_tokens import TopTokens

_BLOCK = 64
# Logits worked on at once: on a CPU what stays in its cache, elsewhere what bounds the temporaries (8 bytes each).
_CACHED_ELEMENTS = 1 << 18
_DEVICE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class HostSampled:
    """A step's tokens on the host; failed rows have id 0, logprob 0.0 and no top tokens."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    failed: list[bool]  # [num_rows]
    # Tokens of each row, in turn in the other lists; None: one each.
    counts: list[int] | None = None  # [num_rows]


@dataclass(slots=True)
class Sampled:
    """A step's tokens on the device, with the copy to the host queued."""

    ids: Tensor  # [num_rows] int64; where a row got several, its last
    _packed: Tensor  # [3, num_rows] float64 on the host: ids, logprobs, failed
    _top: list[TopTokens]
    _copied: torch.cuda.Event | None

    def is_over(self) -> bool:
        """Whether `to_host` would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def to_host(self) -> HostSampled:
        """Wait for this step's tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        ids, logprobs, failed = self._packed.tolist()
        gone = [value != 0.0 for value in failed]
        top: list[list[tuple[int, float]]] = [[] for _ in ids]
        for part in self._top:
            for row, tokens in part.to_host():
                if not gone[row]:
                    top[row] = tokens
        return HostSampled(ids=[int(value) for value in ids], logprobs=logprobs, top=top, failed=gone)


@dataclass(frozen=True, slots=True)
class PlacesSampled:
    """Choices at several places of each row, on the device."""

    ids: Tensor
    # [3, n] float64: ids, logprobs, failures; `ids` [n] int64, n places of all rows.
    packed: Tensor
    # On their way to the host, by place.
    top: list[TopTokens]


@dataclass(slots=True)
class _Choice:
    """A group's choices [n], with their logits rows."""

    index: Tensor | slice
    ids: Tensor  # int64
    logprobs: Tensor  # float32
    failed: Tensor  # bool


@dataclass(slots=True)
class _Chosen:
    """What all groups chose in one step."""

    choices: list[_Choice] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)


class Sampler:
    """Chooses tokens for any mix of rows, on the device thread."""

    def __init__(
        self, vocab_size: int, device: torch.device, *, watermark_gamma: float = 0.5, watermark_delta: float = 2.0
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._bits = weight_bits(vocab_size)
        self._groups: RowGroups | None = None
        self._place_groups: PlaceGroups | None = None
        self._staging = Staging(device)
        self._watermark = Watermark(watermark_gamma, watermark_delta, device)
        # Where a look at a value costs nothing, few candidates are tried first and checked; elsewhere rows go whole.
        self._may_look = device.type == "cpu"
        self._kernels = usable(device)
        self._most_rows = max(1, (_CACHED_ELEMENTS if self._may_look else _DEVICE_ELEMENTS) // vocab_size)
        self._in_block = torch.arange(_BLOCK, device=device)
        if self._kernels and device.type == "cuda":
            self._compile_kernels()

    def new_row(
        self,
        parameters: SamplingParameters,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        top_n_tokens: int = 0,
        *,
        num_generated: int = 0,
        grammar: GrammarState | None = None,
        end_ids: frozenset[int] = frozenset(),
    ) -> SamplingRow:
        """Make one request's state.

        Args:
            num_generated: Ids at the end of `prompt_ids` generated before a preemption.
            end_ids: Tokens that end a text.

        Raises:
            ValueError: An id that matters is outside the vocabulary, or the prompt is empty.
        """
        if not prompt_ids:
            raise ValueError("sampling needs at least one prompt token")
        outside = [token_id for token_id, _ in parameters.logit_bias if not 0 <= token_id < self._vocab_size]
        if outside:
            raise ValueError(f"logit_bias names token {outside[0]}, the vocabulary has {self._vocab_size}")
        if parameters.penalises and (min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab_size):
            raise ValueError(f"penalties need prompt ids inside the vocabulary of {self._vocab_size}")
        return SamplingRow(
            parameters,
            num_prompt=len(prompt_ids) - num_generated,
            max_new_tokens=max_new_tokens,
            top_n_tokens=top_n_tokens,
            num_generated=num_generated,
            grammar=grammar,
            end_ids=frozenset(one for one in end_ids if 0 <= one < self._vocab_size),
            history=upload(torch.tensor(prompt_ids, dtype=torch.int64), self._device) if parameters.penalises else None,
            last_ids=torch.tensor(prompt_ids[-1:]) if parameters.watermark else None,
        )

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """Choose and take a token per row, waiting only for watermarked rows.

        Args:
            logits: [num_rows, vocab_size] float32, perhaps overwritten. Grammars must have taken every token
                before.
        """
        self._place_groups = None  # whose counts of tokens are as wide as the vocabulary, for each place
        groups = self._groups_for(rows)
        self._adjust(logits, groups)
        ids, packed, top = self._chosen(logits, groups, groups.next_uniforms())
        groups.advance(ids)
        return _on_its_way(ids, packed, top)

    def sample_places(self, logits: Tensor, rows: Sequence[SamplingRow], places: Places) -> PlacesSampled:
        """Choose at each place of each row (`windows.places.fits`), without advancing rows or waiting.

        The caller updates `num_generated` and `history` before `sample`.

        Args:
            logits: [num_rows * num_places, vocab_size] float32, row by row, perhaps overwritten.
        """
        self._groups = None  # it would continue where its rows were
        groups, num_places = self._place_groups, places.generated.shape[1]
        if groups is None or not groups.serve_places(rows, num_places):
            groups = self._place_groups = PlaceGroups(
                rows, num_places, self._vocab_size, self._device, self._most_rows, kernels=self._kernels,
                staging=self._staging,
            )  # fmt: skip
        return PlacesSampled(*self._chosen(logits, groups, groups.start(logits, places)))

    def _chosen(
        self, logits: Tensor, groups: RowGroups, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor, list[TopTokens]]:
        """Return ids [n], results [3, n] and top tokens of adjusted logits."""
        chosen = _Chosen()
        for group in groups.groups:
            self._choose(logits[group.index], group, uniforms, len(logits), chosen)
        if groups.kernel_rows is None:
            ids, packed = self._joined(len(logits), chosen.choices)
        else:
            ids, packed = self._with_kernels(groups.kernel_rows, logits, chosen.choices)
        return ids, packed, chosen.top

    def _compile_kernels(self) -> None:
        """Run a row of every kind, or its first request would wait for the compiler."""
        kinds = (SamplingParameters(), SamplingParameters(do_sample=True), SamplingParameters(top_k=1))
        rows = [self.new_row(parameters, [0], 1) for parameters in kinds]
        self.sample(torch.zeros(len(rows), self._vocab_size, device=self._device), rows)
        self._groups = None

    def _groups_for(self, rows: Sequence[SamplingRow]) -> RowGroups:
        groups = self._groups
        if groups is None or not groups.serve(rows):
            groups = RowGroups(
                rows, self._vocab_size, self._device, self._most_rows, kernels=self._kernels, staging=self._staging,
                previous=groups,
            )  # fmt: skip
            self._groups = groups
        return groups

    def _adjust(self, logits: Tensor, groups: RowGroups) -> None:
        """Everything before the temperature, in place."""
        for number in groups.watermarked:
            self._watermark.apply(logits[number], groups.rows[number].last_id())
        if groups.penalties is not None:
            groups.penalties.apply(logits)
        for adjustment in groups.adjustments:
            adjustment.apply(logits)
        if groups.masks is not None:
            groups.masks.apply(logits)

    def _choose(self, logits: Tensor, group: Group, uniforms: Tensor | None, num_rows: int, chosen: _Chosen) -> None:
        if group.kind is GroupKind.GREEDY:
            self._choose_greedy(logits, group, chosen)
            return
        assert uniforms is not None and group.filters is not None
        own = uniforms[group.uniforms]
        if group.kind is GroupKind.UNFILTERED:
            values, peak = shifted(logits, group.filters.temperature)
            self._choose_sampled(Scores(values, None, unusable(peak)), own, group, chosen)
        elif group.kind is GroupKind.WHOLE or not self._may_look:
            self._choose_sampled(filter_whole(logits, group.filters, self._bits), own, group, chosen)
        else:
            scores, enough = filter_selected(logits, group.filters, self._bits)
            if bool(enough.all()):
                self._choose_sampled(scores, own, group, chosen)
                return
            # Some rows' candidates ran out: those rows go the whole way, in a choice of their own.
            for index, whole in ((enough.nonzero().squeeze(1), False), ((~enough).nonzero().squeeze(1), True)):
                if not len(index):
                    continue
                part = group.select(index, num_rows)
                if whole:
                    assert part.filters is not None
                    some = filter_whole(logits[index], part.filters, self._bits)
                else:
                    assert scores.columns is not None
                    some = Scores(scores.values[index], scores.columns[index], scores.failed[index])
                self._choose_sampled(some, own[index], part, chosen)

    def _choose_greedy(self, logits: Tensor, group: Group, chosen: _Chosen) -> None:
        if library.usable(self._device, logits.dtype):
            ids, peak, total = greedy(logits)
        else:
            ids, peak = self._largest(logits)
            total = (logits - peak).exp_().sum(1, keepdim=True)
        log_total = total.log_()
        chosen.choices.append(_Choice(group.index, ids.squeeze(1), -log_total.squeeze(1), unusable(peak)))
        if group.top:
            chosen.top.append(TopTokens.of(logits, None, log_total.squeeze(1), group.top, peak=peak.squeeze(1)))

    def _largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit's lowest id, and the logit, [n, 1] each; on CPUs by blocks, since torch's argmax
        does not use vectors.
        """
        width = logits.shape[1]
        if not self._may_look or width % _BLOCK:
            peak, ids = logits.max(1, keepdim=True)
            return ids, peak
        maxima = logits.reshape(-1, width // _BLOCK, _BLOCK).amax(2)
        block = maxima.argmax(1, keepdim=True)
        columns = block * _BLOCK + self._in_block
        inside = logits.gather(1, columns)
        place = inside.argmax(1, keepdim=True)
        return columns.gather(1, place), inside.gather(1, place)

    def _choose_sampled(self, scores: Scores, uniforms: Tensor, group: Group, chosen: _Chosen) -> None:
        column, total = sample_columns(weights(scores.values, self._bits), uniforms)
        log_total = (total.double().log() - self._bits * math.log(2.0)).float()
        logprobs = (scores.values.gather(1, column) - log_total).squeeze(1)
        ids = (column if scores.columns is None else scores.columns.gather(1, column)).squeeze(1)
        chosen.choices.append(_Choice(group.index, ids, logprobs, scores.failed))
        if group.top:
            chosen.top.append(TopTokens.of(scores.values, scores.columns, log_total.squeeze(1), group.top))

    def _joined(self, num_rows: int, choices: Sequence[_Choice]) -> tuple[Tensor, Tensor]:
        """Ids [num_rows], and all results [3, num_rows]."""
        if len(choices) == 1:
            [choice] = choices
            ids, logprobs, failed = choice.ids, choice.logprobs, choice.failed
        else:
            ids = torch.empty(num_rows, dtype=torch.int64, device=self._device)
            logprobs = torch.empty(num_rows, dtype=torch.float32, device=self._device)
            failed = torch.empty(num_rows, dtype=torch.bool, device=self._device)
            for choice in choices:
                ids[choice.index] = choice.ids
                logprobs[choice.index] = choice.logprobs
                failed[choice.index] = choice.failed
        ids = ids.masked_fill(failed, 0)
        return ids, _pack(ids, logprobs, failed)

    def _with_kernels(self, taken: KernelRows, logits: Tensor, choices: Sequence[_Choice]) -> tuple[Tensor, Tensor]:
        """Choose with kernels for some rows or all."""
        ids = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        packed = torch.empty(3, len(logits), dtype=torch.float64, device=self._device)
        taken.choose(logits, ids, packed)
        for choice in choices:
            chosen = choice.ids.masked_fill(choice.failed, 0)
            ids[choice.index] = chosen
            packed[:, choice.index] = _pack(chosen, choice.logprobs, choice.failed)
        return ids, packed


def _pack(ids: Tensor, logprobs: Tensor, failed: Tensor) -> Tensor:
    return torch.stack([ids.double(), logprobs.masked_fill(failed, 0.0).double(), failed.double()])


def _on_its_way(ids: Tensor, packed: Tensor, top: list[TopTokens]) -> Sampled:
    """Queue the copy to the host behind that of top tokens, for one event."""
    on_host = download(packed)
    copied = None
    if packed.is_cuda:
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    return Sampled(ids, on_host, top, copied)
