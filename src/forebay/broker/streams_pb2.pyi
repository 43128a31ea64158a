# mypy: disable-error-code=type-arg
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenProducer(_message.Message):
    __slots__ = ("topic", "producer_name", "idempotent", "durability")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    producer_name: str
    idempotent: bool
    durability: str
    def __init__(self, topic: _Optional[str] = ..., producer_name: _Optional[str] = ..., idempotent: bool = ..., durability: _Optional[str] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("first_sequence", "payloads", "attributes", "keys")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    attributes: _containers.RepeatedCompositeFieldContainer[Attributes]
    keys: _containers.RepeatedCompositeFieldContainer[RoutingKey]
    def __init__(self, first_sequence: _Optional[int] = ..., payloads: _Optional[_Iterable[bytes]] = ..., attributes: _Optional[_Iterable[_Union[Attributes, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[RoutingKey, _Mapping]]] = ...) -> None: ...

class Attributes(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RoutingKey(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: str
    def __init__(self, value: _Optional[str] = ...) -> None: ...

class ProduceRequest(_message.Message):
    __slots__ = ("open", "batch")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    open: OpenProducer
    batch: Batch
    def __init__(self, open: _Optional[_Union[OpenProducer, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ...) -> None: ...

class ProduceResponse(_message.Message):
    __slots__ = ("last_sequence", "first_offset", "end_offset")
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    last_sequence: int
    first_offset: int
    end_offset: int
    def __init__(self, last_sequence: _Optional[int] = ..., first_offset: _Optional[int] = ..., end_offset: _Optional[int] = ...) -> None: ...

class OpenFetch(_message.Message):
    __slots__ = ("topic", "offset", "position", "time_ms", "subscription", "end_offset", "max_bytes")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    offset: int
    position: str
    time_ms: int
    subscription: SubscriptionStart
    end_offset: int
    max_bytes: int
    def __init__(self, topic: _Optional[str] = ..., offset: _Optional[int] = ..., position: _Optional[str] = ..., time_ms: _Optional[int] = ..., subscription: _Optional[_Union[SubscriptionStart, _Mapping]] = ..., end_offset: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class SubscriptionStart(_message.Message):
    __slots__ = ("name", "consumer_name", "type", "key_filters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    KEY_FILTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    consumer_name: str
    type: int
    key_filters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., consumer_name: _Optional[str] = ..., type: _Optional[int] = ..., key_filters: _Optional[_Iterable[str]] = ...) -> None: ...

class OffsetRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("acks", "nacks", "nack_delay_ms")
    ACKS_FIELD_NUMBER: _ClassVar[int]
    NACKS_FIELD_NUMBER: _ClassVar[int]
    NACK_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedCompositeFieldContainer[OffsetRange]
    nacks: _containers.RepeatedCompositeFieldContainer[OffsetRange]
    nack_delay_ms: int
    def __init__(self, acks: _Optional[_Iterable[_Union[OffsetRange, _Mapping]]] = ..., nacks: _Optional[_Iterable[_Union[OffsetRange, _Mapping]]] = ..., nack_delay_ms: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("open", "acknowledge")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    open: OpenFetch
    acknowledge: Acknowledge
    def __init__(self, open: _Optional[_Union[OpenFetch, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("frames", "next_offset")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    frames: bytes
    next_offset: int
    def __init__(self, frames: _Optional[bytes] = ..., next_offset: _Optional[int] = ...) -> None: ...
