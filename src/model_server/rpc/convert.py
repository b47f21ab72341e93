"""Between protobuf messages and the model server's types."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from model_server.batch.growth import BlockGrowth
from model_server.batch.results import CachedBatch, FinishReason, Generation, StepResult, Tokens
from model_server.batch.sequence import Asked, NewRequest
from model_server.engine.calls import DecodeCall, PrefillCall, Session
from model_server.engine.warm_up import Capacity, WarmupRequest
from model_server.errors import RequestError
from model_server.features.adapters.feature import AskedAdapter, SlotUse
from model_server.features.drafts.report import Drafted
from model_server.features.images.image import AskedImages, EncodedImages, Feature, Image, ImagePlace, LostBytes
from model_server.sampling.parameters import Grammar, GrammarKind, SamplingParameters, StoppingParameters
from wire.processes.shared_memory import SharedBytes, SharedMemory
from wire.v3 import generate_pb2 as pb

logger = logging.getLogger(__name__)

R = TypeVar("R", pb.PrefillResponse, pb.DecodeResponse)
StepMessage = pb.PrefillRequest | pb.DecodeRequest

# Parameters that have the same name and form in the message.
_GRAMMAR_KINDS: dict[int, GrammarKind] = {pb.GRAMMAR_TYPE_JSON: "json", pb.GRAMMAR_TYPE_LARK: "lark"}
_SAMPLING_BY_NAME = tuple(one.name for one in fields(SamplingParameters) if one.name not in ("logit_bias", "grammar"))

_FINISH_REASONS = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: pb.FINISH_REASON_EOS_TOKEN,
    FinishReason.STOP_SEQUENCE: pb.FINISH_REASON_STOP_SEQUENCE,
}


def requests_from(batch: pb.Batch) -> list[NewRequest]:
    """Read requests; what this shard cannot do raises RequestError."""
    images = {one.key: _image_from(one) for one in batch.images}
    return [_request_from(r, images) for r in batch.requests]


def warmup_from(message: pb.WarmupRequest) -> WarmupRequest:
    return WarmupRequest(
        session=Session(max_prefill_tokens=message.max_prefill_tokens),
        requests=requests_from(message.batch),
        max_input_tokens=message.max_input_tokens if message.HasField("max_input_tokens") else None,
        max_total_tokens=message.max_total_tokens if message.HasField("max_total_tokens") else None,
    )


def _image_from(message: pb.PreparedImage) -> Image:
    """Read an image as sent: misfits are its requests' errors."""
    opened: dict[str, SharedMemory] = {}
    return Image(
        key=message.key,
        features={f.name: Feature(f.dtype, tuple(f.shape), _array_from(f, opened)) for f in message.features},
        num_embeds=message.num_embeds,
        grid=tuple(message.grid),
    )


def _array_from(feature: pb.Feature, opened: dict[str, SharedMemory]) -> bytes | SharedBytes | LostBytes:
    """Open an array; what cannot be opened fails when read, where all ranks leave out the same requests."""
    if not feature.memory:
        return bytes(feature.data)
    try:
        memory = opened.get(feature.memory) or opened.setdefault(feature.memory, SharedMemory.open(feature.memory))
    except (OSError, ValueError) as error:
        logger.warning("an image's array %s cannot be opened: %s", feature.name[:50], error)
        return LostBytes(feature.num_bytes)
    return SharedBytes(memory, feature.offset, feature.num_bytes)


