"""Many small objects become large ones: what is the same afterwards, and what stops it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from forebay.catalog.adopt import restoring
from forebay.catalog.catalog import Intent
from forebay.catalog.records import State
from forebay.errors import CorruptLog, UsageError
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.frame import encode_frame, scan
from forebay.format.names import TopicName, object_key, sidecar
from forebay.objects.local import LocalBackend
from forebay.objects.store import CloudStore
from forebay.pipeline.execute import Done
from forebay.pipeline.jobs.compact import Group, Rewrite, Rewritten, compact, rewrite
from forebay.settings import StoreSettings
from forebay.testing.objects import FaultBackend
from forebay.topic.configure import configure_topic
from forebay.topic.resources import executor_resources
from support.compactions import CREATED, TOPIC, RunsHere, Setup, here
from support.stored_objects import message


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path / "data")
    yield setup
    setup.close()


# ---- what becomes of the objects ----


def test_small_objects_become_one_that_holds_the_same(setup: Setup) -> None:
    made = setup.lay(range(0, 101, 5))
    before = setup.record()
    data = b"".join(
        bytes(setup.store.get_range(object_key(TOPIC, each.object_id), 0, each.size))
        for each in made
    )
    report = setup.compacted()
    [large] = setup.chain()
    assert (large.object_id, large.size) == ("data-0-99.dnb1", len(data))
    assert bytes(setup.store.get_range(object_key(TOPIC, large.object_id), 0, large.size)) == data
    assert setup.record() == before
    assert setup.catalog.get_current_pointer(TOPIC) == 0
    setup.require_readable(100)
    [row] = report.rows
    assert report.ok
    assert (row.topic, row.object_id, row.replaced) == (str(TOPIC), large.object_id, 20)
    assert (row.start_offset, row.end_offset, row.messages) == (0, 99, 100)
    assert row.sha256_before == row.sha256_after
    assert row.bytes == len(data)


def test_the_new_object_is_as_old_as_the_newest_in_it_and_has_a_sidecar(setup: Setup) -> None:
    made = setup.lay([0, 10, 20, 30])
    setup.compacted()
    [large] = setup.chain()
    assert large.created_at == made[-1].created_at == CREATED + 20
    key = object_key(TOPIC, sidecar(large.object_id))
    beside = setup.store.get_range(key, 0, setup.store.head(key).size)
    assert decode_descriptor(bytes(beside)) == large


def test_its_index_leads_to_every_message(setup: Setup) -> None:
    setup.lay(range(0, 5001, 500))
    setup.compacted(10**9)
    [large] = setup.chain()
    assert large.offset_index is not None
    assert len(large.offset_index) == 5
    with setup.reader() as reader:
        for start in (0, 999, 1000, 2500, 4999):
            assert next(reader.read_range(start)).payload == b"m%d" % start


def test_thousands_of_objects_take_several_rounds(setup: Setup) -> None:
    setup.lay(range(1101), sidecars=False)
    report = setup.compacted(10**7)
    assert report.rounds == 3
    assert setup.ranges() == [(0, 1099)]
    assert [row.replaced for row in report.rows] == [28] * 39 + [8, 28, 12, 2]
    setup.require_readable(1100)


def test_nothing_is_left_to_do_by_a_second_run(setup: Setup) -> None:
    setup.lay(range(0, 301, 3))
    setup.compacted(2000)
    assert len(setup.chain()) < 30
    assert all(2 * each.size >= 2000 or each is setup.chain()[-1] for each in setup.chain()[:-1])

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("there is nothing to run")

    report = setup.compacted(2000, run=never)
    assert (report.rows, report.rounds, report.ok) == ((), 0, True)


def test_all_topics_are_compacted_or_those_that_are_named(setup: Setup) -> None:
    other = TopicName("default", "invoices")
    setup.lay([0, 10, 20])
    setup.lay([0, 10, 20], other)
    assert [row.topic for row in setup.compacted(topics=["invoices"]).rows] == [str(other)]
    assert [row.topic for row in setup.compacted().rows] == [str(TOPIC)]
    setup.require_readable(20)
    setup.require_readable(20, other)


def test_only_the_verified_part_is_compacted_and_no_lost_range_is_crossed(setup: Setup) -> None:
    setup.lay([0, 10, 20])
    record = setup.record()
    setup.create(**{**_fields(record), "tail": 50, "verified": 50, "lost": ((20, 50),)})
    setup.lay([50, 60, 70, 80])
    setup.create(**{**_fields(setup.record()), "verified": 70})
    setup.compacted()
    assert setup.ranges() == [(0, 19), (50, 69), (70, 79)]


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


# ---- bounds ----


def test_a_dry_run_changes_nothing(setup: Setup) -> None:
    setup.lay(range(0, 101, 5))
    before = setup.names(), setup.chain(), list(setup.catalog.lives(TOPIC))
    report = setup.compacted(dry_run=True)
    assert (setup.names(), setup.chain(), list(setup.catalog.lives(TOPIC))) == before
    [row] = report.rows
    assert (row.object_id, row.replaced, row.sha256_after) == ("data-0-99.dnb1", 20, None)
    assert report.dry_run


def test_a_run_stops_at_its_budget_and_the_next_one_goes_on(setup: Setup) -> None:
    made = setup.lay(range(0, 201, 5))
    size = sum(each.size for each in made)
    report = setup.compacted(size // 3, max_bytes=size // 2)
    assert report.ok
    assert report.bytes <= size // 2
    assert (report.left_groups, report.left_bytes > 0) == (2, True)
    assert setup.compacted(size // 3).left_groups == 0
    assert setup.compacted(size // 3).rows == ()
    setup.require_readable(200)


def test_the_default_target_is_that_of_the_uploader(tmp_path: Path) -> None:
    setup = Setup(tmp_path / "data", max_object_bytes=2000, max_object_messages=15)
    setup.lay(range(0, 61, 5))
    compact(setup.settings, executor=RunsHere(here))
    assert {each.count for each in setup.chain()} == {15}
    setup.close()


def test_a_topic_with_limits_of_its_own_is_compacted_by_them(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    other = TopicName("default", "other")
    for topic in (TOPIC, other):
        setup.lay(range(0, 41, 4), topic)
    configure_topic(setup.catalog, TOPIC, setup.settings, {"max_object_messages": 20})
    compact(setup.settings, executor=RunsHere(here))
    assert [each.count for each in setup.catalog.get_object_descriptors(TOPIC)] == [20, 20]
    assert [each.count for each in setup.catalog.get_object_descriptors(other)] == [40]
    setup.close()


def test_without_a_limit_of_objects_large_ones_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path)
    setup.lay([0, 10, 20])
    configure_topic(setup.catalog, TOPIC, setup.settings, {"max_object_bytes": None})
    monkeypatch.setattr("forebay.pipeline.jobs.compact._TARGET_BYTES", 100)  # in place of 1 GiB
    compact(setup.settings, executor=RunsHere(here))
    assert [each.count for each in setup.catalog.get_object_descriptors(TOPIC)] == [10, 10]
    monkeypatch.undo()
    compact(setup.settings, executor=RunsHere(here))
    assert [each.count for each in setup.catalog.get_object_descriptors(TOPIC)] == [20]
    setup.close()


def test_what_cannot_be_right_is_refused(setup: Setup, tmp_path: Path) -> None:
    setup.lay([0, 10, 20])
    with pytest.raises(UsageError, match="/default/other"):
        setup.compacted(topics=["other"])
    for wrong in ({"target": 0}, {"max_bytes": 0}):
        with pytest.raises(UsageError, match="is 0 bytes"):
            setup.compacted(**wrong)
    with pytest.raises(UsageError, match="an object has at most"):
        setup.compacted(target=10**15)
    with pytest.raises(UsageError, match="there is no catalog"):
        compact(tmp_path / "elsewhere", executor=RunsHere(here))
    assert not (tmp_path / "elsewhere").exists()


def test_progress_is_told(setup: Setup) -> None:
    setup.lay(range(101))
    told: list[tuple[int, int]] = []
    setup.compacted(progress=lambda done, total: told.append((done, total)))
    assert told
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


# ---- what goes wrong ----


def test_a_damaged_object_is_told_and_stops_no_other_group(setup: Setup) -> None:
    made = setup.lay(range(0, 561, 10))
    key = object_key(TOPIC, made[3].object_id)
    data = bytearray(setup.store.get_range(key, 0, made[3].size))
    data[40] ^= 1
    setup.store.put_object(key, bytes(data))
    report = setup.compacted()
    assert not report.ok
    bad, good = report.rows
    assert bad.error is not None
    assert made[3].object_id in bad.error
    assert "position" in bad.error
    assert (good.start_offset, good.end_offset, good.error) == (280, 559, None)
    assert setup.ranges() == [*((at, at + 9) for at in range(0, 280, 10)), (280, 559)]


@pytest.mark.parametrize("damage", ["missing", "longer", "shorter"])
def test_an_object_that_is_not_what_its_descriptor_says_is_not_compacted(
    setup: Setup, damage: str
) -> None:
    made = setup.lay([0, 10, 20, 30])
    key = object_key(TOPIC, made[1].object_id)
    data = bytes(setup.store.get_range(key, 0, made[1].size))
    if damage == "missing":
        setup.store.delete_object(key)
    else:
        setup.store.put_object(key, data + data if damage == "longer" else data[:-1])
    [row] = setup.compacted().rows
    assert row.error is not None
    assert made[1].object_id in row.error
    assert setup.ranges() == [(0, 9), (10, 19), (20, 29)]


def test_frames_of_another_topic_or_order_are_not_compacted(setup: Setup) -> None:
    """Every checksum is right, and so is the size: the offsets are not."""
    made = setup.lay([0, 10, 20, 30])
    first, last = (object_key(TOPIC, made[at].object_id) for at in (1, 2))
    setup.store.put_object(first, bytes(setup.store.get_range(last, 0, made[2].size)))
    [row] = setup.compacted().rows
    assert row.error is not None
    assert "offset" in row.error
    assert len(setup.chain()) == 3


def test_another_topics_frames_of_the_same_offsets_are_not_compacted(setup: Setup) -> None:
    """Checksums, offsets and size are right: only the hash tells that it is another object."""
    made = setup.lay([0, 10, 20, 30])
    key = object_key(TOPIC, made[1].object_id)
    data = bytes(setup.store.get_range(key, 0, made[1].size))
    hashed = replace(made[1], content_hash=f"sha256:{sha256(data).hexdigest()}")
    assert setup.catalog.replace_descriptor(TOPIC, made[1], hashed)
    found = scan(data)
    foreign = [encode_frame(at, bytes(each)[:-1] + b"?") for at, each in found]
    setup.store.put_object(key, b"".join(foreign))
    [row] = setup.compacted().rows
    assert row.error is not None
    assert str(hashed.content_hash) in row.error
    assert setup.ranges() == [(0, 9), (10, 19), (20, 29)]
    setup.store.put_object(key, data)
    [row] = setup.compacted().rows
    assert row.error is None
    [joined] = setup.chain()
    whole = setup.store.get_range(object_key(TOPIC, joined.object_id), 0, joined.size)
    assert joined.content_hash == f"sha256:{sha256(whole).hexdigest()}"


def test_a_new_object_that_was_not_read_back_alike_is_not_committed(setup: Setup) -> None:
    setup.lay([0, 10, 20])

    def careless(tasks: Sequence[Sequence[Rewrite]], work: Any, progress: Any) -> Any:
        [[done]] = here(tasks, work, progress)
        made = done.result
        assert isinstance(made, Rewritten)
        wrong = replace(made, after=replace(made.after, content_hash="0" * 64))
        return [[Done(wrong, None)]]

    [row] = setup.compacted(run=careless).rows
    assert row.error is not None
    assert "differs from the objects" in row.error
    assert len(setup.chain()) == 2


def rewrite_of(made: Sequence[ObjectDescriptor]) -> Rewrite:
    return Rewrite(Group(TOPIC, 1, tuple(made)), Intent("data-0-19.dnb1", 1, "token"))


def test_a_new_object_that_holds_other_messages_is_refused_by_the_task(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody puts another object there, of valid frames, the same offsets and the same size."""
    made = setup.lay([0, 10, 20])
    job = rewrite_of(made)
    key = object_key(TOPIC, job.intent.object_id)
    others = b"".join(encode_frame(at, message(at).replace(b"m", b"n")) for at in range(20))
    backend = FaultBackend(LocalBackend(Path(setup.settings.data or "") / "objects"))

    def overwrite(_: str) -> None:
        setup.store.put_object(key, others)

    backend.hook("complete", overwrite, when="after")
    monkeypatch.setattr(executor_resources(setup.settings), "_store", CloudStore(backend))
    with pytest.raises(CorruptLog, match=job.intent.object_id):
        rewrite(setup.settings, job)
    assert sidecar(job.intent.object_id) not in setup.names()


