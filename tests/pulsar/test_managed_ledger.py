"""A topic as Pulsar's managed ledger: what an offload of a prefix does, and what triggers one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.catalog import Change
from forebay.catalog.records import TopicRecord
from forebay.errors import (
    InvalidPosition,
    InvalidSetting,
    OffloadInProgress,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.names import LedgerName, object_key, parse_ledger
from forebay.limits import KIB, MIB
from forebay.objects.memory import MemoryBackend
from forebay.pulsar.managed_ledger import (
    EARLIEST,
    LATEST,
    History,
    Ledger,
    ManagedLedger,
    OffloadState,
    Position,
    managed_ledger,
)
from forebay.pulsar.managed_ledger import ledgers_of as listed
from forebay.settings import DeleterSettings, UploaderSettings, WalSettings
from forebay.testing.objects import FaultBackend, ObjectFault
from forebay.topic.store import Topic
from support.storages import storage_of
from support.tiered_stores import TOPIC, Setup, fill, offsets, require_chain

OFF: Final = UploaderSettings(
    enabled=False,
    format="pulsar",
    ledger_block_bytes=2 * KIB,
    max_object_messages=10,
    offload_threshold_bytes=None,
)
"""Ledgers of ten messages, which nothing offloads by itself."""


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(
        tmp_path / "data",
        backend=FaultBackend(MemoryBackend()),
        uploader=OFF,
        wal=WalSettings(rotate_max_bytes=64 * KIB),
    )


@contextmanager
def ledgers_of(setup: Setup, closed: int, left: int = 0) -> Iterator[tuple[Topic, ManagedLedger]]:
    """A topic with so many closed ledgers of ten messages, and an open one with `left`."""
    with setup.topic() as topic:
        for _ in range(closed):
            fill(topic, 10)
            topic.rotate()
        if left:
            fill(topic, left)
        yield topic, managed_ledger(storage_of(topic))


def backend_of(setup: Setup) -> FaultBackend:
    assert isinstance(setup.backend, FaultBackend)
    return setup.backend


def offloaded(ledger: ManagedLedger) -> list[bool]:
    return [each.offloaded for each in ledger.ledgers()]


def test_sealed_segments_are_shown_as_the_ledgers_that_they_will_be(setup: Setup) -> None:
    with ledgers_of(setup, 3, left=4) as (topic, ledger):
        planned = ledger.ledgers()
        assert [each.entries for each in planned] == [10, 10, 10, 4]
        assert [each.closed_ms is None for each in planned] == [False, False, False, True]
        assert all(each.context is None for each in planned)
        ids = [each.ledger_id for each in planned]
        assert ids == sorted(set(ids))
        ledger.offload_prefix(Position(ids[3], 0))
        done = ledger.ledgers()
        assert [each.ledger_id for each in done] == ids, "the ids were those it would get"
        assert [each.offloaded for each in done] == [True, True, True, False]
        for each, descriptor in zip(done, setup.descriptors(), strict=False):
            name = parse_ledger(descriptor.object_id)
            assert name is not None
            assert each.context is not None
            assert (each.ledger_id, each.context.uid) == (name.ledger_id, name.uid)
            assert each.context.timestamp_ms == descriptor.created_at * 1000
            assert not each.context.local_deleted
        assert offsets(topic.read(0, end=34)) == list(range(34))
    require_chain(setup)


def test_ids_that_one_topic_shows_are_not_taken_by_another(setup: Setup) -> None:
    with setup.store() as store:
        shown = {}
        for name in ("one", "two"):
            topic = store.topic(name)
            fill(topic, 10)
            topic.rotate()
            ledger = managed_ledger(storage_of(topic))
            shown[name] = [each.ledger_id for each in ledger.ledgers()]
        assert not set(shown["one"]) & set(shown["two"])
        for name in ("two", "one"):
            ledger = managed_ledger(storage_of(store.topic(name)))
            ledger.offload_prefix(Position(shown[name][-1], 0))
            assert [each.ledger_id for each in ledger.ledgers()] == shown[name]


def test_ledgers_that_are_listed_while_they_are_offloaded_keep_their_ids(setup: Setup) -> None:
    with ledgers_of(setup, 3) as (_, ledger):
        ids = [each.ledger_id for each in ledger.ledgers()]
        seen: list[list[int]] = []

        def look(_key: str) -> None:
            seen.append([each.ledger_id for each in ledger.ledgers()])

        backend_of(setup).hook("any", look)
        ledger.offload_prefix(Position(ids[-1], 0))
        backend_of(setup).clear()
        assert seen
        assert all(each == ids for each in seen)


def test_a_ledger_that_is_cut_another_way_keeps_the_id_of_its_attempt(setup: Setup) -> None:
    with ledgers_of(setup, 3) as (topic, ledger):
        uploader = storage_of(topic).uploader
        assert uploader is not None
        shown = [each.ledger_id for each in ledger.ledgers()]
        given = uploader.catalog.intend_ledger(uploader.topic, uploader.epoch, (0, 20))
        first = parse_ledger(given.intent.object_id)
        assert first is not None
        assert [each.ledger_id for each in ledger.ledgers()] == shown
        ledger.offload_prefix(Position(ledger.ledgers()[-1].ledger_id, 0))
        assert ledger.ledgers()[0].ledger_id == first.ledger_id == shown[0]


def test_the_indexes_of_ledgers_are_not_held_while_these_are_listed(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[History] = []

    def noting(history: History) -> list[Ledger]:
        seen.append(history)
        return listed(history)

    monkeypatch.setattr("forebay.pulsar.managed_ledger.ledgers_of", noting)
    with ledgers_of(setup, 2) as (_, ledger):
        ledger.offload_prefix(Position(ledger.ledgers()[-1].ledger_id, 0))
        assert offloaded(ledger) == [True, True, False]
    assert [each.offset_index for each in seen[-1].objects] == [None, None]


def test_only_the_ledger_of_a_position_matters_and_its_own_ledger_stays(setup: Setup) -> None:
    with ledgers_of(setup, 3, left=1) as (_, ledger):
        first, second, third, _open = [each.ledger_id for each in ledger.ledgers()]
        assert ledger.offload_prefix(Position(second, 5)) == Position(second, 0)
        assert offloaded(ledger) == [True, False, False, False]
        assert ledger.offload_prefix(Position(second, 9)) == Position(second, 0)
        assert offloaded(ledger) == [True, False, False, False]
        assert ledger.offload_prefix(Position(third, 0)) == Position(third, 0)
        assert offloaded(ledger) == [True, True, False, False]
        assert first < second < third


def test_a_position_on_the_edge_of_a_ledger_offloads_the_ledgers_before_it(setup: Setup) -> None:
    with ledgers_of(setup, 2, left=1) as (_, ledger):
        first, second, last = [each.ledger_id for each in ledger.ledgers()]
        with pytest.raises(InvalidPosition):
            ledger.offload_prefix(Position(first, 10))
        assert ledger.offload_prefix(Position(first, 9)) == Position(first, 0)
        assert offloaded(ledger) == [False, False, False]
        assert ledger.offload_prefix(Position(last, 1)) == Position(last, 0)
        assert offloaded(ledger) == [True, True, False]
        assert second < last


def test_the_last_ledger_may_be_empty_and_is_never_offloaded(setup: Setup) -> None:
    with ledgers_of(setup, 2) as (_, ledger):
        *closed, last = ledger.ledgers()
        assert (last.entries, last.closed_ms) == (0, None)
        assert ledger.offload_prefix(Position(last.ledger_id, 0)) == Position(last.ledger_id, 0)
        assert offloaded(ledger) == [True, True, False]
        assert ledger.offload_prefix(Position(last.ledger_id, 0)) == Position(last.ledger_id, 0)
        assert len(closed) == 2


@pytest.mark.parametrize(
    "position",
    [EARLIEST, LATEST, Position(0, 0), Position(1 << 40, -1), Position(1 << 40, 10)],
    ids=["earliest", "latest", "no ledger", "negative entry", "after the end"],
)
def test_a_position_out_of_range_is_refused(setup: Setup, position: Position) -> None:
    with ledgers_of(setup, 2, left=1) as (_, ledger):
        with pytest.raises(InvalidPosition):
            ledger.offload_prefix(position)
        assert ledger.status().state is OffloadState.NOT_RUN
        assert offloaded(ledger) == [False, False, False]


def test_nothing_to_offload_is_a_success(setup: Setup) -> None:
    with ledgers_of(setup, 0, left=3) as (_, ledger):
        [only] = ledger.ledgers()
        assert ledger.offload_prefix(Position(only.ledger_id, 0)) == Position(only.ledger_id, 0)
        assert ledger.status().state is OffloadState.SUCCESS
        assert ledger.status().first_unoffloaded == Position(only.ledger_id, 0)


def test_a_topic_of_another_format_does_not_support_offload(setup: Setup) -> None:
    setup.uploading(format="dnb1")
    with ledgers_of(setup, 1) as (topic, ledger):
        with pytest.raises(UsageError, match="does not support offload"):
            ledger.offload_prefix(Position(1 << 40, 0))
        topic.configure(format="pulsar")
        *_, last = ledger.ledgers()
        ledger.offload_prefix(Position(last.ledger_id, 0))
        assert offloaded(ledger) == [True, False]


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 2], ids=["first", "second", "third"])
def test_one_of_three_that_fails_does_not_stop_the_others(setup: Setup, failing: int) -> None:
    with ledgers_of(setup, 3, left=1) as (topic, ledger):
        ids = [each.ledger_id for each in ledger.ledgers()]
        fault = ObjectFault("open_writer", key=f"-ledger-{ids[failing]}")
        backend_of(setup).inject(fault)
        with pytest.raises(ServiceUnavailable):
            ledger.offload_prefix(Position(ids[3], 0))
        assert ledger.status().state is OffloadState.ERROR
        assert ledger.status().error
        written = {
            name.ledger_id
            for key in setup.listed()
            if (name := parse_ledger(key.rpartition("/")[2])) is not None and name.is_index
        }
        assert written == set(ids[:3]) - {ids[failing]}, "the others are in the store"
        assert offloaded(ledger) == [each < failing for each in range(3)] + [False]
        kept = {each.uid for each in names_in(setup)}
        ledger.offload_prefix(Position(ids[3], 0))
        assert offloaded(ledger) == [True, True, True, False]
        assert kept <= {each.uid for each in names_in(setup)}, "they are not written again"
        assert [each.ledger_id for each in ledger.ledgers()] == ids
        assert ledger.status().state is OffloadState.SUCCESS
    shutil.rmtree(setup.data / "wal")
    require_chain(setup)
    with setup.topic() as topic:
        assert offsets(topic.read(0, end=30)) == list(range(30))


def names_in(setup: Setup) -> list[LedgerName]:
    found = (parse_ledger(key.rpartition("/")[2]) for key in setup.listed())
    return [each for each in found if each is not None]


def test_the_first_error_of_several_is_raised(setup: Setup) -> None:
    with ledgers_of(setup, 3) as (_, ledger):
        ids = [each.ledger_id for each in ledger.ledgers()]
        for number in (1, 2):
            fault = ObjectFault("open_writer", key=f"-ledger-{ids[number]}")
            backend_of(setup).inject(fault)
        with pytest.raises(ServiceUnavailable, match=str(ids[1])):
            ledger.offload_prefix(Position(ids[3], 0))
        assert offloaded(ledger) == [True, False, False, False]


def test_a_ledger_that_was_written_ahead_and_lost_is_written_again(setup: Setup) -> None:
    with ledgers_of(setup, 2) as (topic, ledger):
        ids = [each.ledger_id for each in ledger.ledgers()]
        backend_of(setup).inject(ObjectFault("open_writer", key=f"-ledger-{ids[0]}"))
        with pytest.raises(ServiceUnavailable):
            ledger.offload_prefix(Position(ids[2], 0))
        [lost] = {each.data_name for each in names_in(setup)}
        setup.objects.delete_object(object_key(TOPIC, lost))
        ledger.offload_prefix(Position(ids[2], 0))
        assert offloaded(ledger) == [True, True, False]
        assert lost not in {each.data_name for each in names_in(setup)}
        assert offsets(topic.read(0, end=20)) == list(range(20))
    require_chain(setup)


def test_the_written_ahead_ledger_of_a_former_owner_is_committed_by_the_next_one(
    setup: Setup,
) -> None:
    with ledgers_of(setup, 2, left=1) as (_, ledger):
        ids = [each.ledger_id for each in ledger.ledgers()]
        backend_of(setup).inject(ObjectFault("open_writer", key=f"-ledger-{ids[0]}"))
        with pytest.raises(ServiceUnavailable):
            ledger.offload_prefix(Position(ids[2], 0))
        [uid] = {each.uid for each in names_in(setup)}
    with setup.topic() as topic:
        ledger = managed_ledger(storage_of(topic))
        ledger.offload_prefix(Position(ids[2], 0))
        found = ledger.ledgers()[1].context
        assert found is not None
        assert found.uid == uid


def test_what_is_deleted_while_it_is_offloaded_is_no_error(setup: Setup) -> None:
    """Another process has uploaded the first ledger, and retention has deleted it, meanwhile."""
    with ledgers_of(setup, 2) as (topic, ledger):
        ids = [each.ledger_id for each in ledger.ledgers()]
        once: list[str] = []

        def trim(key: str) -> None:
            if not once:
                once.append(key)
                setup.catalog.update(TOPIC, None, moved)
                raise ServiceUnavailable("the store is away")

        def moved(record: TopicRecord) -> Change:
            return Change(replace(record, start_offset=10, tail=10, verified=10))

        backend_of(setup).hook("open_writer", trim)
        assert ledger.offload_prefix(Position(ids[2], 0)) == Position(ids[2], 0)
        assert ledger.status().state is OffloadState.SUCCESS
        assert topic.start_offset == 10
        assert setup.ranges() == [(10, 20)]
        assert offsets(topic.read(10, end=20)) == list(range(10, 20))


# -- at the same time -----------------------------------------------------------------------------


def test_a_second_offload_is_refused_while_one_runs(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: a client that asks again and again does not make it list all ledgers."""
    going, go = threading.Event(), threading.Event()

    def wait(_key: str) -> None:
        going.set()
        assert go.wait(30)

    with ledgers_of(setup, 2) as (_, ledger):
        last = ledger.ledgers()[-1].ledger_id
        backend_of(setup).hook("open_writer", wait)
        ledger.start_offload(Position(last, 0))
        assert going.wait(30)
        assert ledger.status().state is OffloadState.RUNNING
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "ledgers", lambda: pytest.fail("the ledgers were listed"))
            with pytest.raises(OffloadInProgress):
                ledger.offload_prefix(Position(last, 0))
        go.set()
        while ledger.status().state is OffloadState.RUNNING:
            threading.Event().wait(0.01)
        assert ledger.status().state is OffloadState.SUCCESS
        assert offloaded(ledger) == [True, True, False]