def _request_from(message: pb.Request, images: Mapping[bytes, Image]) -> NewRequest:
    if message.stopping_parameters.max_new_tokens < 1:
        raise RequestError(f"request {message.id}: max_new_tokens must be at least 1")
    places = tuple([ImagePlace(p.key, p.start, p.length, images.get(p.key)) for p in message.images])
    asked: list[Asked] = [AskedImages(places)] if places else []
    if message.HasField("adapter") or message.adapter_id:
        asked.append(AskedAdapter(message.adapter if message.HasField("adapter") else message.adapter_id))
    return NewRequest(
        id=message.id,
        input_ids=tuple(message.input_ids),
        sampling=_sampling_from(message),
        stopping=StoppingParameters(
            max_new_tokens=message.stopping_parameters.max_new_tokens,
            # An empty stop text would end every request at its first token.
            stop_sequences=tuple(s for s in message.stopping_parameters.stop_sequences if s),
            ignore_eos_token=message.stopping_parameters.ignore_eos_token,
            stop_token_ids=frozenset(message.stopping_parameters.stop_token_ids),
        ),
        prefill_logprobs=message.prefill_logprobs,
        top_n_tokens=message.top_n_tokens,
        blocks=_blocks_from(message),
        cache_len=message.cache_len,
        chunk_len=message.chunk_len if message.HasField("chunk_len") else None,
        resume_ids=tuple(message.resume_ids),
        prediction_ids=tuple(message.prediction_ids),
        asked=tuple(asked),
        state_slot=message.state_slot,
        state_from=message.state_from if message.HasField("state_from") else None,
        state_saves=tuple([(one.position, one.slot) for one in message.state_saves]),
    )


def _blocks_from(message: pb.Request) -> npt.NDArray[np.int32]:
    """Read block numbers that a cache may have."""
    blocks = np.array(message.blocks, np.int64)
    if blocks.size and int(blocks.max()) > np.iinfo(np.int32).max:
        raise RequestError(f"request {message.id}: block {int(blocks.max())} is outside of any cache")
    return blocks.astype(np.int32)


def prefill_from(message: pb.PrefillRequest) -> PrefillCall:
    """Read the call without its requests."""
    return PrefillCall(
        batch_id=message.batch.id,
        cached_id=message.cached_id if message.HasField("cached_id") else None,
        sequence=message.sequence,
        unanswered=message.unanswered,
        new_blocks=_new_blocks_from(message),
        chunk_tokens=_chunk_tokens_from(message),
    )


def decode_from(message: pb.DecodeRequest) -> DecodeCall:
    return DecodeCall(
        batch_ids=tuple(message.batch_ids),
        sequence=message.sequence,
        unanswered=message.unanswered,
        new_blocks=_new_blocks_from(message),
        chunk_tokens=_chunk_tokens_from(message),
    )


def _new_blocks_from(message: StepMessage) -> tuple[BlockGrowth, ...]:
    return tuple([BlockGrowth(m.request_id, np.array(m.blocks, np.int64)) for m in message.new_blocks])


def _chunk_tokens_from(message: StepMessage) -> int | None:
    return message.chunk_tokens if message.HasField("chunk_tokens") else None


def _sampling_from(message: pb.Request) -> SamplingParameters:
    """Copy by name; an unset zero becomes the default."""
    p = message.parameters
    return SamplingParameters(
        **{name: value for name in _SAMPLING_BY_NAME if (value := getattr(p, name))},
        logit_bias=tuple((b.token_id, b.bias) for b in p.logit_bias),
        grammar=_grammar_from(p),
    )


def _grammar_from(parameters: pb.NextTokenChooserParameters) -> Grammar | None:
    if not parameters.grammar or parameters.grammar_type == pb.GRAMMAR_TYPE_NONE:
        return None
    return Grammar(_GRAMMAR_KINDS.get(parameters.grammar_type, "regex"), parameters.grammar)


def capacity_to(capacity: Capacity) -> pb.WarmupResponse:
    return pb.WarmupResponse(
        max_supported_total_tokens=capacity.total_tokens,
        max_input_tokens=capacity.max_input_tokens,
        max_total_tokens=capacity.max_total_tokens,
    )


def cached_batch_to(batch: CachedBatch) -> pb.CachedBatch:
    return pb.CachedBatch(
        id=batch.id,
        request_ids=batch.request_ids,
        max_tokens=batch.max_tokens,
        current_tokens=batch.current_tokens,
    )


def prefill_response(result: StepResult) -> pb.PrefillResponse:
    return _fill(pb.PrefillResponse(), result)


def decode_response(result: StepResult) -> pb.DecodeResponse:
    return _fill(pb.DecodeResponse(), result)


