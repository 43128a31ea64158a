"""`forebay produce` and `forebay consume` through a running server, by HTTP.

`Sender` sends lines as they arrive, in requests of bounded size, one after the other. A request
that failed is not repeated, because that could store its lines twice. Its lines are known to be
refused only if the server says so, by a status or by `"taken": false`. After any other error it is
unknown whether they are stored, and the error message says which lines are confirmed.

`received` reconnects if the server goes away, for a bounded time, and continues at the next offset.
No message is printed twice or left out. The server at the address must then serve the same store:
offsets of another store mean nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from forebay.cli.messages import MessageParts, arriving_lines, payload_facts, sound_lines
from forebay.cli.options import connected, refused_token
from forebay.errors import (
    ForebayError,
    LogClosed,
    LostOffsets,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
    UsageError,
    WaitTimeout,
)
from forebay.format.names import TopicName
from forebay.limits import MIB
from forebay.settings import ServerAddress

if TYPE_CHECKING:
    from forebay.client.http import ServerClient


Durability = Literal["buffered", "synced", "uploaded"]

_BATCH_BYTES: Final = 1 * MIB
_BATCH_LINES: Final = 1000
_IDLE_SECONDS: Final = 1.0
"""A connection that was idle for longer is not used again: the server may be closing it."""
_BUSY_TRIES: Final = 30
_BUSY_SECONDS: Final = 1.0


@dataclass(slots=True)
class Sent:
    """What the server has confirmed."""

    topic: str
    first: int | None = None
    next: int | None = None
    count: int = 0
    stage: str = "synced"
    interrupted: bool = False
    doubt: str | None = None
    """Says which lines may or may not be stored, after an interrupt during a request."""


class Sender:
    """One run of `produce` through a server."""

    def __init__(
        self,
        client: ServerClient,
        topic: TopicName,
        durability: Durability,
        parts: MessageParts | None = None,
    ) -> None:
        self._client = client
        self._parts = parts or MessageParts()
        self._topic = topic
        self._messages = _path(topic, "messages")
        self._durability = durability
        self._used = 0.0
        self._held: list[bytes] = []
        """With `uploaded`, the newest lines, not sent yet: only the last request waits for uploads,
        and whether a request is the last one is known when the next lines arrive."""
        self._under_way: tuple[int, int] | None = None
        """The first and the last line of the request that is under way."""
        self._run: str | None = None
        """The run of the server that sent the last response."""
        self.sent = Sent(str(topic))

    def run(self) -> Sent:
        """Sends all lines until the input ends or the user interrupts; returns what is confirmed.

        UsageError for a line that is too long, ServiceUnavailable or ServiceRefused for a request
        that failed. Their messages say which lines are stored.
        """
        problem: UsageError | None = None
        try:
            problem = self._send_arriving()
        except KeyboardInterrupt:
            self.sent.interrupted = True
        if self._under_way is None:
            try:
                self._finish()
            except KeyboardInterrupt:
                self.sent.interrupted = True
        if self._under_way is not None:
            self.sent.doubt = f"interrupted; {self._doubt(*self._under_way)}"
        elif self.sent.next is None:
            self.sent.doubt = "interrupted; no line was sent"
        elif problem is not None:
            raise problem
        return self.sent

    def _send_arriving(self) -> UsageError | None:
        """Sends all lines. Stops before one that is too long, and returns the error for it."""
        plain: Durability = "buffered" if self._durability == "buffered" else "synced"
        arrived = 0
        for lines in arriving_lines():
            sound, problem = sound_lines(lines, arrived)
            arrived += len(lines)
            for batch in _batches(sound):
                self._send(self._held, plain)
                self._held = []
                if self._durability == "uploaded":
                    self._held = batch
                else:
                    self._send(batch, plain)
            if problem is not None:
                return problem
        return None

    def _finish(self) -> None:
        held, self._held = self._held, []
        if held:
            uploaded = not self.sent.interrupted
            self._send(held, "uploaded" if uploaded else "synced")
            self.sent.stage = "uploaded" if uploaded else "synced"
        elif self._durability == "buffered" and self.sent.next is not None:
            self._await_synced(self.sent.next - 1)
        elif self.sent.next is None:
            self._create_topic()

    def _create_topic(self) -> None:
        """Creates the topic although no line was sent, as `produce` does without a server."""
        path = _path(self._topic)
        self._request("PUT", path)
        end = self._request("GET", path, {"limit": 0}).get("appended") or 0
        self.sent.first = self.sent.next = int(end)

    def _request(self, method: str, path: str, query: dict[str, str | int] | None = None) -> Any:
        try:
            return self._client.json(method, path, query=query)
        except ServiceRefused as error:
            raise refused_token(error, self._client.address) from error

    def _await_synced(self, last: int) -> None:
        """Reads the message at offset `last`, which makes the log sync everything up to it."""
        self._under_way = 1, self.sent.count
        query: dict[str, str | int] = {"start": last, "limit": 1, "follow": "true"}
        try:
            self._require_message(next(self._client.lines(self._messages, query), b"null"))
        except (ForebayError, ValueError) as error:
            # The lines were taken before, so this error says nothing about them.
            raise ServiceUnavailable(f"{error}; {self._doubt(*self._under_way)}") from error
        self._require_same_run()
        self._under_way = None

    def _require_message(self, line: bytes) -> None:
        from forebay.client.http import wire_error

        reply = json.loads(line)
        reply = reply if isinstance(reply, dict) else {}
        if "offset" not in reply:
            error = reply.get("error")
            words = {"message": "the server stopped before it confirmed that all lines are synced"}
            raise wire_error(error if isinstance(error, dict) else words)

    def _send(self, lines: list[bytes], durability: Durability) -> None:
        if not lines:
            return
        if time.monotonic() - self._used > _IDLE_SECONDS:
            self._client.close()
        first, last = self.sent.count + 1, self.sent.count + len(lines)
        self._under_way = first, last
        try:
            offsets = self._post(lines, durability)
        except ForebayError as error:
            raise self._failed(error, first, last) from error
        self._used = time.monotonic()
        self._require_same_run(offsets.start)
        self._under_way = None
        self.sent.count += len(lines)
        self.sent.next = offsets.stop
        if self.sent.first is None:
            self.sent.first = offsets.start

    def _require_same_run(self, offset: int | None = None) -> None:
        """Raises if the server restarted while lines were only buffered, as these may be lost.

        A restart shows by another run of the server, or by an `offset`, the first of the newest
        lines, that was given before.
        """
        before, self._run = self._run, self._client.instance
        if self._durability != "buffered" or self.sent.next is None or self._under_way is None:
            return
        back = offset is not None and offset < self.sent.next
        if back or (before is not None and self._run != before):
            raise ServiceUnavailable(
                "the server restarted while lines were only buffered; "
                f"{self._doubt(*self._under_way)}"
            )

    def _failed(self, error: ForebayError, first: int, last: int) -> ForebayError:
        """The error to raise after a failed request: which lines are stored, and which may be."""
        from forebay.client.http import took_nothing

        if isinstance(error, WaitTimeout) and "synced" in vars(error):
            return ServiceUnavailable(f"{error}; {self._lines(1, last)} are stored")
        if not took_nothing(error):
            return ServiceUnavailable(f"{error}; {self._doubt(first, last)}")
        if isinstance(error, ServiceRefused):
            refusal = refused_token(error, self._client.address)
            return ServiceRefused(f"{refusal}; {self._certain(first)}")
        if "status" in vars(error):
            refused = f"{self._lines(first, last)} were refused: {error}"
            return UsageError(f"{refused}; {self._certain(first)}")
        unsent = f"{self._lines(first, last)} were not sent: {error}"
        return ServiceUnavailable(f"{unsent}; {self._certain(first)}")

    def _doubt(self, first: int, last: int) -> str:
        if self._durability == "buffered":
            first = 1
        return (
            f"{self._certain(first)}; it is unknown whether {self._lines(first, last)} are stored: "
            "look at the end of the topic before you send them again"
        )

    def _certain(self, first: int) -> str:
        if first == 1:
            return "no line is confirmed"
        if self._durability == "buffered":
            return f"{self._lines(1, first - 1)} were taken, but are not confirmed as synced"
        return f"{self._lines(1, first - 1)} are stored"

    @staticmethod
    def _lines(first: int, last: int) -> str:
        return f"lines {first} to {last}"

    def _post(self, lines: list[bytes], durability: Durability) -> range:
        """Returns the offsets. Retries only if the server says that it is busy and took nothing."""
        from forebay.client.http import is_busy, not_sent

        body, kind = _body(lines, self._parts)
        for _ in range(_BUSY_TRIES):
            try:
                return self._post_once(body, kind, durability, len(lines))
            except ForebayError as error:
                if not is_busy(error):
                    raise
                time.sleep(_BUSY_SECONDS)
        raise not_sent(
            UsageError(f"the server was busy {_BUSY_TRIES} times in a row; try again later")
        )

    def _post_once(self, body: bytes, kind: str, durability: Durability, count: int) -> range:
        from http.client import HTTPException

        reply = self._client.request(
            "POST",
            self._messages,
            query={"durability": durability, **(_query(self._parts) if kind == _RAW else {})},
            body=body,
            headers={"Content-Type": kind},
        )
        try:
            stored = json.loads(reply.read())
            offsets = range(int(stored["first_offset"]), int(stored["next_offset"]))
        except (OSError, ValueError, TypeError, KeyError, HTTPException) as error:
            # The server had begun to respond, so the lines are probably stored.
            raise ServiceUnavailable(f"the server's response is incomplete: {error!r}") from error
        if len(offsets) != count:
            raise ServiceUnavailable(
                f"the server confirmed {len(offsets)} lines, but {count} were sent"
            )
        return offsets


def _path(topic: TopicName, *rest: str) -> str:
    from forebay.client.http import topic_path

    return topic_path(topic, *rest)


def _batches(lines: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for line in lines:
        most = 2 * len(line)  # enough for base64, quotes and escapes, except control characters
        if batch and (len(batch) >= _BATCH_LINES or size + most > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += most
    if batch:
        yield batch


_RAW: Final = "application/octet-stream"


def _body(lines: list[bytes], parts: MessageParts) -> tuple[bytes, str]:
    """The body of a request and its content type.

    A single line is sent as raw bytes: as JSON, a large one could exceed the server's limit.
    """
    if len(lines) == 1:
        return lines[0], _RAW
    more: dict[str, Any] = {} if parts.key is None else {"routing_key": parts.key}
    if parts.attributes:
        more["attributes"] = parts.attributes
    encoded = (json.dumps({**payload_facts(line), **more}, ensure_ascii=False) for line in lines)
    return "".join(f"{each}\n" for each in encoded).encode(), "application/x-ndjson"


def _query(parts: MessageParts) -> dict[str, str | list[str]]:
    """The key and the attributes of a body of raw bytes."""
    found: dict[str, str | list[str]] = {}
    if parts.key is not None:
        found["routing_key"] = parts.key
    if parts.attributes:
        found["attribute"] = [f"{name}={text}" for name, text in parts.attributes.items()]
    return found


# ---- consume ----


RECONNECT_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.25
_STEADY_SECONDS: Final = 5.0
"""A request that lasted longer was accepted; a shorter one may have been refused."""
_AWAY: Final = (ServiceUnavailable, LogClosed, TopicFenced)
"""Errors of a server that is stopping or has stopped."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of `consume`."""

    start: str
    """An offset, `earliest` or `latest`."""
    end: int | None
    follow: bool
    limit: int | None
    skip_lost: bool
    start_time: int | None = None
    """Instead of `start`, a time in milliseconds since 1970."""
    end_time: int | None = None
    last: int | None = None
    """Instead of `start`, a number of messages before the end."""

    def is_over(self, publish_time: int) -> bool:
        """Whether a message of this time ends the output."""
        return self.end_time is not None and publish_time >= self.end_time

    @property
    def option(self) -> str:
        """The option that begins where this does."""
        if self.start_time is not None:
            return f"--since {self.start_time}"
        return f"--start {self.start}" if self.last is None else f"--last {self.last}"

    def query(self) -> dict[str, str | int]:
        found: dict[str, str | int] = {"start": self.start}
        if self.start_time is not None:
            found = {"start_time": self.start_time}
        elif self.last is not None:
            found = {"last": self.last}
        if self.end_time is not None:
            found["end_time"] = self.end_time
        if self.end is not None:
            found["end"] = self.end
        if self.limit is not None:
            found["limit"] = self.limit
        for name in ("follow", "skip_lost"):
            if getattr(self, name):
                found[name] = "true"
        return found


