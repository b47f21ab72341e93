"""Domain to protobuf and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

import numpy as np

from router.events import FinishReason, PlacesTop, Token
from router.limits import ShardInfo
from router.request import SamplingParameters, ValidRequest
from router.shards.interface import (
    PROBE_ID,
    BlockGrowth,
    CachedBatch,
    Columns,
    DecodeCall,
    Drafted,
    EncodedImages,
    Ended,
    NewBatch,
    NewRequest,
    PrefillCall,
    Row,
    SlotUse,
    StepReply,
    Timings,
    UnsendableError,
)
from wire.images.prepared import PreparedImage
from wire.processes.shared_memory import process_namespace
from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as pb

StepMessage = pb.PrefillResponse | pb.DecodeResponse

_GRAMMAR_TYPES = {
    "none": pb.GRAMMAR_TYPE_NONE, "json": pb.GRAMMAR_TYPE_JSON, "regex": pb.GRAMMAR_TYPE_REGEX,
    "lark": pb.GRAMMAR_TYPE_LARK,
}  # fmt: skip
_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_EOS_TOKEN: "eos_token",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop_sequence",
}
_NS = 1e-9
# Under the names that both sides have.
_SAMPLING_NAMES = tuple(one.name for one in fields(SamplingParameters) if one.name != "grammar_kind")


# Outward.


def prefill_to(call: PrefillCall) -> pb.PrefillRequest:
    """Raises `UnsendableError`."""
    request = pb.PrefillRequest(
        cached_id=call.cached_id,
        new_blocks=_new_blocks_to(call.new_blocks),
        chunk_tokens=call.chunk_tokens,
        unanswered=call.unanswered,
    )
    _fill_batch(request.batch, call.batch)
    return request


def decode_to(call: DecodeCall) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        batch_ids=call.batch_ids,
        new_blocks=_new_blocks_to(call.new_blocks),
        chunk_tokens=call.chunk_tokens,
        unanswered=call.unanswered,
    )


def _fill_batch(message: pb.Batch, batch: NewBatch) -> None:
    requests: list[pb.Request] = []
    reasons: dict[int, Exception] = {}
    for request in batch.requests:
        try:
            requests.append(_request_to(request))
        except (ValueError, TypeError) as error:
            reasons[request.request_id] = error
    if reasons:
        raise UnsendableError(reasons)
    message.id = batch.batch_id
    message.requests.extend(requests)
    _add_images(message, batch.requests)


def _add_images(message: pb.Batch, requests: Sequence[NewRequest]) -> None:
    """Add each image once, arrays only for uncomputed tokens."""
    needed: dict[bytes, tuple[PreparedImage, bool]] = {}
    for new in requests:
        for one in new.request.images:
            is_cached = one.place.stop <= new.cache_len
            _, was_cached = needed.get(one.image.key, (one.image, True))
            needed[one.image.key] = one.image, is_cached and was_cached
    for image, is_cached in needed.values():
        # Made in its place: a message is copied into the one that it becomes part of, and arrays have megabytes.
        added = message.images.add(key=image.key, grid=image.grid or (), num_embeds=image.num_embeds)
        for name, array in () if is_cached else image.features.items():
            feature = added.features.add(name=name, dtype=array.dtype, shape=array.shape)
            if isinstance(array.data, bytes):
                feature.data = array.data
            else:  # only where the shards open it
                feature.memory, feature.offset = array.data.memory.name, array.data.offset
                feature.num_bytes = len(array.data)


def _new_blocks_to(new_blocks: Sequence[BlockGrowth]) -> list[pb.BlockGrowth]:
    return [pb.BlockGrowth(request_id=one.request_id, blocks=one.blocks) for one in new_blocks]


def probe_to() -> pb.PrefillRequest:
    """Make TGI's one-token health probe, in block 0."""
    request = pb.Request(
        id=PROBE_ID,
        input_ids=[0],
        parameters=_sampling_to(SamplingParameters()),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1),
        blocks=[0],
    )
    return pb.PrefillRequest(batch=pb.Batch(id=PROBE_ID, requests=[request]))