def test_a_manual_offload_is_refused_while_the_automatic_one_runs(setup: Setup) -> None:
    setup.uploading(offload_threshold_bytes=0)
    going, go = threading.Event(), threading.Event()

    def wait(_key: str) -> None:
        going.set()
        assert go.wait(30)

    with ledgers_of(setup, 2) as (topic, ledger):
        last = ledger.ledgers()[-1].ledger_id
        backend_of(setup).hook("open_writer", wait)
        automatic = threading.Thread(target=storage_of(topic).upload_due)
        automatic.start()
        assert going.wait(30)
        with pytest.raises(OffloadInProgress):
            ledger.offload_prefix(Position(last, 0))
        go.set()
        automatic.join(30)
        assert offloaded(ledger) == [True, True, False]
        assert ledger.offload_prefix(Position(last, 0)) == Position(last, 0)


def test_an_automatic_offload_waits_for_a_manual_one_and_then_has_nothing_to_do(
    setup: Setup,
) -> None:
    setup.uploading(offload_threshold_bytes=0)
    going, go = threading.Event(), threading.Event()

    def wait(_key: str) -> None:
        going.set()
        assert go.wait(30)

    with ledgers_of(setup, 2) as (topic, ledger):
        last = ledger.ledgers()[-1].ledger_id
        backend_of(setup).hook("open_writer", wait)
        ledger.start_offload(Position(last, 0))
        assert going.wait(30)
        automatic = threading.Thread(target=storage_of(topic).upload_due)
        automatic.start()
        go.set()
        automatic.join(30)
        assert not automatic.is_alive()
        assert len(setup.descriptors()) == 2
        assert backend_of(setup).calls("open_writer") == 2, "nothing was written twice"


