"""Several processes change one topic as they like: its chain is whole at every moment (I3, I4)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.records import State
from forebay.catalog.swap import swap, swap_back
from forebay.errors import CommitRefused
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import ObjectName
from support.catalog_swaps import require_whole
from support.catalogs import TOPIC, Setup, descriptor_of
from support.kv_stores import Backend, requested_backend

ACTORS: Final = 4


@pytest.fixture(params=["sqlite", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


class Actor(threading.Thread):
    """One of the processes. Objects are names in a set: one deleted while it counts is noticed."""

    def __init__(self, catalog: Catalog, objects: set[str], seed: int, steps: int) -> None:
        super().__init__()
        self._catalog = catalog
        self._objects = objects
        self._random = random.Random(seed)
        self._steps = steps
        self.done: dict[str, int] = {}
        self.failure: BaseException | None = None

    def run(self) -> None:
        actions: list[Callable[[], object]] = [
            *(3 * [self.append]),
            *(3 * [self.compact]),
            self.undo,
            self.retire,
            self.sweep,
        ]
        try:
            for _ in range(self._steps):
                action = self._random.choice(actions)
                try:
                    worked = action()
                except CommitRefused:
                    worked = None
                if worked:
                    name = action.__name__
                    self.done[name] = self.done.get(name, 0) + 1
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error

    def append(self) -> object:
        record = self._catalog.record(TOPIC)
        assert record is not None
        name = ObjectName(record.tail, record.tail + self._random.randrange(5))
        intent = self._catalog.intend(TOPIC, 1, name)
        descriptor = descriptor_of(name.start, name.end, intent.object_id)
        self._objects.add(intent.object_id)
        record = self._catalog.put_object_descriptor(TOPIC, intent, descriptor)
        for each in self._catalog.get_object_descriptors(TOPIC, record.verified):
            record = self._catalog.mark_verified(TOPIC, each)
        return record

    def compact(self) -> object:
        start = self._random.choice(self._starts() or [0])
        found = self._catalog.get_object_descriptors_range(
            TOPIC, start, limit=self._random.randint(2, 5)
        )
        if len(found) < 2:
            return None
        name = ObjectName(found[0].start_offset, found[-1].end_offset)
        intent = self._catalog.intend(TOPIC, 1, name)
        self._objects.add(intent.object_id)
        descriptor = descriptor_of(name.start, name.end, intent.object_id)
        return swap(self._catalog, TOPIC, intent, descriptor, found)

    def undo(self) -> object:
        names = [each.object_id for each in self._catalog.get_object_descriptors(TOPIC)]
        return swap_back(self._catalog, TOPIC, self._random.choice(names)) if names else None

    def retire(self) -> object:
        oldest = self._catalog.get_object_descriptors_range(TOPIC, 0, limit=1)
        if not oldest:
            return None
        token = self._catalog.retire(TOPIC, None, oldest[0])
        return token and self._remove(oldest[0].object_id, token)

    def sweep(self) -> object:
        """Without any grace time."""
        unwanted = {State.INTENDED, State.REPLACED}
        rows = [row for row in self._catalog.lives(TOPIC) if row[1].state in unwanted]
        if not rows:
            return None
        object_id, life = self._random.choice(rows)
        token = self._catalog.condemn(TOPIC, object_id, life)
        return token and self._remove(object_id, token)

    def _remove(self, object_id: str, token: str) -> bool:
        self._objects.discard(object_id)
        self._catalog.bury(TOPIC, object_id, token, certain=True)
        return True

    def _starts(self) -> list[int]:
        return [each.start_offset for each in self._catalog.get_object_descriptors(TOPIC)]


def look(catalog: Catalog, stop: threading.Event) -> int:
    """Reads the chain again and again until it is stopped; returns how often it did."""
    looks = 0
    while not stop.is_set():
        start = random.randrange(200)
        found = catalog.get_object_descriptors_range(TOPIC, start)
        assert all(one.next_offset == then.start_offset for one, then in pairwise(found))
        record = catalog.record(TOPIC)
        assert record is not None
        if found and record.start_offset <= start:
            assert found[0].start_offset <= start <= found[0].end_offset
        looks += 1
    return looks


def played(backend: Backend, seed: int, steps: int) -> tuple[Setup, set[str], dict[str, int]]:
    setup = Setup(backend)
    setup.create()
    objects: set[str] = set()
    actors = [Actor(setup.catalog, objects, seed * 100 + at, steps) for at in range(ACTORS)]
    stop = threading.Event()
    looked: list[int] = []
    reader = threading.Thread(target=lambda: looked.append(look(setup.catalog, stop)))
    for thread in (reader, *actors):
        thread.start()
    for actor in actors:
        actor.join()
    stop.set()
    reader.join()
    for actor in actors:
        if actor.failure is not None:
            raise actor.failure
    assert looked, "the reader found a gap"
    totals: dict[str, int] = {}
    for actor in actors:
        for name, count in actor.done.items():
            totals[name] = totals.get(name, 0) + count
    return setup, objects, totals


def require_objects(setup: Setup, objects: set[str]) -> None:
    named: list[ObjectDescriptor] = list(setup.catalog.get_object_descriptors(TOPIC))
    assert {each.object_id for each in named} <= objects


@pytest.mark.parametrize("seed", range(3))
def test_the_chain_is_whole_whoever_changes_it(backend: Backend, seed: int) -> None:
    setup, objects, totals = played(backend, seed, 60)
    require_whole(setup)
    require_objects(setup, objects)
    assert totals.keys() >= {"append", "compact"}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 130))
def test_the_chain_is_whole_after_long_runs(backend: Backend, seed: int) -> None:
    setup, objects, totals = played(backend, seed, 500)
    require_whole(setup)
    require_objects(setup, objects)
    assert totals.keys() >= {"append", "compact", "undo", "retire", "sweep"}
