"""Lines to a running server: `forebay produce` through HTTP.

Lines go as they arrive, in requests of bounded size, one after the other. A request that broke off
is not sent again: nobody knows whether its lines were stored, and sending them again might store
them twice. What is certain is said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from forebay.cli.lines import arriving_lines, payload_facts, sound_lines
from forebay.cli.servers import refused_token
from forebay.errors import (
    ForebayError,
    LogClosed,
    LogStopped,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
    UsageError,
    WaitTimeout,
)
from forebay.format.names import TopicName
from forebay.limits import MIB

if TYPE_CHECKING:
    from forebay.remote import ServerClient

Durability = Literal["buffered", "synced", "uploaded"]

_BATCH_BYTES: Final = 1 * MIB
_BATCH_LINES: Final = 1000
_IDLE_SECONDS: Final = 1.0
"""A connection that was idle for longer is made anew: the server may be closing it."""
_BUSY_TRIES: Final = 30
_BUSY_SECONDS: Final = 1.0
_UNKNOWN: Final = (ServiceUnavailable, LogStopped, LogClosed, TopicFenced, WaitTimeout)
"""After these nobody knows what became of the request."""


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
    """What nobody knows, if the interrupt came while a request was under way."""


class Sender:
    """One run of `produce` through a server."""

    def __init__(self, client: ServerClient, topic: TopicName, durability: Durability) -> None:
        self._client = client
        self._topic = topic
        self._durability = durability
        self._used = 0.0
        self._held: list[bytes] = []
        """With `uploaded`, the last lines wait for their successors: only the end is waited for."""
        self._under_way: tuple[int, int] | None = None
        self.sent = Sent(str(topic))

    def run(self) -> Sent:
        """Everything that arrives; ends with the input, or when it is interrupted."""
        try:
            self._send_arriving()
        except KeyboardInterrupt:
            self.sent.interrupted = True
            if self._under_way is not None:
                first, last = self._under_way
                self.sent.doubt = f"interrupted; {self._doubt(first, last)}"
                return self.sent
        self._finish()
        return self.sent

    def _send_arriving(self) -> None:
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
                self._finish()
                raise problem

    def _finish(self) -> None:
        held, self._held = self._held, []
        if held:
            uploaded = not self.sent.interrupted
            self._send(held, "uploaded" if uploaded else "synced")
            self.sent.stage = "uploaded" if uploaded else "synced"
        elif self._durability == "buffered" and self.sent.next is not None:
            self._await_synced(self.sent.next - 1)
        elif self.sent.next is None:
            self._look()

    def _look(self) -> None:
        """Nothing was sent: the topic is made all the same, as it is without a server."""
        path = _path(self._topic)
        self._asked("PUT", path)
        end = self._asked("GET", path, {"limit": 0}).get("appended") or 0
        self.sent.first = self.sent.next = int(end)

    def _asked(self, method: str, path: str, query: dict[str, str | int] | None = None) -> Any:
        try:
            return self._client.json(method, path, query=query)
        except ServiceRefused as error:
            raise refused_token(error, self._client.address) from error

    def _await_synced(self, last: int) -> None:
        """A reader of what is synced waits for the message, and has the log sync it."""
        query: dict[str, str | int] = {"start": last, "limit": 1, "follow": "true"}
        for line in self._client.lines(_path(self._topic, "messages"), query):
            told = json.loads(line).get("error")
            if told is not None:
                raise ServiceUnavailable(
                    f"the server took {self._lines(1, self.sent.count)} and did not confirm that "
                    f"they are synced: {told.get('message')}"
                )
            return
        raise ServiceUnavailable("the server ended before it confirmed that all lines are synced")

    def _send(self, lines: list[bytes], durability: Durability) -> None:
        if not lines:
            return
        if time.monotonic() - self._used > _IDLE_SECONDS:
            self._client.close()
        first, last = self.sent.count + 1, self.sent.count + len(lines)
        self._under_way = first, last
        try:
            answer = self._post(lines, durability)
        except _UNKNOWN as error:
            raise ServiceUnavailable(f"{error}; {self._doubt(first, last)}") from error
        except ServiceRefused as error:
            told = refused_token(error, self._client.address)
            raise ServiceRefused(f"{told}; {self._certain(first)}") from error
        except ForebayError as error:
            raise UsageError(
                f"{self._lines(first, last)} were refused: {error}; {self._certain(first)}"
            ) from error
        self._under_way = None
        self._used = time.monotonic()
        self.sent.count += len(lines)
        self.sent.next = int(answer["next_offset"])
        if self.sent.first is None:
            self.sent.first = int(answer["first_offset"])

    def _doubt(self, first: int, last: int) -> str:
        return (
            f"{self._certain(first)}; whether {self._lines(first, last)} are stored is unknown: "
            "look at the end of the topic before sending them again"
        )

    def _certain(self, first: int) -> str:
        return f"{self._lines(1, first - 1)} are stored" if first > 1 else "no line is confirmed"

    @staticmethod
    def _lines(first: int, last: int) -> str:
        return f"lines {first} to {last}"

    def _post(self, lines: list[bytes], durability: Durability) -> Any:
        """Tries again only where the server says that it took nothing."""
        from http.client import HTTPException

        body, kind = _body(lines)
        path = _path(self._topic, "messages")
        for _ in range(_BUSY_TRIES):
            try:
                answer = self._client.request(
                    "POST",
                    path,
                    query={"durability": durability},
                    body=body,
                    headers={"Content-Type": kind},
                )
                return json.loads(answer.read())
            except ServiceUnavailable as error:
                if "nothing" not in str(error):
                    raise
                time.sleep(_BUSY_SECONDS)
            except (OSError, ValueError, HTTPException) as error:
                # The answer broke off: it was on its way, so the lines may well be stored.
                if isinstance(error, ForebayError):
                    raise
                raise ServiceUnavailable(f"the server's answer broke off: {error}") from error
        raise UsageError(f"the server was too busy {_BUSY_TRIES} times in a row; try again later")


def _path(topic: TopicName, *rest: str) -> str:
    from forebay.remote.client import topic_path

    return topic_path(topic, *rest)


def _encoded(line: bytes) -> bytes:
    return json.dumps(payload_facts(line), ensure_ascii=False).encode()


def _batches(lines: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for line in lines:
        most = 2 * len(line)  # base64, quotes and escapes; control characters take more
        if batch and (len(batch) >= _BATCH_LINES or size + most > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += most
    if batch:
        yield batch


def _body(lines: list[bytes]) -> tuple[bytes, str]:
    """One line is sent as it is: in JSON a large one might be over the server's limit."""
    if len(lines) == 1:
        return lines[0], "application/octet-stream"
    return b"\n".join(map(_encoded, lines)) + b"\n", "application/x-ndjson"