def received(
    address: ServerAddress,
    topic: TopicName,
    wanted: Wanted,
    find_again: Callable[[], ServerAddress | None],
    reconnect_seconds: float = RECONNECT_SECONDS,
    monotonic: Callable[[], float] = time.monotonic,
) -> Generator[dict[str, Any], None, None]:
    """Yields the messages as JSON objects; reconnects for `reconnect_seconds`, then raises.

    `find_again` returns the address of the server after a failure, or None to keep the old one.
    """
    seen = False
    away: float | None = None
    while True:
        began = monotonic()
        try:
            with connected(address) as client:
                address = client.address  # has the id of the store, which must stay the same
                for facts in _once(client, topic, wanted):
                    seen, away = True, None
                    if "offset" in facts:
                        wanted = _after(wanted, int(facts["offset"]) + 1, 1)
                        yield facts
                    elif "lost" in facts:
                        print_skipped(*facts["lost"])
                        wanted = _after(wanted, int(facts["lost"][1]), 0)
            if _is_all(wanted):
                return
        except _AWAY as error:
            if not seen and not wanted.follow:
                raise
            now = monotonic()
            if away is None or now - began > _STEADY_SECONDS:
                away = now  # it was up until now, even if it sent nothing
            if now - away >= reconnect_seconds:
                raise ServiceUnavailable(
                    f"{error}; tried for {reconnect_seconds:.0f} seconds; to continue later, use "
                    f"{wanted.option}"
                ) from error
            seen = True
        time.sleep(_PAUSE_SECONDS)
        if (found := find_again()) is not None:
            address = replace(found, store=address.store or found.store)


