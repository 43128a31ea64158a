"""The uploader: how a topic's segments become objects."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.catalog import Change
from forebay.catalog.kv import Remove
from forebay.errors import (
    CommitRefused,
    CorruptFrame,
    LogClosed,
    MissingData,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
)
from forebay.objects.memory import MemoryBackend
from forebay.settings import UploaderSettings, WalSettings
from forebay.testing.objects import FaultBackend, ObjectFault
from forebay.topic.store import Topic
from forebay.upload import metrics
from support.storages import checkpoints_of, storage_of, uploader_checkpoint
from support.tiered_stores import TOPIC, Setup, fill, offsets, payloads, require_chain


@pytest.fixture(params=["ahead", "rolling", "ledgers"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data")
    form = "pulsar" if request.param == "ledgers" else "dnb1"
    setup.uploading(rolling=request.param == "rolling", format=form, ledger_block_bytes=2048)
    return setup


of_frames = pytest.mark.parametrize("setup", ["ahead", "rolling"], indirect=True)
"""For what is otherwise with ledgers: see `test_ledgers.py`."""


def cycle(topic: Topic) -> None:
    """One cycle of the background work, as its timer runs it."""
    storage_of(topic).upload_due()


def test_an_upload_covers_everything_that_was_appended(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.append(b"0000000100 not synced yet")
        [descriptor] = topic.upload()
        assert (descriptor.start_offset, descriptor.end_offset) == (0, 100)
        assert topic.watermarks().uploaded == topic.watermarks().verified == 101
        assert topic.upload() == []
    require_chain(setup)


def test_objects_are_within_their_bounds_and_cover_the_log(setup: Setup) -> None:
    setup.uploading(max_object_bytes=6000)
    with setup.topic() as topic:
        fill(topic, 500)
        found = topic.upload()
    assert len(found) > 5
    assert all(each.size <= 6000 for each in found)
    assert setup.ranges() == [(each.start_offset, each.next_offset) for each in found]
    require_chain(setup)


@of_frames
def test_messages_bound_an_object_too(setup: Setup) -> None:
    setup.uploading(max_object_messages=64)
    with setup.topic() as topic:
        fill(topic, 200)
        topic.upload()
    assert setup.ranges() == [(0, 64), (64, 128), (128, 192), (192, 200)]


@of_frames
def test_an_object_is_the_frames_of_the_log_byte_for_byte(setup: Setup) -> None:
    setup.wal = WalSettings(rotate_max_bytes=2000)
    with setup.topic() as topic:
        fill(topic, 100)
        frames = b"".join(segment.path.read_bytes() for segment in topic.segments())
        [descriptor] = topic.upload()
    key = f"storage/topics{TOPIC}/objects/{descriptor.object_id}"
    assert bytes(setup.objects.get_object(key, 10**6)) == frames


@of_frames
def test_the_index_points_at_the_frames_of_the_object(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 3500)
        [descriptor] = topic.upload()
    index = descriptor.offset_index
    assert index is not None
    assert [offset for offset, _ in index] == [0, 1000, 2000, 3000]
    key = f"storage/topics{TOPIC}/objects/{descriptor.object_id}"
    data = bytes(setup.objects.get_object(key, 10**7))
    for offset, position in index:
        assert int.from_bytes(data[position : position + 8], "little") == offset


@of_frames
def test_a_quiet_topic_waits_for_its_time_and_no_longer(setup: Setup) -> None:
    setup.uploading(max_open_seconds=600)
    with setup.topic() as topic:
        fill(topic, 10)
        cycle(topic)
        assert topic.watermarks().uploaded == 0
        setup.clock.advance(599)
        cycle(topic)
        assert topic.watermarks().uploaded == 0
        setup.clock.advance(1.001)
        cycle(topic)
        assert topic.watermarks().uploaded == 10
    assert setup.ranges() == [(0, 10)]


def test_a_busy_topic_does_not_wait(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploading(max_object_bytes=5000)
    with setup.topic() as topic:
        fill(topic, 100)
        cycle(topic)
        uploaded = topic.watermarks().uploaded
        assert 0 < uploaded < 100
        assert all(each.size <= 5000 for each in setup.descriptors())


def test_it_goes_on_at_the_exact_byte_after_a_restart(setup: Setup) -> None:
    setup.uploading(max_object_messages=33)
    with setup.topic() as topic:
        fill(topic, 120)
        topic.upload()
    for _ in range(3):
        with setup.topic() as topic:
            fill(topic, 50)
            topic.upload()
    require_chain(setup)
    with setup.topic() as topic:
        assert offsets(topic.read(0)) == list(range(270))


@pytest.mark.parametrize("damage", ["missing", "wrong position", "another file"])
def test_the_catalog_wins_over_the_checkpoint(setup: Setup, damage: str) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        topic.upload()
        fill(topic, 50)
        checkpoints, memory = checkpoints_of(topic), uploader_checkpoint(topic)
        if damage == "wrong position":
            checkpoints.update_uploader(
                replace(memory, last_read_byte_position=memory.last_read_byte_position - 3)
            )
        elif damage == "another file":
            checkpoints.update_uploader(replace(memory, last_read_file_seq=0))
    if damage == "missing":
        (setup.data / "wal/default/orders/uploader.ckpt").unlink()
    with setup.topic() as topic:
        topic.upload()
        assert offsets(topic.read(0)) == list(range(100))
    assert setup.ranges() == [(0, 50), (50, 100)]


def test_nothing_that_is_committed_is_uploaded_twice(tmp_path: Path) -> None:
    backend = FaultBackend(MemoryBackend())
    setup = Setup(tmp_path, backend=backend)
    with setup.topic() as topic:
        fill(topic, 50)
        topic.upload()
    writers = backend.calls("open_writer")
    with setup.topic() as topic:
        topic.upload()
        topic.upload()
    assert backend.calls("open_writer") == writers == 1


def corrupt(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def test_a_damaged_frame_stops_the_upload_and_what_is_before_it_counts(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        middle = topic.segments()[1]
        corrupt(middle.path, middle.size // 2)
        stopped = metrics.corrupt_frames.value()
        with pytest.raises(CorruptFrame) as caught:
            topic.upload()
        assert caught.value.offset is not None
        assert middle.first_offset < caught.value.offset < middle.end_offset
        assert metrics.corrupt_frames.value() > stopped
        assert topic.watermarks().uploaded == caught.value.offset
        with pytest.raises(CorruptFrame):
            topic.upload()
        assert topic.watermarks().uploaded == caught.value.offset
        gone = topic.trim_local()
        assert all(each.end_offset <= caught.value.offset for each in gone)
    assert setup.ranges() == [(0, caught.value.offset)]
    require_chain(setup)


def test_an_object_that_the_store_lost_on_the_way_does_not_count(tmp_path: Path) -> None:
    setup = Setup(tmp_path, backend=FaultBackend(MemoryBackend()))
    backend = setup.backend
    assert isinstance(backend, FaultBackend)
    with setup.topic() as topic:
        fill(topic, 50)
        backend.inject(ObjectFault("complete"))
        with pytest.raises(ServiceUnavailable):
            topic.upload()
        assert setup.ranges() == []
        assert topic.watermarks().uploaded == 0
        topic.upload()
    assert setup.ranges() == [(0, 50)]


@of_frames
def test_a_frame_that_is_not_synced_is_not_uploaded(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 10)
        topic.append_many(payloads(10, 10))
        uploader = storage_of(topic).uploader
        assert uploader is not None
        uploader.run_once(force=True)
        assert topic.watermarks().uploaded == topic.watermarks().synced == 10


def test_an_uploader_of_an_older_epoch_commits_nothing(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 10)
        setup.catalog.update(
            TOPIC, None, lambda record: Change(replace(record, epoch=record.epoch + 1))
        )
        with pytest.raises(TopicFenced, match=str(TOPIC)):
            topic.upload()
        assert setup.ranges() == []
        with pytest.raises(TopicFenced):
            topic.append(b"x", durability="synced")


def test_a_catalog_that_lost_the_topic_says_what_to_do(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    with setup.topic() as topic:
        fill(topic, 10)
        setup.kv.commit([], [Remove(setup.catalog.keys.record(TOPIC))])
        with pytest.raises(MissingData, match="forebay restore"):
            topic.upload()


def test_a_topic_that_is_closed_uploads_no_more(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 10)
    with pytest.raises(LogClosed):
        topic.upload()


def test_a_key_that_is_being_deleted_is_not_written_to(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    with setup.topic() as topic:
        fill(topic, 10)
        token = setup.catalog.condemn(TOPIC, "data-0-9.dnb1", None)
        assert token is not None
        [descriptor] = topic.upload()
        assert descriptor.object_id == "data-0-9-1.dnb1"
        assert offsets(topic.read(0)) == list(range(10))


def test_an_intent_that_a_sweep_took_back_is_refused_at_commit(tmp_path: Path) -> None:
    backend = FaultBackend(MemoryBackend())
    setup = Setup(tmp_path, backend=backend)

    def take_back(_key: str) -> None:
        backend.clear()
        life = setup.catalog.life(TOPIC, "data-0-9.dnb1")
        assert setup.catalog.condemn(TOPIC, "data-0-9.dnb1", life) is not None

    with setup.topic() as topic:
        fill(topic, 10)
        backend.hook("complete", take_back, when="after")
        with pytest.raises(CommitRefused, match=r"data-0-9\.dnb1"):
            topic.upload()
        assert setup.ranges() == []
        topic.upload()
    assert [each.object_id for each in setup.descriptors()] == ["data-0-9-1.dnb1"]


def test_rolling_objects_grow_across_cycles_and_end_when_idle(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploader = UploaderSettings(
        enabled=False, rolling=True, max_open_seconds=1000, max_idle_seconds=60
    )
    with setup.topic() as topic:
        for _ in range(3):
            fill(topic, 10)
            cycle(topic)
            setup.clock.advance(30)
        assert topic.watermarks().uploaded == 0
        memory = uploader_checkpoint(topic)
        assert (memory.active_start_offset, memory.active_msgs_written) == (0, 30)
        setup.clock.advance(31)
        cycle(topic)
        assert topic.watermarks().uploaded == 30
    assert setup.ranges() == [(0, 30)]
    assert not [key for key in setup.listed() if "pending" in key]


@pytest.mark.parametrize("limits", [{"max_object_bytes": 200_000}, {"max_object_messages": 990}])
def test_both_writers_cut_the_same_objects_in_the_first_cycle(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    """Frames of 202 bytes do not divide the limit: an object is full when the next does not fit."""
    made = []
    for rolling in (False, True):
        setup = Setup(tmp_path / str(rolling), wal=WalSettings(rotate_max_bytes=1_000_000))
        setup.uploading(rolling=rolling, **limits)
        with setup.topic() as topic:
            for first in range(0, 20_000, 1000):
                topic.append_many(payloads(first, 1000, 95), durability="synced")
            cycle(topic)
            assert topic.watermarks().uploaded == 19_800
        made.append([(each.object_id, each.size) for each in setup.descriptors()])
        require_chain(setup)
    planned, rolled = made
    assert {size for _, size in planned} == {990 * 202}
    assert rolled == planned


def test_rolling_objects_that_grow_across_cycles_have_the_same_borders(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploading(rolling=True, max_object_bytes=5000)
    with setup.topic() as topic:
        for _ in range(20):
            fill(topic, 7)
            cycle(topic)
        [size] = {each.size for each in setup.descriptors()}
        frame = size // setup.descriptors()[0].count
    assert 5000 - frame < size <= 5000
    require_chain(setup)


def test_a_frame_larger_than_the_limit_is_a_rolling_object_of_its_own(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploading(rolling=True, max_object_bytes=2000)
    with setup.topic() as topic:
        for size in (100, 3000, 100, 3000, 3000):
            topic.append(b"." * size, durability="synced")
        cycle(topic)
        assert setup.ranges() == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_a_rolling_object_in_progress_is_abandoned_by_a_restart_and_built_again(
    tmp_path: Path,
) -> None:
    setup = Setup(tmp_path)
    setup.uploading(rolling=True)
    with setup.topic() as topic:
        fill(topic, 30)
        cycle(topic)
    with setup.topic() as topic:
        assert uploader_checkpoint(topic).active_start_offset is None
        fill(topic, 10)
        topic.upload()
    assert setup.ranges() == [(0, 40)]
    assert not [key for key in setup.listed() if "pending" in key]


@pytest.mark.parametrize("rolling", [False, True])
def test_objects_that_cannot_be_read_back_do_not_pile_up(tmp_path: Path, rolling: bool) -> None:
    backend = FaultBackend(MemoryBackend())
    setup = Setup(tmp_path, backend=backend)
    setup.uploading(rolling=rolling, max_object_bytes=6000, max_open_seconds=1)
    backend.inject(ObjectFault("get_range", ServiceRefused, times=None))
    with setup.topic() as topic:
        fill(topic, 200)
        for _ in range(6):
            setup.clock.advance(600)
            with suppress(ServiceRefused):
                cycle(topic)
        assert backend.fired >= 3
        assert topic.watermarks().uploaded == 0
        assert len([key for key in setup.listed() if "/data-" in key]) <= 1
