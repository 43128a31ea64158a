"""After a compaction: the grace time, undoing it, sweeps, restores, and readers with old plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.catalog.ownership import Session
from forebay.catalog.records import State
from forebay.catalog.swap import replaced_descriptors
from forebay.errors import UsageError
from forebay.format.names import object_key, sidecar
from forebay.objects.local import LocalBackend
from forebay.pipeline.jobs.compact import undo_compaction
from forebay.read.object_stream import ObjectStream
from forebay.read.tiered_log import CatalogSource
from forebay.settings import CloudReaderSettings
from forebay.upload.restore import RestoreChoices, restore_topic
from forebay.upload.sweep import Action, Kind
from support.compactions import TOPIC, Setup


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path / "data")
    yield setup
    setup.close()


def kept(setup: Setup) -> int:
    return len(list(replaced_descriptors(setup.catalog, TOPIC, 0, 10**9)))


# ---- undo ----


def test_a_compaction_is_undone(setup: Setup) -> None:
    made = setup.lay(range(0, 51, 5))
    setup.compacted()
    report = undo_compaction(setup.settings, "orders")
    assert report.ok
    assert [(row.object_id, row.replaced) for row in report.rows] == [("data-0-49.dnb1", 10)]
    assert setup.chain() == made
    assert kept(setup) == 0
    setup.require_readable(50)
    again = setup.compacted()
    assert again.rows[0].object_id == "data-0-49-1.dnb1"
    setup.require_readable(50)


def test_all_rounds_are_undone_newest_first(setup: Setup) -> None:
    made = setup.lay(range(101))
    assert setup.compacted().rounds == 2
    assert len(undo_compaction(setup.settings, "orders").rows) == 5
    assert setup.chain() == made
    assert undo_compaction(setup.settings, "orders").rows == ()
    setup.require_readable(100)


def test_one_compaction_of_several_is_undone_by_the_name_of_its_object(setup: Setup) -> None:
    made = setup.lay(range(0, 81, 10))
    setup.compacted(2 * made[0].size + 10**3)
    before = setup.ranges()
    name = setup.chain()[1].object_id
    dry = undo_compaction(setup.settings, "orders", name, dry_run=True)
    assert dry.ok
    assert setup.ranges() == before
    assert undo_compaction(setup.settings, "orders", name).ok
    assert len(setup.ranges()) > len(before)
    setup.require_readable(80)
    with pytest.raises(UsageError, match="is not among its objects"):
        undo_compaction(setup.settings, "orders", name)


def test_after_the_sweep_it_cannot_be_undone(setup: Setup) -> None:
    setup.lay(range(0, 51, 5))
    setup.compacted()
    assert setup.swept().counts[Action.REMOVED] == 10
    assert undo_compaction(setup.settings, "orders").rows == ()
    [row] = undo_compaction(setup.settings, "orders", "data-0-49.dnb1").rows
    assert row.error is not None
    assert "cannot be undone" in row.error
    assert setup.ranges() == [(0, 49)]


@pytest.mark.parametrize("dry_run", [True, False])
def test_when_one_of_the_objects_is_gone_nothing_is_undone(setup: Setup, dry_run: bool) -> None:
    made = setup.lay([0, 10, 20, 30])
    setup.compacted()
    name = made[1].object_id
    token = setup.catalog.condemn(TOPIC, name, setup.catalog.life(TOPIC, name))
    assert token is not None
    [row] = undo_compaction(setup.settings, "orders", dry_run=dry_run).rows
    assert "objects that it replaced are deleted" in str(row.error)
    assert setup.ranges() == [(0, 29)]
    setup.require_readable(30)


def test_an_object_that_somebody_deleted_by_hand_stops_an_undo(setup: Setup) -> None:
    made = setup.lay([0, 10, 20, 30])
    setup.compacted()
    setup.store.delete_object(object_key(TOPIC, made[1].object_id))
    [row] = undo_compaction(setup.settings, "orders").rows
    assert made[1].object_id in str(row.error)
    setup.require_readable(30)


# ---- sweeps ----


def test_within_the_grace_time_a_sweep_removes_nothing(setup: Setup) -> None:
    made = setup.lay([0, 10, 20, 30])
    setup.compacted()
    report = setup.swept(60)
    assert [(item.kind, item.action) for item in report.items] == [(Kind.REPLACED, Action.KEPT)] * 3
    assert (report.committed, report.errors) == (1, 0)
    assert {each.object_id for each in made} < set(setup.names())
    assert kept(setup) == 3


def test_after_it_objects_sidecars_and_kept_descriptors_go(setup: Setup) -> None:
    setup.lay([0, 10, 20, 30])
    setup.compacted()
    report = setup.swept()
    assert [(item.kind, item.action) for item in report.items] == [
        (Kind.REPLACED, Action.REMOVED)
    ] * 3
    assert setup.names() == ["data-0-29.dnb1", sidecar("data-0-29.dnb1")]
    assert kept(setup) == 0
    assert [name for name, _ in setup.catalog.lives(TOPIC)] == ["data-0-29.dnb1"]
    setup.require_readable(30)
    assert setup.swept().items == []


def test_after_an_undo_a_sweep_removes_the_large_object(setup: Setup) -> None:
    made = setup.lay([0, 10, 20, 30])
    setup.compacted()
    undo_compaction(setup.settings, "orders")
    assert setup.catalog.life(TOPIC, "data-0-29.dnb1").state is State.REPLACED  # type: ignore[union-attr]
    setup.swept()
    assert setup.names() == sorted(
        name for each in made for name in (each.object_id, sidecar(each.object_id))
    )
    setup.require_readable(30)


def test_what_a_killed_compaction_wrote_is_swept(setup: Setup) -> None:
    made = setup.lay([0, 10, 20, 30])

    class Killed(BaseException):
        pass

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        setup.compacted(run=dies)
    assert setup.catalog.life(TOPIC, "data-0-29.dnb1") is not None
    setup.swept()
    assert setup.catalog.life(TOPIC, "data-0-29.dnb1") is None
    assert setup.chain() == made
    assert setup.compacted().ok
    setup.require_readable(30)


# ---- restores ----


@pytest.mark.parametrize("state", ["replaced", "undone", "swept"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_restore_from_the_bucket_alone_gives_the_same_topic(
    setup: Setup, tmp_path: Path, state: str, verify: bool
) -> None:
    setup.lay(range(101))
    setup.compacted()
    if state == "undone":
        undo_compaction(setup.settings, "orders", setup.chain()[0].object_id)
    if state == "swept":
        setup.swept()
    other = Setup(tmp_path / "other")
    for meta in setup.store.list(""):
        other.store.put_object(meta.key, bytes(setup.store.get_range(meta.key, 0, meta.size)))
    session = Session(other.catalog, other.settings.metadata, other.bench.clock)
    report = restore_topic(
        other.catalog, other.store, session, TOPIC, RestoreChoices(verify=verify)
    )
    session.close()
    assert report.gaps == []
    assert (report.start_offset, report.tail) == (0, 100)
    assert other.ranges() == [(0, 99)], "the fewest objects"
    other.require_readable(100)
    other.swept(60)
    other.require_readable(100)
    other.close()


# ---- readers with an old plan ----


def stream_of(setup: Setup) -> ObjectStream:
    """Reads in small steps, and knows many objects ahead."""
    return ObjectStream(
        TOPIC,
        setup.store,
        CatalogSource(setup.catalog, TOPIC),
        setup.bench.pool,
        CloudReaderSettings(read_ahead_chunks=2),
        0,
    )


@pytest.mark.parametrize("steps", [1, 7, 23])
@pytest.mark.parametrize("swept", [False, True])
def test_a_reader_in_the_middle_of_the_old_objects_goes_on(
    setup: Setup, steps: int, swept: bool
) -> None:
    setup.lay(range(0, 121, 3))
    found: list[int] = []
    with stream_of(setup) as stream:
        for _ in range(steps):
            frames = stream.next(1)
            assert frames is not None
            found += frames.offsets
        setup.compacted()
        if swept:
            setup.swept()
            assert len(setup.names()) == 2
        while (frames := stream.next(1)) is not None:
            found += frames.offsets
    assert found == list(range(120))


def test_a_reader_of_messages_goes_on_through_compaction_undo_and_sweep(setup: Setup) -> None:
    setup.lay(range(0, 121, 3))
    with setup.reader() as reader:
        messages = reader.read_range(0)
        found = [next(messages).payload for _ in range(10)]
        setup.compacted()
        found += [next(messages).payload for _ in range(10)]
        undo_compaction(setup.settings, "orders")
        found += [next(messages).payload for _ in range(10)]
        setup.compacted()
        setup.swept()
        found += [each.payload for each in messages]
    assert found == [b"m%d" % at for at in range(120)]


def test_the_objects_are_on_disk_as_the_names_say(setup: Setup, tmp_path: Path) -> None:
    """Another client of the same directory reads the compacted object."""
    setup.lay([0, 10, 20, 30])
    setup.compacted()
    [large] = setup.chain()
    other = LocalBackend(tmp_path / "data" / "objects")
    assert other.head(object_key(TOPIC, large.object_id)).size == large.size