def test_a_topic_whose_restore_is_unfinished_is_left_alone(setup: Setup) -> None:
    setup.lay([0, 10, 20])
    setup.create(**{**_fields(setup.record()), "log_id": restoring("log")})
    [row] = setup.compacted().rows
    assert row.object_id is None
    assert "/default/orders: a restore is running or was interrupted" in str(row.error)


def test_doing_a_task_twice_gives_the_same(setup: Setup) -> None:
    made = setup.lay([0, 10, 20])
    job = rewrite_of(made)
    first, second = rewrite(setup.settings, job), rewrite(setup.settings, job)
    assert (first.before, first.after) == (second.before, second.after)
    assert replace(first.descriptor, etag=None) == replace(second.descriptor, etag=None)


# ---- others at work between the plan and the commit ----


def moved(setup: Setup, change: Any) -> Any:
    """A run during which something changes, when its first objects are written."""
    changes = [change]

    def run(tasks: Any, work: Any, progress: Any) -> Any:
        answers = here(tasks, work, progress)
        if changes:
            changes.pop()()
        return answers

    return setup.compacted(run=run)


def test_when_retention_took_one_the_rest_is_planned_anew(setup: Setup) -> None:
    made = setup.lay([0, 10, 20, 30])
    report = moved(setup, lambda: setup.catalog.retire(TOPIC, None, made[0]))
    assert (report.ok, report.refused, report.replaced) == (True, 1, 2)
    assert setup.ranges() == [(10, 29)]
    setup.require_readable(30, start=10)