def _request_to(new: NewRequest) -> pb.Request:
    request = new.request
    message = pb.Request(
        id=new.request_id,
        input_ids=request.input_ids,
        parameters=_sampling_to(request.sampling),
        stopping_parameters=_stopping_to(request),
        prefill_logprobs=request.decoder_input_details and not new.resume_ids,  # they were delivered before
        top_n_tokens=request.top_n_tokens,
        blocks=new.blocks,
        cache_len=new.cache_len,
        chunk_len=new.chunk_len,
        resume_ids=new.resume_ids,
        prediction_ids=request.prediction_ids,
    )
    if request.adapter is not None:
        message.adapter = request.adapter
    elif request.adapter_id is not None:
        message.adapter_id = request.adapter_id
    if new.state is not None:
        message.state_slot = new.state.slot
        if new.state.restored_from is not None:
            message.state_from = new.state.restored_from
        for position, slot in new.state.saves:
            message.state_saves.add(position=position, slot=slot)
    for one in request.images:
        message.images.add(key=one.place.key, start=one.place.start, length=one.place.length)
    return message


def _sampling_to(sampling: SamplingParameters) -> pb.NextTokenChooserParameters:
    """Convert; zero needs no field."""
    values = {name: value for name in _SAMPLING_NAMES if (value := getattr(sampling, name))}
    biases = values.pop("logit_bias", ())
    return pb.NextTokenChooserParameters(
        **values,
        grammar_type=_GRAMMAR_TYPES[sampling.grammar_kind],
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in biases],
    )


def _stopping_to(request: ValidRequest) -> pb.StoppingCriteriaParameters:
    stopping = request.stopping
    stops = () if request.answer == "marked" else stopping.stop_sequences
    return pb.StoppingCriteriaParameters(
        max_new_tokens=stopping.max_new_tokens,
        stop_sequences=stops,
        ignore_eos_token=stopping.ignore_eos_token,
        stop_token_ids=stopping.stop_token_ids,
    )


# Inward.


def info_from(messages: Sequence[pb.InfoResponse]) -> ShardInfo:
    """Read what all ranks agree on, of this release."""
    for message in messages:
        if message.protocol != PROTOCOL:
            raise ValueError(
                f"the shards speak protocol {message.protocol}, this router {PROTOCOL}: start both from one release"
            )
    first = messages[0]
    plain = [(m.speculate, m.block_size, m.dtype, m.kv_cache_dtype, m.quantize, *m.adapters) for m in messages]
    if any(p != plain[0] for p in plain):
        raise ValueError("the shards disagree about speculation, block size, dtype, quantization or adapters")
    return ShardInfo(
        dtype=first.dtype,
        device_type=first.device_type,
        speculate=first.speculate,
        chunks=all(m.support_chunking for m in messages),
        shares_prefixes=all(m.prefix_caching for m in messages),
        attention_impl=first.attention_impl,
        block_size=max(first.block_size, 1),
        pipeline_depth=max(min(m.pipeline_depth for m in messages), 1),
        micro_batches=max(min(m.micro_batches for m in messages), 1),
        kv_cache_dtype=first.kv_cache_dtype,
        quantize=first.quantize or None,
        speculator=first.speculator or None,
        task=first.task or "generate",
        adapters=tuple(first.adapters),
        image_reserve=max(m.image_reserve for m in messages),
        adapter_slots=min((m.adapter_slots for m in messages if m.adapter_slots), default=None),
        grows=all(m.grows for m in messages),
        loads_adapters=all(m.loads_adapters for m in messages),
        images=all(m.images for m in messages),
        shares_memory=_see_this_process(messages),
        state_slots=min((m.state_slots for m in messages if m.state_slots), default=0),
        state_bytes=max(m.state_bytes for m in messages),
        state_grid=max(m.state_grid for m in messages),
        decoder_prefix=max(m.decoder_prefix for m in messages),
    )


def _see_this_process(messages: Sequence[pb.InfoResponse]) -> bool:
    own = process_namespace()
    return bool(own) and all(m.process_namespace == own for m in messages)


def cached_batch_from(message: pb.CachedBatch) -> CachedBatch:
    return CachedBatch(message.id, message.request_ids, message.max_tokens, message.current_tokens)


