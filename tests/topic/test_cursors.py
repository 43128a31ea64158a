"""What consumers acknowledged survives restarts and kills, and never moves back."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.catalog.cursors import read_cursor, read_cursors, write_cursor
from forebay.catalog.kv import Put, Remove
from forebay.errors import DescriptorError, OffsetOutOfRange, TopicFenced, UsageError
from forebay.format.cursor import Cursor
from forebay.format.names import parse_topic
from forebay.settings import MetadataSettings, StoreSettings, UploaderSettings
from forebay.topic.cursors import CHECKPOINT_CURSOR
from forebay.topic.describe import describe
from forebay.topic.factory import WalStorageFactory
from forebay.topic.storage import WalStorage
from forebay.topic.store import open_store
from forebay.topic.view import StoreView
from support.cli_runs import done
from support.disks import wait_until
from support.paths import TESTS

TOPIC = parse_topic("orders")


def settings_of(tmp_path: Path, **metadata: float) -> StoreSettings:
    return StoreSettings(
        data=tmp_path / "data",
        uploader=UploaderSettings(enabled=False),
        metadata=MetadataSettings(**metadata),  # type: ignore[arg-type]
    )


def opened(settings: StoreSettings) -> tuple[WalStorageFactory, WalStorage]:
    factory = WalStorageFactory(settings)
    return factory, factory.for_topic("orders")


def in_catalog(factory: WalStorageFactory, name: str = CHECKPOINT_CURSOR) -> Cursor | None:
    assert factory.resources is not None
    return read_cursor(factory.resources.catalog, TOPIC, name)


def append(storage: WalStorage, count: int) -> None:
    storage.wal.append_many([b"m"] * count, durability="synced")


def test_what_was_acknowledged_survives_a_restart(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, progress_flush_interval_seconds=3600)
    factory, storage = opened(settings)
    append(storage, 10)
    storage.ack_checkpoint(6)
    assert in_catalog(factory) is None, "nothing is written before the interval"
    factory.close()
    factory, storage = opened(settings)
    assert storage.acknowledged == 7
    storage.ack_checkpoint(3)
    assert storage.acknowledged == 7, "it does not move back"
    factory.close()
    factory, storage = opened(settings)
    assert storage.acknowledged == 7
    factory.close()


def test_a_cursor_is_written_after_the_interval(tmp_path: Path) -> None:
    factory, storage = opened(settings_of(tmp_path, progress_flush_interval_seconds=0.01))
    append(storage, 10)
    for offset in (2, 5, 9):
        storage.ack_checkpoint(offset)
        wait_until(lambda: (in_catalog(factory) or Cursor()).position == offset + 1)  # noqa: B023
    factory.close()


def test_a_cursor_that_moved_little_is_written_at_close_only(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, progress_flush_interval_seconds=0.01, progress_min_offset_delta=5
    )
    factory, storage = opened(settings)
    append(storage, 20)
    storage.ack_checkpoint(3)
    storage.flush_cursors()
    assert in_catalog(factory) is None
    storage.ack_checkpoint(4)
    wait_until(lambda: (in_catalog(factory) or Cursor()).position == 5)
    storage.ack_checkpoint(6)
    storage.flush_cursors()
    assert (in_catalog(factory) or Cursor()).position == 5
    factory.close()
    factory, storage = opened(settings)
    assert storage.acknowledged == 7
    factory.close()


def test_a_flush_that_fails_stays_the_only_one_and_writes_the_other_cursors(tmp_path: Path) -> None:
    factory, storage = opened(settings_of(tmp_path, progress_flush_interval_seconds=3600))
    append(storage, 10)
    assert factory.resources is not None
    catalog, cursors = factory.resources.catalog, storage.cursors
    key = catalog.keys.cursor_row(TOPIC, "a")
    catalog.kv.commit([], [Put(key, b"damaged")])
    scheduled: list[str] = []
    cursors.schedule = lambda: scheduled.append("flush")
    for offset in range(4):
        cursors.acknowledge("a", offset, offset + 1)
        cursors.acknowledge("b", offset, offset + 1)
        with pytest.raises(DescriptorError):
            cursors.flush()
        assert (in_catalog(factory, "b") or Cursor()).position == offset + 1
    assert scheduled == ["flush"]
    catalog.kv.commit([], [Remove(key)])
    cursors.flush()
    assert (in_catalog(factory, "a") or Cursor()).position == 4
    cursors.acknowledge("a", 4, 5)
    assert scheduled == ["flush", "flush"]
    factory.close()


def test_a_message_that_was_never_appended_cannot_be_acknowledged(tmp_path: Path) -> None:
    factory, storage = opened(settings_of(tmp_path))
    append(storage, 2)
    with pytest.raises(OffsetOutOfRange):
        storage.ack_checkpoint(2)
    assert storage.acknowledged == 0
    factory.close()


def test_an_owner_of_an_older_epoch_writes_no_cursor(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    factory, storage = opened(settings)
    append(storage, 5)
    assert factory.resources is not None
    catalog = factory.resources.catalog
    record = catalog.record(TOPIC)
    assert record is not None
    storage.ack_checkpoint(1)
    storage.flush_cursors()
    with pytest.raises(TopicFenced):
        write_cursor(catalog, TOPIC, record.epoch - 1, CHECKPOINT_CURSOR, Cursor(4), 0)
    assert in_catalog(factory) is not None
    assert (in_catalog(factory) or Cursor()).position == 2
    factory.close()


def test_a_write_adds_to_what_the_row_has(tmp_path: Path) -> None:
    factory, storage = opened(settings_of(tmp_path))
    assert factory.resources is not None
    catalog, epoch = factory.resources.catalog, (factory.resources.catalog.record(TOPIC))
    assert epoch is not None
    write_cursor(catalog, TOPIC, epoch.epoch, "a/b ä", Cursor(5, ((8, 9),)), 10)
    found = write_cursor(catalog, TOPIC, epoch.epoch, "a/b ä", Cursor(3, ((6, 7),)), 20)
    assert (found.position, found.ranges) == (5, ((6, 7), (8, 9)))
    same = write_cursor(catalog, TOPIC, epoch.epoch, "a/b ä", Cursor(5), 30)
    assert same.updated_ms == 20, "nothing is written if nothing changes"
    assert dict(read_cursors(catalog, TOPIC)) == {"a/b ä": found}
    storage.cursors.acknowledge("a/b ä", 5, 6)
    assert storage.cursors.cursor("a/b ä").position == 7
    for bad in ("", "x" * 261, "\ud800"):
        with pytest.raises(UsageError, match="the name of a cursor"):
            read_cursor(catalog, TOPIC, bad)
    factory.close()


def test_cursors_are_shown_by_describe(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with open_store(settings) as store:
        store.topic("orders").append_many([b"m"] * 9, durability="synced")
        store.topic("orders")._storage.ack_checkpoint(4)
        assert store.topic("orders").cursors()[CHECKPOINT_CURSOR].position == 5
    with StoreView(settings) as views:
        (shown,) = describe(views.topic("orders")).cursors
    assert (shown.name, shown.position, shown.ranges) == (CHECKPOINT_CURSOR, 5, 0)
    assert "cursor     checkpoint: acknowledged before 5" in done(
        "describe", "orders", "--data", tmp_path / "data"
    )


def test_a_topic_in_memory_keeps_its_cursor_in_memory() -> None:
    with open_store(None) as store:
        topic = store.topic("orders")
        topic.append(b"m")
        topic._storage.ack_checkpoint(0)
        assert topic._storage.acknowledged == 1


_KILLED = """
import sys
from pathlib import Path
from topic.test_cursors import append, in_catalog, opened, settings_of
factory, storage = opened(settings_of(Path(sys.argv[1]), progress_flush_interval_seconds=0.01))
append(storage, 100_000)
for offset in range(100_000):
    storage.ack_checkpoint(offset)
    if offset % 50 == 0:
        found = in_catalog(factory)
        print(offset, found.position if found else 0, flush=True)
"""


@pytest.mark.kill
def test_a_kill_loses_only_what_was_not_written_and_adds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        written, acknowledged = 0, 0
        for line in process.stdout:
            acknowledged, written = map(int, line.split())
            if written > 500:
                break
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
    last = int(rest[-1].split()[0]) if rest else acknowledged
    factory, storage = opened(settings_of(tmp_path))
    assert written <= storage.acknowledged <= last + 51
    factory.close()
