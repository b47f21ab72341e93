"""Domain to protobuf and back; the only file of the router that fills or reads generation messages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

import numpy as np

from router.events import FinishReason, Token
from router.limits import ShardInfo
from router.request import SAMPLING_EXTENSIONS, SamplingParameters, StoppingParameters
from router.shards.interface import (
    PROBE_ID,
    CachedBatch,
    Columns,
    DecodeCall,
    Drafted,
    EncodedImages,
    Ended,
    Growth,
    NewBatch,
    NewRequest,
    PrefillCall,
    Row,
    SlotUse,
    StepReply,
    Timings,
    UnsendableError,
)
from wire.extensions import Extension
from wire.images.prepared import PreparedImage
from wire.images.upstream.texts import mimetype
from wire.processes.shared_memory import process_namespace
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


# Outward.


def prefill_to(call: PrefillCall, extensions: frozenset[Extension]) -> pb.PrefillRequest:
    """Fields of an extension are set only if the shards announced it. Raises `UnsendableError`."""
    request = pb.PrefillRequest(
        growth=_growth_to(call.growth),
        chunk_tokens=call.chunk_tokens,
        unanswered=call.unanswered or None,
    )
    _fill_batch(request.batch, call.batch, extensions)
    if call.cached_id is not None:
        request.cached_batch.id = call.cached_id
    return request


def decode_to(call: DecodeCall) -> pb.DecodeRequest:
    """Only the id of a batch: shards read nothing else."""
    batches = [pb.CachedBatch(id=batch_id) for batch_id in call.batch_ids]
    return pb.DecodeRequest(
        batches=batches,
        growth=_growth_to(call.growth),
        chunk_tokens=call.chunk_tokens,
        unanswered=call.unanswered or None,
    )


def batch_to(batch: NewBatch, extensions: frozenset[Extension]) -> pb.Batch:
    """Raises `UnsendableError`."""
    message = pb.Batch()
    _fill_batch(message, batch, extensions)
    return message


def _fill_batch(message: pb.Batch, batch: NewBatch, extensions: frozenset[Extension]) -> None:
    requests: list[pb.Request] = []
    reasons: dict[int, Exception] = {}
    for request in batch.requests:
        try:
            requests.append(_request_to(request, extensions))
        except (ValueError, TypeError) as error:
            reasons[request.request_id] = error
    if reasons:
        raise UnsendableError(reasons)
    message.id, message.size = batch.batch_id, len(batch.requests)
    message.max_tokens, message.max_blocks = batch.max_tokens, batch.max_blocks
    message.requests.extend(requests)
    if Extension.IMAGES in extensions:
        _add_images(message, batch.requests)


def _add_images(message: pb.Batch, requests: Sequence[NewRequest]) -> None:
    """Each image once: its arrays only if tokens of it are still to be computed, its grid in any case."""
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


def _growth_to(growth: Sequence[Growth]) -> list[pb.BlockGrowth]:
    return [pb.BlockGrowth(request_id=g.request_id, blocks=g.blocks) for g in growth]


def probe_to() -> pb.PrefillRequest:
    """The one-token generation that TGI's health check runs in the reserved block 0."""
    request = pb.Request(
        id=PROBE_ID,
        inputs="liveness",
        input_chunks=pb.Input(chunks=[pb.InputChunk(text="liveness")]),
        truncate=1,
        parameters=_sampling_to(SamplingParameters(), frozenset()),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1),
        blocks=[0],
        slots=[0],
    )
    return pb.PrefillRequest(batch=pb.Batch(id=PROBE_ID, requests=[request], size=1, max_tokens=2, max_blocks=1))


def _request_to(new: NewRequest, extensions: frozenset[Extension]) -> pb.Request:
    request = new.request
    message = pb.Request(
        id=new.request_id,
        truncate=request.truncate,
        add_special_tokens=request.add_special_tokens,
        parameters=_sampling_to(request.sampling, extensions),
        stopping_parameters=_stopping_to(request.stopping, extensions),
        prefill_logprobs=request.decoder_input_details and not new.resume_ids,  # they were delivered before
        top_n_tokens=request.top_n_tokens,
        blocks=new.blocks,
        slots=new.slots,
        cache_len=new.cache_len,
    )
    if new.chunk_len is not None:
        message.chunk_len = new.chunk_len
    if request.adapter is not None:
        message.adapter = request.adapter
    elif request.adapter_id is not None:
        message.adapter_id = request.adapter_id
    if Extension.TOKEN_IDS in extensions and request.input_ids:
        message.input_ids.extend(request.input_ids)
    elif request.chunks:
        message.input_chunks.chunks.extend(map(_chunk_to, request.chunks))
    else:  # upstream TGI shards read `input_chunks`, older ones `inputs`
        message.inputs = request.inputs
        message.input_chunks.chunks.add(text=request.inputs)
    if request.images:
        if Extension.IMAGES not in extensions:
            raise ValueError("the model server in use reads no images")
        for one in request.images:
            message.images.add(key=one.place.key, start=one.place.start, length=one.place.length)
    if new.resume_ids:
        message.resume_ids.extend(new.resume_ids)
    if Extension.PREDICTION in extensions:
        message.prediction_ids.extend(request.prediction_ids)
    return message


def _chunk_to(chunk: str | bytes) -> pb.InputChunk:
    if isinstance(chunk, str):
        return pb.InputChunk(text=chunk)
    return pb.InputChunk(image=pb.Image(data=chunk, mimetype=mimetype(chunk)))


