"""Reads the query and the body of a request, with strict checks and size limits.

A query is declared as a structure: `read_query` checks and converts its parameters, and the OpenAPI
document describes them from the same declaration.

`RequestBody` reads a body whole, within limits of size, memory and time. It reserves bytes of the
server's `ByteBudget` as they arrive, never by what the header says, so that a silent client holds
nothing. Each reservation doubles what has come, so that a large body does not wait for the budget
with every chunk. A client that sends nothing for some seconds is not waited for.

Beware: always call `release` on the body in the end, even if the request is refused.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from forebay.admin.records import explain, rule, schema_of
from forebay.errors import MessageTooLarge, ServiceUnavailable, UsageError, WaitTimeout
from forebay.format.names import TopicName, parse_topic
from forebay.limits import OFFSET_MAX
from forebay.metrics import Gauge

PENDING: Final = Gauge("forebay_http_pending_bytes", "Bodies of requests that are under way.")
BODY_SECONDS: Final = 60.0
"""The time limit for receiving a whole body, including the wait for its byte budget."""
STALL_SECONDS: Final = 10.0
"""The time limit for the next chunk of a body."""
LONG_STALL_SECONDS: Final = 600.0
"""The time limit for the next bytes of a long transfer: a task that stages rows may be slow."""
BUDGET_WAIT_SECONDS: Final = 5.0
"""How long a request may wait for bytes of the budget."""
_PARAMETERS_MAX: Final = 2048
_SHOWN: Final = 40
_BOOLEANS: Final = {"true": True, "false": False}
_DIGITS_MAX: Final = len(str(OFFSET_MAX))


# ---- a small body -----------------------------------------------------------------------------


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Reads a body of a few kilobytes; UsageError if it is larger. See `RequestBody` for others."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise UsageError(f"the body is larger than {bytes_max} bytes")
    return bytes(body)


# ---- path and query ---------------------------------------------------------------------------


def topic_of(path_params: dict[str, str]) -> TopicName:
    """The topic that a request's path names."""
    return parse_topic(f"/{path_params['namespace']}/{path_params['topic']}")


_Q = TypeVar("_Q", bound=Struct)


def read_query(raw: bytes, kind: type[_Q], *, lenient: bool = False) -> _Q:
    """The parameters of a query as a structure; UsageError if one is wrong.

    A parameter that is unknown or comes twice is refused: with a mistyped name, a default would
    otherwise be used silently. A lenient call ignores it, or takes the last one.
    """
    try:
        pairs = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_PARAMETERS_MAX,
        )
    except ValueError as error:  # UnicodeDecodeError is one
        raise UsageError("the query cannot be read: it must be UTF-8, percent-encoded") from error
    known = query_schema(kind)["properties"]
    texts: dict[str, list[str]] = {}
    for name, text in pairs:
        if name in known:
            texts.setdefault(name, []).append(text)
        elif not lenient:
            names = ", ".join(sorted(known)) or "none"
            raise UsageError(f"unknown parameter {name[:_SHOWN]!r}; known ones: {names}")
    if lenient:
        texts = {name: given[-1:] for name, given in texts.items()}
    found = {name: _from_texts(name, given, known[name]) for name, given in texts.items()}
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        wrong = next((name for name in found if f"`$.{name}" in str(error)), None)
        if wrong is None:
            raise UsageError(explain(error, kind).replace("key", "parameter", 1)) from error
        raise _wrong(wrong, texts[wrong][0], known[wrong]) from error


def query_schema(kind: type[Struct]) -> dict[str, Any]:
    """The JSON schema of a query: its fields are the parameters."""
    found: dict[str, Any] = schema_of(kind)["$defs"][kind.__name__]
    return found


def _from_texts(name: str, texts: list[str], schema: dict[str, Any]) -> object:
    """Converts a parameter to the JSON type of its schema, or leaves it if it does not fit."""
    kinds = {each.get("type") for each in schema.get("anyOf", [schema])}
    if "array" in kinds:
        return texts
    if len(texts) > 1:
        raise UsageError(f"{name} is given twice")
    text = texts[0]
    # The length first: int() of very many digits is slow.
    if "integer" in kinds and len(text) <= _DIGITS_MAX and text.isascii() and text.isdigit():
        return int(text)
    if "boolean" in kinds:
        return _BOOLEANS.get(text, text)
    if "number" in kinds:
        return _float(text)
    return text


