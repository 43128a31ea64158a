"""After a compaction: the grace time, undoing it, sweeps, restores, and readers with old plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from compactions import TOPIC, Site
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
from forebay.upload.restore import restore_topic
from forebay.upload.sweep import Action, Kind


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "data")
    yield site
    site.close()


def kept(site: Site) -> int:
    return len(list(replaced_descriptors(site.catalog, TOPIC, 0, 10**9)))


# ---- undo ----


def test_a_compaction_is_undone(site: Site) -> None:
    made = site.lay(range(0, 51, 5))
    site.compacted()
    report = undo_compaction(site.settings, "orders")
    assert report.ok
    assert [(row.object_id, row.replaced) for row in report.rows] == [("data-0-49.dnb1", 10)]
    assert site.chain() == made
    assert kept(site) == 0
    site.require_readable(50)
    again = site.compacted()
    assert again.rows[0].object_id == "data-0-49-1.dnb1"
    site.require_readable(50)


def test_all_rounds_are_undone_newest_first(site: Site) -> None:
    made = site.lay(range(101))
    assert site.compacted().rounds == 2
    assert len(undo_compaction(site.settings, "orders").rows) == 5
    assert site.chain() == made
    assert undo_compaction(site.settings, "orders").rows == ()
    site.require_readable(100)


def test_one_compaction_of_several_is_undone_by_the_name_of_its_object(site: Site) -> None:
    made = site.lay(range(0, 81, 10))
    site.compacted(2 * made[0].size + 10**3)
    before = site.ranges()
    name = site.chain()[1].object_id
    dry = undo_compaction(site.settings, "orders", name, dry_run=True)
    assert dry.ok
    assert site.ranges() == before
    assert undo_compaction(site.settings, "orders", name).ok
    assert len(site.ranges()) > len(before)
    site.require_readable(80)
    with pytest.raises(UsageError, match="is not among its objects"):
        undo_compaction(site.settings, "orders", name)


def test_after_the_sweep_it_cannot_be_undone(site: Site) -> None:
    site.lay(range(0, 51, 5))
    site.compacted()
    assert site.swept().counts[Action.REMOVED] == 10
    assert undo_compaction(site.settings, "orders").rows == ()
    [row] = undo_compaction(site.settings, "orders", "data-0-49.dnb1").rows
    assert row.error is not None
    assert "cannot be undone" in row.error
    assert site.ranges() == [(0, 49)]


@pytest.mark.parametrize("dry_run", [True, False])
def test_when_one_of_the_objects_is_gone_nothing_is_undone(site: Site, dry_run: bool) -> None:
    made = site.lay([0, 10, 20, 30])
    site.compacted()
    name = made[1].object_id
    token = site.catalog.condemn(TOPIC, name, site.catalog.life(TOPIC, name))
    assert token is not None
    [row] = undo_compaction(site.settings, "orders", dry_run=dry_run).rows
    assert "objects that it replaced are deleted" in str(row.error)
    assert site.ranges() == [(0, 29)]
    site.require_readable(30)


def test_an_object_that_somebody_deleted_by_hand_stops_an_undo(site: Site) -> None:
    made = site.lay([0, 10, 20, 30])
    site.compacted()
    site.store.delete_object(object_key(TOPIC, made[1].object_id))
    [row] = undo_compaction(site.settings, "orders").rows
    assert made[1].object_id in str(row.error)
    site.require_readable(30)


# ---- sweeps ----


def test_within_the_grace_time_a_sweep_removes_nothing(site: Site) -> None:
    made = site.lay([0, 10, 20, 30])
    site.compacted()
    report = site.swept(60)
    assert [(item.kind, item.action) for item in report.items] == [(Kind.REPLACED, Action.KEPT)] * 3
    assert (report.committed, report.errors) == (1, 0)
    assert {each.object_id for each in made} < set(site.names())
    assert kept(site) == 3


def test_after_it_objects_sidecars_and_kept_descriptors_go(site: Site) -> None:
    site.lay([0, 10, 20, 30])
    site.compacted()
    report = site.swept()
    assert [(item.kind, item.action) for item in report.items] == [
        (Kind.REPLACED, Action.REMOVED)
    ] * 3
    assert site.names() == ["data-0-29.dnb1", sidecar("data-0-29.dnb1")]
    assert kept(site) == 0
    assert [name for name, _ in site.catalog.lives(TOPIC)] == ["data-0-29.dnb1"]
    site.require_readable(30)
    assert site.swept().items == []


def test_after_an_undo_a_sweep_removes_the_large_object(site: Site) -> None:
    made = site.lay([0, 10, 20, 30])
    site.compacted()
    undo_compaction(site.settings, "orders")
    assert site.catalog.life(TOPIC, "data-0-29.dnb1").state is State.REPLACED  # type: ignore[union-attr]
    site.swept()
    assert site.names() == sorted(
        name for each in made for name in (each.object_id, sidecar(each.object_id))
    )
    site.require_readable(30)


def test_what_a_killed_compaction_wrote_is_swept(site: Site) -> None:
    made = site.lay([0, 10, 20, 30])

    class Killed(BaseException):
        pass

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        site.compacted(run=dies)
    assert site.catalog.life(TOPIC, "data-0-29.dnb1") is not None
    site.swept()
    assert site.catalog.life(TOPIC, "data-0-29.dnb1") is None
    assert site.chain() == made
    assert site.compacted().ok
    site.require_readable(30)


# ---- restores ----


@pytest.mark.parametrize("state", ["replaced", "undone", "swept"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_restore_from_the_bucket_alone_gives_the_same_topic(
    site: Site, tmp_path: Path, state: str, verify: bool
) -> None:
    site.lay(range(101))
    site.compacted()
    if state == "undone":
        undo_compaction(site.settings, "orders", site.chain()[0].object_id)
    if state == "swept":
        site.swept()
    other = Site(tmp_path / "other")
    for meta in site.store.list(""):
        other.store.put_object(meta.key, bytes(site.store.get_range(meta.key, 0, meta.size)))
    session = Session(other.catalog, other.settings.metadata, other.bench.clock)
    report = restore_topic(other.catalog, other.store, session, TOPIC, dry_run=False, verify=verify)
    session.close()
    assert report.gaps == []
    assert (report.start_offset, report.tail) == (0, 100)
    assert other.ranges() == [(0, 99)], "the fewest objects"
    other.require_readable(100)
    other.swept(60)
    other.require_readable(100)
    other.close()


# ---- readers with an old plan ----


def stream_of(site: Site) -> ObjectStream:
    """Reads in small steps, and knows many objects ahead."""
    return ObjectStream(
        TOPIC,
        site.store,
        CatalogSource(site.catalog, TOPIC),
        site.bench.pool,
        CloudReaderSettings(read_ahead_chunks=2),
        0,
    )


@pytest.mark.parametrize("steps", [1, 7, 23])
@pytest.mark.parametrize("swept", [False, True])
def test_a_reader_in_the_middle_of_the_old_objects_goes_on(
    site: Site, steps: int, swept: bool
) -> None:
    site.lay(range(0, 121, 3))
    found: list[int] = []
    with stream_of(site) as stream:
        for _ in range(steps):
            frames = stream.next(1)
            assert frames is not None
            found += frames.offsets
        site.compacted()
        if swept:
            site.swept()
            assert len(site.names()) == 2
        while (frames := stream.next(1)) is not None:
            found += frames.offsets
    assert found == list(range(120))


def test_a_reader_of_messages_goes_on_through_compaction_undo_and_sweep(site: Site) -> None:
    site.lay(range(0, 121, 3))
    with site.reader() as reader:
        messages = reader.read_range(0)
        found = [next(messages).payload for _ in range(10)]
        site.compacted()
        found += [next(messages).payload for _ in range(10)]
        undo_compaction(site.settings, "orders")
        found += [next(messages).payload for _ in range(10)]
        site.compacted()
        site.swept()
        found += [each.payload for each in messages]
    assert found == [b"m%d" % at for at in range(120)]


def test_the_objects_are_on_disk_as_the_names_say(site: Site, tmp_path: Path) -> None:
    """Another client of the same directory reads the compacted object."""
    site.lay([0, 10, 20, 30])
    site.compacted()
    [large] = site.chain()
    other = LocalBackend(tmp_path / "data" / "objects")
    assert other.head(object_key(TOPIC, large.object_id)).size == large.size