def step_from(messages: Sequence[StepMessage]) -> StepReply:
    """Join a step's ranks: all rows, last batch, slowest timings."""
    reply = StepReply()
    reply.drafted = _drafted_from([message.speculation for message in messages if message.HasField("speculation")])
    reply.adapter_slots = _slots_from(messages[0])
    reply.images = _images_from([message.images for message in messages if message.HasField("images")])
    for message in messages:
        if message.HasField("columns"):
            columns = message.columns  # read once: protobuf wraps it again each time
            if columns.counts:
                reply.rows.extend(_rows_of_several(columns))
            else:
                reply.columns.append(_columns_from(columns))
        if message.generations:
            reply.rows.extend(_row_from(g) for g in message.generations)
    last = messages[-1]
    if last.HasField("batch"):
        reply.batch = cached_batch_from(last.batch)
    slowest = last if len(messages) == 1 else max(messages, key=lambda m: m.total_ns)
    concat_s = slowest.concat_ns * _NS if slowest.HasField("concat_ns") else None
    phases_s = tuple([ns * _NS for ns in slowest.phases_ns])
    reply.timings = Timings(slowest.forward_ns * _NS, slowest.decode_ns * _NS, concat_s, phases_s)
    return reply


def _drafted_from(messages: Sequence[pb.Speculation]) -> Drafted | None:
    """Sum the ranks' own requests."""
    if not messages:
        return None
    ranks = [zip(m.drafted_by_kind, m.accepted_by_kind, strict=False) for m in messages]
    by_kind = itertools.zip_longest(*ranks, fillvalue=(0, 0))
    return Drafted(
        num_tokens=sum(m.drafted for m in messages),
        num_right=sum(m.accepted for m in messages),
        longest=max(m.window for m in messages),
        by_kind=tuple((sum(drafted for drafted, _ in one), sum(right for _, right in one)) for one in by_kind),
        predicted={one.request_id: (one.accepted, one.rejected) for m in messages for one in m.predicted},
    )


def _slots_from(message: StepMessage) -> SlotUse | None:
    if not isinstance(message, pb.PrefillResponse) or not message.HasField("adapter_slots"):
        return None
    return SlotUse(message.adapter_slots.loads, message.adapter_slots.held)


def _images_from(messages: Sequence[pb.EncodedImages]) -> EncodedImages | None:
    """Return the slowest rank's time: all encode all."""
    if not messages:
        return None
    first = messages[0]
    return EncodedImages(first.hits, first.misses, max(m.encode_ns for m in messages) * _NS)


def _columns_from(message: pb.Columns) -> Columns:
    return Columns(
        list(message.request_ids),
        list(message.ids),
        _float32s(message.logprobs),
        list(message.texts),
        list(message.is_special),
    )


def _float32s(values: Sequence[float]) -> list[np.float32]:
    """Convert one by one, seven times as fast as numpy."""
    return list(np.array(values, np.float32))


def _rows_of_several(columns: pb.Columns) -> Iterator[Row]:
    """Split columns by `counts`."""
    tokens = map(Token, columns.ids, columns.texts, _float32s(columns.logprobs), columns.is_special)
    for request_id, count in zip(columns.request_ids, columns.counts, strict=True):
        row = Row(request_id)
        row.tokens = tuple(itertools.islice(tokens, count))
        yield row


def _row_from(message: pb.Generation) -> Row:
    row = Row(message.request_id)
    if message.HasField("error"):
        row.error, row.grammar_at_fault, row.overloaded = message.error, message.grammar_at_fault, message.overloaded
        return row
    row.tokens = _tokens_from(message.tokens)
    if message.top_tokens:
        row.top_tokens = [_tokens_from(t) for t in message.top_tokens]
    if message.HasField("prefill_tokens"):
        row.prefill_tokens = _tokens_from(message.prefill_tokens)
        row.prefill_top_tokens = _places_top_from(message)
    if message.HasField("generated_text"):
        ended = message.generated_text
        row.ended = Ended(
            ended.text,
            ended.generated_tokens,
            _FINISH_REASONS.get(ended.finish_reason, "length"),
            ended.seed if ended.HasField("seed") else None,
        )
    return row


def _places_top_from(message: pb.Generation) -> PlacesTop:
    top = message.prefill_top_tokens
    return PlacesTop(message.prefill_top_count, list(top.ids), list(top.texts), _float32s(top.logprobs))


def _tokens_from(message: pb.Tokens) -> tuple[Token, ...]:
    specials: Iterable[bool] = message.is_special or [False] * len(message.ids)  # absent for prompt tokens
    return tuple(map(Token, message.ids, message.texts, _float32s(message.logprobs), specials))
