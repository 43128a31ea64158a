"""Offload: planned by the driver, transferred anywhere, committed in order by the driver alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay.catalog.catalog import Change
from forebay.catalog.kv import Compare, Kv, Put, Remove
from forebay.catalog.records import TopicRecord
from forebay.errors import CorruptFrame, MissingData, ServiceUnavailable, UsageError
from forebay.format.names import (
    SIDECAR_ENDING,
    object_key,
    parse_marker,
    parse_object,
    parse_topic,
)
from forebay.pipeline.execute import Done
from forebay.pipeline.jobs.offload import Offload, OffloadReport, ReadBackTask
from forebay.pipeline.location import job_settings
from forebay.settings import (
    DeleterSettings,
    StoreSettings,
    SweeperSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing.clock import ManualClock
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store
from forebay.topic.view import StoreView
from forebay.upload import metrics
from forebay.upload.engine import UploadTask
from forebay.upload.sweep import Action, SweepReport, sweep
from support.disks import wait_until
from support.inline_executor import InlineExecutor

NAME = "/default/orders"


def settings_of(data: Path, **uploader: Any) -> StoreSettings:
    """Segments of four kilobytes, and nobody who uploads in the background."""
    return StoreSettings(
        data=data,
        wal=WalSettings(rotate_max_bytes=4096),
        uploader=UploaderSettings(**{"enabled": False, **uploader}),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


@contextmanager
def offloading(
    settings: StoreSettings, executor: InlineExecutor, clock: Any = None
) -> Iterator[Offload]:
    more = {} if clock is None else {"clock": clock}
    with Offload(job_settings(settings), executor, **more) as run:
        yield run


def once(settings: StoreSettings, executor: InlineExecutor, **how: Any) -> OffloadReport:
    with offloading(settings, executor) as run:
        return run.once(**{"force": True, **how})


def payloads(count: int, start: int = 0) -> list[bytes]:
    return [b"%06d" % number * 10 for number in range(start, start + count)]


def contents(settings: StoreSettings, topic: str = NAME) -> list[bytes]:
    with StoreView(settings) as view:
        return [message.payload for message in view.topic(topic).reader(0)]


def chain(settings: StoreSettings, topic: str = NAME) -> list[tuple[int, int]]:
    with StoreView(settings) as view:
        return [(each.start_offset, each.end_offset) for each in view.topic(topic).objects()]


def test_everything_synced_is_uploaded_while_its_owner_goes_on(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    with forebay.open(settings) as store:
        topic = store.topic(NAME)
        topic.append_many(payloads(500))
        topic.flush()
        report = once(settings, executor)
        assert report.ok
        assert (report.messages, report.waves, executor.runs) == (500, 1, 1)
        topic.append_many(payloads(100, 500))
        topic.flush()
        assert once(settings, executor).messages == 100
        assert topic.trim_local()
        assert [message.payload for message in topic.read(0)] == payloads(600)
    assert contents(settings) == payloads(600)


def test_with_nothing_to_do_nothing_runs(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    with forebay.open(settings) as store:
        store.topic(NAME).append(b"one", durability="synced")
    once(settings, executor)
    executor.slots = None  # type: ignore[assignment,method-assign]  # asking would begin a session
    report = once(settings, executor)
    assert (report.rows, report.waves, executor.runs) == ((), 0, 1)


def test_objects_of_one_topic_end_with_segments_and_are_made_side_by_side(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path, max_object_bytes=10_000), InlineExecutor()
    with forebay.open(settings) as store:
        topic = store.topic(NAME)
        for number in range(10):
            topic.append_many(payloads(50, number * 50))
            topic.flush()
            topic.rotate()
        ends = {segment.end_offset - 1 for segment in topic.segments()}
    report = once(settings, executor)
    assert executor.runs == 1
    assert len(executor.items) == report.objects > 2
    assert {row.end_offset for row in report.rows} <= ends
    assert contents(settings) == payloads(500)


def test_tasks_that_run_twice_at_once_both_succeed(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, max_object_bytes=10_000)
    ends: list[object] = []

    class Twice(InlineExecutor):
        """Runs each item on two threads at once, as Spark's speculative execution may."""

        def _one(self, work: Callable[[Any], Any], item: Any) -> Done[Any]:
            start = threading.Barrier(2)

            def attempt(_number: int) -> Any:
                start.wait()
                return work(item)

            with ThreadPoolExecutor(2) as pool:
                done = list(pool.map(attempt, range(2)))
            ends.extend(each.descriptor.object_id for each in done)
            assert done[0].descriptor.content_hash == done[1].descriptor.content_hash
            assert done[0].descriptor.etag == done[1].descriptor.etag, "one has created it"
            return Done(done[1], None)

    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(500), durability="synced")
    report = once(settings, Twice())
    assert report.ok
    assert len(ends) == 2 * report.objects > 4
    assert contents(settings) == payloads(500)


