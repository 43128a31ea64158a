"""What must not go wrong in the tiers: lost ownership, half-done steps, interrupts, clocks."""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import pytest

from forebay.catalog.adopt import adopt
from forebay.catalog.catalog import Change
from forebay.catalog.records import TopicRecord
from forebay.errors import (
    CorruptFrame,
    CorruptLog,
    ForebayError,
    LogClosed,
    ServiceUnavailable,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.objects.local import LocalBackend
from forebay.objects.memory import MemoryBackend
from forebay.settings import CloudReaderSettings, RemoteRetentionSettings
from forebay.testing import ManualClock
from forebay.testing.objects import FaultBackend, ObjectFault
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store, Topic
from support.storages import storage_of
from support.tiered_stores import TOPIC, Setup, fill, offsets

PATIENCE = 60.0


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data", backend=FaultBackend(MemoryBackend()))
    setup.uploading(max_object_bytes=20_000)
    return setup


def faults(setup: Setup) -> FaultBackend:
    assert isinstance(setup.backend, FaultBackend)
    return setup.backend


def record_of(setup: Setup) -> TopicRecord:
    record = setup.catalog.record(TOPIC)
    assert record is not None
    return record


# ---- what may be deleted ----------------------------------------------------------------------


def test_a_store_that_deletes_nothing_does_not_keep_local_segments(setup: Setup) -> None:
    setup.remote = RemoteRetentionSettings(size_mb=0)
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        faults(setup).inject(ObjectFault("delete", times=None))
        with pytest.raises(ForebayError):
            storage_of(topic).trim_due()
        assert topic.segments()[0].first_offset > 0


def test_a_gap_where_verification_had_got_to_does_not_hold_it_up(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        topic.upload()
        before = record_of(setup)
        (made,) = setup.descriptors()
        later = ObjectDescriptor("data-200-249.dnb1", 200, 249, made.size, made.etag, 0)
        adopt(setup.catalog, TOPIC, before.epoch, [later], fill=TopicRecord.with_lost)
        assert record_of(setup).lost == ((50, 200),)
        assert setup.catalog.mark_verified(TOPIC, later).verified == 250


def test_an_object_with_another_etag_is_read_even_where_nothing_is_read_back(
    setup: Setup,
) -> None:
    setup.uploading(verify_after_upload=False)

    def replace_it(key: str) -> None:
        faults(setup).clear()
        setup.objects.put_object(key, bytes(setup.objects.head(key).size))

    with setup.topic() as topic:
        fill(topic, 50)
        faults(setup).hook("complete", replace_it, when="after")
        with pytest.raises(CorruptFrame):
            topic.upload()
        assert record_of(setup).tail == record_of(setup).verified == 0
        assert not [key for key in setup.listed() if key.endswith(".json")]


def test_an_index_that_leads_nowhere_is_not_verified(setup: Setup) -> None:
    """A sidecar may be wrong, and readers look for frames where it says."""
    with setup.topic() as topic:
        fill(topic, 50)
        made = topic.upload()[0]
    at = made.size // 50
    resources = StoreResources(
        setup.settings(), setup.clock, catalog=setup.catalog, store=setup.objects
    )
    with closing(resources):
        for index in ((), ((0, 0), (1, at), (49, 49 * at))):
            resources.read_back(TOPIC, replace(made, offset_index=index))
        for wrong in ((0, 0), (2, at)), ((0, 0), (1, at + 1)), ((0, 0), (49, 48 * at)):
            with pytest.raises(CorruptLog, match=r"data-0-49\.dnb1"):
                resources.read_back(TOPIC, replace(made, offset_index=wrong))


# ---- what was done counts ---------------------------------------------------------------------


def test_an_uploaded_append_succeeds_when_only_reading_back_failed(setup: Setup) -> None:
    """A producer that gets an error appends again, and then the message is there twice."""
    with setup.topic() as topic:
        faults(setup).inject(ObjectFault("get_range"))
        assert topic.append(b"once", durability="uploaded") == 0
        assert topic.watermarks().uploaded == topic.watermarks().verified == 1
        assert faults(setup).calls("open_writer") == 1, "a failed read costs no second transfer"


def test_an_uploaded_append_succeeds_when_only_an_older_object_is_not_verified(
    setup: Setup,
) -> None:
    with setup.topic() as topic:
        topic.append(b"restored", durability="uploaded")
        setup.catalog.update(TOPIC, None, lambda record: Change(replace(record, verified=0)))
        faults(setup).inject(ObjectFault("get_range", skip=1, times=None))
        assert topic.append(b"once", durability="uploaded") == 1
        assert topic.watermarks().uploaded == 2
        assert record_of(setup).verified == 0
        faults(setup).clear()
        topic.upload()
        assert topic.watermarks().verified == 2


@pytest.mark.parametrize("rolling", [False, True])
def test_an_object_that_cannot_be_read_back_has_no_sidecar_and_does_not_count(
    setup: Setup, rolling: bool
) -> None:
    setup.uploading(rolling=rolling)
    with setup.topic() as topic:
        faults(setup).inject(ObjectFault("get_range", times=None))
        with pytest.raises(ServiceUnavailable):
            topic.append(b"once", durability="uploaded")
        assert topic.watermarks().uploaded == 0
        assert setup.descriptors() == []
        assert not [key for key in setup.listed() if key.endswith(".json")]
        faults(setup).clear()
        topic.upload()
        assert topic.watermarks().uploaded == topic.watermarks().verified == 1


@pytest.mark.parametrize("rolling", [False, True])
def test_a_full_disk_does_not_stop_uploads(
    setup: Setup, rolling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.uploading(rolling=rolling)

    def full(_checkpoint: object) -> None:
        raise OSError(28, "No space left on device")

    with setup.topic() as topic:
        uploader = storage_of(topic).uploader
        assert uploader is not None
        monkeypatch.setattr(uploader.checkpoints, "update_uploader", full)
        fill(topic, 300)
        assert len(topic.upload()) > 1
        assert topic.watermarks().verified == 300


def test_the_first_error_of_a_cycle_is_told(setup: Setup) -> None:
    """And what was committed is read back, if it can be."""
    with setup.topic() as topic:
        fill(topic, 300)
        faults(setup).inject(ObjectFault("complete", skip=1))
        with pytest.raises(ForebayError, match="of complete"):
            topic.upload()
        assert 0 < topic.watermarks().verified == topic.watermarks().uploaded < 300
        faults(setup).inject(ObjectFault("complete", skip=1))
        faults(setup).inject(ObjectFault("get_range"))
        with pytest.raises(ForebayError, match="of complete"):
            topic.upload()


def test_an_interrupt_of_an_upload_ends_it_at_once(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        done = iter([None])

        def interrupt_the_second(_key: str) -> None:
            if next(done, _Interrupt):
                raise _Interrupt

        faults(setup).hook("complete", interrupt_the_second)
        with pytest.raises(_Interrupt):
            topic.upload()
        assert faults(setup).calls("get_range") == 1, "the first object was read back, and no more"
        assert len(setup.descriptors()) == 1
        faults(setup).clear()
        topic.upload()
        assert topic.watermarks().verified == 300


class _Interrupt(BaseException):
    """An interrupt such as KeyboardInterrupt."""


# ---- closing ----------------------------------------------------------------------------------


def test_a_close_that_was_interrupted_goes_on_when_it_is_called_again(setup: Setup) -> None:
    with setup.store() as store:
        topics = [store.topic(f"t{number}") for number in range(3)]
        for topic in topics:
            topic.append(b"buffered")
        wal = storage_of(topics[1]).wal
        shutdown, wal.shutdown = wal.shutdown, _interrupt  # type: ignore[method-assign] # once
        with pytest.raises(_Interrupt):
            store.close()
        wal.shutdown = shutdown  # type: ignore[method-assign] # as it was
        store.close()
    with setup.store() as store:
        for number in range(3):
            found = [message.payload for message in store.topic(f"t{number}").read()]
            assert found == [b"buffered"]
    assert record_of_any(setup, "t1").lost == ()


def _interrupt() -> None:
    raise _Interrupt


def record_of_any(setup: Setup, name: str) -> TopicRecord:
    record = setup.catalog.record(TopicName("default", name))
    assert record is not None
    return record


def test_readers_of_objects_are_told_that_the_store_was_closed(setup: Setup) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def stall(_key: str) -> None:
        reached.set()
        go_on.wait(PATIENCE)

    ends: list[BaseException] = []

    def read(topic: Topic) -> None:
        try:
            list(topic.read(0))
        except BaseException as error:  # noqa: BLE001 - looked at below
            ends.append(error)

    settings = replace(setup.settings(), cloud_reader=CloudReaderSettings(fetch_threads=1))
    with Store(settings, clock=setup.clock, catalog=setup.catalog, store=setup.objects) as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 300)
        topic.upload()
        assert topic.trim_local()
        faults(setup).hook("get_range", stall)
        readers = [threading.Thread(target=read, args=(topic,)) for _ in range(3)]
        for reader in readers:
            reader.start()
        assert reached.wait(PATIENCE)
        store.close()
        go_on.set()
        for reader in readers:
            reader.join(PATIENCE)
    assert [type(error) for error in ends] == [LogClosed] * 3


# ---- reading ----------------------------------------------------------------------------------


def test_a_reader_that_was_closed_before_it_came_to_objects_asks_for_none(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        assert topic.trim_local()
        before = faults(setup).calls("get_range")
        reader = topic.read(0, end=300)
        reader.close()
        # The reader is closed between planning and fetching: no public call stops there.
        objects = reader._log.plan(reader)
        assert not isinstance(objects, list)
        assert objects is not None
        assert reader.fetch(objects, reader.buffer(objects)) is None
        assert faults(setup).calls("get_range") == before


def test_a_reader_of_frames_keeps_no_old_piece_while_it_fetches_the_next(setup: Setup) -> None:
    one_by_one = CloudReaderSettings(read_ahead_chunks=0)
    settings = replace(setup.settings(), cloud_reader=one_by_one)
    with Store(settings, clock=setup.clock, catalog=setup.catalog, store=setup.objects) as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 300)
        topic.upload()
        assert topic.trim_local()
        pieces = topic.read(0, end=200).frames()
        frames = next(pieces)
        assert isinstance(frames.buffer, memoryview)
        buffer = weakref.ref(frames.buffer)
        del frames
        kept: list[object] = []
        faults(setup).hook("get_range", lambda _key: kept.append(buffer()))
        next(pieces)
        assert kept == [None]


@pytest.mark.parametrize(
    ("lenient", "compression"), [(False, "none"), (True, "none"), (False, "zstd")]
)
def test_a_reader_of_objects_goes_on_after_an_interrupt_at_any_line(
    setup: Setup, lenient: bool, compression: Literal["none", "zstd"]
) -> None:
    setup.uploading(max_object_bytes=150_000, compression=compression)
    chunked = CloudReaderSettings(fetch_chunk_size=65_536, read_ahead_chunks=2, lenient=lenient)
    settings = replace(setup.settings(), cloud_reader=chunked)
    with Store(settings, clock=setup.clock, catalog=setup.catalog, store=setup.objects) as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 40, 8000)
        topic.upload()
        assert topic.trim_local()
        at = 0
        while _interrupted_at(at := at + 7, topic):
            pass
        assert at > 200


_INTERRUPTED: Final = tuple(
    f"/forebay/{each}.py" for each in ("format/frame", "format/blocks", "processors")
)


def _interrupted_at(line: int, topic: Topic) -> bool:
    """Whether the interrupt came while the reader read; it then reads on without a gap."""
    count = 0

    def trace(frame: FrameType, kind: str, _argument: object) -> Any:
        nonlocal count
        file = frame.f_code.co_filename
        # Not at a `with`: a real interrupt never comes between its block and its end.
        if (
            kind == "line"
            and ("/forebay/read/" in file or file.endswith(_INTERRUPTED))
            and "with " not in linecache.getline(file, frame.f_lineno)
        ):
            count += 1
            if count == line:
                raise _Interrupt
        return trace

    reader, found, before = topic.read(0, end=30), [], sys.gettrace()
    interrupted = False
    sys.settrace(trace)
    try:
        found += offsets(reader)
    except _Interrupt:
        interrupted = True
        found = list(range(reader.position))
    finally:
        sys.settrace(before)
    found += offsets(reader)
    assert found == list(range(30))
    return interrupted


def test_metadata_files_that_make_no_sense_are_as_none(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put_object("a/b", b"data", {"name": "value"})
    for nonsense in (b"[]", b"{}", b"5", b'{"etag": 1}', b"\xff", b"[" * 100_000):
        (tmp_path / ".meta/a/b.meta").write_bytes(nonsense)
        assert backend.head("a/b").metadata == {}


# ---- time -------------------------------------------------------------------------------------


class _MovedClock(ManualClock):
    """A clock whose wall time can be set back, as people and time servers do."""

    moved_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.moved_ns


@pytest.mark.parametrize("rolling", [False, True])
def test_a_clock_that_was_put_back_holds_no_upload_up(tmp_path: Path, rolling: bool) -> None:
    clock = _MovedClock()
    setup = Setup(tmp_path / "data", clock=clock)
    setup.uploading(max_open_seconds=600, rolling=rolling)
    with setup.topic() as topic:
        fill(topic, 10)
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == 0
        clock.moved_ns = -(10**9) * 3600 * 24 * 365
        clock.advance(600)
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == 10
        fill(topic, 10)
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == 10, "and it makes no small objects from then on"
        clock.advance(600)
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == 20