def _fill(response: R, result: StepResult) -> R:
    """Put rows with tokens alone into packed arrays."""
    response.forward_ns = result.forward_ns
    response.decode_ns = result.decode_ns
    response.total_ns = result.total_ns
    if result.concat_ns is not None:
        response.concat_ns = result.concat_ns
    if result.batch is not None:
        response.batch.CopyFrom(cached_batch_to(result.batch))
    response.phases_ns.extend(result.phases_ns)
    plain: list[tuple[int, Tokens]] = []
    for generation in result.generations:
        tokens = _plain_tokens(generation)
        if tokens is not None:
            plain.append((generation.request_id, tokens))
        else:
            response.generations.append(_generation_to(generation))
    if plain:
        response.columns.CopyFrom(_columns_to(plain))
    for report in result.reports:
        if isinstance(report, EncodedImages):
            counts = pb.EncodedImages(hits=report.hits, misses=report.misses, encode_ns=report.encode_ns)
            response.images.CopyFrom(counts)
        elif isinstance(report, SlotUse) and isinstance(response, pb.PrefillResponse):
            response.adapter_slots.CopyFrom(pb.AdapterSlots(loads=report.loads, held=report.held))
        elif isinstance(report, Drafted):
            response.speculation.CopyFrom(_drafted_to(report))
    return response


def _drafted_to(drafted: Drafted) -> pb.Speculation:
    return pb.Speculation(
        drafted=drafted.num_tokens,
        accepted=drafted.num_right,
        window=drafted.longest,
        drafted_by_kind=drafted.tokens,
        accepted_by_kind=drafted.right,
        predicted=[
            pb.PredictedTokens(request_id=request_id, accepted=accepted, rejected=rejected)
            for request_id, (accepted, rejected) in drafted.predicted.items()
        ],
    )


def _plain_tokens(generation: Generation) -> Tokens | None:
    """Return a row's tokens if it has nothing else."""
    has_more = generation.generated_text is not None or generation.prefill_tokens is not None or generation.top_tokens
    return None if has_more else generation.tokens


def _columns_to(rows: list[tuple[int, Tokens]]) -> pb.Columns:
    columns = pb.Columns(
        request_ids=[request_id for request_id, _ in rows],
        ids=[i for _, tokens in rows for i in tokens.ids],
        logprobs=[logprob for _, tokens in rows for logprob in tokens.logprobs],
        texts=[text for _, tokens in rows for text in tokens.texts],
        is_special=[special for _, tokens in rows for special in tokens.is_special],
    )
    if len(columns.ids) > len(rows):
        columns.counts.extend(len(tokens.ids) for _, tokens in rows)
    return columns


def _generation_to(generation: Generation) -> pb.Generation:
    if generation.error is not None:
        return pb.Generation(
            request_id=generation.request_id, error=generation.error, grammar_at_fault=generation.grammar_at_fault,
            overloaded=generation.overloaded,
        )  # fmt: skip
    message = pb.Generation(request_id=generation.request_id)
    if generation.tokens is not None:
        message.tokens.CopyFrom(_tokens_to(generation.tokens))
    if generation.prefill_tokens is not None:
        message.prefill_tokens.CopyFrom(_tokens_to(generation.prefill_tokens))
    if generation.prefill_top is not None:
        message.prefill_top_tokens.CopyFrom(_tokens_to(generation.prefill_top.tokens))
        message.prefill_top_count = generation.prefill_top.count
    message.top_tokens.extend(_tokens_to(t) for t in generation.top_tokens)
    ended = generation.generated_text
    if ended is not None:
        message.generated_text.text = ended.text
        message.generated_text.generated_tokens = ended.generated_tokens
        message.generated_text.finish_reason = _FINISH_REASONS[ended.finish_reason]
        if ended.seed is not None:
            message.generated_text.seed = ended.seed
    return message


def _tokens_to(tokens: Tokens) -> pb.Tokens:
    return pb.Tokens(ids=tokens.ids, logprobs=tokens.logprobs, texts=tokens.texts, is_special=tokens.is_special)
