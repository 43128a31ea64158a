"""The catalog in an etcd cluster: for stores whose topics move between machines.

Reads are linearizable. A transaction that got no answer is not asked again: it may have happened.
A lease has whole seconds, and never fewer than the cluster's own minimum (about two).

`etcd.proto` has what is used of etcd's API.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from forebay.catalog import etcd_pb2 as pb
from forebay.catalog.etcd_channel import Call, Cluster, EtcdChannel, Method
from forebay.catalog.kv import (
    Change,
    Compare,
    Entry,
    Put,
    Remove,
    Watch,
    check_commit,
    check_key,
    check_range,
)
from forebay.errors import (
    LogClosed,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
    UsageError,
)

_RANGE: Final = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
_TXN: Final = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
_WATCH: Final = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
_GRANT: Final = Method(
    "/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse
)
_REVOKE: Final = Method(
    "/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse
)
_KEEP_ALIVE: Final = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
"""A stream that is used for one request and one answer, which on the wire is a plain call."""

_FIRST: Final = b"\0"
"""etcd has no empty key; this is the first."""

_RECONNECT_SECONDS: Final = 0.1
_LEASE_SECONDS_MAX: Final = 9_000_000_000


class EtcdKv:
    """A `Kv` in the cluster at `endpoints`, each `host:port`.

    With a `ca_file`, a `cert_file` or an `https://` the connection is encrypted. Nothing is asked
    until the first request.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        username: str | None = None,
        password: str | None = None,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
        timeout_seconds: float = 5.0,
    ) -> None:
        cluster = Cluster(tuple(endpoints), username, password, ca_file, cert_file, key_file)
        self._channel = EtcdChannel(cluster, timeout_seconds)

    @property
    def name(self) -> str:
        return self._channel.name

    def __repr__(self) -> str:
        return f"EtcdKv({self.name})"

    def get(self, key: str) -> Entry | None:
        request = pb.RangeRequest(key=check_key(key))
        found = self._channel.call(_RANGE, request, again=True).kvs
        return _entry(found[0]) if found else None

    def range(self, start: str, end: str, *, limit: int, descending: bool = False) -> list[Entry]:
        bounds = check_range(start, end, limit)
        if bounds is None:
            return []
        order = pb.RangeRequest.DESCEND if descending else pb.RangeRequest.ASCEND
        request = pb.RangeRequest(
            key=bounds[0] or _FIRST, range_end=bounds[1], limit=limit, sort_order=order
        )
        return [_entry(found) for found in self._channel.call(_RANGE, request, again=True).kvs]

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        check_commit(compares, writes)
        request = pb.TxnRequest(
            compare=[
                pb.Compare(
                    key=compare.key.encode(), target=pb.Compare.MOD, mod_revision=compare.revision
                )
                for compare in compares
            ],
            success=[_operation(write) for write in writes],
        )
        answer = self._channel.call(_TXN, request, again=False)
        return answer.header.revision if answer.succeeded else None

    def watch(self, start: str, end: str, *, after: int) -> Watch:
        bounds = check_range(start, end)
        if bounds is None:
            raise UsageError(f"a watch from {start!r} to {end!r}, where no key can be")
        if self._channel.closed.is_set():
            raise LogClosed(f"{self.name}: it was closed")
        return EtcdWatch(self._channel, bounds[0] or _FIRST, bounds[1], after)

    def revision(self) -> int:
        request = pb.RangeRequest(key=_FIRST, limit=1)
        return self._channel.call(_RANGE, request, again=True).header.revision

    def grant(self, ttl_seconds: float) -> int:
        if not 0 < ttl_seconds <= _LEASE_SECONDS_MAX:
            raise UsageError(f"a lease of {ttl_seconds} seconds")
        request = pb.LeaseGrantRequest(ttl=math.ceil(ttl_seconds))
        # A lease whose number got lost holds nothing, and ends.
        return self._channel.call(_GRANT, request, again=True).id

    def keep_alive(self, lease: int) -> float:
        request = pb.LeaseKeepAliveRequest(id=lease)
        ttl = self._channel.call(_KEEP_ALIVE, request, again=True).ttl
        if ttl <= 0:
            raise TopicFenced(f"{self.name}: the lease {lease} has ended")
        return float(ttl)

    def revoke(self, lease: int) -> None:
        try:
            self._channel.call(_REVOKE, pb.LeaseRevokeRequest(id=lease), again=True)
        except TopicFenced:
            return

    def close(self) -> None:
        self._channel.close()