def test_an_object_of_another_log_stops_the_topic_and_is_not_changed(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, max_object_bytes=10_000)
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(100), durability="synced")
    with offloading(settings, InlineExecutor()) as run:
        planned = run.once(force=True, dry_run=True).rows[0]
        resources = run.store.resources()
        assert resources is not None
        name = f"data-{planned.start_offset}-{planned.end_offset}.dnb1"
        key = object_key(parse_topic(NAME), name)
        resources.store.put_object(key, b"of another log")
        for _ in range(2):
            report = run.once(force=True)
            assert not report.ok
            assert "(content not read)" in str(report.rows[0].error)
        assert bytes(resources.store.get_object(key, 100)) == b"of another log"
    assert chain(settings) == []


def test_only_the_prefix_of_what_succeeded_is_committed(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path, max_object_bytes=5000), InlineExecutor()
    with forebay.open(settings) as store:
        for name in ("a", "b"):
            store.topic(name).append_many(payloads(300))
    broken = ServiceUnavailable("no answer")

    def fail(task: Any) -> None:
        if task.topic.topic == "a" and task.planned.start_offset > 100:
            raise broken

    executor.before = fail
    report = once(settings, executor)
    assert not report.ok
    committed = chain(settings, "a")
    assert committed
    assert committed[-1][1] < 299
    assert [row.error for row in report.rows if row.error] == [str(broken)]
    assert chain(settings, "b")[-1][1] == 299
    executor.before = lambda _task: None
    assert once(settings, executor).ok
    assert chain(settings, "a")[-1][1] == 299
    assert contents(settings, "a") == payloads(300)


def test_work_that_is_done_twice_is_done_once(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    executor.twice = True
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(300))
    assert once(settings, executor).ok
    assert contents(settings) == payloads(300)