# -- triggers and the deletion lag ----------------------------------------------------------------


def cycle(topic: Topic) -> None:
    storage_of(topic).upload_due()


def sizes(ledger: ManagedLedger) -> list[int]:
    return [each.size for each in ledger.ledgers()]


def test_zero_bytes_offload_a_ledger_as_soon_as_it_is_closed(setup: Setup) -> None:
    setup.uploading(offload_threshold_bytes=0)
    with ledgers_of(setup, 2, left=3) as (topic, ledger):
        cycle(topic)
        assert offloaded(ledger) == [True, True, False]
        topic.rotate()
        cycle(topic)
        assert offloaded(ledger) == [True, True, True, False]


def test_a_threshold_of_bytes_keeps_the_newest_ledgers(setup: Setup) -> None:
    setup.deleter = DeleterSettings()
    with ledgers_of(setup, 3, left=3) as (topic, ledger):
        one, two, three, _ = sizes(ledger)
        topic.configure(offload_threshold_bytes=one + two + three)
        cycle(topic)
        assert offloaded(ledger) == [False, False, False, False], "not more than the threshold"
        topic.configure(offload_threshold_bytes=one + two + three - 1)
        cycle(topic)
        assert offloaded(ledger) == [True, False, False, False], "the one that crosses it goes too"
        topic.configure(offload_threshold_bytes=three)
        cycle(topic)
        assert offloaded(ledger) == [True, True, False, False]


