"""Objects through the server: what may be written, and that nothing stored is ever changed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from forebay.admin.context import ServerContext
from forebay.catalog.catalog import Catalog, Intent
from forebay.client.objects import ServerBackend
from forebay.errors import (
    CommitRefused,
    ForebayError,
    ObjectExists,
    ObjectMissing,
    OffsetOutOfRange,
    UsageError,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import ObjectName, TopicName, object_key, parse_ledger
from forebay.limits import MIB
from forebay.objects.local import LocalBackend
from forebay.objects.store import CloudStore
from forebay.settings import AdminSettings, CloudSettings, StoreSettings, UploaderSettings
from forebay.testing.objects import FaultBackend
from forebay.topic.store import Store
from support.disks import wait_until
from support.s3_server import S3Server
from support.served import Served, served, serving

TOPIC = TopicName("default", "orders")
ROWS = "staging/0123456789abcdef/3-17.frames"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("objects")
    with served(StoreSettings(data=data, uploader=UploaderSettings(enabled=False))) as server:
        yield server


def catalog(server: Served) -> Catalog:
    with server.store.view() as view:
        resources = view.resources()
    assert resources is not None
    return resources.catalog


def intended(server: Served, topic: TopicName, start: int = 0, end: int = 9) -> Intent:
    """An object that somebody is about to write."""
    server.store.topic(str(topic))
    record = catalog(server).record(topic)
    assert record is not None
    return catalog(server).intend(topic, record.epoch, ObjectName(start, end))


def put(server: Served, key: str, data: bytes) -> object:
    with server.new_client() as client:
        return client.request("PUT", f"/v1/objects/{key}", body=data).read()


def get(server: Served, key: str, asked: str | None = None) -> bytes:
    headers = {} if asked is None else {"Range": asked}
    with server.new_client() as client:
        return client.request("GET", f"/v1/objects/{key}", headers=headers).read()


def leftovers(server: Served) -> list[Path]:
    return list((Path(server.store.settings.data or "") / "objects/.tmp").glob("*"))


def test_an_intended_object_is_put_and_read_again(server: Served) -> None:
    topic = TopicName("default", "whole")
    key = object_key(topic, intended(server, topic).object_id)
    data = bytes(range(256)) * 12_000  # some pieces
    put(server, key, data)
    assert get(server, key) == data
    assert get(server, key, "bytes=1000000-2000000") == data[1_000_000:2_000_001]
    with server.new_client() as client:
        answer = client.request("HEAD", f"/v1/objects/{key}")
        assert int(answer.headers["Content-Length"]) == len(data)
        assert answer.headers["ETag"]
    with pytest.raises(OffsetOutOfRange):
        get(server, key, f"bytes={len(data)}-")
    put(server, key + ".json", b"{}")  # its sidecar
    assert leftovers(server) == []


def test_an_object_gets_its_metadata_from_its_name(server: Served) -> None:
    topic = TopicName("default", "described")
    key = object_key(topic, intended(server, topic).object_id)
    own = {
        "topic": "/default/described",
        "format": "dnb1",
        "start_offset": "0",
        "end_offset": "9",
        "messages": "10",
    }
    backend = ServerBackend(server.client.address)
    with backend.open_streaming_writer(
        key, chunk_bytes=MIB, concurrent_parts=1, metadata=own
    ) as writer:
        writer.write(b"frames")
    with server.store.view() as view:
        resources = view.resources()
    assert resources is not None
    assert dict(resources.store.head(key).metadata) == own
    for other in ({**own, "messages": "11"}, {"mine": "x"}):
        with pytest.raises(UsageError, match="cannot have other metadata"):
            backend.open_streaming_writer(key, chunk_bytes=1, concurrent_parts=1, metadata=other)
    put(server, f"{key}.json", b"{}")
    assert dict(resources.store.head(f"{key}.json").metadata) == {}
    backend.close()


def test_an_object_that_nobody_intends_is_refused(server: Served) -> None:
    with pytest.raises(CommitRefused, match="has no intent"):
        put(server, object_key(TOPIC, "data-5-9.dnb1"), b"x" * (3 * MIB))


def test_both_files_of_a_ledger_are_put_once_with_the_metadata_that_brokers_demand(
    server: Served,
) -> None:
    topic = TopicName("default", "ledgers")
    server.store.topic(str(topic))
    record = catalog(server).record(topic)
    assert record is not None
    name = parse_ledger(catalog(server).intend_ledger(topic, record.epoch, (0, 5)).intent.object_id)
    assert name is not None
    with server.store.view() as view:
        resources = view.resources()
    assert resources is not None
    for file in (name.data_name, name.index_name):
        key = object_key(topic, file)
        put(server, key, b"its bytes")
        put(server, key, b"its bytes")  # a task that runs twice
        with pytest.raises(ObjectExists):
            put(server, key, b"other bytes")
        assert get(server, key) == b"its bytes"
        metadata = dict(resources.store.head(key).metadata)
        assert metadata["s3managedledgeroffloaderformatversion"] == "1"
        assert metadata["role"] == ("index" if file == name.index_name else "data")
    put(server, object_key(topic, name.data_name) + ".json", b"{}")
    put(server, object_key(topic, name.data_name) + ".json", b"[]")
    other = name._replace(uid="00000000-0000-4000-8000-000000000000")
    with pytest.raises(CommitRefused, match="has no intent"):
        put(server, object_key(topic, other.index_name), b"of nobody")


def test_an_object_is_written_once_before_its_commit_too(server: Served) -> None:
    topic = TopicName("default", "again")
    key = object_key(topic, intended(server, topic).object_id)
    put(server, key, b"frames")
    put(server, key, b"frames")  # a task that runs twice
    for other in (b"others", b"frames and more"):
        with pytest.raises(ObjectExists, match=f"6 bytes.* {len(other)} other bytes") as caught:
            put(server, key, other)
        assert caught.value.status == 409  # type: ignore[attr-defined]  # set by the client
    assert get(server, key) == b"frames"
    assert leftovers(server) == []


def test_the_sidecar_of_an_object_that_is_not_committed_may_be_written_again(
    server: Served,
) -> None:
    topic = TopicName("default", "sidecar")
    key = object_key(topic, intended(server, topic).object_id) + ".json"
    put(server, key, b'{"created_at": 1}')
    put(server, key, b'{"created_at": 2}')
    assert get(server, key) == b'{"created_at": 2}'


def test_a_committed_object_is_never_changed(server: Served) -> None:
    topic = TopicName("default", "committed")
    intent = intended(server, topic)
    key = object_key(topic, intent.object_id)
    put(server, key, b"frames")
    descriptor = ObjectDescriptor(intent.object_id, 0, 9, size=6, etag=None, created_at=1)
    server.store.topic(str(topic)).append_many([b"x"] * 10, durability="synced")
    catalog(server).put_object_descriptor(topic, intent, descriptor)
    put(server, key, b"frames")  # a late copy of a task writes the same
    for other in (b"others", b"", b"frames and more"):
        with pytest.raises(CommitRefused, match="is never changed"):
            put(server, key, other)
    assert get(server, key) == b"frames"
    (Path(server.store.settings.data or "") / "objects" / key).unlink()
    with pytest.raises(CommitRefused, match="is gone"):
        put(server, key, b"frames")
    assert leftovers(server) == []


def test_a_sidecar_whose_object_is_committed_while_another_one_comes_is_not_changed(
    tmp_path: Path,
) -> None:
    topic = TopicName("default", "late")
    admin = AdminSettings(listen="127.0.0.1:0")
    uploader = UploaderSettings(enabled=False)
    settings = StoreSettings(data=tmp_path, admin=admin, uploader=uploader)
    backend = FaultBackend(LocalBackend(tmp_path / "objects"))
    with (
        Store(settings, store=CloudStore(backend)) as store,
        serving(context := ServerContext(store)) as client,
    ):
        server = Served(context, client)
        intent = intended(server, topic)
        key = object_key(topic, intent.object_id)
        put(server, key, b"frames")
        put(server, f"{key}.json", b"{}")
        store.topic(str(topic)).append_many([b"x"] * 10, durability="synced")
        descriptor = ObjectDescriptor(intent.object_id, 0, 9, size=6, etag=None, created_at=1)

        def commit(_key: str) -> None:
            catalog(server).put_object_descriptor(topic, intent, descriptor)

        backend.hook("complete", commit)  # between the look and the rename
        with pytest.raises(CommitRefused, match="is never changed"):
            put(server, f"{key}.json", b'{"late": true}')
        assert get(server, f"{key}.json") == b"{}"
        assert list((tmp_path / "objects").glob("staging/*/*")) == []


@pytest.mark.parametrize("same", [True, False], ids=["the same bytes", "other bytes"])
def test_an_object_that_is_created_while_another_one_comes_is_not_changed(
    tmp_path: Path, same: bool
) -> None:
    topic = TopicName("default", "late")
    admin = AdminSettings(listen="127.0.0.1:0")
    settings = StoreSettings(data=tmp_path, admin=admin, uploader=UploaderSettings(enabled=False))
    local = LocalBackend(tmp_path / "objects")
    backend = FaultBackend(local)
    with (
        Store(settings, store=CloudStore(backend)) as store,
        serving(context := ServerContext(store)) as client,
    ):
        server = Served(context, client)
        key = object_key(topic, intended(server, topic).object_id)

        def create(key: str) -> None:
            local.put_object(key, b"frames", create=True)

        backend.hook("complete", create)  # between the look and the link
        if same:
            put(server, key, b"frames")
        else:
            with pytest.raises(ObjectExists, match="is never changed"):
                put(server, key, b"late, and other")
        assert get(server, key) == b"frames"


def test_a_link_is_no_object(server: Served, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not for everyone")
    folder = Path(server.store.settings.data or "") / "objects"
    folder.mkdir(exist_ok=True)
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ObjectMissing):
        get(server, "link")
    (folder / "link").unlink()


def test_rows_of_a_write_are_put_once(server: Served) -> None:
    put(server, ROWS, b"rows")
    put(server, ROWS, b"rows")
    with pytest.raises(ObjectExists, match="is never changed"):
        put(server, ROWS, b"rows of somebody else")
    assert get(server, ROWS) == b"rows"


@pytest.mark.parametrize(
    "key",
    [
        "staging/0123456789abcdef/manifest.json",
        "staging/elsewhere/0-0.frames",
        "staging/../catalog.db",
        "..%2F..%2Fcatalog.db",
        "%2Fetc%2Fpasswd",
        ".tmp/x",
        ".meta/x",
        "storage/topics/default/orders/objects/data-0-9.txt",
        "storage/topics/default/orders/objects/../objects/data-0-9.dnb1",
        "storage/topics/default/orders/objects/data-0-pending-ab.dnb1",
        "storage/topics/a.b/orders/objects/data-0-9.dnb1",
        "%00",
        "",
    ],
)
def test_no_other_key_can_be_put(server: Served, key: str) -> None:
    with pytest.raises(ForebayError):
        put(server, key, b"x")
    assert leftovers(server) == []


@pytest.mark.parametrize("key", ["..%2Fcatalog.db", ".tmp/x", "%2Fetc%2Fpasswd", "a//b", "%00"])
def test_no_file_of_another_kind_can_be_read(server: Served, key: str) -> None:
    with pytest.raises(UsageError):
        get(server, key)


def test_an_object_that_is_not_there_is_missing(server: Served) -> None:
    with pytest.raises(ObjectMissing):
        get(server, object_key(TOPIC, "data-70-79.dnb1"))
    with server.new_client() as client, pytest.raises(ObjectMissing):
        client.request("HEAD", "/v1/objects/" + object_key(TOPIC, "data-70-79.dnb1"))


def test_a_client_that_breaks_off_leaves_nothing(server: Served) -> None:
    key = "staging/0123456789abcdef/4-1.frames"
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=120) as raw:
        raw.sendall(
            f"PUT /v1/objects/{key} HTTP/1.1\r\nHost: {where.netloc}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(3):
            raw.sendall(b"%x\r\n%s\r\n" % (MIB, bytes(MIB)))
        wait_until(lambda: bool(leftovers(server)))
    wait_until(lambda: not leftovers(server))
    with pytest.raises(ObjectMissing):
        get(server, key)


def test_objects_in_a_bucket_are_asked_for_there(tmp_path: Path, s3: S3Server) -> None:
    settings = StoreSettings(
        data=tmp_path, uploader=UploaderSettings(enabled=False), cloud=s3.settings()
    )
    assert isinstance(settings.cloud, CloudSettings)
    with served(settings) as server:
        key = object_key(TOPIC, intended(server, TOPIC).object_id)
        with pytest.raises(UsageError, match="access that store directly"):
            put(server, key, b"frames")
        with pytest.raises(UsageError, match="access that store directly"):
            get(server, key)
        put(server, ROWS, b"rows")  # which a sink that knows nothing but the server has to put
        assert get(server, ROWS) == b"rows"
