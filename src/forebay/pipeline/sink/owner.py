"""Commits a batch through the owner of the topics, as only the owner can append.

If a server runs, it owns the topics: `commit_through` sends it a request that says where the rows
are staged, and the server appends them with `commit_in`. If none runs, the committing process owns
the topics during the commit: `LocalTopicWriter` opens the store and closes it again.

    POST /v1/sink/commit
    {"sink_id": "orders", "batch": 7, "named": true, "streaming": true, "query": "e1cf8bef-…",
     "parts": [...]}

The response is lines of JSON: `{"working": true}` every few seconds, and at the end the result or
an error. Other producers may append to the same topics at the same time. The rows of a batch keep
their order, with other messages between them.

Beware: two commits of one sink must not run at the same time. `LocalTopicWriter` prevents it,
because it owns the topics alone. Users of `StoreTopicWriter` must prevent it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from http.client import HTTPException
from types import TracebackType
from typing import Any, Final, Self

from forebay.client.address import find_server
from forebay.client.http import ServerClient, wire_error
from forebay.errors import (
    LogLocked,
    LostOffsets,
    ServiceError,
    ServiceUnavailable,
    TopicOwned,
    UsageError,
)
from forebay.format.names import TopicName, is_staged_file, parse_topic
from forebay.limits import MIB
from forebay.objects.store import CloudStore
from forebay.pipeline.sink.commit import (
    MARK,
    Committed,
    Position,
    SinkBatch,
    check_sink_id,
    commit_batch,
    parse_mark,
    sweep_if_due,
)
from forebay.pipeline.sink.staging import Part, forget_parts
from forebay.settings import ServerAddress, StoreSettings
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView

COMMIT_PATH: Final = "/v1/sink/commit"
FORGET_PATH: Final = "/v1/sink/forget"
REQUEST_BYTES_MAX: Final = 8 * MIB
"""A request has no rows, only where they are: 10,000 parts of two topics each take 2 MiB."""
PARTS_MAX: Final = 100_000
_SILENCE_SECONDS_MAX: Final = 60.0
"""A server that is working sends a line every few seconds."""
_LINE_BYTES_MAX: Final = 1 * MIB
_TOPICS_MAX: Final = 10_000
"""The most topics of one batch: each has an open log while the batch is appended."""
OWNED_SECONDS_MAX: Final = 30.0
"""How long to wait for a topic that another process owns."""
_LOOK_SECONDS: Final = 0.1


# ---- through a server: on the driver


def serving(settings: StoreSettings) -> ServerAddress | None:
    """The server that owns the topics: the one on the data directory, else `settings.server`."""
    return find_server(settings) or settings.server


def commit_through(address: ServerAddress, batch: SinkBatch, parts: Sequence[Part]) -> Committed:
    """Makes the server append the rows.

    ServiceUnavailable if the connection breaks. It is unknown then how many rows were appended; if
    the sink is named, committing the same batch again appends the rest.
    """
    body = json.dumps(encode_request(batch, parts), separators=(",", ":")).encode()
    with ServerClient(address, timeout_seconds=_SILENCE_SECONDS_MAX) as client:
        for line in _lines(client, batch, body):
            reply = json.loads(line)
            if "error" in reply:
                raise wire_error(reply["error"])
            if "appended" in reply:
                return Committed(int(reply["appended"]), int(reply["known"]))
    raise ServiceUnavailable(_broke_off(address, batch))


def _broke_off(address: ServerAddress, batch: SinkBatch) -> str:
    """The error text. Only a named sink can find the rows that it appended before."""
    then = (
        "write the batch again: rows that were appended are not appended twice"
        if batch.named
        else "some rows may have been appended. Look at the end of the topics before you write "
        "them again, and set a sinkId the next time"
    )
    return f"the connection to {address.url} broke during a commit: {then}"


def _lines(client: ServerClient, batch: SinkBatch, body: bytes) -> Iterator[bytes]:
    headers = {"Content-Type": "application/json"}
    response = client.request("POST", COMMIT_PATH, body=body, headers=headers)
    try:
        while line := response.body.readline(_LINE_BYTES_MAX):
            if line.endswith(b"\n"):
                yield line
    except (OSError, HTTPException) as error:
        raise ServiceUnavailable(f"{_broke_off(client.address, batch)} ({error})") from error


def forget_through(address: ServerAddress, batch: SinkBatch, parts: Sequence[Part]) -> None:
    """Makes the server delete staged files, unless their batch is being committed or was begun."""
    request = encode_request(batch, parts)
    with ServerClient(address, timeout_seconds=_SILENCE_SECONDS_MAX) as client:
        client.json("POST", FORGET_PATH, value=request)


# ---- through a server: the request


def encode_request(batch: SinkBatch, parts: Sequence[Part]) -> dict[str, Any]:
    return {
        "sink_id": batch.sink_id,
        "batch": batch.number,
        "named": batch.named,
        "streaming": batch.streaming,
        "query": batch.query,
        **({} if batch.after is None else {"after": batch.after}),
        "parts": [asdict(part) for part in parts],
    }


def check_request(batch: SinkBatch, parts: Sequence[Part]) -> None:
    """Raises UsageError for what no sink sends. The types of the fields were checked before."""
    check_sink_id(batch.sink_id)
    for part in parts:
        staged = part.key is None or is_staged_file(part.key)
        _require(staged, f"{part.key!r} is not the key of a staged file")
        for name in part.topics:
            parse_topic(name)
        whole = sum(part.topics.values()) == part.rows and (part.key is not None or not part.rows)
        _require(whole, "rows of a part must be the sum of its topics, and need a key")
        _require(set(part.zeros) <= set(part.topics), "zeros of a part must be topics of it")


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise UsageError(otherwise)


# ---- through a server: on the server


def commit_in(store: Store, batch: SinkBatch, parts: Sequence[Part]) -> Committed:
    """Appends the rows through an open store.

    The caller must not commit two batches of the same sink at the same time.
    """
    resources = _resources(store)
    sweep_if_due(resources.store, batch)
    with StoreTopicWriter(store) as writer:
        return commit_batch(writer, resources.catalog, resources.store, batch, parts)


def forget_in(store: Store, parts: Sequence[Part]) -> None:
    forget_parts(staging_of(store), parts)


def staging_of(store: Store) -> CloudStore:
    return _resources(store).store


def _resources(store: Store) -> StoreResources:
    with store.view() as view:
        resources = view.resources()
    if resources is None:
        raise ServiceError("the store has no catalog")
    return resources


# ---- through a store that this process has open


class StoreTopicWriter:
    """Appends through an open store, which stays open. Not thread-safe.

    The writer keeps the `Topic` object of its first use. If its log stops in between, everything
    after that fails, so that no row is missing between appended ones.
    """

    def __init__(self, store: Store, *, wait_seconds: float = OWNED_SECONDS_MAX) -> None:
        self._store = store
        self._wait_seconds = wait_seconds
        self._topics: dict[TopicName, Topic] = {}

    def end(self, topic: TopicName) -> int:
        opened = self._topic(topic)
        opened.flush()
        return opened.watermarks().synced

    def start(self, topic: TopicName) -> int:
        return self._topic(topic).start_offset

    def last(self, topic: TopicName, sink_id: str, start: int) -> Position | None:
        opened = self._topic(topic)
        end = self.end(topic)
        at, found = max(start, opened.start_offset), None
        while at < end:
            try:
                with opened.read(at, end=end) as reader:
                    for message in reader:
                        at = message.offset + 1
                        found = parse_mark(message.attributes.get(MARK), sink_id) or found
                    break
            except LostOffsets as lost:
                at = lost.end
        return found

    def append(
        self,
        topic: TopicName,
        payloads: Sequence[bytes | memoryview],
        attributes: Sequence[dict[str, str]],
        keys: Sequence[str | None],
    ) -> None:
        self._topic(topic).append_many(payloads, attributes, keys)

    def flush(self) -> None:
        for topic in self._topics.values():
            topic.flush()

    def close(self) -> None:
        """Drops the topics, which stay open in the store. Idempotent."""
        self._topics.clear()

    def _topic(self, name: TopicName) -> Topic:
        found = self._topics.get(name)
        if found is None:
            if len(self._topics) >= _TOPICS_MAX:
                raise UsageError(
                    f"the batch has more than {_TOPICS_MAX} topics: write it in several batches"
                )
            found = self._topics[name] = self._opened(name)
        return found

    def _opened(self, name: TopicName) -> Topic:
        """Opens the topic; waits if another process owns it, as a sink does for one batch.

        TopicOwned after `wait_seconds`.
        """
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                return self._store.topic(str(name))
            except (LogLocked, TopicOwned) as error:
                if time.monotonic() >= deadline:
                    raise TopicOwned(self._who_owns(name, error)) from error
            time.sleep(_LOOK_SECONDS)

    def _who_owns(self, name: TopicName, error: LogLocked | TopicOwned) -> str:
        with StoreView(self._store.settings) as view:
            resources = view.resources()
            owner = None if resources is None else resources.catalog.owner(name)
        who = "another process" if owner is None else owner.name
        return (
            f"the sink cannot append to {name}, which {who} owns. No row was appended: close the "
            f"topic there, and write again ({error})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LocalTopicWriter(StoreTopicWriter):
    """Opens the store itself, and owns each topic from its first use until `close`."""

    def __init__(self, settings: StoreSettings, *, wait_seconds: float = OWNED_SECONDS_MAX) -> None:
        # This owner is short-lived: uploads are left to the next owner, and to the pipeline.
        quiet = replace(settings, uploader=replace(settings.uploader, enabled=False))
        super().__init__(Store(quiet), wait_seconds=wait_seconds)

    def close(self) -> None:
        """Closes the store, and gives up the topics. Idempotent."""
        super().close()
        self._store.close()
