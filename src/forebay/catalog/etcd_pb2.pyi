# Types of the declarations in etcd.proto that are used.

from collections.abc import Iterable, Sequence
from typing import Self

class Message:
    def SerializeToString(self) -> bytes: ...  # noqa: N802 - protobuf's name
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...  # noqa: N802 - protobuf's name

class ResponseHeader(Message):
    revision: int

class KeyValue(Message):
    key: bytes
    mod_revision: int
    value: bytes
    lease: int

class RangeRequest(Message):
    def __init__(self, *, key: bytes, range_end: bytes = ..., limit: int = ...) -> None: ...

class RangeResponse(Message):
    header: ResponseHeader
    kvs: Sequence[KeyValue]

class PutRequest(Message):
    def __init__(self, *, key: bytes, value: bytes, lease: int = ...) -> None: ...

class DeleteRangeRequest(Message):
    def __init__(self, *, key: bytes) -> None: ...

class RequestOp(Message):
    def __init__(
        self, *, request_put: PutRequest = ..., request_delete_range: DeleteRangeRequest = ...
    ) -> None: ...

class Compare(Message):
    MOD: int
    def __init__(self, *, key: bytes, target: int, mod_revision: int) -> None: ...

class TxnRequest(Message):
    def __init__(self, *, compare: Iterable[Compare], success: Iterable[RequestOp]) -> None: ...

class TxnResponse(Message):
    header: ResponseHeader
    succeeded: bool

class Event(Message):
    PUT: int
    DELETE: int
    type: int
    kv: KeyValue

class WatchCreateRequest(Message):
    def __init__(
        self, *, key: bytes, range_end: bytes, start_revision: int, progress_notify: bool
    ) -> None: ...

class WatchRequest(Message):
    def __init__(self, *, create_request: WatchCreateRequest) -> None: ...

class WatchResponse(Message):
    header: ResponseHeader
    created: bool
    canceled: bool
    compact_revision: int
    cancel_reason: str
    events: Sequence[Event]

class LeaseGrantRequest(Message):
    def __init__(self, *, ttl: int) -> None: ...

class LeaseGrantResponse(Message):
    id: int
    ttl: int

class LeaseRevokeRequest(Message):
    def __init__(self, *, id: int) -> None: ...  # noqa: A002 - the field's name

class LeaseRevokeResponse(Message): ...

class LeaseKeepAliveRequest(Message):
    def __init__(self, *, id: int) -> None: ...  # noqa: A002 - the field's name

class LeaseKeepAliveResponse(Message):
    id: int
    ttl: int

class AuthenticateRequest(Message):
    def __init__(self, *, name: str, password: str) -> None: ...

class AuthenticateResponse(Message):
    token: str