def test_a_threshold_of_seconds_offloads_what_was_closed_so_long_ago(setup: Setup) -> None:
    setup.uploading(offload_threshold_seconds=600)
    with ledgers_of(setup, 1) as (topic, ledger):
        setup.clock.advance(300)
        fill(topic, 10)
        topic.rotate()
        cycle(topic)
        assert offloaded(ledger) == [False, False, False]
        setup.clock.advance(300)
        cycle(topic)
        assert offloaded(ledger) == [True, False, False]
        setup.clock.advance(300)
        cycle(topic)
        assert offloaded(ledger) == [True, True, False]


def test_without_thresholds_nothing_is_offloaded_by_itself(setup: Setup) -> None:
    with ledgers_of(setup, 3) as (topic, ledger):
        setup.clock.advance(10**7)
        cycle(topic)
        assert offloaded(ledger) == [False, False, False, False]


def test_a_threshold_that_retention_reaches_first_is_refused(setup: Setup) -> None:
    setup.deleter = DeleterSettings(retention_size_mb=10, retention_time_minutes=60)
    with setup.topic() as topic:
        with pytest.raises(InvalidSetting, match="offload_threshold_bytes"):
            topic.configure(offload_threshold_bytes=10 * MIB)
        with pytest.raises(InvalidSetting, match="offload_threshold_seconds"):
            topic.configure(offload_threshold_seconds=3600)
        topic.configure(offload_threshold_bytes=10 * MIB - 1, offload_threshold_seconds=3599)


