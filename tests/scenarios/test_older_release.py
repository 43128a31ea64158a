"""Stores that older releases wrote: they open, are read, continued, swept and restored.

The archives are in `support/stores`; `support/older_store.py` says what is in them.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.catalog.job_state import read_job_state
from forebay.errors import LostOffsets, MissingData
from forebay.format.names import parse_topic
from forebay.settings import UploaderSettings
from forebay.topic.describe import describe
from forebay.topic.resources import StoreResources, open_resources
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView
from forebay.upload.restore import RestoreReport
from forebay.upload.sweep import Action, Kind, sweep
from support import older_store
from support.older_store import OlderTopic, settings_of, unpack
from support.restores import restore

VERSIONS: Final = sorted(
    path.name.removeprefix("store-").removesuffix(".tar.gz")
    for path in older_store.STORES.glob("store-*.tar.gz")
)


class OlderStore:
    """An unpacked archive, and what must be readable in it."""

    def __init__(self, version: str, folder: Path) -> None:
        self.data = folder / "data"
        self.topics = unpack(version, self.data)

    def open(self, **parts: Any) -> Store:
        return Store(settings_of(self.data, **parts))

    def resources(self) -> StoreResources:
        return open_resources(settings_of(self.data))

    def restore(self, name: str, **choices: Any) -> RestoreReport:
        return restore(settings_of(self.data), name, **choices)

    def lose_catalog(self) -> None:
        for path in self.data.glob("catalog.db*"):
            path.unlink()

    def lose_log(self) -> None:
        shutil.rmtree(self.data / "wal")


@pytest.fixture(params=VERSIONS)
def older(request: pytest.FixtureRequest, tmp_path: Path) -> OlderStore:
    return OlderStore(request.param, tmp_path)


def names_in(*left_out: str) -> list[str]:
    every = [getattr(older_store, name) for name in dir(older_store) if name.isupper()]
    flat = [name for each in every for name in (each if isinstance(each, tuple) else (each,))]
    topics = [name for name in flat if isinstance(name, str) and name.startswith("/default/")]
    return sorted(set(topics) - set(left_out))


def read_all(topic: Topic) -> tuple[dict[int, Any], list[tuple[int, int]]]:
    """All messages by offset, and the ranges that the reader said are lost."""
    found: dict[int, Any] = {}
    lost: list[tuple[int, int]] = []
    at, end = topic.start_offset, topic.watermarks().appended
    while at < end:
        try:
            for message in topic.read(at, end=end):
                assert message.offset >= at
                found[message.offset] = message
                at = message.offset + 1
            at = end
        except LostOffsets as hole:
            lost.append((hole.start, hole.end))
            at = hole.end
    return found, lost


def require_same(said: OlderTopic, found: dict[int, Any], wanted: list[int]) -> None:
    """The messages at the offsets `wanted` are those that the older release wrote."""
    for offset in wanted:
        message, expected = found[offset], said.messages[offset]
        assert message.payload == said.payload(offset)
        assert dict(message.attributes) == expected["attributes"]
        assert message.routing_key == expected["routing_key"]


def require_sound(store: Store, name: str, said: OlderTopic, wanted: list[int]) -> None:
    """Everything is read, and the topic continues through both tiers with offsets of its own."""
    topic = store.topic(name)
    found, lost = read_all(topic)
    require_same(said, found, wanted)
    assert found.keys() <= said.messages.keys()
    told = [range(start, end) for start, end in lost]
    for offset in range(said.start_offset, said.next_offset):
        assert offset in found or any(offset in each for each in told), offset
    begin = topic.append(b"continued", durability="synced")
    assert begin >= said.next_offset
    for first in range(begin + 1, begin + 21, 5):
        numbers = range(first, first + 5)
        assert topic.append_many([b"%d" % at for at in numbers], durability="synced") == numbers
    topic.upload()
    marks = topic.watermarks()
    assert marks.verified == marks.uploaded == marks.appended
    topic.rotate()
    topic.append(b"last", durability="synced")
    topic.trim_local()
    again, lost_again = read_all(topic)
    assert [*again] == [*found, *range(begin, begin + 22)]
    assert lost_again == lost or lost == []
    require_same(said, again, wanted)
    assert again[begin].payload == b"continued"
    assert again[begin + 20].payload == b"%d" % (begin + 20)


@pytest.mark.parametrize("name", names_in(older_store.INTERRUPTED))
@pytest.mark.parametrize("rolling", [False, True], ids=["planned", "rolling"])
def test_a_topic_of_an_older_release_is_read_and_continued(
    older: OlderStore, name: str, rolling: bool
) -> None:
    said = older.topics[name]
    uploader = UploaderSettings(enabled=False, rolling=rolling, max_object_bytes=2000)
    with older.open(uploader=uploader) as store:
        assert store.topic(name).start_offset == said.start_offset
        require_sound(store, name, said, [*said.messages])
    with older.open() as store:
        found, _ = read_all(store.topic(name))
        require_same(said, found, [*said.messages])


def test_a_restore_that_an_older_release_left_unfinished_is_finished(older: OlderStore) -> None:
    name = older_store.INTERRUPTED
    said = older.topics[name]
    with older.open() as store, pytest.raises(MissingData, match="forebay restore"):
        store.topic(name)
    assert older.restore(name).adopted > 0
    with older.open() as store:
        require_sound(store, name, said, [*said.messages])


def test_a_store_of_an_older_release_is_described_without_opening_it(older: OlderStore) -> None:
    with StoreView(settings_of(older.data)) as view:
        assert view.topics() == sorted(older.topics)
        for name, said in older.topics.items():
            with view.topic(name) as topic:
                facts = describe(topic)
                assert facts.lost == said.lost
                if said.refused:
                    assert any("forebay restore" in each for each in facts.problems)
                    continue
                assert facts.problems == []
                for offset in said.messages:
                    message = next(topic.reader(offset, offset + 1))
                    assert message.payload == said.payload(offset)


def test_the_objects_of_an_older_release_are_verified(older: OlderStore) -> None:
    verify = pytest.importorskip("forebay.pipeline.jobs.verify").verify
    older.restore(older_store.INTERRUPTED)
    report = verify(settings_of(older.data), runner="threads")
    assert report.errors == 0, report.findings
    # The rest of an interrupted upload is a note while it may go on, and a warning a day later.
    warned = {row.kind for row in report.findings if row.severity == "warning"}
    assert warned <= {"pending"}, report.findings
    assert report.objects > 20


def test_a_sweep_leaves_what_an_older_release_committed(older: OlderStore) -> None:
    with closing(older.resources()) as resources:
        report = sweep(resources.catalog, resources.store, grace_minutes=0, dry_run=True)
        assert report.errors == 0, report.items
        removed = {item.kind for item in report.items if item.action is Action.WOULD_REMOVE}
        assert removed == {Kind.REPLACED, Kind.PENDING, Kind.INTENT}
        done = sweep(resources.catalog, resources.store, grace_minutes=0, dry_run=False)
        assert done.counts[Action.REMOVED] == report.counts[Action.WOULD_REMOVE]
    for name in names_in(older_store.INTERRUPTED):
        with older.open() as store:
            said = older.topics[name]
            require_same(said, read_all(store.topic(name))[0], [*said.messages])


def test_cursors_and_states_of_jobs_are_those_of_the_older_release(older: OlderStore) -> None:
    with closing(older.resources()) as resources:
        subscription, offset = older_store.CURSOR
        name, value = older_store.JOB_STATE
        topic = parse_topic(older_store.MIXED)
        assert resources.catalog.cursor(topic, subscription) == offset
        assert read_job_state(resources.catalog, topic, name) == value


# ---- a part of it is lost ----


def has_objects(said: OlderTopic) -> bool:
    return bool(said.uploaded())


@pytest.mark.parametrize("name", names_in(older_store.INTERRUPTED))
def test_without_its_log_the_rest_of_the_topic_is_read_and_offsets_go_on(
    older: OlderStore, name: str
) -> None:
    older.lose_log()
    said = older.topics[name]
    with older.open() as store:
        require_sound(store, name, said, said.uploaded())


@pytest.mark.parametrize("name", names_in())
def test_a_restore_rebuilds_the_catalog_beside_the_log_of_the_older_release(
    older: OlderStore, name: str
) -> None:
    older.lose_catalog()
    said = older.topics[name]
    if has_objects(said):
        with older.open() as store, pytest.raises(MissingData, match="forebay restore"):
            store.topic(name)
        older.restore(name, allow_gaps=bool(said.lost))
    with older.open() as store:
        require_sound(store, name, said, [*said.messages])


@pytest.mark.parametrize("name", names_in(older_store.LOGGED, older_store.EMPTY))
@pytest.mark.parametrize("verify", [False, True], ids=["by sidecars", "read whole"])
def test_a_restore_from_the_bucket_alone_gives_no_offset_of_the_older_release_again(
    older: OlderStore, name: str, verify: bool
) -> None:
    older.lose_catalog()
    older.lose_log()
    said = older.topics[name]
    report = older.restore(name, allow_gaps=bool(said.lost), verify=verify)
    assert report.messages == len(said.uploaded())
    with older.open() as store:
        require_sound(store, name, said, said.uploaded())


def test_no_archive_is_large_or_names_a_machine(older: OlderStore) -> None:
    assert sum(path.stat().st_size for path in older_store.STORES.iterdir()) < 200_000
    files = [path for path in older.data.rglob("*") if path.is_file()]
    assert [path.name for path in files if names_a_place(path.read_bytes())] == []


def names_a_place(data: bytes) -> bool:
    return any(b'"/%s/' % word in data for word in (b"home", b"root", b"tmp", b"work", b"Users"))
