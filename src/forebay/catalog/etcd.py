"""The catalog in an etcd cluster, for stores whose topics move between machines.

`EtcdKv` implements `Kv`. `EtcdChannel` sends its requests and handles endpoints, TLS, log-in,
deadlines and errors. `etcd.proto` declares the part of etcd's API that is used. No other module
uses gRPC.

Reads are linearizable. One endpoint is used at a time, and the next one after a failure. Requests
that can be repeated are retried until their deadline. A transaction cannot: it is sent again only
if it certainly was not sent, or if etcd refused its token. A lease has whole seconds, and at least
the cluster's minimum (about two).

Beware: the timeout is for the whole request, not for each endpoint. And gRPC does not survive a
fork: all channels are closed before a fork, and the parent opens new ones. A child that used gRPC
would hang now and then (measured: 7 of 150 children, and 1 of 150 with gRPC's own support of
forks), so it is refused. Connect after forking, or use spawn.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc

from forebay.catalog import etcd_pb2 as pb
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
    deadline_of_request,
)
from forebay.errors import (
    ForebayError,
    InvalidSetting,
    LogClosed,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
    UsageError,
)
from forebay.forks import registering
from forebay.limits import CATALOG_PAGE, CATALOG_VALUE_BYTES_MAX, MIB

Request = TypeVar("Request", bound="pb.Message")
Response = TypeVar("Response", bound="pb.Message")

_PAUSE_SECONDS: Final = 0.02
_PAUSE_SECONDS_MAX: Final = 0.25
_RECONNECT_SECONDS: Final = 0.1
_LEASE_SECONDS_MAX: Final = 9_000_000_000
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", (CATALOG_PAGE + 1) * CATALOG_VALUE_BYTES_MAX),
    ("grpc.max_send_message_length", 2 * MIB),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd closes connections that ping every 5 s or more often
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_TOKEN: Final = re.compile("invalid auth token|revision of auth store is old")
_UNSENT: Final = re.compile("failed to connect to all addresses|resolution failed", re.IGNORECASE)
_CERTIFICATE: Final = re.compile("CERTIFICATE_VERIFY_FAILED|Peer name .* not in peer certificate")
_REFUSED: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
_FIRST: Final = b"\0"
"""The first possible key: etcd has no empty key."""


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    path: str
    request: type[Request]
    response: type[Response]


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
"""A stream used for one request and one response; on the wire that is a unary call."""
_AUTHENTICATE: Final = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)


class EtcdKv:
    """A `Kv` in the cluster at `endpoints`, each `host:port`. Thread-safe.

    The connection uses TLS if there is a `ca_file` or a `cert_file`, or if an endpoint begins with
    `https://`. The constructor does not connect. It raises InvalidSetting.
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

    def range(self, start: str, end: str, *, limit: int) -> list[Entry]:
        bounds = check_range(start, end, limit)
        if bounds is None:
            return []
        # Without a sort order: etcd returns entries by key in any case, and if it is asked to sort
        # it reads the whole range before it applies the limit.
        request = pb.RangeRequest(key=bounds[0] or _FIRST, range_end=bounds[1], limit=limit)
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
        response = self._channel.call(_TXN, request, again=False)
        return response.header.revision if response.succeeded else None

    def watch(self, start: str, end: str, *, after: int) -> Watch:
        bounds = check_range(start, end)
        if bounds is None:
            raise UsageError(f"the watch from {start!r} to {end!r} covers no key")
        if self._channel.closed.is_set():
            raise LogClosed(f"{self.name} is closed")
        return EtcdWatch(self._channel, bounds[0] or _FIRST, bounds[1], after)

    def revision(self) -> int:
        request = pb.RangeRequest(key=_FIRST, limit=1)
        return self._channel.call(_RANGE, request, again=True).header.revision

    def grant(self, ttl_seconds: float) -> int:
        if not 0 < ttl_seconds <= _LEASE_SECONDS_MAX:
            raise UsageError(
                f"a lease of {ttl_seconds} seconds; it must be more than 0 and at most "
                f"{_LEASE_SECONDS_MAX}"
            )
        request = pb.LeaseGrantRequest(ttl=math.ceil(ttl_seconds))
        # If the response is lost, the unused lease expires.
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
    """A `Watch` that reopens its stream at the revision where the last one broke."""

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
        ended.wait()  # the server ends the stream once the requests end

    def _started(self, call: Call) -> None:
        self._call = call
        if self._ended():
            call.cancel()

    def _take(self, response: pb.WatchResponse) -> None:
        """Stores the changes of the response, and the revision that the watch has reached."""
        if response.canceled:
            self._cancelled(response)
        elif response.events:
            self._forbidden = False
            self._received.extend(_change(event) for event in response.events)
            # Not the header's revision: a backlog comes in several responses, and it is ahead.
            self._after = response.events[-1].kv.mod_revision
        elif not response.created:
            self._after = max(self._after, response.header.revision)

    def _cancelled(self, response: pb.WatchResponse) -> None:
        name = self._channel.name
        if response.compact_revision:
            raise ServiceError(
                f"{name}: the changes after revision {self._after} are no longer known; "
                "read the range again, and watch from its revision"
            )
        # etcd 3.5 also says this of an expired token, so log in again, once.
        if "permission denied" in response.cancel_reason:
            if self._forbidden:
                raise ServiceRefused(f"{name}: {response.cancel_reason}")
            self._forbidden = True
            self._channel.forget_token()
        raise ServiceUnavailable(f"{name}: {response.cancel_reason}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The endpoints, user and certificates of a cluster; InvalidSetting if they do not fit."""

    endpoints: tuple[str, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if not self.endpoints or any("@" in endpoint for endpoint in self.endpoints):
            raise InvalidSetting("metadata.endpoints must be a list of host:port, without a user")
        if (self.username is None) != (self.password is None):
            raise InvalidSetting("set both metadata.username and metadata.password, or neither")
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidSetting("set both metadata.cert_file and metadata.key_file, or neither")

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(re.sub("^https?://", "", item).rstrip("/") for item in self.endpoints)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Returns gRPC's credentials for TLS, or None for a connection without TLS."""
        secure = any(endpoint.startswith("https://") for endpoint in self.endpoints)
        if self.ca_file is None and self.cert_file is None and not secure:
            return None
        credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(
            _content(self.ca_file), _content(self.key_file), _content(self.cert_file)
        )
        return credentials


def _content(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidSetting(
            f"{path} cannot be read: {error.strerror}; check the files of metadata"
        ) from error


class Call(Protocol):
    """A running stream of responses. `cancel` ends it and may be called from any thread."""

    def __iter__(self) -> Iterator[Any]: ...

    def cancel(self) -> object: ...


class _Failure:
    """A gRPC error, classified: which error to raise, and whether the request was sent."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code = error.code()
        self.text = str(error.details())
        self.token = bool(_TOKEN.search(self.text))
        self.unsent = self.code is grpc.StatusCode.UNAVAILABLE and bool(_UNSENT.search(self.text))

    def error(self, name: str) -> ForebayError:
        text = f"{name}: {self.text} ({self.code.name})"
        if self.code is grpc.StatusCode.NOT_FOUND and "lease not found" in self.text:
            return TopicFenced(f"{name}: the lease has ended")
        if self.code in _REFUSED or _CERTIFICATE.search(self.text):
            return ServiceRefused(f"{text}; check the user, its permissions and the certificates")
        if self.code is grpc.StatusCode.OUT_OF_RANGE:
            return ServiceError(text)
        return ServiceUnavailable(f"{text}; try again")


class EtcdChannel:
    """Sends requests to one endpoint of the cluster at a time, logged in. Thread-safe."""

    def __init__(self, cluster: Cluster, timeout_seconds: float) -> None:
        self._cluster = cluster
        self._credentials = cluster.credentials()
        self._timeout = timeout_seconds
        self.name = f"the catalog in etcd at {', '.join(cluster.targets)}"
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._gate = threading.Condition(threading.Lock())
        self._asking = 0
        self._forking = False
        self._forked = False
        self._channels: dict[int, grpc.Channel] = {}
        self._calls: dict[tuple[int, str], Callable[..., Any]] = {}
        self._current = 0
        self._token: str | None = None
        with registering(self):
            pass

    def call(
        self,
        method: Method[Request, Response],
        request: Request,
        *,
        again: bool,
        deadline: float | None = None,
    ) -> Response:
        """Sends the request and returns its response.

        `again` says that the request may be sent more than once. `deadline` is monotonic time; the
        channel's timeout is used without it. Raises ServiceError, TopicFenced if the request names
        a lease that has ended, and LogClosed.
        """
        deadline = deadline_of_request(self._timeout) if deadline is None else deadline
        if time.monotonic() >= deadline:
            raise ServiceUnavailable(f"{self.name}: there was no time left to ask it; try again")
        pause = _PAUSE_SECONDS
        tokens = 0
        while True:
            token = None if method is _AUTHENTICATE else self._log_in(deadline)
            at = self._current
            try:
                with self._no_fork():
                    response: Response = self._callable(at, method)(
                        request,
                        timeout=self._attempt_seconds(deadline, again=again),
                        metadata=self._metadata(token),
                    )
            except grpc.RpcError as error:
                failure = _Failure(error)
                if failure.token and self._cluster.username is not None and tokens == 0:
                    tokens += 1
                    self.forget_token(token)
                    continue
                self._require_open()
                meaning = failure.error(self.name)
                if not isinstance(meaning, ServiceUnavailable):
                    raise meaning from error
                self._leave(at)
                late = time.monotonic() + pause >= deadline
                if late or not (again or failure.unsent):
                    raise meaning from error
            else:
                return response
            self.closed.wait(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)

    def stream(
        self,
        method: Method[Request, Response],
        requests: Iterator[Request],
        started: Callable[[Call], None],
    ) -> Iterator[Response]:
        """Opens a stream and yields its responses; raises ServiceUnavailable when it breaks.

        `started` gets the call before the first response, so that another thread can cancel it.
        """
        token = self._log_in(deadline_of_request(self._timeout))
        at = self._current
        with self._no_fork():
            call = self._callable(at, method, stream=True)(requests, metadata=self._metadata(token))
        started(call)
        try:
            yield from call
        except grpc.RpcError as error:
            failure = _Failure(error)
            if failure.token:
                self.forget_token(token)
            self._leave(at)
            if failure.token and self._cluster.username is not None:
                raise ServiceUnavailable(f"{self.name}: the log-in has expired") from error
            raise failure.error(self.name) from error
        finally:
            call.cancel()

    def forget_token(self, token: str | None = None) -> None:
        """Makes the next request log in again, unless a newer token than `token` is known."""
        with self._lock:
            if token is None or self._token == token:
                self._token = None

    def close(self) -> None:
        self.closed.set()
        self._close_channels()

    # ---- forks ----

    @contextmanager
    def _no_fork(self) -> Iterator[None]:
        if self._forked:
            raise LogClosed(
                f"{self.name} was opened before a fork, and belongs to the parent: open stores "
                "after forking"
            )
        with self._gate:
            self._gate.wait_for(lambda: not self._forking)
            self._asking += 1
        try:
            yield
        except ValueError as error:  # what gRPC raises for a channel that was just closed
            if self.closed.is_set():
                raise LogClosed(f"{self.name}: it was closed") from error
            raise
        finally:
            with self._gate:
                self._asking -= 1
                self._gate.notify_all()

    def before_fork(self) -> None:
        with self._gate:
            self._forking = True
            self._gate.wait_for(lambda: self._asking == 0, self._timeout)
        self._close_channels()

    def after_fork_in_parent(self) -> None:
        with self._gate:
            self._forking = False
            self._gate.notify_all()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._gate = threading.Condition(threading.Lock())
        self._asking, self._forking = 0, False
        self._forked = True

    # ---- inside ----

    def _require_open(self) -> None:
        if self.closed.is_set():
            raise LogClosed(f"{self.name} is closed")

    def _close_channels(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, {}
            self._calls = {}
        for channel in channels.values():
            channel.close()

    def _callable(
        self, at: int, method: Method[Request, Response], *, stream: bool = False
    ) -> Callable[..., Any]:
        found = self._calls.get((at, method.path))
        if found is not None:
            return found
        with self._lock:
            self._require_open()
            if at not in self._channels:
                self._channels[at] = self._connect(self._cluster.targets[at])
            channel = self._channels[at]
            make = channel.stream_stream if stream else channel.unary_unary
            made: Callable[..., Any] = make(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            self._calls[at, method.path] = made
            return made

    def _connect(self, target: str) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(target, options=_OPTIONS)
        return grpc.secure_channel(target, self._credentials, options=_OPTIONS)

    def _leave(self, at: int) -> None:
        """Makes the next request use the next endpoint, unless another thread already did."""
        with self._lock:
            if self._current == at:
                self._current = (at + 1) % len(self._cluster.endpoints)

    def _attempt_seconds(self, deadline: float, *, again: bool) -> float:
        """Returns the time left, or half of it if another endpoint can be tried afterwards."""
        left = max(0.001, deadline - time.monotonic())
        others = again and len(self._cluster.endpoints) > 1
        return left / 2 if others and left > _PAUSE_SECONDS_MAX else left

    def _metadata(self, token: str | None) -> list[tuple[str, str]]:
        # With this header, a member without a leader fails at once instead of at the deadline.
        return [("hasleader", "true")] + ([] if token is None else [("token", token)])

    def _log_in(self, deadline: float) -> str | None:
        self._require_open()
        if self._cluster.username is None or self._token is not None:
            return self._token
        assert self._cluster.password is not None
        request = pb.AuthenticateRequest(
            name=self._cluster.username, password=self._cluster.password
        )
        try:
            response = self.call(_AUTHENTICATE, request, again=True, deadline=deadline)
        except ServiceRefused as error:
            if "authentication is not enabled" in str(error):
                return None
            raise
        self._token = response.token
        return response.token