def _sampling_to(sampling: SamplingParameters, extensions: frozenset[Extension]) -> pb.NextTokenChooserParameters:
    """Zero needs no field: it is what a shard reads where there is none."""
    values = {name: value for name in _sent(extensions) if (value := getattr(sampling, name))}
    biases = values.pop("logit_bias", ())
    return pb.NextTokenChooserParameters(
        **values,
        grammar_type=_GRAMMAR_TYPES[sampling.grammar_kind],
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in biases],
    )


@functools.lru_cache
def _sent(extensions: frozenset[Extension]) -> tuple[str, ...]:
    """The sampling parameters that shards with these extensions are sent, under the names that both sides have."""
    names = (one.name for one in fields(SamplingParameters) if one.name != "grammar_kind")
    return tuple(name for name in names if name not in SAMPLING_EXTENSIONS or SAMPLING_EXTENSIONS[name] in extensions)


def _stopping_to(stopping: StoppingParameters, extensions: frozenset[Extension]) -> pb.StoppingCriteriaParameters:
    message = pb.StoppingCriteriaParameters(
        max_new_tokens=stopping.max_new_tokens,
        stop_sequences=stopping.stop_sequences,
        ignore_eos_token=stopping.ignore_eos_token,
        stop_token_ids=stopping.stop_token_ids,
    )
    if stopping.stop_anywhere and stopping.stop_sequences and Extension.STOP_ANYWHERE in extensions:
        message.stop_anywhere = True
    return message


# Inward.


def info_from(messages: Sequence[pb.InfoResponse]) -> ShardInfo:
    """What all ranks say. Raises ValueError where they differ; an extension counts if every rank offers it."""
    first = messages[0]
    plain = [
        (
            m.requires_padding,
            m.window_size,
            m.speculate,
            m.block_size,
            m.dtype,
            m.kv_cache_dtype,
            m.quantize,
            *m.adapters,
        )
        for m in messages
    ]
    if any(p != plain[0] for p in plain):
        raise ValueError(
            "the shards disagree about padding, window, speculation, block size, dtype, quantization or adapters"
        )
    return ShardInfo(
        requires_padding=first.requires_padding,
        dtype=first.dtype,
        device_type=first.device_type,
        window_size=first.window_size if first.HasField("window_size") else None,
        speculate=first.speculate,
        support_chunking=all(m.support_chunking for m in messages),
        use_prefix_caching=all(m.use_prefix_caching or m.adapter_prefix_caching for m in messages),
        attention_impl=first.attention_impl,
        block_size=max(first.block_size, 1),
        pipeline_depth=max(min(m.pipeline_depth for m in messages), 1),
        micro_batches=max(min(m.micro_batches for m in messages), 1),
        kv_cache_dtype=first.kv_cache_dtype or first.dtype,
        quantize=first.quantize or None,
        speculator=first.speculator or None,
        task=first.task or "generate",
        adapters=tuple(first.adapters),
        image_reserve=max(m.image_reserve for m in messages),
        adapter_slots=min((m.adapter_slots for m in messages if m.adapter_slots), default=None),
        extensions=_extensions_of(messages),
    )


def _extensions_of(messages: Sequence[pb.InfoResponse]) -> frozenset[Extension]:
    """What all ranks offer. Memory is shared only with processes that see this one."""
    extensions = frozenset.intersection(*(Extension.known(m.extensions) for m in messages))
    own = process_namespace()
    sees_all = own and all(m.process_namespace == own for m in messages)
    return extensions if sees_all else extensions - {Extension.SHARED_MEMORY}


def cached_batch_from(message: pb.CachedBatch) -> CachedBatch:
    return CachedBatch(message.id, message.request_ids, message.size, message.max_tokens, message.current_tokens)


def step_from(messages: Sequence[StepMessage]) -> StepReply:
    """One step of all ranks: rows of all, the batch of the last, timings of the slowest."""
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
    """Of all ranks, each of which counts its own requests."""
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
    """Every rank encodes all images: the slowest one's time."""
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
    """As they are on the wire. One by one numpy would need seven times as long."""
    return list(np.array(values, np.float32))


def _rows_of_several(columns: pb.Columns) -> Iterator[Row]:
    """Columns whose rows have as many tokens as `counts` says."""
    tokens = map(Token, columns.ids, columns.texts, _float32s(columns.logprobs), columns.is_special)
    for request_id, count in zip(columns.request_ids, columns.counts, strict=True):
        row = Row(request_id)
        row.tokens = tuple(itertools.islice(tokens, count))
        yield row


def _row_from(message: pb.Generation) -> Row:
    row = Row(message.request_id)
    if message.HasField("error"):
        row.error = message.error
        return row
    row.tokens = _tokens_from(message.tokens)
    if message.top_tokens:
        row.top_tokens = [_tokens_from(t) for t in message.top_tokens]
    if message.HasField("prefill_tokens"):
        row.prefill_tokens = _tokens_from(message.prefill_tokens)
    if message.HasField("generated_text"):
        ended = message.generated_text
        row.ended = Ended(
            ended.text,
            ended.generated_tokens,
            _FINISH_REASONS.get(ended.finish_reason, "length"),
            ended.seed if ended.HasField("seed") else None,
        )
    return row


def _tokens_from(message: pb.Tokens) -> tuple[Token, ...]:
    specials: Iterable[bool] = message.is_special or [False] * len(message.ids)  # absent for prompt tokens
    return tuple(map(Token, message.ids, message.texts, _float32s(message.logprobs), specials))