def _once(
    client: ServerClient, topic: TopicName, wanted: Wanted
) -> Generator[dict[str, Any], None, None]:
    """Yields the lines of one response; raises the error that a line or the server reports."""
    from forebay.client.http import topic_path, wire_error

    try:
        for line in client.lines(topic_path(topic, "messages"), wanted.query()):
            facts = json.loads(line)
            if "error" in facts:
                raise wire_error(facts["error"])
            yield facts
    except LostOffsets as lost:
        raise with_advice(lost) from lost
    except ServiceRefused as error:
        raise refused_token(error, client.address) from error
    except ValueError as error:
        if isinstance(error, ForebayError):
            raise
        raise ServiceError(f"{client.address.url} sent a line that is not JSON: {error}") from error


def _after(wanted: Wanted, offset: int, taken: int) -> Wanted:
    limit = None if wanted.limit is None else wanted.limit - taken
    return replace(wanted, start=str(offset), limit=limit, start_time=None, last=None)


def _is_all(wanted: Wanted) -> bool:
    """Whether everything wanted has arrived, after a response that ended without an error."""
    if not wanted.follow or wanted.limit == 0 or wanted.end_time is not None:
        return True
    if wanted.end is None or not wanted.start.isdecimal():
        return False
    return int(wanted.start) >= wanted.end


def print_skipped(start: int, end: int) -> None:
    click.echo(f"forebay: skipped offsets {start} to {end - 1}: lost", err=True)


def with_advice(lost: LostOffsets) -> LostOffsets:
    """The same error, with the option that skips the range."""
    return LostOffsets(f"{lost}, or use --skip-lost", start=lost.start, end=lost.end)
