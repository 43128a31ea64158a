"""`ProducerCore`: sends messages in batches over a ProduceStream, and gives each its offset.

Messages are added by any thread, and sent by tasks of one event loop. A batch is sent at once if
none is on its way, otherwise when the one before was acknowledged, when it is full, or after
LINGER_SECONDS. Several batches may be on their way.

After a lost connection the stream is opened again. Batches without an answer are sent again, just
as they were, by an idempotent producer: the server knows their numbers. Those of another producer
may or may not be stored, and fail with MaybeStored.

`AsyncProducer` and `Producer` in `forebay.broker.client` are the public interfaces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from forebay.broker import streams_pb2 as pb
from forebay.broker.connection import Attempts, Connection
from forebay.errors import (
    ForebayError,
    LogClosed,
    MaybeStored,
    MessageTooLarge,
    ProducerReplaced,
    ServiceError,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.layout import Buffer
from forebay.limits import KIB, MIB, STREAM_BATCH_BYTES_MAX, STREAM_BATCH_MESSAGES_MAX

LINGER_SECONDS: Final = 0.001
_BATCH_BYTES: Final = 512 * KIB
"""A batch is full with this many bytes, unless a single message is larger."""
_BATCH_MESSAGES: Final = 10_000
_BATCHES_MAX: Final = 32
"""Batches on their way. The server remembers the offsets of more than these."""
_MESSAGE_BYTES: Final = 16
"""What a message takes in a batch besides its contents, at most."""
IN_FLIGHT_BYTES: Final = 8 * MIB


@dataclass(slots=True)
class Chunk:
    """Messages that were sent together, and the future that gets their offsets."""

    payloads: Sequence[Buffer]
    attributes: Sequence[Mapping[str, str] | None] | None
    keys: Sequence[str | None] | None
    future: Any
    """A future of asyncio or of concurrent.futures."""
    single: bool
    """Whether the future is of one offset, and not of a list."""
    direct: bool
    """Whether the caller waits for the future, so that nobody else has to be told of an error."""
    size: int

    def succeed(self, offsets: Sequence[int | None]) -> None:
        if not self.future.done():
            self.future.set_result(offsets[0] if self.single else offsets)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # asyncio does not complain of one that nobody awaits


@dataclass(slots=True)
class Batch:
    """What one request holds."""

    chunks: list[Chunk]
    count: int
    size: int
    request: bytes = b""
    first: int = 0
    """The number of its first message; 0 if the producer is not idempotent."""

    def succeed(self, response: pb.ProduceResponse) -> None:
        new = range(response.first_offset, response.end_offset)
        offsets: Sequence[int | None] = new
        if len(new) < self.count:  # the others were stored earlier, and their offsets are unknown
            offsets = [None] * (self.count - len(new)) + list(new)
        at = 0
        for chunk in self.chunks:
            after = at + len(chunk.payloads)
            chunk.succeed(offsets[at:after])
            at = after


def chunk_bytes(
    payloads: Sequence[Buffer],
    attributes: Sequence[Mapping[str, str] | None] | None,
    keys: Sequence[str | None] | None,
) -> int:
    """About what the messages take in a request, and not less."""
    size = sum(map(len, payloads)) + _MESSAGE_BYTES * len(payloads)
    for each in attributes or ():
        size += _MESSAGE_BYTES + sum(
            4 * (len(key) + len(value)) + _MESSAGE_BYTES for key, value in (each or {}).items()
        )
    for key in keys or ():
        size += 4 * len(key or "") + _MESSAGE_BYTES
    return size


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    topic: str
    name: str
    idempotent: bool = False
    durability: str | None = None
    timeout: float = 60.0
    """How long to try to reach the server before everything that waits fails."""
    in_flight_bytes: int = IN_FLIGHT_BYTES
    linger_seconds: float = field(default=LINGER_SECONDS)


class ProducerCore:
    """One producer. `pending` may be extended by any thread; everything else is the loop's."""

    def __init__(
        self, connection: Connection, options: ProducerOptions, settled: Callable[[int], None]
    ) -> None:
        """`settled` is called with the bytes of messages that have got their results."""
        self.options = options
        self.pending: deque[Chunk] = deque()
        self.more = asyncio.Event()
        """Set it after `pending` was extended."""
        self.failure: ForebayError | None = None
        """Once this is set, nothing more is sent."""
        self.last_sequence = 0
        """The number of the last message that the server has acknowledged."""
        self.opened = asyncio.Event()
        """Set when the stream was open for the first time, or failed."""
        self._connection = connection
        self._settled = settled
        self._attempts = Attempts(options.timeout)
        self._sent: deque[Batch] = deque()
        self._next_sequence = 0
        self._answered = asyncio.Event()
        self._closing = False
        self._unreported: ForebayError | None = None
        self.task = asyncio.create_task(self._run())

    # -- the end --------------------------------------------------------------------------------

    async def close(self) -> None:
        """Waits until everything was sent and answered. Idempotent."""
        self._closing = True
        self.more.set()
        await asyncio.wait({self.task})

    async def abandon(self) -> None:
        """Ends without waiting for anything."""
        self.task.cancel()
        await asyncio.wait({self.task})

    def _fail(self, error: ForebayError) -> None:
        """Nothing more is sent: everything that waits gets the error."""
        self.failure = error
        self._fail_sent(error)
        self.fail_pending()
        self.opened.set()

    def fail_pending(self) -> None:
        """Fails what was added, if the producer has failed; call it after adding."""
        while self.failure is not None and self.pending:
            self._fail_chunk(self.pending.popleft(), self.failure)

    def _fail_sent(self, error: ForebayError) -> None:
        while self._sent:
            for chunk in self._sent.popleft().chunks:
                self._fail_chunk(chunk, error)

    def _fail_chunk(self, chunk: Chunk, error: ForebayError) -> None:
        if not chunk.direct:
            self._unreported = self._unreported or error
        chunk.fail(error)
        self._settled(chunk.size)

    def raise_unreported(self) -> None:
        """Raises the first error, since the last call, of a message that nobody waits for."""
        error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    # -- connections ----------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._done:
                try:
                    await self._stream()
                except grpc.aio.AioRpcError as error:
                    await self._lost(self._connection.error(error))
        except ForebayError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ServiceError(f"{self.options.topic}: the producer failed: {error!r}"))
            raise
        except asyncio.CancelledError:
            self._fail(LogClosed(f"{self.options.topic}: the producer was closed"))
            raise

    @property
    def _done(self) -> bool:
        return self._closing and not self.pending and not self._sent

    async def _lost(self, error: ForebayError) -> None:
        """Decides what an ended stream means; raises if it is the end of the producer."""
        if not isinstance(error, ServiceUnavailable):
            raise error
        if not self.options.idempotent:
            unknown = MaybeStored(
                f"{self.options.topic}: the connection was lost before the answer, so the message "
                f"may or may not be stored: {error}"
            )
            self._fail_sent(unknown)
        if self.pending or self._sent or not self.opened.is_set():
            await self._attempts.failed(error)
            return
        self.more.clear()
        self._attempts.succeeded()
        if not self._closing:  # nobody waits, so nobody has to be told that the server is away
            await self.more.wait()

    async def _stream(self) -> None:
        """Opens a stream and uses it until it ends, or until there is nothing to send any more."""
        call = self._connection.stream("ProduceStream")
        try:
            await call.write(self._open_request())
            raw = await call.read()
            if not isinstance(raw, bytes):
                raise await _status(call)
            self._continue(pb.ProduceResponse.FromString(raw).last_sequence)
            sending = asyncio.create_task(self._send(call))
            receiving = asyncio.create_task(self._receive(call))
            try:
                await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                sending.cancel()
                receiving.cancel()
                await asyncio.wait({sending, receiving})
            for task in (receiving, sending):
                if not task.cancelled():
                    task.result()
        finally:
            call.cancel()

    def _open_request(self) -> bytes:
        options = self.options
        opened = pb.OpenProducer(
            topic=options.topic,
            producer_name=options.name,
            idempotent=options.idempotent,
            durability=options.durability or "",
        )
        return pb.ProduceRequest(open=opened).SerializeToString()

    def _continue(self, stored: int) -> None:
        """Compares what the server has with what was sent before."""
        if self.options.idempotent:
            if not self.opened.is_set():
                self._next_sequence, self.last_sequence = stored + 1, stored
            if stored >= self._next_sequence:
                raise ProducerReplaced(
                    f"{self.options.topic}: another process has sent messages as "
                    f"{self.options.name!r}; find it, and give each producer a name of its own"
                )
            if stored < self.last_sequence:
                raise MaybeStored(
                    f"{self.options.topic}: the server knows the messages of {self.options.name!r} "
                    f"up to number {stored}, but has acknowledged {self.last_sequence}: messages "
                    "were lost, or the producer was forgotten; use another name"
                )
        self.opened.set()

    # -- sending and receiving ------------------------------------------------------------------

    async def _send(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        try:
            for batch in list(self._sent):  # those without an answer, of an earlier stream
                await call.write(batch.request)
            while not self._done:
                await self._gather()
                if self.pending and len(self._sent) < _BATCHES_MAX:
                    batch = self._take()
                    self._sent.append(batch)
                    await call.write(batch.request)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended, and reading it tells why

    async def _gather(self) -> None:
        """Waits until there is something to send, and it is time to."""
        while not self.pending and not self._done:
            self.more.clear()
            if not self.pending and not self._done:
                await self.more.wait()
        if not self._sent:
            await asyncio.sleep(0)  # others of this turn of the loop may add to the batch
            return
        self._answered.clear()
        full = len(self._sent) >= _BATCHES_MAX
        if full or not self._enough():
            timeout = None if full else self.options.linger_seconds
            try:
                await asyncio.wait_for(self._answered.wait(), timeout)
            except TimeoutError:
                return

    def _enough(self) -> bool:
        size = count = 0
        for chunk in self.pending.copy():
            size += chunk.size
            count += len(chunk.payloads)
            if size >= _BATCH_BYTES or count >= _BATCH_MESSAGES:
                return True
        return False

    def _take(self) -> Batch:
        """Makes a batch of pending messages."""
        batch = Batch([self.pending.popleft()], 0, 0)
        batch.size, batch.count = batch.chunks[0].size, len(batch.chunks[0].payloads)
        while self.pending:
            chunk = self.pending[0]
            size, count = batch.size + chunk.size, batch.count + len(chunk.payloads)
            if size > _BATCH_BYTES or count > _BATCH_MESSAGES:
                break
            batch.chunks.append(self.pending.popleft())
            batch.size, batch.count = size, count
        if self.options.idempotent:
            batch.first = self._next_sequence
            self._next_sequence += batch.count
        batch.request = _encoded(batch)
        return batch

    async def _receive(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        while isinstance(raw := await call.read(), bytes):
            if not self._sent:
                raise ServiceUnavailable("the server has answered more often than it was asked")
            batch = self._sent.popleft()
            response = pb.ProduceResponse.FromString(raw)
            self._attempts.succeeded()
            if batch.first:
                self.last_sequence = batch.first + batch.count - 1
            batch.succeed(response)
            self._settled(batch.size)
            self._answered.set()
            if self._closing:
                self.more.set()
        error = await _status(call)
        if not self._done:
            raise error


def _encoded(batch: Batch) -> bytes:
    request = pb.ProduceRequest()
    found = request.batch
    found.first_sequence = batch.first
    attributed = any(chunk.attributes is not None for chunk in batch.chunks)
    keyed = any(chunk.keys is not None for chunk in batch.chunks)
    for chunk in batch.chunks:
        found.payloads.extend(
            each if type(each) is bytes else bytes(each) for each in chunk.payloads
        )
        if attributed:
            for each in chunk.attributes or [None] * len(chunk.payloads):
                found.attributes.add().values.update(each or {})
        if keyed:
            for key in chunk.keys or [None] * len(chunk.payloads):
                added = found.keys.add()
                if key is not None:
                    added.value = key
    return request.SerializeToString()


async def _status(call: grpc.aio.StreamStreamCall[Any, Any]) -> Exception:
    """The status of a call that the server has ended, as an error in any case."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return ServiceUnavailable("the server has ended the stream")
    return grpc.aio.AioRpcError(
        code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def split(
    payloads: Sequence[Buffer],
    attributes: Sequence[Mapping[str, str] | None] | None,
    keys: Sequence[str | None] | None,
) -> list[slice]:
    """Cuts messages into parts that fit into a request. Raises MessageTooLarge and UsageError."""
    for name, column in (("attributes", attributes), ("routing_keys", keys)):
        if column is not None and len(column) != len(payloads):
            raise UsageError(
                f"{len(payloads)} payloads, but {len(column)} {name}; give one for each payload"
            )
    for each in attributes or ():
        for text in (text for pair in (each or {}).items() for text in pair):
            _require_text("an attribute", text)
    for key in keys or ():
        if key is not None:
            _require_text("a routing key", key)
    parts: list[slice] = []
    begin = size = 0
    for at in range(len(payloads)):
        one = chunk_bytes(
            payloads[at : at + 1],
            None if attributes is None else attributes[at : at + 1],
            None if keys is None else keys[at : at + 1],
        )
        if one > STREAM_BATCH_BYTES_MAX - KIB:
            raise MessageTooLarge(
                f"a message of {one} bytes; at most {STREAM_BATCH_BYTES_MAX - KIB} are allowed"
            )
        if at > begin and (size + one > _BATCH_BYTES or at - begin >= _BATCH_MESSAGES):
            parts.append(slice(begin, at))
            begin, size = at, 0
        size += one
    parts.append(slice(begin, len(payloads)))
    return parts


def _require_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise UsageError(f"{what} is {type(text).__name__}; it must be a str")


assert _BATCH_MESSAGES <= STREAM_BATCH_MESSAGES_MAX
assert _BATCH_BYTES < STREAM_BATCH_BYTES_MAX
