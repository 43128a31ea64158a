"""What stands in for the server's disk and objects in a process that cannot see them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.admin.executors import TRANSFERS
from forebay.catalog.catalog import Catalog
from forebay.client.address import ServerInfo, server_file
from forebay.client.disk import WINDOW_BYTES, ServerDisk
from forebay.client.objects import ServerBackend, ServerWriter
from forebay.errors import (
    CommitRefused,
    ObjectChanged,
    ObjectMissing,
    ServiceError,
    ServiceUnavailable,
    UsageError,
)
from forebay.files.local import LocalDisk
from forebay.format.names import SIDECAR_ENDING, ObjectName, TopicName, object_key
from forebay.limits import PART_BYTES_MIN
from forebay.pipeline.jobs.offload import Offload
from forebay.pipeline.jobs.replay import replay
from forebay.pipeline.location import NO_DATA, job_settings
from forebay.pipeline.sink.owner import serving
from forebay.pipeline.sink.writer import sink_options
from forebay.pipeline.source.plan import Split, plan_topic
from forebay.pipeline.source.scan import read_split
from forebay.settings import AdminSettings, ServerAddress, StoreSettings, UploaderSettings
from forebay.topic.resources import close_executor_resources, open_resources
from support.inline_executor import InlineExecutor
from support.served import Served, served

TOPIC = TopicName("default", "orders")
KEY = object_key(TOPIC, "data-0-9.dnb1")
CHUNK = PART_BYTES_MIN
NOISE = random.Random(7).randbytes(3 * CHUNK + 17)
QUIET = UploaderSettings(enabled=False, max_object_bytes=2 * 1024 * 1024)


def announce(server: Served, instance: str | None = None) -> None:
    """The file that a server keeps in its directory."""
    setup = server.context
    note = ServerInfo(server.url, instance or setup.instance, 1, setup.store_id)
    server_file(server.store.settings.data or "").write_bytes(note.encode())


def told(server: Served) -> StoreSettings:
    """The settings of a job, as they travel to executors that see no such file."""
    settings = job_settings(server.store.settings)
    return replace(settings, server=server.client.address)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(StoreSettings(data=tmp_path_factory.mktemp("data"), uploader=QUIET)) as server:
        server.store.topic(str(TOPIC)).append_many([b"x"] * 10, durability="synced")
        yield server
        close_executor_resources()


# ---- objects ----


@pytest.fixture
def backend(server: Served) -> Iterator[ServerBackend]:
    with server.store.view() as view:
        resources = view.resources()
        assert resources is not None
        record = resources.catalog.record(TOPIC)
        assert record is not None
        resources.catalog.intend(TOPIC, record.epoch, ObjectName(0, 9))
        resources.store.delete_object(KEY)
    backend = ServerBackend(server.client.address)
    yield backend
    backend.close()


def writer(backend: ServerBackend) -> ServerWriter:
    return backend.open_streaming_writer(KEY, chunk_bytes=CHUNK, concurrent_parts=2)


def whole(backend: ServerBackend) -> bytes:
    return bytes(backend.get_range(KEY, 0, backend.head(KEY).size))


def test_put_takes_every_kind_of_buffer(backend: ServerBackend) -> None:
    for data in (b"", b"bytes", bytearray(b"bytearray"), memoryview(b"a view")[2:]):
        key = KEY + SIDECAR_ENDING  # only a sidecar may be replaced
        meta = backend.put_object(key, data)
        assert (meta.key, meta.size) == (key, len(data))
        assert bytes(backend.get_range(key, 0, len(data))) == bytes(data)
        assert backend.head(key) == meta


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_a_writer_keeps_every_byte(backend: ServerBackend, size: int) -> None:
    buffer = bytearray(1_000_003)
    with writer(backend) as made:
        for start in range(0, size, len(buffer)):
            piece = NOISE[start : min(start + len(buffer), size)]
            buffer[: len(piece)] = piece
            made.write(memoryview(buffer)[: len(piece)])
            buffer[:] = bytes(len(buffer))  # which is the caller's again
        meta = made.close()
    assert meta.size == size
    assert whole(backend) == NOISE[:size]
    assert meta.etag == backend.head(KEY).etag


def test_nothing_is_visible_before_close(backend: ServerBackend) -> None:
    made = writer(backend)
    made.write(NOISE[: 2 * CHUNK + 1])
    with pytest.raises(ObjectMissing):
        backend.head(KEY)
    made.close()
    made.abort()
    assert whole(backend) == NOISE[: 2 * CHUNK + 1]


@pytest.mark.parametrize("size", [0, 10, 2 * CHUNK + 1])
def test_an_aborted_writer_publishes_nothing_and_takes_nothing_more(
    backend: ServerBackend, size: int
) -> None:
    backend.put_object(KEY, b"old")
    made = writer(backend)
    made.write(NOISE[:size])
    made.abort()
    made.abort()
    with pytest.raises(UsageError):
        made.write(b"more")
    with pytest.raises(UsageError):
        made.close()
    assert whole(backend) == b"old"


def test_ranges_are_exact_and_one_past_the_end_is_an_error(backend: ServerBackend) -> None:
    data = NOISE[:100]
    backend.put_object(KEY, data)
    for start, end in [(0, 100), (0, 1), (99, 100), (1, 99), (0, 0), (40, 40), (100, 100)]:
        assert bytes(backend.get_range(KEY, start, end)) == data[start:end]
    for start, end in [(0, 101), (99, 101), (100, 101), (101, 102), (101, 101)]:
        with pytest.raises(ServiceError, match="ends before") as caught:
            backend.get_range(KEY, start, end)
        assert not isinstance(caught.value, ObjectMissing)
    for start, end in [(-1, 5), (5, 4)]:
        with pytest.raises(UsageError):
            backend.get_range(KEY, start, end)


def test_a_range_of_an_object_with_another_etag_is_refused(backend: ServerBackend) -> None:
    etag = backend.put_object(KEY, NOISE[:100]).etag
    assert bytes(backend.get_range(KEY, 3, 9, etag=etag)) == NOISE[3:9]
    with pytest.raises(ObjectChanged) as caught:
        backend.get_range(KEY, 3, 9, etag="another")
    assert caught.value.etag == etag


def test_what_is_not_there_is_missing(backend: ServerBackend) -> None:
    for missing in ("no/such/object", KEY.rpartition("/")[0], KEY + "/below"):
        with pytest.raises(ObjectMissing):
            backend.head(missing)
        for start, end in [(0, 1), (0, 0)]:
            with pytest.raises(ObjectMissing):
                backend.get_range(missing, start, end)


def test_many_threads_read_and_write_at_the_same_time(backend: ServerBackend) -> None:
    keys = [f"staging/{number:016x}/0-{random.getrandbits(40)}.frames" for number in range(16)]

    def there_and_back(key: str) -> bool:
        with backend.open_streaming_writer(key, chunk_bytes=CHUNK, concurrent_parts=2) as made:
            made.write(key.encode() * 1000)
        return bytes(backend.get_range(key, 0, len(key) * 1000)) == key.encode() * 1000

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, keys))


def test_a_refusal_is_told_to_the_one_who_writes(backend: ServerBackend) -> None:
    key = object_key(TOPIC, "data-10-19.dnb1")
    made = backend.open_streaming_writer(key, chunk_bytes=CHUNK, concurrent_parts=2)
    made.write(NOISE)
    with pytest.raises(CommitRefused, match="has no intent"):
        made.close()


def test_a_server_that_is_gone_is_told_to_the_one_who_writes(tmp_path: Path) -> None:
    with served(tmp_path) as gone:
        address = gone.client.address
    backend = ServerBackend(address)
    made = backend.open_streaming_writer(KEY, chunk_bytes=CHUNK, concurrent_parts=2)

    def write() -> None:
        with made:
            for _ in range(8):
                made.write(NOISE)

    with pytest.raises(ServiceUnavailable):
        write()
    with pytest.raises(ServiceUnavailable):
        backend.head(KEY)


def test_listing_copying_and_deleting_are_for_owners(backend: ServerBackend) -> None:
    for refused in (
        lambda: backend.list(""),
        lambda: backend.copy_object(KEY, KEY),
        lambda: backend.delete_object(KEY),
        lambda: backend.put_object(KEY, b"x", {"a": "b"}),
    ):
        with pytest.raises(UsageError):
            refused()


# ---- segments ----


def test_a_segment_is_read_as_the_file_is(server: Served) -> None:
    topic = server.store.topic("large")
    topic.append_many([NOISE[:50_000]] * 250)
    topic.flush()
    bench = open_resources(told(server))
    [segment] = topic.segments()
    data = segment.path.read_bytes()
    assert len(data) > WINDOW_BYTES
    assert isinstance(bench.disk, ServerDisk)
    assert bench.disk.size(segment.path) == len(data)
    file = bench.disk.open_read(segment.path)
    for position, count in [
        (0, 10),
        (5, 1_000_000),
        (WINDOW_BYTES - 7, 100),
        (3, 2 * WINDOW_BYTES),
        (len(data) - 9, 100),
        (len(data), 5),
        (len(data) + 100, 5),
    ]:
        buffer = bytearray(count)
        taken = file.read_into(memoryview(buffer), position)
        assert buffer[:taken] == data[position : position + count]
    file.close()
    bench.close()


def test_everything_else_on_the_disk_is_missing_or_refused(server: Served) -> None:
    bench = open_resources(told(server))
    folder = Path(server.store.settings.data or "") / "wal/default/orders"
    for path in (folder / "wal.9.log", folder / "wal.id", Path("/etc/passwd"), folder):
        assert not bench.disk.exists(path)
        with pytest.raises(FileNotFoundError):
            bench.disk.open_read(path)
    with pytest.raises(FileNotFoundError):
        bench.disk.open_read(folder.with_name("nothing") / "wal.log")
    for refused in (bench.disk.unlink, bench.disk.open_append, bench.disk.sync_dir):
        with pytest.raises(PermissionError):
            refused(folder / "wal.log")
    bench.close()


# ---- who goes through the server ----


def test_a_process_that_reads_the_servers_note_reads_its_files(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.store.topic(str(TOPIC))
        assert job_settings(tmp_path).server is None
        announce(server)
        settings = job_settings(tmp_path)
        assert settings.server == server.client.address
        seeing = open_resources(settings)
        assert isinstance(seeing.disk, LocalDisk)
        assert seeing.objects_are_files
        # The same path on another machine: an old copy of the directory, or nothing.
        announce(server, "0" * 32)
        blind = open_resources(settings)
        assert isinstance(blind.disk, ServerDisk)
        assert not blind.objects_are_files
        with pytest.raises(UsageError, match="etcd"):
            assert isinstance(blind.catalog, Catalog)
        for bench in (seeing, blind):
            bench.close()
    assert job_settings(tmp_path).server is None
    # Nobody serves the directory any more: it is read as it was before there was a server.
    assert isinstance(open_resources(settings).disk, LocalDisk)


def test_a_directory_of_the_servers_next_run_is_seen(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.store.topic(str(TOPIC))
        announce(server)
        settings = job_settings(tmp_path)
        assert settings.server is not None
        old = replace(settings, server=replace(settings.server, instance="0" * 32))
        assert isinstance(open_resources(old).disk, LocalDisk)
        server_file(tmp_path).unlink()
        assert isinstance(open_resources(old).disk, ServerDisk)


def test_a_copy_of_a_log_is_not_taken_for_the_planned_one(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        server.store.topic(str(TOPIC)).append(b"x", durability="synced")
        announce(server)
        settings = job_settings(tmp_path / "data")
        folder = Path("wal/default/orders")
        log_id = (tmp_path / "data" / folder / "wal.id").read_text()
        bench = open_resources(settings)
        assert bench.segments_of(TOPIC, log_id) is bench.disk
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        (tmp_path / "copy" / folder / "wal.id").write_text("0" * 32)
        copy = open_resources(replace(settings, data=tmp_path / "copy"))
        with pytest.raises(CommitRefused, match="is it a copy"):
            copy.segments_of(TOPIC, log_id)
        path = tmp_path / "data" / folder / "wal.log"
        announce(server, "0" * 32)
        blind = open_resources(settings)
        blind.segments_of(TOPIC, log_id).open_read(path).close()
        with pytest.raises(CommitRefused, match="do not belong to the log"):
            blind.segments_of(TOPIC, "1" * 32).open_read(path)
        for each in (bench, copy, blind):
            each.close()


def test_an_offload_works_through_the_server(tmp_path: Path) -> None:
    with served(StoreSettings(data=tmp_path, uploader=QUIET)) as server:
        names = [f"/default/t{number}" for number in range(3)]
        for name in names:
            server.store.topic(name).append_many([NOISE[:1000]] * 4000)
            server.store.topic(name).flush()
        before = TRANSFERS.values()
        with Offload(told(server), InlineExecutor()) as run:
            report = run.once(force=True)
        assert report.ok
        assert report.messages == 12_000
        size = sum(row.bytes for row in report.rows)
        after = TRANSFERS.values()
        for kind, least in ((("segment", "down"), size), (("object", "up"), size)):
            assert after[kind] - before.get(kind, 0) >= least
        assert after["object", "down"] - before.get(("object", "down"), 0) >= size  # read back
        with server.store.view() as view:
            for name in names:
                record = view.topic(name).record
                assert record is not None
                assert record.tail == record.verified == 4000
    close_executor_resources()


def test_a_scan_reads_both_tiers_through_the_server(tmp_path: Path) -> None:
    with served(StoreSettings(data=tmp_path, uploader=QUIET)) as server:
        topic = server.store.topic(str(TOPIC))
        topic.append_many([b"%d" % number for number in range(3000)])
        topic.upload()
        topic.rotate()
        topic.append_many([b"%d" % number for number in range(3000, 5000)])
        topic.flush()
        with server.store.view() as view:
            pieces = plan_topic(view.topic(str(TOPIC)), 10, 4990)
        resources = {piece.descriptor is None for piece in pieces}
        assert resources == {True, False}
        before = {each: TRANSFERS.value(each, "down") for each in ("segment", "object")}
        batches = read_split(told(server), Split(tuple(pieces)), ("offset", "value"))
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert [row["offset"] for row in rows] == list(range(10, 4990))
        assert [row["value"] for row in rows] == [b"%d" % number for number in range(10, 4990)]
        assert all(TRANSFERS.value(each, "down") > count for each, count in before.items())
    close_executor_resources()


def test_a_replay_appends_through_the_server(tmp_path: Path) -> None:
    with served(StoreSettings(data=tmp_path, uploader=QUIET)) as server:
        server.store.topic("from").append_many([b"%d" % number for number in range(500)])
        server.store.topic("from").flush()
        announce(server)
        for _ in range(2):
            report = replay(tmp_path, "from", "into", executor=InlineExecutor())
            assert report.ok
        found = [each.payload for each in server.store.topic("into").read()]
        assert found == [b"%d" % number for number in range(500)]
    close_executor_resources()


def test_nothing_is_read_from_the_server_of_another_store(server: Served, tmp_path: Path) -> None:
    """It has the address that an executor was told, and objects of the same names."""
    here = server.client.address
    with served(tmp_path / "other") as other:
        backend = ServerBackend(replace(here, url=other.url))
        with pytest.raises(ServiceUnavailable, match="serves another store"):
            backend.head("storage/topics/default/orders/objects/data-0-19.dnb1")


# ---- the options of the sink ----


def test_a_sink_needs_nothing_but_the_server(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_TOKEN", "secret")
    options = {"server": server.url + "/", "topic": "orders"}
    found = sink_options(options, streaming=False).settings
    setup = server.context
    assert found.server == ServerAddress(server.url, setup.instance, "secret", store=setup.store_id)
    assert found.data == NO_DATA
    assert serving(found) == found.server
    assert "secret" not in repr(found)
    store = {"store": "s3://bucket/prefix", "store.endpoint": "http://127.0.0.1:1"}
    assert sink_options({**options, **store}, streaming=False).settings.cloud.backend == "s3"


def test_a_sink_takes_the_token_of_a_configuration_file(server: Served, tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text("admin: {token: from-the-file}\n")
    found = sink_options({"server": server.url, "path": str(config)}, streaming=False).settings
    assert found.server is not None
    assert found.server.token == "from-the-file"
    assert found.admin == AdminSettings(token="from-the-file")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"token": "x"}, "FOREBAY_TOKEN"),
        ({"server": "nowhere"}, "not the address of a server"),
        ({"server": "http://127.0.0.1:1", "store": "relative/folder"}, "store is a directory"),
        ({"server": "http://127.0.0.1:1", "catalog": "etcd://a:1"}, "leave out catalog"),
        ({"topic": "a"}, "say where the store is"),
    ],
)
def test_addresses_that_make_no_sense_are_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        sink_options(options, streaming=False)


def test_a_server_that_does_not_answer_is_said_when_the_write_is_planned() -> None:
    with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:1"):
        sink_options({"server": "http://127.0.0.1:1", "topic": "a"}, streaming=False)
