"""Segments through the server: synced bytes, by range, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import (
    CommitRefused,
    ForebayError,
    ObjectMissing,
    OffsetOutOfRange,
    UnknownTopic,
    UsageError,
)
from forebay.limits import MIB
from forebay.settings import StoreSettings, UploaderSettings
from support.served import Served, served

PATH = "/v1/topics/default/orders/segments/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("segments")
    with served(StoreSettings(data=data, uploader=UploaderSettings(enabled=False))) as server:
        topic = server.store.topic("orders")
        topic.append_many([b"%06d" % number * 100 for number in range(4000)])
        topic.flush()
        topic.rotate()
        topic.append(b"newest", durability="synced")
        yield server


def fetch(server: Served, name: str, asked: str | None = None, **query: str) -> tuple[int, bytes]:
    headers = {} if asked is None else {"Range": asked}
    with server.new_client() as client:
        answer = client.request("GET", PATH + name, headers=headers, query=query)
        return answer.status, answer.read()


def files(server: Served) -> dict[str, bytes]:
    folder = Path(server.store.settings.data or "") / "wal/default/orders"
    return {path.name: path.read_bytes() for path in folder.glob("*.log")}


def test_a_segment_is_given_as_it_is(server: Served) -> None:
    found = files(server)
    assert len(found) == 2
    assert len(found["wal.log"]) > 2 * MIB  # several pieces
    for name, data in found.items():
        assert fetch(server, name) == (200, data)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=100-1500000", slice(100, 1_500_001)),
        ("bytes=2000000-", slice(2_000_000, None)),
        ("bytes=-77", slice(-77, None)),
        ("bytes=0-99999999", slice(0, None)),
    ],
)
def test_a_range_is_given_exactly_and_cut_at_the_end(
    server: Served, asked: str, part: slice
) -> None:
    assert fetch(server, "wal.log", asked) == (206, files(server)["wal.log"][part])


def test_head_tells_the_size_and_sends_nothing(server: Served) -> None:
    with server.new_client() as client:
        answer = client.request("HEAD", PATH + "wal.log")
        assert answer.read() == b""
        assert int(answer.headers["Content-Length"]) == len(files(server)["wal.log"])
        with pytest.raises(ObjectMissing):
            client.request("HEAD", PATH + "wal.7.log")


def test_bytes_that_are_not_synced_are_not_given(server: Served) -> None:
    server.store.topic("torn").append(b"synced", durability="synced")
    file = Path(server.store.settings.data or "") / "wal/default/torn/wal.log"
    whole = file.read_bytes()
    with file.open("ab") as appended:
        appended.write(b"torn")
    path = "/v1/topics/default/torn/segments/wal.log"
    with server.new_client() as client:
        assert client.request("GET", path).read() == whole
        with pytest.raises(OffsetOutOfRange) as caught:
            client.request("GET", path, headers={"Range": f"bytes={len(whole)}-"})
    assert caught.value.end == len(whole)
    file.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("wal.2.log", ObjectMissing),
        ("wal.synced", ObjectMissing),
        ("wal.id", ObjectMissing),
        ("..%2F..%2F..%2Fcatalog.db", ForebayError),
        ("%2e%2e", ForebayError),
        ("../../../../../etc/passwd", ForebayError),
        ("%00", ForebayError),
    ],
)
def test_only_segments_are_given(server: Served, name: str, error: type[ForebayError]) -> None:
    with pytest.raises(error):
        fetch(server, name)


@pytest.mark.parametrize("asked", ["bytes=", "bytes=a-b", "lines=1-2", "bytes=0-1,4-5", "bytes=-"])
def test_a_range_that_is_none_is_refused(server: Served, asked: str) -> None:
    with pytest.raises(UsageError, match="is invalid"):
        fetch(server, "wal.log", asked)


@pytest.mark.parametrize("asked", ["bytes=999999999-", "bytes=5-4"])
def test_a_range_beyond_the_end_says_where_that_is(server: Served, asked: str) -> None:
    with pytest.raises(OffsetOutOfRange) as caught:
        fetch(server, "wal.log", asked)
    assert caught.value.end == len(files(server)["wal.log"])


def test_a_topic_that_is_not_there_is_unknown(server: Served) -> None:
    with server.new_client() as client, pytest.raises(UnknownTopic):
        client.request("GET", "/v1/topics/default/nothing/segments/wal.log")
    with server.new_client() as client, pytest.raises(UsageError):
        client.request("GET", "/v1/topics/default/a.b/segments/wal.log")


def test_segments_of_another_log_than_the_asked_one_are_refused(server: Served) -> None:
    folder = Path(server.store.settings.data or "") / "wal/default/orders"
    own = (folder / "wal.id").read_text()
    assert fetch(server, "wal.log", log=own)[0] == 200
    with pytest.raises(CommitRefused):
        fetch(server, "wal.log", log="0" * 32)