def test_the_local_copy_of_an_offloaded_ledger_is_deleted_after_the_lag(setup: Setup) -> None:
    setup.deleter = DeleterSettings(retention_size_mb=0, deletion_lag_minutes=240)
    with ledgers_of(setup, 2, left=2) as (topic, ledger):
        last = ledger.ledgers()[-1].ledger_id
        ledger.offload_prefix(Position(last, 0))
        setup.clock.advance(240 * 60 - 1)
        topic.trim_local()
        deleted = [each.context.local_deleted for each in ledger.ledgers()[:2] if each.context]
        assert deleted == [False, False]
        setup.clock.advance(2)
        topic.trim_local()
        deleted = [each.context.local_deleted for each in ledger.ledgers()[:2] if each.context]
        assert deleted == [True, True]
        assert offsets(topic.read(0, end=22)) == list(range(22))


def test_a_lag_of_none_keeps_the_local_copy(setup: Setup) -> None:
    setup.deleter = DeleterSettings(retention_size_mb=0, deletion_lag_minutes=None)
    with ledgers_of(setup, 2, left=2) as (topic, ledger):
        ledger.offload_prefix(Position(ledger.ledgers()[-1].ledger_id, 0))
        setup.clock.advance(10**7)
        assert topic.trim_local() == []
