"""`POST /v1/topics/{namespace}/{topic}/messages`: messages in.

A body is read whole, within limits, and checked whole before its first message is appended. All
its messages go in with one append, and wait together for the disk; nothing here waits for it on
the event loop, and no request has a thread of its own but one that waits for an upload.

What a caller gets wrong: an error after the append (the disk failed, the server stopped) does not
say that the messages are absent. A 4xx says so, and so does `"taken": false` in any error. Where
the objects did not come about, `synced` says how far the log has them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope

from forebay.admin.bodies import Batch, one_message, parse_lines
from forebay.admin.intake import STALL_SECONDS, Body
from forebay.admin.problems import nothing_taken
from forebay.admin.queries import Query, one_of, parse_query
from forebay.admin.room import ROOM_SECONDS, Room
from forebay.admin.site import Site, topic_of
from forebay.errors import ForebayError, ServiceUnavailable, UsageError, WaitTimeout
from forebay.limits import MIB
from forebay.metrics import Counter
from forebay.topic.store import AnyDurability, Topic

NDJSON: Final = b"application/x-ndjson"
_DURABILITIES: Final[tuple[AnyDurability, ...]] = ("buffered", "synced", "uploaded")
_STEP_BYTES: Final = 1 * MIB
_UPLOADS_MAX: Final = 32
_MESSAGES: Final = Counter("forebay_http_messages_appended_total", "Messages taken over HTTP.")


class Produce:
    """The handler, for one server."""

    def __init__(self, site: Site, *, stall_seconds: float = STALL_SECONDS) -> None:
        admin = site.settings.admin
        self._site = site
        self._bytes_max = admin.request_bytes_max
        self._messages_max = admin.request_messages_max
        self._stall_seconds = stall_seconds
        self._room = Room(admin.pending_bytes_max, ROOM_SECONDS, "admin.pending_bytes_max")
        self._uploads = asyncio.Semaphore(_UPLOADS_MAX)

    async def answer(self, scope: Scope, receive: Receive) -> Response:
        headers = dict(scope["headers"])
        lines = headers.get(b"content-type", b"").split(b";")[0].strip().lower() == NDJSON
        query = _query(scope["query_string"], lines=lines)
        durability = one_of(query, "durability", _DURABILITIES, "synced")
        name = topic_of(scope["path_params"])
        body = Body(
            receive,
            self._room,
            headers,
            self._bytes_max,
            "admin.request_bytes_max",
            stall_seconds=self._stall_seconds,
        )
        try:
            with nothing_taken():
                data = await body.read()
                batch = await self._batch(data, query, lines=lines)
                topic = self._site.store.opened(str(name))
                if topic is None:
                    topic = await asyncio.to_thread(self._site.topic, name)
            if durability == "uploaded":
                offsets = await self._upload(topic, batch)
            else:
                offsets = await topic.append_many_async(
                    batch.payloads, batch.attributes, batch.routing_keys, durability
                )
        finally:
            body.release()
        _MESSAGES.add(len(offsets))
        answer = {
            "topic": str(name),
            "first_offset": offsets.start,
            "next_offset": offsets.stop,
            "count": len(offsets),
            "durability": durability,
        }
        return Response(orjson.dumps(answer), media_type="application/json")

    async def _batch(self, data: bytes, query: Query, *, lines: bool) -> Batch:
        if not lines:
            return one_message(
                data, query.get("attribute", []), query.get("routing_key", [None])[0]
            )
        if len(data) <= _STEP_BYTES:
            return parse_lines(data, self._messages_max)
        return await asyncio.to_thread(parse_lines, data, self._messages_max)

    async def _upload(self, topic: Topic, batch: Batch) -> range:
        """Appends, and waits for the objects on a thread that a stop need not wait for."""
        if self._uploads.locked():
            with nothing_taken():
                raise ServiceUnavailable(
                    f"{_UPLOADS_MAX} requests wait for uploads already: nothing of this one was "
                    "taken, send it again, or with durability=synced"
                )
        async with self._uploads:
            offsets = await topic.append_many_async(
                batch.payloads, batch.attributes, batch.routing_keys, "synced"
            )
            last = offsets.stop - 1
            try:
                await self._unless_stopping(
                    _on_own_thread(lambda: topic.wait(last, durability="uploaded")), last
                )
            except ForebayError as error:
                raise _not_uploaded(offsets, error) from error
        return offsets

    async def _unless_stopping(self, uploaded: asyncio.Future[None], last: int) -> None:
        stopping = asyncio.create_task(self._site.stopping.wait())
        try:
            either: set[asyncio.Future[Any]] = {uploaded, stopping}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not uploaded.done():
            raise WaitTimeout(f"the server stops before the message at {last} is uploaded")
        uploaded.result()


def _not_uploaded(offsets: range, error: ForebayError) -> WaitTimeout:
    """Whatever went wrong, it is no refusal: the messages are in the log."""
    told = WaitTimeout(
        f"the messages from offset {offsets.start} to {offsets.stop - 1} are synced, and are not "
        f"uploaded: {error}; do not send them again"
    )
    vars(told).update(first_offset=offsets.start, synced=offsets.stop)
    return told


def _query(raw: bytes, *, lines: bool) -> Query:
    query = parse_query(raw, ("durability", "routing_key"), ("attribute",))
    for name in ("routing_key", "attribute"):
        if lines and name in query:
            raise UsageError(
                f"{name} goes with a body that is one payload; here it is in each line"
            )
    return query


def _on_own_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Runs what may take as long as an upload does, on a thread that nobody joins."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as error:  # noqa: BLE001  # raised again by whoever waits
            failure = error
        try:
            loop.call_soon_threadsafe(settle, failure)
        except RuntimeError:  # the loop is closed, and nobody waits any more
            return

    threading.Thread(target=run, name="forebay-http-upload", daemon=True).start()
    return done
