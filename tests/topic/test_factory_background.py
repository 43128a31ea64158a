"""Background work of topics: when it runs, what its errors do, and how it ends."""

from __future__ import annotations

import errno
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pytest

from forebay.errors import LogClosed, ServiceUnavailable, TopicFenced
from forebay.testing import ManualClock
from forebay.topic.factory import FAILURES, Background, Maintained
from forebay.wal.pool import WriterPool
from support.disks import PATIENCE_SECONDS, wait_until

EVERY: Final = 10.0
LATE: Final = 0.001


class Owner:
    def __init__(self, name: str = "/default/orders") -> None:
        self.name = name
        self.fenced: list[TopicFenced] = []

    def fence(self, error: TopicFenced) -> None:
        self.fenced.append(error)


@dataclass
class Chore:
    """Counts its runs; the first ones raise the planned errors."""

    plan: list[Exception] = field(default_factory=list)
    runs: int = 0

    def __call__(self, owner: Maintained) -> None:
        self.runs += 1
        if self.plan:
            raise self.plan.pop(0)


class Setup:
    """Background work on one thread, with a clock that only the test moves."""

    def __init__(self, threads: int = 1) -> None:
        self.clock = ManualClock()
        self.pool = WriterPool(threads, self.clock)
        self.clock.subscribe(self.pool.recheck)
        self.background = Background(self.pool, self.clock)

    def settle(self) -> None:
        """Returns once the one thread that is free has run all that was due."""
        settle(self.pool)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.settle()


def settle(pool: WriterPool) -> None:
    """The first job finds the timers that are due; the second runs after what they started."""
    for _ in range(2):
        done = threading.Event()
        pool.submit(done.set)
        assert done.wait(PATIENCE_SECONDS)


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.pool.close()


def test_a_chore_runs_first_when_asked_to_and_then_after_each_interval(setup: Setup) -> None:
    owner, chore = Owner(), Chore()
    setup.background.every(EVERY, owner, chore, first=0)
    setup.settle()
    assert chore.runs == 1
    for turn in (2, 3):
        setup.pass_time(EVERY - LATE)
        assert chore.runs == turn - 1
        setup.pass_time(LATE)
        assert chore.runs == turn


def test_a_chore_waits_for_its_interval_unless_told_otherwise(setup: Setup) -> None:
    owner, chore = Owner(), Chore()
    setup.background.every(EVERY, owner, chore)
    setup.pass_time(EVERY - LATE)
    assert chore.runs == 0
    setup.pass_time(LATE)
    assert chore.runs == 1


def test_the_interval_begins_when_the_chore_has_ended(setup: Setup) -> None:
    owner, entered, go_on = Owner(), threading.Event(), threading.Event()
    runs = []

    def chore(_: Maintained) -> None:
        runs.append(setup.clock.monotonic())
        entered.set()
        assert go_on.wait(PATIENCE_SECONDS)

    setup.background.every(EVERY, owner, chore, first=0)
    assert entered.wait(PATIENCE_SECONDS)
    setup.clock.advance(5 * EVERY)
    go_on.set()
    setup.settle()
    assert runs == [0]
    setup.pass_time(EVERY)
    assert runs == [0, 6 * EVERY]


@pytest.mark.parametrize(
    ("error", "level", "traced"),
    [
        (ServiceUnavailable("come back later"), logging.WARNING, False),
        (OSError(errno.EIO, "the disk is ill"), logging.ERROR, False),
        (RuntimeError("a bug"), logging.ERROR, True),
        (AssertionError("another bug"), logging.ERROR, True),
        (KeyError("a third"), logging.ERROR, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_chore_that_fails_is_told_counted_and_tried_again(
    setup: Setup,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    level: int,
    traced: bool,
) -> None:
    kind = type(error).__name__
    owner, chore, before = Owner(), Chore([error, error]), FAILURES.value(kind)
    setup.background.every(EVERY, owner, chore, first=0)
    setup.settle()
    setup.pass_time(EVERY)
    setup.pass_time(EVERY)
    assert chore.runs == 3
    assert FAILURES.value(kind) - before == 2
    assert [record.levelno for record in caplog.records] == [level, level]
    for record in caplog.records:
        line = record.getMessage()
        assert line.startswith("background work failed topic=/default/orders error=")
        assert str(error) in line
        assert (record.exc_info is not None) == traced
    if traced:
        assert "raise self.plan.pop(0)" in caplog.text


@pytest.mark.parametrize("error", [LogClosed("closed"), TopicFenced("taken")], ids=["closed", ""])
def test_a_chore_ends_with_its_topic(setup: Setup, error: Exception) -> None:
    owner, chore = Owner(), Chore([error])
    before = FAILURES.value(type(error).__name__)
    setup.background.every(EVERY, owner, chore, first=0)
    setup.settle()
    for _ in range(3):
        setup.pass_time(EVERY)
    assert chore.runs == 1
    assert FAILURES.value(type(error).__name__) == before
    assert owner.fenced == ([error] if isinstance(error, TopicFenced) else [])


def test_the_work_keeps_no_owner_alive_and_ends_with_it(setup: Setup) -> None:
    owner, chore = Owner(), Chore()
    reference = weakref.ref(owner)
    setup.background.every(EVERY, owner, chore, first=0)
    setup.settle()
    del owner
    gc.collect()
    assert reference() is None
    setup.pass_time(EVERY)
    assert chore.runs == 1


def test_hundreds_of_owners_share_a_few_threads() -> None:
    setup = Setup(threads=3)
    owners = [Owner(f"/default/topic-{number}") for number in range(400)]
    chores = [Chore() for _ in owners]
    for owner, chore in zip(owners, chores, strict=True):
        setup.background.every(EVERY, owner, chore, first=0)

    def have_run_often() -> bool:
        setup.clock.advance(EVERY)
        return all(chore.runs >= 3 for chore in chores)

    wait_until(have_run_often)
    assert 1 <= setup.pool.thread_count <= 3
    setup.pool.close()


def test_a_chore_that_hangs_holds_up_nobody_else_while_a_thread_is_left() -> None:
    setup = Setup(threads=2)
    hanging, release = threading.Event(), threading.Event()

    def hang(_: Maintained) -> None:
        hanging.set()
        assert release.wait(PATIENCE_SECONDS)

    stuck, owner, chore = Owner("/default/stuck"), Owner(), Chore()
    setup.background.every(EVERY, stuck, hang, first=0)
    assert hanging.wait(PATIENCE_SECONDS)
    setup.background.every(EVERY, owner, chore, first=0)
    setup.settle()  # on the other thread
    for turn in range(1, 4):
        assert chore.runs == turn
        setup.pass_time(EVERY)
    release.set()
    setup.pool.close()


def test_a_closed_pool_runs_no_chore_again(setup: Setup) -> None:
    owner, chore = Owner(), Chore()
    setup.background.every(EVERY, owner, chore, first=0)
    setup.settle()
    setup.pool.close()
    setup.clock.advance(2 * EVERY)
    assert chore.runs == 1