def test_a_damaged_frame_stops_its_topic_and_nothing_before_it(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    with forebay.open(settings) as store:
        for name in ("bad", "good"):
            store.topic(name).append_many(payloads(300))
            store.topic(name).flush()
        segment = store.topic("bad").segments()[0]
        with segment.path.open("r+b") as file:
            file.seek(segment.size // 2)
            file.write(b"\xff\xff\xff\xff")
        for _ in range(2):  # it stays so, and what is before it stays uploaded
            report = once(settings, executor)
            [error] = [row for row in report.rows if row.error]
            assert error.topic == "/default/bad"
            assert "position" in str(error.error)
            assert 0 < chain(settings, "bad")[-1][1] < 299
            assert chain(settings, "good")[-1][1] == 299


def test_the_thresholds_hold_unless_it_is_forced(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = settings_of(tmp_path, max_object_bytes=5000, max_open_seconds=60)
    executor = InlineExecutor()
    with Store(settings, clock=clock) as store, offloading(settings, executor, clock) as run:
        topic = store.topic(NAME)
        topic.append_many(payloads(10))
        topic.flush()
        assert run.once(force=False).rows == ()
        clock.advance(61)
        assert run.once(force=False).messages == 10
        topic.append_many(payloads(10, 10))
        topic.flush()
        assert run.once(force=False).rows == (), "the last object is of this moment"
        topic.append_many(payloads(200, 20))
        topic.flush()
        full = run.once(force=False)
        assert full.rows
        assert all(row.bytes <= 5000 for row in full.rows)
        assert full.messages < 210, "what does not fill an object waits"
        assert run.once(force=True).messages == 210 - full.messages
    assert contents(settings) == payloads(220)


def test_the_thresholds_of_a_topic_are_its_own(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    with forebay.open(settings) as store, offloading(settings, executor) as run:
        topic = store.topic(NAME)
        topic.configure(rotate_max_bytes=None)
        topic.append_many(payloads(100), durability="synced")
        assert run.once(force=False).rows == ()
        topic.configure(max_object_messages=30)
        report = run.once(force=False)
        assert [row.messages for row in report.rows] == [30, 30, 30]
        assert {item.settings.max_object_messages for item in executor.items} == {30}
        topic.configure(max_open_seconds=0, max_object_messages=4)
        assert [row.messages for row in run.once(force=False).rows] == [4, 4]
    assert len(contents(settings)) == 100


def test_a_topic_that_rolls_is_left_to_its_owner_unless_it_is_forced(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, enabled=True, runner="spark", max_open_seconds=0)
    executor = InlineExecutor()
    with offloading(settings, executor) as run:
        with forebay.open(settings) as store:
            topic, other = store.topic(NAME), store.topic("other")
            topic.configure(rolling=True, max_open_seconds="1h")
            for each in (topic, other):
                each.append_many(payloads(10), durability="synced")
            report = run.once(force=False)
            assert [(row.topic, row.messages) for row in report.rows] == [("/default/other", 10)]
            assert report.left_to_owners == 1
            assert run.once([NAME], force=False).rows == ()
            assert run.once([NAME], force=True).messages == 10
            topic.append_many(payloads(10, 10), durability="synced")
            topic.upload()
            topic.append_many(payloads(10, 20), durability="synced")
            topic.configure(max_open_seconds=0)
            assert run.once(force=False).rows == ()
        report = run.once(force=False)
        assert [row.topic for row in report.rows] == [NAME], "nobody owns it, so nobody else would"
    assert contents(settings) == payloads(30)


def test_a_topic_that_rolls_where_owners_do_not_upload_is_taken(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, enabled=False, rolling=True, max_open_seconds=0)
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(10), durability="synced")
        assert once(settings, InlineExecutor(), force=False).messages == 10


def forget_verified(settings: StoreSettings) -> None:
    """As after a restore: what is committed counts as not read back."""
    with StoreView(settings) as view:
        resources = view.resources()
        assert resources is not None
        resources.catalog.update(
            parse_topic(NAME), None, lambda record: Change(replace(record, verified=0))
        )


def record_of(settings: StoreSettings) -> TopicRecord:
    with StoreView(settings) as view:
        record = view.topic(NAME).record
    assert record is not None
    return record


def test_what_is_committed_counts_as_verified_at_once(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path, max_object_bytes=5000), InlineExecutor()
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(200))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with offloading(settings, executor) as run:
        run.catalog().mark_verified = die  # type: ignore[method-assign,assignment]
        assert run.once(force=True).objects > 1
    assert record_of(settings).verified == record_of(settings).tail == 200


def test_what_was_committed_and_not_read_back_is_read_back(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path, max_object_bytes=5000), InlineExecutor()
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(200))
    once(settings, executor)
    forget_verified(settings)
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(100, 200))
    executor.items.clear()
    report = once(settings, executor)
    assert report.ok
    assert report.messages == 100
    kinds = [type(item) for item in executor.items]
    assert kinds.count(ReadBackTask) > 1
    assert kinds.count(UploadTask) == report.objects
    assert record_of(settings).verified == record_of(settings).tail == 300


def test_an_unsound_object_is_told_and_uploads_go_on(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with forebay.open(settings) as store:
        topic = store.topic(NAME)
        topic.append_many(payloads(100))
        topic.flush()

        def ruin(task: Any) -> None:
            if isinstance(task, ReadBackTask):
                raise MissingData("it is not there")

        executor = InlineExecutor()
        assert once(settings, executor).ok
        forget_verified(settings)
        topic.append_many(payloads(100, 100))
        topic.flush()
        executor.before = ruin
        report = once(settings, executor)
        assert not report.ok
        assert report.messages == 100
        assert chain(settings)[-1][1] == 199


def test_the_owner_that_uploads_as_well_is_no_error(tmp_path: Path) -> None:
    """Whoever is first commits; the other one goes on behind it."""
    settings = settings_of(tmp_path)
    executor = InlineExecutor()
    with forebay.open(settings) as store:
        topic = store.topic(NAME)
        topic.append_many(payloads(100))
        topic.flush()

        def race(task: Any) -> None:
            if isinstance(task, UploadTask) and task.planned.start_offset == 0:
                topic.upload()

        executor.before = race
        report = once(settings, executor)
        assert report.ok
        topic.append_many(payloads(50, 100))
        assert once(settings, executor).ok
        topic.upload()
        assert topic.watermarks().verified == 150
    assert contents(settings) == payloads(150)


def test_an_owner_that_changes_in_the_middle_costs_no_transfer(tmp_path: Path) -> None:
    """As a sink does with every batch: it goes on with the same log, so the object is right."""
    settings = settings_of(tmp_path)
    executor = InlineExecutor()
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(100))

    def take_over(_task: Any) -> None:
        with forebay.open(settings) as store:
            store.topic(NAME).append(b"from the next owner", durability="synced")

    executor.before = take_over
    report = once(settings, executor)
    assert report.ok
    assert (report.messages, executor.runs) == (100, 1)
    executor.before = lambda _task: None
    assert once(settings, executor).messages == 1
    assert len(contents(settings)) == 101


