from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrammarType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_TYPE_NONE: _ClassVar[GrammarType]
    GRAMMAR_TYPE_JSON: _ClassVar[GrammarType]
    GRAMMAR_TYPE_REGEX: _ClassVar[GrammarType]
    GRAMMAR_TYPE_LARK: _ClassVar[GrammarType]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_EOS_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
GRAMMAR_TYPE_NONE: GrammarType
GRAMMAR_TYPE_JSON: GrammarType
GRAMMAR_TYPE_REGEX: GrammarType
GRAMMAR_TYPE_LARK: GrammarType
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_EOS_TOKEN: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("protocol", "dtype", "device_type", "speculate", "support_chunking", "attention_impl", "block_size", "pipeline_depth", "kv_cache_dtype", "quantize", "adapters", "prefix_caching", "micro_batches", "adapter_slots", "image_reserve", "speculator", "process_namespace", "task", "grows", "loads_adapters", "images", "state_slots", "state_bytes", "state_grid", "decoder_prefix", "other_ranks")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_CHUNKING_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_IMPL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_RESERVE_FIELD_NUMBER: _ClassVar[int]
    SPECULATOR_FIELD_NUMBER: _ClassVar[int]
    PROCESS_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GROWS_FIELD_NUMBER: _ClassVar[int]
    LOADS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_GRID_FIELD_NUMBER: _ClassVar[int]
    DECODER_PREFIX_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    dtype: str
    device_type: str
    speculate: int
    support_chunking: bool
    attention_impl: str
    block_size: int
    pipeline_depth: int
    kv_cache_dtype: str
    quantize: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    prefix_caching: bool
    micro_batches: int
    adapter_slots: int
    image_reserve: int
    speculator: str
    process_namespace: str
    task: str
    grows: bool
    loads_adapters: bool
    images: bool
    state_slots: int
    state_bytes: int
    state_grid: int
    decoder_prefix: int
    other_ranks: _containers.RepeatedCompositeFieldContainer[InfoResponse]
    def __init__(self, protocol: _Optional[int] = ..., dtype: _Optional[str] = ..., device_type: _Optional[str] = ..., speculate: _Optional[int] = ..., support_chunking: bool = ..., attention_impl: _Optional[str] = ..., block_size: _Optional[int] = ..., pipeline_depth: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., quantize: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., prefix_caching: bool = ..., micro_batches: _Optional[int] = ..., adapter_slots: _Optional[int] = ..., image_reserve: _Optional[int] = ..., speculator: _Optional[str] = ..., process_namespace: _Optional[str] = ..., task: _Optional[str] = ..., grows: bool = ..., loads_adapters: bool = ..., images: bool = ..., state_slots: _Optional[int] = ..., state_bytes: _Optional[int] = ..., state_grid: _Optional[int] = ..., decoder_prefix: _Optional[int] = ..., other_ranks: _Optional[_Iterable[_Union[InfoResponse, _Mapping]]] = ...) -> None: ...

class ServiceDiscoveryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceDiscoveryResponse(_message.Message):
    __slots__ = ("urls",)
    URLS_FIELD_NUMBER: _ClassVar[int]
    urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, urls: _Optional[_Iterable[str]] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("id", "sequence")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    id: int
    sequence: int
    def __init__(self, id: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class NextTokenChooserParameters(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty", "watermark", "frequency_penalty", "grammar", "grammar_type", "presence_penalty", "absolute_frequency_penalty", "logit_bias", "min_p", "min_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_TYPE_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    ABSOLUTE_FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    typical_p: float
    do_sample: bool
    seed: int
    repetition_penalty: float
    watermark: bool
    frequency_penalty: float
    grammar: str
    grammar_type: GrammarType
    presence_penalty: float
    absolute_frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    min_p: float
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., do_sample: bool = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., watermark: bool = ..., frequency_penalty: _Optional[float] = ..., grammar: _Optional[str] = ..., grammar_type: _Optional[_Union[GrammarType, str]] = ..., presence_penalty: _Optional[float] = ..., absolute_frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., min_p: _Optional[float] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class StoppingCriteriaParameters(_message.Message):
    __slots__ = ("max_new_tokens", "stop_sequences", "ignore_eos_token", "stop_token_ids")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    stop_sequences: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos_token: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_new_tokens: _Optional[int] = ..., stop_sequences: _Optional[_Iterable[str]] = ..., ignore_eos_token: bool = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "parameters", "stopping_parameters", "prefill_logprobs", "top_n_tokens", "blocks", "adapter_id", "cache_len", "chunk_len", "input_ids", "adapter", "resume_ids", "prediction_ids", "images", "state_slot", "state_from", "state_saves")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STOPPING_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_LEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LEN_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RESUME_IDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FROM_FIELD_NUMBER: _ClassVar[int]
    STATE_SAVES_FIELD_NUMBER: _ClassVar[int]
    id: int
    parameters: NextTokenChooserParameters
    stopping_parameters: StoppingCriteriaParameters
    prefill_logprobs: bool
    top_n_tokens: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    adapter_id: str
    cache_len: int
    chunk_len: int
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: int
    resume_ids: _containers.RepeatedScalarFieldContainer[int]
    prediction_ids: _containers.RepeatedScalarFieldContainer[int]
    images: _containers.RepeatedCompositeFieldContainer[ImagePlace]
    state_slot: int
    state_from: int
    state_saves: _containers.RepeatedCompositeFieldContainer[StateSave]
    def __init__(self, id: _Optional[int] = ..., parameters: _Optional[_Union[NextTokenChooserParameters, _Mapping]] = ..., stopping_parameters: _Optional[_Union[StoppingCriteriaParameters, _Mapping]] = ..., prefill_logprobs: bool = ..., top_n_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., adapter_id: _Optional[str] = ..., cache_len: _Optional[int] = ..., chunk_len: _Optional[int] = ..., input_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[int] = ..., resume_ids: _Optional[_Iterable[int]] = ..., prediction_ids: _Optional[_Iterable[int]] = ..., images: _Optional[_Iterable[_Union[ImagePlace, _Mapping]]] = ..., state_slot: _Optional[int] = ..., state_from: _Optional[int] = ..., state_saves: _Optional[_Iterable[_Union[StateSave, _Mapping]]] = ...) -> None: ...

class StateSave(_message.Message):
    __slots__ = ("position", "slot")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    position: int
    slot: int
    def __init__(self, position: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class PreparedImage(_message.Message):
    __slots__ = ("key", "features", "grid", "num_embeds")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    NUM_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    features: _containers.RepeatedCompositeFieldContainer[Feature]
    grid: _containers.RepeatedScalarFieldContainer[int]
    num_embeds: int
    def __init__(self, key: _Optional[bytes] = ..., features: _Optional[_Iterable[_Union[Feature, _Mapping]]] = ..., grid: _Optional[_Iterable[int]] = ..., num_embeds: _Optional[int] = ...) -> None: ...

class Feature(_message.Message):
    __slots__ = ("name", "dtype", "shape", "data", "memory", "offset", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    memory: str
    offset: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., memory: _Optional[str] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ImagePlace(_message.Message):
    __slots__ = ("key", "start", "length")
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    start: int
    length: int
    def __init__(self, key: _Optional[bytes] = ..., start: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class BlockGrowth(_message.Message):
    __slots__ = ("request_id", "blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("id", "requests", "images")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    id: int
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    images: _containers.RepeatedCompositeFieldContainer[PreparedImage]
    def __init__(self, id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[PreparedImage, _Mapping]]] = ...) -> None: ...

class CachedBatch(_message.Message):
    __slots__ = ("id", "request_ids", "max_tokens", "current_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    current_tokens: int
    def __init__(self, id: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., current_tokens: _Optional[int] = ...) -> None: ...

class GeneratedText(_message.Message):
    __slots__ = ("text", "generated_tokens", "finish_reason", "seed")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int
    def __init__(self, text: _Optional[str] = ..., generated_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., seed: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids", "logprobs", "texts", "is_special")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    IS_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    is_special: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ..., is_special: _Optional[_Iterable[bool]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("request_id", "prefill_tokens", "tokens", "generated_text", "top_tokens", "prefill_top_tokens", "prefill_top_count", "error", "grammar_at_fault", "overloaded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TEXT_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_AT_FAULT_FIELD_NUMBER: _ClassVar[int]
    OVERLOADED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prefill_tokens: Tokens
    tokens: Tokens
    generated_text: GeneratedText
    top_tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    prefill_top_tokens: Tokens
    prefill_top_count: int
    error: str
    grammar_at_fault: bool
    overloaded: bool
    def __init__(self, request_id: _Optional[int] = ..., prefill_tokens: _Optional[_Union[Tokens, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., generated_text: _Optional[_Union[GeneratedText, _Mapping]] = ..., top_tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., prefill_top_tokens: _Optional[_Union[Tokens, _Mapping]] = ..., prefill_top_count: _Optional[int] = ..., error: _Optional[str] = ..., grammar_at_fault: bool = ..., overloaded: bool = ...) -> None: ...

class Columns(_message.Message):
    __slots__ = ("request_ids", "ids", "logprobs", "texts", "is_special", "counts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    IS_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    is_special: _containers.RepeatedScalarFieldContainer[bool]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ..., is_special: _Optional[_Iterable[bool]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class FilterBatchRequest(_message.Message):
    __slots__ = ("batch_id", "request_ids", "sequence")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    sequence: int
    def __init__(self, batch_id: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ..., sequence: _Optional[int] = ...) -> None: ...

class FilterBatchResponse(_message.Message):
    __slots__ = ("batch", "other_ranks")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    batch: CachedBatch
    other_ranks: _containers.RepeatedCompositeFieldContainer[FilterBatchResponse]
    def __init__(self, batch: _Optional[_Union[CachedBatch, _Mapping]] = ..., other_ranks: _Optional[_Iterable[_Union[FilterBatchResponse, _Mapping]]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("batch", "cached_id", "sequence", "unanswered", "new_blocks", "chunk_tokens")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CACHED_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    batch: Batch
    cached_id: int
    sequence: int
    unanswered: int
    new_blocks: _containers.RepeatedCompositeFieldContainer[BlockGrowth]
    chunk_tokens: int
    def __init__(self, batch: _Optional[_Union[Batch, _Mapping]] = ..., cached_id: _Optional[int] = ..., sequence: _Optional[int] = ..., unanswered: _Optional[int] = ..., new_blocks: _Optional[_Iterable[_Union[BlockGrowth, _Mapping]]] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("generations", "batch", "forward_ns", "decode_ns", "total_ns", "concat_ns", "columns", "phases_ns", "speculation", "images", "adapter_slots", "other_ranks")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    CONCAT_NS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PHASES_NS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    batch: CachedBatch
    forward_ns: int
    decode_ns: int
    total_ns: int
    concat_ns: int
    columns: Columns
    phases_ns: _containers.RepeatedScalarFieldContainer[int]
    speculation: Speculation
    images: EncodedImages
    adapter_slots: AdapterSlots
    other_ranks: _containers.RepeatedCompositeFieldContainer[PrefillResponse]
    def __init__(self, generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., batch: _Optional[_Union[CachedBatch, _Mapping]] = ..., forward_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., concat_ns: _Optional[int] = ..., columns: _Optional[_Union[Columns, _Mapping]] = ..., phases_ns: _Optional[_Iterable[int]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., images: _Optional[_Union[EncodedImages, _Mapping]] = ..., adapter_slots: _Optional[_Union[AdapterSlots, _Mapping]] = ..., other_ranks: _Optional[_Iterable[_Union[PrefillResponse, _Mapping]]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("drafted", "accepted", "window", "drafted_by_kind", "accepted_by_kind", "predicted")
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_KIND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_KIND_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    drafted: int
    accepted: int
    window: int
    drafted_by_kind: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_kind: _containers.RepeatedScalarFieldContainer[int]
    predicted: _containers.RepeatedCompositeFieldContainer[PredictedTokens]
    def __init__(self, drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., window: _Optional[int] = ..., drafted_by_kind: _Optional[_Iterable[int]] = ..., accepted_by_kind: _Optional[_Iterable[int]] = ..., predicted: _Optional[_Iterable[_Union[PredictedTokens, _Mapping]]] = ...) -> None: ...

class PredictedTokens(_message.Message):
    __slots__ = ("request_id", "accepted", "rejected")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    accepted: int
    rejected: int
    def __init__(self, request_id: _Optional[int] = ..., accepted: _Optional[int] = ..., rejected: _Optional[int] = ...) -> None: ...

class AdapterSlots(_message.Message):
    __slots__ = ("loads", "held")
    LOADS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    loads: int
    held: int
    def __init__(self, loads: _Optional[int] = ..., held: _Optional[int] = ...) -> None: ...

class EncodedImages(_message.Message):
    __slots__ = ("hits", "misses", "encode_ns")
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    hits: int
    misses: int
    encode_ns: int
    def __init__(self, hits: _Optional[int] = ..., misses: _Optional[int] = ..., encode_ns: _Optional[int] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("batch_ids", "sequence", "unanswered", "new_blocks", "chunk_tokens")
    BATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    batch_ids: _containers.RepeatedScalarFieldContainer[int]
    sequence: int
    unanswered: int
    new_blocks: _containers.RepeatedCompositeFieldContainer[BlockGrowth]
    chunk_tokens: int
    def __init__(self, batch_ids: _Optional[_Iterable[int]] = ..., sequence: _Optional[int] = ..., unanswered: _Optional[int] = ..., new_blocks: _Optional[_Iterable[_Union[BlockGrowth, _Mapping]]] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("generations", "batch", "forward_ns", "decode_ns", "total_ns", "concat_ns", "columns", "phases_ns", "speculation", "images", "other_ranks")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    CONCAT_NS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PHASES_NS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    batch: CachedBatch
    forward_ns: int
    decode_ns: int
    total_ns: int
    concat_ns: int
    columns: Columns
    phases_ns: _containers.RepeatedScalarFieldContainer[int]
    speculation: Speculation
    images: EncodedImages
    other_ranks: _containers.RepeatedCompositeFieldContainer[DecodeResponse]
    def __init__(self, generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., batch: _Optional[_Union[CachedBatch, _Mapping]] = ..., forward_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., concat_ns: _Optional[int] = ..., columns: _Optional[_Union[Columns, _Mapping]] = ..., phases_ns: _Optional[_Iterable[int]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., images: _Optional[_Union[EncodedImages, _Mapping]] = ..., other_ranks: _Optional[_Iterable[_Union[DecodeResponse, _Mapping]]] = ...) -> None: ...

class WarmupRequest(_message.Message):
    __slots__ = ("batch", "max_input_tokens", "max_prefill_tokens", "max_total_tokens", "sequence")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    batch: Batch
    max_input_tokens: int
    max_prefill_tokens: int
    max_total_tokens: int
    sequence: int
    def __init__(self, batch: _Optional[_Union[Batch, _Mapping]] = ..., max_input_tokens: _Optional[int] = ..., max_prefill_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("max_supported_total_tokens", "max_input_tokens", "max_total_tokens", "other_ranks")
    MAX_SUPPORTED_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    max_supported_total_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    other_ranks: _containers.RepeatedCompositeFieldContainer[WarmupResponse]
    def __init__(self, max_supported_total_tokens: _Optional[int] = ..., max_input_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., other_ranks: _Optional[_Iterable[_Union[WarmupResponse, _Mapping]]] = ...) -> None: ...

class OtherRanks(_message.Message):
    __slots__ = ("other_ranks",)
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    other_ranks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, other_ranks: _Optional[_Iterable[bytes]] = ...) -> None: ...
