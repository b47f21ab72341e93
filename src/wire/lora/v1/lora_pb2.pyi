from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadRequest(_message.Message):
    __slots__ = ("id", "name", "path")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    path: str
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("num_bytes", "rank", "refused", "digest", "other_ranks")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    rank: int
    refused: str
    digest: bytes
    other_ranks: _containers.RepeatedCompositeFieldContainer[LoadResponse]
    def __init__(self, num_bytes: _Optional[int] = ..., rank: _Optional[int] = ..., refused: _Optional[str] = ..., digest: _Optional[bytes] = ..., other_ranks: _Optional[_Iterable[_Union[LoadResponse, _Mapping]]] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("id", "sequence")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    id: int
    sequence: int
    def __init__(self, id: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class DropResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