def test_a_log_that_was_replaced_is_read_with_its_own_places(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    settings = replace(settings, wal=WalSettings())
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(100))
    with offloading(settings, executor) as run:
        assert run.once(force=True).messages == 100
        shutil.rmtree(tmp_path / "wal")
        with forebay.open(settings) as store:
            topic = store.topic(NAME)
            topic.append_many([b"another length"] * 50)
            topic.flush()
            report = run.once(force=True)
            assert report.ok
            assert report.messages == 50
            topic.append_many([b"and more"] * 50)
            topic.flush()
            assert run.once(force=True).messages == 50


def test_spark_that_does_not_start_is_told_once(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with forebay.open(settings) as store:
        for number in range(3):
            store.topic(f"t{number}").append(b"x", durability="synced")

    class Absent(InlineExecutor):
        def slots(self) -> int:
            self.runs += 1
            raise UsageError("no Java")

    executor = Absent()
    with pytest.raises(UsageError, match="no Java"):
        once(settings, executor)
    assert executor.runs == 1


def test_a_topic_that_is_not_there_is_an_error_of_the_call(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with forebay.open(settings) as store:
        store.topic(NAME).append(b"x", durability="synced")
    with pytest.raises(UsageError, match="no topic"):
        once(settings, InlineExecutor(), topics=["nosuch"])


def test_a_dry_run_says_what_would_be_and_does_nothing(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(300))
    report = once(settings, executor, dry_run=True)
    assert (report.dry_run, report.messages, executor.runs) == (True, 300, 0)
    assert chain(settings) == []


def test_the_owner_sees_what_the_pipeline_uploaded(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, enabled=True, runner="spark", interval_seconds=0.05)
    with forebay.open(settings) as store:
        topic = store.topic(NAME)
        topic.append_many(payloads(100))
        topic.flush()
        assert once(settings, InlineExecutor()).ok
        for _ in range(1000):
            if topic.watermarks().verified == 100:
                break
            topic.append(b"x", durability="synced")  # a while, without sleeping
        assert topic.watermarks().uploaded == 100


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["offload", "rotate", "upload", "trim"])),
        max_size=8,
    ),
    object_bytes=st.sampled_from([1, 700, 5000, 1 << 30]),
)
@settings(max_examples=30, deadline=None)
def test_any_history_keeps_every_message_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]], object_bytes: int
) -> None:
    settings = settings_of(tmp_path_factory.mktemp("any"), max_object_bytes=object_bytes)
    settings = replace(settings, wal=WalSettings(rotate_max_bytes=1000))
    said: list[bytes] = []
    executor = InlineExecutor()
    with forebay.open(settings) as store:
        topic = store.topic(NAME)
        topic.append(b"first", durability="synced")
        said.append(b"first")
        for count, action in steps:
            new = payloads(count, len(said))
            topic.append_many(new)
            topic.flush()
            said += new
            if action == "offload":
                assert once(settings, executor).ok
            elif action == "upload":
                topic.upload()
            elif action == "rotate":
                topic.rotate()
            else:
                topic.trim_local()
    assert once(settings, executor).ok
    assert contents(settings) == said
    found = chain(settings)
    assert found[0][0] == 0
    assert found[-1][1] == len(said) - 1
    assert all(before[1] + 1 == after[0] for before, after in pairwise(found))


