"""Every single call of an upload cycle fails once, before it happened or after.

The next cycles finish what the failed one began. Whatever it left behind is an orphan that a
sweep finds; nothing is committed twice, and every message is readable.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import pytest

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import ForebayError
from forebay.format.names import parse_topic
from forebay.limits import KIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import (
    CloudSettings,
    DeleterSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing import CrashDisk
from forebay.testing.kv import FaultKv
from forebay.testing.objects import FaultBackend, ObjectFault
from forebay.topic.store import Store
from support.storages import storage_of
from support.topic_evidence import (
    NAME,
    assert_chain,
    assert_each_committed_once,
    assert_only_orphans_are_swept,
    read_all,
)

MESSAGES: Final = 15
CALLS_MAX: Final = 400
"""More calls than a cycle has: a test that reaches this does not end by itself."""

Uploading = Literal["planned", "rolling", "ledgers"]


class Setup:
    """A store with one topic, whose catalog and object store fail when a test says so."""

    def __init__(self, path: Path, uploading: Uploading) -> None:
        self._disk = CrashDisk()
        self.kv = FaultKv(SqliteKv(None))
        self.backend = FaultBackend(MemoryBackend())
        self.catalog = Catalog(self.kv)
        self.objects = CloudStore(self.backend)
        self._settings = StoreSettings(
            path,
            wal=WalSettings(rotate_max_bytes=900),
            uploader=UploaderSettings(
                enabled=False,
                rolling=uploading == "rolling",
                format="pulsar" if uploading == "ledgers" else "dnb1",
                ledger_block_bytes=KIB,
                max_object_bytes=2000,
                max_open_seconds=60,
            ),
            cloud=CloudSettings(backend="memory"),
            deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
        )
        self.expected: dict[int, bytes] = {}
        self.store = self.open()
        self.topic = self.store.topic(NAME)

    def open(self) -> Store:
        return Store(self._settings, disk=self._disk, catalog=self.catalog, store=self.objects)

    def append(self, count: int = MESSAGES) -> None:
        first = len(self.expected)
        payloads = [b"%06d" % number + bytes(150) for number in range(first, first + count)]
        offsets = self.topic.append_many(payloads, durability="synced")
        assert offsets == range(first, first + count)
        self.expected.update(zip(offsets, payloads, strict=True))

    def leave_unverified(self) -> None:
        """Objects that a restore found: committed, and to be read back by the next cycle."""
        self.append()
        self.topic.upload()
        self.catalog.update(
            parse_topic(NAME), None, lambda record: Change(replace(record, verified=0))
        )

    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.topic = self.store.topic(NAME)

    def heal(self) -> None:
        self.kv.heal()
        self.backend.clear()

    def check(self) -> None:
        """After the faults: what is left is uploaded, and everything is as it must be."""
        self.heal()
        self.append(3)
        self.topic.upload()
        marks = self.topic.watermarks()
        assert marks.verified == marks.uploaded == marks.appended == len(self.expected)
        assert_chain(self.catalog, self.objects)
        assert_each_committed_once(self.catalog)
        assert_only_orphans_are_swept(self.catalog, self.objects)
        self.topic.rotate()
        self.topic.trim_local()
        assert self.topic.segments()[0].first_offset > 0
        assert read_all(self.topic).messages == self.expected

    def close(self) -> None:
        self.heal()
        self.store.close()
        self.catalog.close()


def fail_each_call(
    path: Path,
    uploading: Uploading,
    plan: Callable[[Setup, int], Callable[[], bool]],
    reopen: bool,
    unverified: bool = False,
) -> int:
    """For n = 1, 2, 3 …: the n-th call fails; ends when a cycle passes without it.

    `plan` sets the fault and returns how to find out whether it struck. With `unverified` the
    cycle finds objects that are committed and not verified. Returns how many calls failed.
    """
    for number in range(1, CALLS_MAX):
        setup = Setup(path / str(number), uploading)
        try:
            if unverified:
                setup.leave_unverified()
            setup.append()
            struck = plan(setup, number)
            try:
                storage_of(setup.topic).upload_due()  # leaves a rolling object open
                setup.append(5)
                setup.topic.upload()
            except ForebayError:
                assert struck(), "it failed for another reason"
            if not struck():
                return number - 1
            if reopen:
                setup.heal()
                setup.reopen()
            setup.check()
        finally:
            setup.close()
    raise AssertionError("the cycle does not end")


@pytest.mark.parametrize("reopen", [False, True], ids=["same store", "opened again"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("uploading", ["planned", "rolling", "ledgers"])
def test_a_call_of_the_object_store_that_fails_costs_nothing_but_an_orphan(
    tmp_path: Path, uploading: Uploading, when: Literal["before", "after"], reopen: bool
) -> None:
    def plan(setup: Setup, number: int) -> Callable[[], bool]:
        setup.backend.inject(ObjectFault("any", when=when, skip=number - 1))
        return lambda: setup.backend.fired > 0

    assert fail_each_call(tmp_path, uploading, plan, reopen) > 10


@pytest.mark.parametrize(
    ("times", "reopen"),
    [(1, False), (1, True), (4, False)],
    ids=["once", "once, opened again", "for a while"],
)
@pytest.mark.parametrize(
    ("operation", "applied"),
    [("get", False), ("range", False), ("commit", False), ("commit", True)],
    ids=["get", "range", "commit", "answer of a commit"],
)
@pytest.mark.parametrize("uploading", ["planned", "rolling", "ledgers"])
def test_a_call_of_the_catalog_that_fails_costs_nothing_but_an_orphan(
    tmp_path: Path, uploading: Uploading, operation: str, applied: bool, times: int, reopen: bool
) -> None:
    def plan(setup: Setup, number: int) -> Callable[[], bool]:
        before = setup.kv.count(operation)
        setup.kv.fail(operation, at=number, times=times, applied=applied)
        return lambda: setup.kv.count(operation) - before >= number

    # Only what is left to be verified is looked for by a range.
    unverified = operation == "range"
    assert fail_each_call(tmp_path, uploading, plan, reopen, unverified) >= 3


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("uploading", ["planned", "rolling", "ledgers"])
def test_cycle_after_cycle_may_fail_anywhere(
    tmp_path: Path, uploading: Uploading, seed: int
) -> None:
    rng = random.Random(seed)
    setup = Setup(tmp_path, uploading)
    try:
        for _ in range(12):
            setup.append(rng.randint(0, 12))
            for _ in range(rng.randint(0, 3)):
                when: Literal["before", "after"] = rng.choice(["before", "after"])
                fault = ObjectFault("any", when=when, skip=rng.randint(0, 12))
                setup.backend.inject(fault)
                operation = rng.choice(["get", "range", "commit"])
                setup.kv.fail(
                    operation,
                    at=rng.randint(1, 12),
                    times=rng.randint(1, 4),
                    applied=rng.random() < 0.5,
                )
            with_force = rng.random() < 0.5
            try:
                if with_force:
                    setup.topic.upload()
                else:
                    storage_of(setup.topic).upload_due()
                setup.topic.trim_local()
            except ForebayError:
                assert not storage_of(setup.topic).wal.ended
            setup.heal()
            if rng.random() < 0.3:
                setup.reopen()
        setup.check()
    finally:
        setup.close()