def _entry(found: pb.KeyValue) -> Entry:
    return Entry(found.key.decode(), found.value, found.mod_revision, found.lease or None)


def _operation(write: Put | Remove) -> pb.RequestOp:
    key = write.key.encode()
    if isinstance(write, Remove):
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
    return pb.RequestOp(
        request_put=pb.PutRequest(key=key, value=bytes(write.value), lease=write.lease or 0)
    )


def _change(event: pb.Event) -> Change:
    removed = event.type == pb.Event.DELETE
    return Change(event.kv.key.decode(), None if removed else event.kv.value, event.kv.mod_revision)


class EtcdWatch:
    """A `Watch` that opens its stream again where the last one broke."""

    def __init__(self, channel: EtcdChannel, start: bytes, end: bytes, after: int) -> None:
        self._channel = channel
        self._start = start
        self._end = end
        self._after = after
        self._received: deque[Change] = deque()
        self._closed = threading.Event()
        self._call: Call | None = None
        self._forbidden = False

    def __iter__(self) -> Iterator[Change]:
        while not self._ended():
            ended = threading.Event()
            try:
                yield from self._stream(ended)
            except LogClosed:
                return
            except ServiceUnavailable:
                self._closed.wait(_RECONNECT_SECONDS)
            finally:
                ended.set()

    def close(self) -> None:
        self._closed.set()
        call = self._call
        if call is not None:
            call.cancel()

    def _ended(self) -> bool:
        return self._closed.is_set() or self._channel.closed.is_set()

    def _stream(self, ended: threading.Event) -> Iterator[Change]:
        while self._received:
            yield self._received.popleft()
        for response in self._channel.stream(_WATCH, self._requests(ended), self._started):
            self._take(response)
            while self._received and not self._ended():
                yield self._received.popleft()
            if self._ended():
                return

    def _requests(self, ended: threading.Event) -> Iterator[pb.WatchRequest]:
        yield pb.WatchRequest(
            create_request=pb.WatchCreateRequest(
                key=self._start,
                range_end=self._end,
                start_revision=self._after + 1,
                progress_notify=True,
            )
        )
        ended.wait()  # the server ends the stream when it hears that nothing more will be asked

    def _started(self, call: Call) -> None:
        self._call = call
        if self._ended():
            call.cancel()

    def _take(self, response: pb.WatchResponse) -> None:
        """The answer's changes have been received, and how far the watch has got is known."""
        if response.canceled:
            self._cancelled(response)
        elif response.events:
            self._forbidden = False
            self._received.extend(_change(event) for event in response.events)
            # The header's revision may be ahead of a backlog that comes in pieces.
            self._after = response.events[-1].kv.mod_revision
        elif not response.created:
            self._after = max(self._after, response.header.revision)

    def _cancelled(self, response: pb.WatchResponse) -> None:
        name = self._channel.name
        if response.compact_revision:
            raise ServiceError(
                f"{name}: the changes after revision {self._after} are no longer known; "
                "read the range, and watch from there"
            )
        # etcd 3.5 says the same of a token that has run out: log in again, once.
        if "permission denied" in response.cancel_reason:
            if self._forbidden:
                raise ServiceRefused(f"{name}: {response.cancel_reason}")
            self._forbidden = True
            self._channel.forget_token()
        raise ServiceUnavailable(f"{name}: {response.cancel_reason}")