def test_a_segment_that_cannot_be_opened_is_its_topics_own_trouble(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    with forebay.open(settings) as store:
        for name in ("bad", "good"):
            store.topic(name).append_many(payloads(100))
            store.topic(name).flush()
        path = store.topic("bad").segments()[-1].path

        def take_away(task: Any) -> None:
            if task.topic.topic == "bad" and path.exists():
                path.rename(path.with_suffix(".away"))

        executor.before = take_away
        report = once(settings, executor)
        path.with_suffix(".away").rename(path)
    assert [row.topic for row in report.rows if row.error] == ["/default/bad"]
    assert chain(settings, "good")[-1][1] == 99
    executor.before = lambda _task: None
    assert once(settings, executor).ok
    assert contents(settings, "bad") == payloads(100)


def test_no_sweep_overtakes_a_wave_of_a_topic_that_nobody_owns(tmp_path: Path) -> None:
    """A wave takes longer than the grace time: its driver lives, and renews what it announced."""
    clock = ManualClock()
    settings = replace(
        settings_of(tmp_path, max_object_bytes=5000), sweeper=SweeperSettings(grace_minutes=0.01)
    )
    with Store(settings, clock=clock) as store:
        store.topic(NAME).append_many(payloads(200))
    executor = InlineExecutor()
    reports: list[SweepReport] = []
    with offloading(settings, executor, clock) as run:

        def take_hours(_task: Any) -> None:
            clock.advance(3600)
            catalog, topic = run.catalog(), parse_topic(NAME)
            assert catalog.owner(topic) is None
            now = clock.now_ms()
            wait_until(lambda: all(life.updated_ms == now for _, life in catalog.lives(topic)))
            resources = run.store.resources()
            assert resources is not None
            swept = sweep(catalog, resources.store, grace_minutes=30, dry_run=False, clock=clock)
            reports.append(swept)

        executor.before = take_hours
        report = run.once(force=True)
    assert report.ok
    assert report.waves == 1, "nothing was taken away, and planned again"
    assert len(reports) == report.objects > 2
    assert sum(each.counts[Action.REMOVED] for each in reports) == 0
    assert contents(settings) == payloads(200)


class Killed(BaseException):
    """As a kill of the driver, at a call that we choose."""


class DyingKv:
    """A catalog's store whose user dies before or after one of its commits."""

    def __init__(self, kv: Kv, at: int, *, applied: bool) -> None:
        self._kv = kv
        self._left = at
        self._applied = applied

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        self._left -= 1
        if self._left == 0 and not self._applied:
            raise Killed
        revision = self._kv.commit(compares, writes)
        if self._left == 0:
            raise Killed
        return revision


def killed_at(settings: StoreSettings, at: int, *, applied: bool) -> bool:
    """Whether a run was killed at its `at`-th commit; False where it has fewer."""
    with offloading(settings, InlineExecutor()) as run:
        catalog = run.catalog()
        kv = catalog.kv
        catalog.kv = DyingKv(kv, at, applied=applied)
        try:
            assert run.once(force=True).ok
        except Killed:
            return True
        finally:
            catalog.kv = kv
    return False


def swept(settings: StoreSettings) -> set[str]:
    """Sweeps at once, and returns the objects that are left and that no descriptor names."""
    with StoreView(settings) as view:
        resources = view.resources()
        assert resources is not None
        sweep(resources.catalog, resources.store, grace_minutes=0, dry_run=False)
        ids = {each.object_id for each in view.topic(NAME).objects()}
        listed = {meta.key.rpartition("/")[2] for meta in resources.store.list("")}
    left = {each.removesuffix(SIDECAR_ENDING) for each in listed if parse_marker(each) is None}
    assert ids <= left
    return left - ids


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
def test_a_driver_that_dies_at_any_commit_leaves_nothing_but_orphans(
    tmp_path: Path, applied: bool
) -> None:
    kills = 0
    for at in range(1, 50):
        settings = settings_of(tmp_path / str(at), max_object_bytes=5000)
        with forebay.open(settings) as store:
            store.topic(NAME).append_many(payloads(100))
        if not killed_at(settings, at, applied=applied):
            break
        kills += 1
        before = chain(settings)
        assert record_of(settings).verified == record_of(settings).tail
        tail = record_of(settings).tail
        for object_id in swept(settings):
            name = parse_object(object_id)
            assert name is not None
            assert name.start >= tail, "a sweep leaves only what may still be needed"
        assert once(settings, InlineExecutor()).ok
        assert swept(settings) == set()
        assert chain(settings)[: len(before)] == before
        assert contents(settings) == payloads(100)
    assert kills >= 4, "two objects, each announced and committed"


def test_an_object_that_cannot_be_read_back_is_not_committed(tmp_path: Path) -> None:
    settings, executor = settings_of(tmp_path), InlineExecutor()
    with forebay.open(settings) as store:
        store.topic(NAME).append_many(payloads(100))
    before = metrics.verified.value("failed")

    def unreadable(*_: object) -> None:
        raise CorruptFrame("a checksum", file="data-0-99.dnb1", position=7, offset=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreResources, "read_back", unreadable)
        report = once(settings, executor)
    assert not report.ok
    assert chain(settings) == []
    assert metrics.verified.value("failed") == before + 1
    stored = (tmp_path / "objects" / "storage").rglob("data-*")
    assert [path.suffix for path in stored] == [".dnb1"]
    assert once(settings, executor).ok
    assert contents(settings) == payloads(100)