def _float(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _wrong(name: str, text: str, schema: dict[str, Any]) -> UsageError:
    return UsageError(f"{name} is {text[:_SHOWN]!r}; it must be {rule(schema)}")


def offset_of(path_params: dict[str, str]) -> int:
    """The offset that a request's path names."""
    schema = {"type": "integer", "minimum": 0, "maximum": OFFSET_MAX}
    found = _from_texts("offset", [path_params["offset"]], schema)
    if isinstance(found, int) and found <= OFFSET_MAX:
        return found
    raise _wrong("offset", path_params["offset"], schema)


# ---- body -------------------------------------------------------------------------------------


class RequestBody:
    def __init__(
        self,
        receive: Receive,
        budget: ByteBudget,
        headers: dict[bytes, bytes],
        bytes_max: int,
        limit: str,
        *,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Raises MessageTooLarge if Content-Length exceeds the limit, which errors call `limit`."""
        self._receive = receive
        self._budget = budget
        self._length = _content_length(headers)
        self._bytes_max = bytes_max
        self._limit = limit
        self._stall_seconds = stall_seconds
        self._reserved = 0
        if self._length is not None and self._length > bytes_max:
            raise self._too_large()

    async def read(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        clock = asyncio.get_running_loop().time
        last = clock() + BODY_SECONDS
        try:
            async with asyncio.timeout_at(min(clock() + self._stall_seconds, last)) as timeout:
                more = True
                while more:
                    chunk, more = await self._next()
                    chunks.append(chunk)
                    size += len(chunk)
                    await self._reserve(size, more=more)
                    timeout.reschedule(min(clock() + self._stall_seconds, last))
        except TimeoutError as error:
            raise WaitTimeout(
                f"the body is incomplete: after {size} bytes no more arrived for "
                f"{self._stall_seconds:.0f} seconds, or not all arrived within "
                f"{BODY_SECONDS:.0f} seconds: nothing was taken"
            ) from error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Returns its bytes to the budget. Idempotent."""
        self._budget.release(self._reserved)
        self._reserved = 0

    async def _next(self) -> tuple[bytes, bool]:
        message: Any = await self._receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)

    async def _reserve(self, size: int, *, more: bool) -> None:
        """Waits until the budget has at least `size` bytes for this body."""
        if size > self._bytes_max:
            raise self._too_large()
        if size > self._reserved:
            most = self._bytes_max if self._length is None else max(self._length, size)
            step = (min(2 * size, most) if more else size) - self._reserved
            await self._budget.acquire(step)
            self._reserved += step

    def _too_large(self) -> MessageTooLarge:
        return MessageTooLarge(
            f"the body is larger than {self._bytes_max} bytes ({self._limit}): send it in several "
            "requests; nothing was taken"
        )


def _content_length(headers: dict[bytes, bytes]) -> int | None:
    text = headers.get(b"content-length")
    if text is None or b"transfer-encoding" in headers:
        return None
    if not text.isdigit() or len(text) > 19:
        raise UsageError("Content-Length is not a number")
    return int(text)


class ByteBudget:
    """Limits the bytes that requests hold in the server's memory. For one event loop.

    Waiting requests are served in the order of their arrival, so that small requests cannot starve
    a large one.
    """

    def __init__(
        self, bytes_max: int, wait_seconds: float | None, limit: str, gauge: Gauge = PENDING
    ) -> None:
        """`limit` is the name of the limit in errors; `gauge` shows the bytes in use.

        With `wait_seconds` None a request waits for as long as it takes.
        """
        self._limit = limit
        self._gauge = gauge
        self._bytes_max = bytes_max
        self._wait_seconds = wait_seconds
        self._waiting: deque[tuple[int, asyncio.Future[None], float]] = deque()
        """The bytes that each one wants, its turn, and since when it waits."""
        self.used = 0

    @property
    def contended(self) -> bool:
        """Whether a request waits for bytes."""
        return bool(self._waiting)

    def waited_seconds(self) -> float:
        """How long the request whose turn is next has waited."""
        return time.monotonic() - self._waiting[0][2] if self._waiting else 0.0

    def try_acquire(self, size: int, used_max: int) -> bool:
        """Reserves the bytes, unless a request waits or more than `used_max` would be in use."""
        if self._waiting or self.used + size > used_max:
            return False
        self._add(size)
        return True

    async def acquire(self, size: int) -> None:
        """Returns once the bytes are reserved; ServiceUnavailable if that takes too long."""
        if not self._waiting and self.used + size <= self._bytes_max:
            self._add(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (size, turn, time.monotonic())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(size)  # granted at the very moment of giving up
            else:
                with suppress(ValueError):  # already removed by `_grant_waiting`
                    self._waiting.remove(waiting)
                self._grant_waiting()
            if isinstance(error, TimeoutError):
                raise ServiceUnavailable(
                    f"the server holds {self.used} bytes of other requests "
                    f"({self._limit}), and had no room in time: nothing was taken; "
                    "send the request again"
                ) from error
            raise

    def release(self, size: int) -> None:
        self._add(-size)
        self._grant_waiting()

    def _add(self, size: int) -> None:
        self.used += size
        self._gauge.add(size)

    def _grant_waiting(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self._bytes_max:
            size, turn, _ = self._waiting.popleft()
            if not turn.done():
                self._add(size)
                turn.set_result(None)