def test_an_object_that_retention_deleted_while_it_was_read_is_no_error(setup: Setup) -> None:
    made = setup.lay([0, 10, 20, 30])
    retired = False

    def run(tasks: Any, work: Any, progress: Any) -> Any:
        nonlocal retired
        if not retired:
            assert setup.catalog.retire(TOPIC, None, made[0]) is not None
            setup.store.delete_object(object_key(TOPIC, made[0].object_id))
            retired = True
        return here(tasks, work, progress)

    report = setup.compacted(run=run)
    assert (report.ok, report.refused) == (True, 1)
    assert setup.ranges() == [(10, 29)]


def test_when_the_topic_has_a_new_owner_it_is_planned_anew(setup: Setup) -> None:
    setup.lay([0, 10, 20])
    report = moved(setup, lambda: setup.create(**{**_fields(setup.record()), "epoch": 2}))
    assert (report.ok, report.refused) == (True, 1)
    life = setup.catalog.life(TOPIC, setup.chain()[0].object_id)
    assert life is not None
    assert (life.state, life.epoch) == (State.COMMITTED, 2)
    setup.require_readable(20)


def test_a_topic_that_never_stands_still_is_given_up_and_told(setup: Setup) -> None:
    setup.lay([0, 10, 20])

    def run(tasks: Any, work: Any, progress: Any) -> Any:
        answers = here(tasks, work, progress)
        record = setup.record()
        setup.create(**{**_fields(record), "epoch": record.epoch + 1})
        return answers

    report = setup.compacted(run=run)
    [row] = report.rows
    assert "new owner" in str(row.error)
    assert not report.ok
    assert len(setup.chain()) == 2


def test_appending_and_committing_goes_on_meanwhile(setup: Setup) -> None:
    setup.lay([0, 10, 20])
    moved(setup, lambda: setup.lay([20, 30, 40]))
    assert setup.ranges() == [(0, 39)], "the second round took the new ones"
    setup.require_readable(40)


def test_two_runs_at_once_do_the_work_once(setup: Setup) -> None:
    setup.lay([0, 10, 20, 30])
    inner: list[Any] = []
    outer = moved(setup, lambda: inner.append(setup.compacted()))
    assert (inner[0].ok, inner[0].replaced) == (True, 3)
    assert (outer.ok, outer.refused, outer.rows) == (True, 1, ())
    assert setup.ranges() == [(0, 29)]
    setup.swept()
    setup.require_readable(30)


def test_a_store_in_memory_cannot_be_compacted() -> None:
    with pytest.raises(UsageError, match="memory"):
        compact(StoreSettings(data=None), executor=RunsHere(here))
