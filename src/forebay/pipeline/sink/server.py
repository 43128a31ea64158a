"""A batch of the sink as one request to a server, and what the server does with it.

    {"sink_id": "orders", "batch": 7, "named": true, "streaming": false, "parts": [...]}

The parts say where the rows are staged; the server appends them (`sink_commit.py`). It answers
lines of JSON: `{"working": true}` now and then, and a last one with what became of the rows, or
with the error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from http.client import HTTPException
from typing import Any, Final

from forebay.client import ServerClient, find_server
from forebay.client.http import wire_error
from forebay.errors import ServiceError, ServiceUnavailable, UsageError
from forebay.format.names import is_staged_file, parse_topic
from forebay.limits import MIB, OFFSET_MAX
from forebay.objects.store import CloudStore
from forebay.pipeline.sink.commit import Committed, commit_batch, forget_parts, sweep_if_due
from forebay.pipeline.sink.marks import Run, check_sink_id
from forebay.pipeline.sink.staging import Part
from forebay.pipeline.sink.topic_writer import StoreDoor
from forebay.settings import ServerAddress, StoreSettings
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store

COMMIT_PATH: Final = "/v1/sink/commit"
FORGET_PATH: Final = "/v1/sink/forget"
REQUEST_BYTES_MAX: Final = 8 * MIB
"""It says where rows are: 10,000 parts of two topics each take 2 MiB."""
_PARTS_MAX: Final = 100_000
_SILENCE_SECONDS_MAX: Final = 60.0
"""A server that works says so every few seconds."""
_LINE_BYTES_MAX: Final = 1 * MIB


# ---- on the driver ---------------------------------------------------------------------------


def serving(settings: StoreSettings) -> ServerAddress | None:
    """The server that owns the topics now: the one that runs here, else the one that was named."""
    return find_server(settings) or settings.server


def commit_through(address: ServerAddress, run: Run, parts: Sequence[Part]) -> Committed:
    """Has the server append the rows.

    ServiceUnavailable if it goes away meanwhile: what of the rows was appended shows when the
    same batch of a named sink is committed again, which adds the rest.
    """
    body = json.dumps(encode_request(run, parts), separators=(",", ":")).encode()
    with ServerClient(address, timeout_seconds=_SILENCE_SECONDS_MAX) as client:
        for line in _lines(client, run, body):
            told = json.loads(line)
            if "error" in told:
                raise wire_error(told["error"])
            if "appended" in told:
                return Committed(int(told["appended"]), int(told["known"]))
    raise ServiceUnavailable(_broke_off(address, run))


def _broke_off(address: ServerAddress, run: Run) -> str:
    """What to do: a sink without a name is another one the next time, and knows of no rows."""
    then = (
        "write the batch again: rows that are there are not doubled"
        if run.named
        else "some of the rows may be there; to write them again without doubles, look at the end "
        "of the topics first, and name the sink (sinkId) the next time"
    )
    return f"the server at {address.url} broke off in the middle of a commit: {then}"


def _lines(client: ServerClient, run: Run, body: bytes) -> Iterator[bytes]:
    headers = {"Content-Type": "application/json"}
    answer = client.request("POST", COMMIT_PATH, body=body, headers=headers)
    try:
        while line := answer.body.readline(_LINE_BYTES_MAX):
            if line.endswith(b"\n"):
                yield line
    except (OSError, HTTPException) as error:
        raise ServiceUnavailable(f"{_broke_off(client.address, run)} ({error})") from error


def forget_through(address: ServerAddress, run: Run, parts: Sequence[Part]) -> None:
    """Has the server remove staged files, unless the batch is under way there, or was begun."""
    request = encode_request(run, parts)
    with ServerClient(address, timeout_seconds=_SILENCE_SECONDS_MAX) as client:
        client.json("POST", FORGET_PATH, value=request)


# ---- the request -----------------------------------------------------------------------------


def encode_request(run: Run, parts: Sequence[Part]) -> dict[str, Any]:
    return {**asdict(run), "parts": [asdict(part) for part in parts]}


def decode_request(value: Any) -> tuple[Run, list[Part]]:
    """UsageError for anything that no sink would send."""
    if not isinstance(value, dict) or not isinstance(value.get("parts"), list):
        raise UsageError("the body must be a JSON object with a list of parts")
    if len(value["parts"]) > _PARTS_MAX:
        raise UsageError(f"a batch of more than {_PARTS_MAX} parts")
    try:
        run = Run(**{name: each for name, each in value.items() if name != "parts"})
        parts = [Part(**part) for part in value["parts"]]
    except TypeError as error:
        raise UsageError(f"the body is no batch of a sink: {error!r}") from error
    _check_run(run)
    for part in parts:
        _check_part(part)
    return run, parts


def _check_run(run: Any) -> None:
    if not isinstance(run.sink_id, str):
        raise UsageError("sink_id must be text")
    check_sink_id(run.sink_id)
    _require(_is_count(run.batch), "batch must be a number from 0 on")
    kinds = isinstance(run.named, bool) and isinstance(run.streaming, bool)
    _require(kinds, "named and streaming must be true or false")


def _check_part(part: Any) -> None:
    counts = (part.partition, part.rows, part.bytes)
    _require(all(map(_is_count, counts)), "partition, rows and bytes of a part are numbers")
    _require(type(part.digest) is int and part.digest >= 0, "digest of a part is a number")
    key = part.key
    staged = key is None or (isinstance(key, str) and is_staged_file(key))
    _require(staged, f"{key!r} is no key of staged rows")
    _require(isinstance(part.topics, Mapping), "topics of a part are names with numbers")
    _require(all(map(_is_count, part.topics.values())), "topics of a part have numbers of rows")
    for name in part.topics:
        parse_topic(name)
    whole = sum(part.topics.values()) == part.rows and (part.key is not None or not part.rows)
    _require(whole, "the rows of a part are those of its topics, and are staged somewhere")


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise UsageError(otherwise)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= OFFSET_MAX


# ---- on the server ---------------------------------------------------------------------------


def commit_in(store: Store, run: Run, parts: Sequence[Part]) -> Committed:
    """Appends the rows through a store that is open.

    No two of the same sink at the same time: that is for the caller to see to.
    """
    tiers = _tiers(store)
    sweep_if_due(tiers.store, run)
    with StoreDoor(store) as door:
        return commit_batch(door, tiers.catalog, tiers.store, run, parts)


def forget_in(store: Store, parts: Sequence[Part]) -> None:
    forget_parts(staging_of(store), parts)


def staging_of(store: Store) -> CloudStore:
    return _tiers(store).store


def _tiers(store: Store) -> StoreResources:
    with store.view() as view:
        tiers = view.tiers()
    if tiers is None:
        raise ServiceError("the store has no catalog")
    return tiers
