"""Sweeps of the background work: when they run, in which process, and what ends them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.kv import Put
from forebay.errors import LogClosed, ServiceUnavailable
from forebay.format.names import TopicName, object_key, pending_object, staged_file
from forebay.settings import SweeperSettings
from forebay.topic.store import Store
from forebay.upload.sweep import ERRORS, REMOVED, STAGED_HOURS, Kind
from forebay.upload.sweeper import SWEEPS, Sweeper
from forebay.wal.pool import WriterPool
from support.disks import wait_until
from support.reservoirs import (
    GRACE_MINUTES,
    TOPIC,
    HookedBackend,
    Reservoir,
    Stall,
    frames,
    running,
)
from support.tiered_stores import Setup, fill

SETTINGS: Final = SweeperSettings(interval_minutes=60, grace_minutes=GRACE_MINUTES)
HOUR: Final = 3600.0
ORPHAN: Final = "data-5-14.dnb1"


@pytest.fixture
def at() -> Iterator[Reservoir]:
    reservoir = Reservoir()
    yield reservoir
    reservoir.close()


@pytest.fixture
def pool(at: Reservoir) -> Iterator[WriterPool]:
    pool = WriterPool(1, at.clock)
    at.clock.subscribe(pool.recheck)
    yield pool
    pool.close()


def sweeper_of(at: Reservoir, pool: WriterPool, settings: SweeperSettings = SETTINGS) -> Sweeper:
    """That of one process; all of them have the same catalog."""
    return Sweeper(at.catalog, at.store, settings, pool, at.clock)


def leave_garbage(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10, 20)
    at.write(ORPHAN, frames(5, 10))
    at.write(pending_object(3, "ab"), frames(3, 3), with_sidecar=False)
    at.store.put_object(staged_file("0123456789abcdef", 0, 1), b"rows")


def test_orphans_pending_objects_and_staged_rows_go_after_their_time(
    at: Reservoir, pool: WriterPool
) -> None:
    leave_garbage(at)
    committed = ["data-0-9.dnb1", "data-0-9.dnb1.json", "data-10-19.dnb1", "data-10-19.dnb1.json"]
    kinds = (Kind.ORPHAN, Kind.PENDING, "staged rows")
    before = [REMOVED.value(kind) for kind in kinds]
    sweeper = sweeper_of(at, pool)
    young = sweeper.run_if_due()
    assert young is not None
    assert len(young.report.items) == 2, "nothing is old enough"
    at.grow_old()
    assert sweeper.run_if_due() is not None
    assert at.names() == committed
    assert len(list(at.store.list("staging/"))) == 1, "rows are kept for a week"
    at.clock.advance(STAGED_HOURS * HOUR)
    last = sweeper.run_if_due()
    assert last is not None
    assert last.staged == 1
    assert list(at.store.list("staging/")) == []
    assert [REMOVED.value(kind) - was for kind, was in zip(kinds, before, strict=True)] == [1, 1, 1]


def test_one_process_sweeps_in_each_interval(at: Reservoir, pool: WriterPool) -> None:
    leave_garbage(at)
    first, second = sweeper_of(at, pool), sweeper_of(at, pool)
    assert first.run_if_due() is not None
    assert second.run_if_due() is None
    at.clock.advance(HOUR - 1)
    assert second.run_if_due() is None
    at.clock.advance(1)
    assert second.run_if_due() is not None
    assert first.run_if_due() is None


def test_a_clock_that_was_years_ahead_stops_no_sweep(at: Reservoir, pool: WriterPool) -> None:
    at.clock.jump(10 * 365 * 24 * HOUR)
    assert sweeper_of(at, pool).run_if_due() is not None
    at.clock.jump(-10 * 365 * 24 * HOUR)
    assert sweeper_of(at, pool).run_if_due() is not None


def test_a_row_that_is_not_readable_is_replaced(at: Reservoir, pool: WriterPool) -> None:
    at.kv.inner.commit([], [_row(at, b"not json")])
    assert sweeper_of(at, pool).run_if_due() is not None
    at.kv.inner.commit([], [_row(at, b"[]")])
    assert sweeper_of(at, pool).run_if_due() is not None


def _row(at: Reservoir, value: bytes) -> Put:
    return Put(at.catalog.keys.sweep(), value)


def test_sweeps_come_with_the_time_and_not_at_the_start(at: Reservoir, pool: WriterPool) -> None:
    leave_garbage(at)
    before = SWEEPS.value("done")
    sweeper = sweeper_of(at, pool)
    sweeper.start()
    sweeper.start()
    assert SWEEPS.value("done") == before
    at.clock.advance(300)
    wait_until(lambda: SWEEPS.value("done") == before + 1)
    wait_until(lambda: _advanced(at, before + 2))
    assert ORPHAN not in at.names()
    sweeper.close()


def _advanced(at: Reservoir, sweeps: float) -> bool:
    """Half an interval passes: the next sweep is planned on another thread, at a random time."""
    if SWEEPS.value("done") < sweeps:
        at.clock.advance(HOUR / 2)
        return False
    return True


def test_one_that_is_switched_off_plans_nothing(at: Reservoir, pool: WriterPool) -> None:
    sweeper_of(at, pool, replace(SETTINGS, enabled=False)).start()
    assert pool.thread_count == 0


def test_while_the_store_is_away_a_sweep_is_one_line_and_one_count(
    at: Reservoir, pool: WriterPool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        at.own(at.session(), TopicName("default", name))

    def fail(_operation: str, _key: str) -> None:
        raise ServiceUnavailable("nobody answers")

    at.backend.before = fail
    before, errors = SWEEPS.value("failed"), sum(ERRORS.values().values())
    sweeper = sweeper_of(at, pool)
    with caplog.at_level(logging.INFO, "forebay"):
        sweeper.start()
        at.clock.advance(300)
        wait_until(lambda: SWEEPS.value("failed") == before + 1)
        wait_until(lambda: bool(caplog.messages))
        sweeper.close()
    assert caplog.messages == [
        'sweep failed: the next one begins after the interval error="nobody answers"'
    ]
    assert sum(ERRORS.values().values()) == errors
    at.backend.before = lambda _operation, _key: None
    at.clock.advance(HOUR)
    assert sweeper_of(at, pool).run_if_due() is not None


def test_closing_ends_a_sweep_that_runs(at: Reservoir, pool: WriterPool) -> None:
    leave_garbage(at)
    at.grow_old()
    stall = Stall("delete", object_key(TOPIC, pending_object(3, "ab")))
    at.backend.before = stall
    sweeper = sweeper_of(at, pool)
    ended: list[BaseException] = []

    def sweep() -> None:
        with pytest.raises(LogClosed) as caught:
            sweeper.run_if_due()
        ended.append(caught.value)

    with running(sweep):
        assert stall.reached.wait(60)
        sweeper.close(0)
        stall.release()
    assert ended
    assert ORPHAN in at.names(), "its turn would have come next"


# ---- a store -----------------------------------------------------------------------------------


def test_a_store_sweeps_by_itself_and_uploads_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at = Reservoir()
    backend = HookedBackend(at.clock)
    setup = Setup(tmp_path, backend=backend, clock=at.clock)
    settings = replace(setup.settings(), sweeper=SweeperSettings(grace_minutes=30))
    orphan = object_key(TOPIC, "data-2-3.dnb1")
    with (
        caplog.at_level(logging.INFO, "forebay.upload"),
        Store(settings, clock=at.clock, catalog=setup.catalog, store=setup.objects) as store,
    ):
        at.clock.subscribe(store._factory._background_pool.recheck)
        topic = store.topic(str(TOPIC))
        fill(topic, 10)
        topic.upload()
        backend.put_object(orphan, b"left by a process that died")
        at.clock.advance(30 * 60)
        stall = Stall("delete", orphan)
        backend.before = stall
        wait_until(lambda: stall.reached.is_set() or _tick(at))
        fill(topic, 10)
        assert [each.end_offset for each in topic.upload()] == [19], "uploads do not wait"
        stall.release()
        wait_until(lambda: orphan not in setup.listed())
        wait_until(lambda: any(line.startswith("sweep done ") for line in caplog.messages))
    [swept] = [line for line in caplog.messages if line.startswith("swept ")]
    assert swept == (
        f'swept topic={TOPIC} key={orphan} kind="orphan object" reason="no descriptor names it"'
    )
    at.close()


def _tick(at: Reservoir) -> bool:
    at.clock.advance(1)
    return False
