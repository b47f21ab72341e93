from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLED: _ClassVar[Kind]
    TOKENS: _ClassVar[Kind]
    SPARSE: _ClassVar[Kind]
    SCORES: _ClassVar[Kind]
POOLED: Kind
TOKENS: Kind
SPARSE: Kind
SCORES: Kind

class WarmUpRequest(_message.Message):
    __slots__ = ("max_batch_tokens", "max_input_tokens", "sequence")
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    max_batch_tokens: int
    max_input_tokens: int
    sequence: int
    def __init__(self, max_batch_tokens: _Optional[int] = ..., max_input_tokens: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class WarmUpResponse(_message.Message):
    __slots__ = ("max_input_tokens", "dimensions", "pooling", "other_ranks")
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    max_input_tokens: int
    dimensions: int
    pooling: str
    other_ranks: _containers.RepeatedCompositeFieldContainer[WarmUpResponse]
    def __init__(self, max_input_tokens: _Optional[int] = ..., dimensions: _Optional[int] = ..., pooling: _Optional[str] = ..., other_ranks: _Optional[_Iterable[_Union[WarmUpResponse, _Mapping]]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("id", "input_ids", "second_from", "prompt_tokens", "kind", "dimensions", "normalize")
    ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SECOND_FROM_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    id: int
    input_ids: bytes
    second_from: int
    prompt_tokens: int
    kind: Kind
    dimensions: int
    normalize: bool
    def __init__(self, id: _Optional[int] = ..., input_ids: _Optional[bytes] = ..., second_from: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., dimensions: _Optional[int] = ..., normalize: bool = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("items", "sequence")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    sequence: int
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., sequence: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("id", "values", "rows", "columns", "indices", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    values: bytes
    rows: int
    columns: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    error: str
    def __init__(self, id: _Optional[int] = ..., values: _Optional[bytes] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., error: _Optional[str] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("results", "forward_ns", "total_ns", "phases_ns", "other_ranks")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    PHASES_NS_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[Result]
    forward_ns: int
    total_ns: int
    phases_ns: _containers.RepeatedScalarFieldContainer[int]
    other_ranks: _containers.RepeatedCompositeFieldContainer[RunResponse]
    def __init__(self, results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., phases_ns: _Optional[_Iterable[int]] = ..., other_ranks: _Optional[_Iterable[_Union[RunResponse, _Mapping]]] = ...) -> None: ...
