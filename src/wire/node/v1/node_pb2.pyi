from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeSays(_message.Message):
    __slots__ = ("hello", "prepared", "serving", "failure", "stop_asked", "progress", "record")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STOP_ASKED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prepared: Prepared
    serving: Serving
    failure: Failure
    stop_asked: StopAsked
    progress: str
    record: Record
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., serving: _Optional[_Union[Serving, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., stop_asked: _Optional[_Union[StopAsked, _Mapping]] = ..., progress: _Optional[str] = ..., record: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node_rank", "num_nodes", "address", "versions", "num_gpus")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_GPUS_FIELD_NUMBER: _ClassVar[int]
    node_rank: int
    num_nodes: int
    address: str
    versions: _containers.ScalarMap[str, str]
    num_gpus: int
    def __init__(self, node_rank: _Optional[int] = ..., num_nodes: _Optional[int] = ..., address: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., num_gpus: _Optional[int] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("endpoint", "digests", "num_shard")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARD_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    digests: _containers.ScalarMap[str, str]
    num_shard: int
    def __init__(self, endpoint: _Optional[str] = ..., digests: _Optional[_Mapping[str, str]] = ..., num_shard: _Optional[int] = ...) -> None: ...

class Serving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopAsked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("text", "is_consequence")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IS_CONSEQUENCE_FIELD_NUMBER: _ClassVar[int]
    text: str
    is_consequence: bool
    def __init__(self, text: _Optional[str] = ..., is_consequence: bool = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("level", "message", "target", "rank")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    level: str
    message: str
    target: str
    rank: int
    def __init__(self, level: _Optional[str] = ..., message: _Optional[str] = ..., target: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class LeaderSays(_message.Message):
    __slots__ = ("refuse", "plan", "start", "stop")
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    refuse: str
    plan: Plan
    start: Start
    stop: Stop
    def __init__(self, refuse: _Optional[str] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("options", "commit", "lease_seconds")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    commit: str
    lease_seconds: int
    def __init__(self, options: _Optional[_Iterable[str]] = ..., commit: _Optional[str] = ..., lease_seconds: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("store_address", "store_port", "nonce", "endpoints")
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    store_address: str
    store_port: int
    nonce: bytes
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, store_address: _Optional[str] = ..., store_port: _Optional[int] = ..., nonce: _Optional[bytes] = ..., endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("first_failure", "node_rank")
    FIRST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    first_failure: str
    node_rank: int
    def __init__(self, first_failure: _Optional[str] = ..., node_rank: _Optional[int] = ...) -> None: ...
