"""Time rows: a lookup by time reads two entries, and never begins after a message that it wants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.catalog.adopt import adopt, remove_rows
from forebay.catalog.catalog import Catalog
from forebay.catalog.chain import decode_totals, encode_totals
from forebay.catalog.kv import Remove
from forebay.catalog.records import TopicRecord
from forebay.catalog.sqlite import SqliteKv
from forebay.catalog.swap import swap, swap_back
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import after_prefix
from support.catalogs import TOPIC, Setup, descriptor_of
from support.counting_kv import CountingKv, write_chain
from support.kv_stores import Backend, requested_backend

COUNT = 5
"""Messages in each small object."""


@pytest.fixture(params=["sqlite", "etcd"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    backend = requested_backend(request, tmp_path)
    setup = Setup(backend)
    setup.create()
    yield setup
    backend.kv.close()


class TimedTopic:
    """A topic whose messages have publish times, and every kind of change of its chain."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.catalog = setup.catalog
        self.times: list[int] = []

    def commit(self, times: list[int], *, named: bool = True) -> ObjectDescriptor:
        start = len(self.times)
        self.times += times
        made = self._made(start, start + len(times) - 1, named=named)
        intent = self.setup.intend(made.start_offset, made.end_offset)
        self.catalog.put_object_descriptor(TOPIC, intent, made, verified=True)
        self.catalog.mark_verified(TOPIC, made)
        return made

    def _made(self, start: int, end: int, *, named: bool = True) -> ObjectDescriptor:
        highest = max(self.times[start : end + 1]) if named else None
        return descriptor_of(start, end, highest_publish_time=highest)

    def chain(self) -> list[ObjectDescriptor]:
        return list(self.catalog.get_object_descriptors(TOPIC))

    def compact(self, at: int, count: int) -> str | None:
        replaced = self.chain()[at : at + count]
        if len(replaced) < 2:
            return None
        start, end = replaced[0].start_offset, replaced[-1].end_offset
        intent = self.setup.intend(start, end)
        named = all(each.highest_publish_time is not None for each in replaced)
        made = self._made(start, end, named=named)
        made = descriptor_of(
            start, end, intent.object_id, highest_publish_time=made.highest_publish_time
        )
        swap(self.catalog, TOPIC, intent, made, replaced, clock=self.setup.clock)
        return intent.object_id

    def retire(self) -> None:
        oldest, *rest = self.chain()
        if rest:
            assert self.catalog.retire(TOPIC, 1, oldest)

    def restore(self, at: int) -> None:
        """Makes the chain anew from an object on, as a restore does."""
        again = self.chain()[at:]
        remove_rows(self.catalog, TOPIC, 1, again[0].start_offset, len(self.times) + 1)
        adopt(self.catalog, TOPIC, 1, again, start=again[0].start_offset)

    def index(self) -> None:
        while not self.catalog.chain(TOPIC).index(3):
            pass

    def forget(self) -> None:
        """Writes the totals as an earlier release does, which knows no time rows."""
        entry = self.catalog.kv.get(self.catalog.keys.totals(TOPIC))
        if entry is not None:
            plain = decode_totals(entry.value, "totals")
            self.setup.put(entry.key, encode_totals(type(plain)(*_plain(plain))))

    def require_right(self) -> None:
        """No lookup begins after the first message of its time or later."""
        first = self.setup.record().start_offset
        for time in sorted({0, *self.times, *(each + 1 for each in self.times)}):
            wanted = next(
                (at for at in range(first, len(self.times)) if self.times[at] >= time), None
            )
            found = self.catalog.chain(TOPIC).first_at(time)
            if wanted is not None:
                assert found is not None, (time, wanted)
                assert found <= wanted, time

    def require_exact(self) -> None:
        """Each lookup begins at the object that holds the first such message, or before it."""
        chain = self.chain()
        for time in {0, *self.times}:
            wanted = next(
                (each for each in chain if (each.highest_publish_time or 0) >= time), None
            )
            found = self.catalog.chain(TOPIC).first_at(time)
            if wanted is None:
                assert found is None
            else:
                assert found is not None
                assert wanted.start_offset <= found <= wanted.end_offset


def _plain(totals: object) -> tuple[int, int, int | None]:
    return tuple(getattr(totals, name) for name in ("objects", "bytes", "next"))


def test_the_first_row_at_or_after_a_time_leads_to_its_object(setup: Setup) -> None:
    topic = TimedTopic(setup)
    for times in ([10, 30, 20], [25, 5], [40], [50, 60]):
        topic.commit(times)
    lookups = [topic.catalog.chain(TOPIC).first_at(time) for time in (0, 30, 31, 40, 41, 60, 61)]
    assert lookups == [0, 0, 5, 5, 6, 6, None]


def test_a_lookup_takes_two_requests_however_many_objects_there_are() -> None:
    found = []
    for objects in (300, 3000):
        kv = CountingKv(SqliteKv(None))
        made = [
            descriptor_of(at * 10, at * 10 + 9, highest_publish_time=1000 * at)
            for at in range(objects)
        ]
        record = TopicRecord(epoch=1, tail=10 * objects, reserved=10 * objects)
        write_chain(kv, "/forebay", TOPIC, made, record)
        before = kv.reads
        assert Catalog(kv).chain(TOPIC).first_at(1000 * objects // 2 - 1) == 10 * objects // 2
        found.append(kv.since(before))
        kv.close()
    assert found[0].requests == found[1].requests == 2
    assert found[0].entries == found[1].entries == 2
    assert found[1].walked <= 1100


def test_a_compaction_and_its_undo_leave_lookups_exact(setup: Setup) -> None:
    topic = TimedTopic(setup)
    for at in range(8):
        topic.commit([100 * at + each for each in range(COUNT)])
    name = topic.compact(2, 3)
    topic.require_exact()
    swap_back(topic.catalog, TOPIC, name or "", clock=setup.clock)
    topic.require_exact()


def test_a_time_far_ahead_spoils_lookups_only_while_its_object_is_there(setup: Setup) -> None:
    topic = TimedTopic(setup)
    topic.commit([2_000_000])
    for at in range(5):
        topic.commit([100 * at, 100 * at + 50])
    assert topic.catalog.chain(TOPIC).first_at(150) == 0
    topic.retire()
    topic.require_right()
    topic.index()
    topic.require_exact()


def test_rows_of_retired_objects_are_removed(setup: Setup) -> None:
    topic = TimedTopic(setup)
    for at in range(6):
        topic.commit([100 * at])
    for _ in range(4):
        topic.retire()
        topic.require_exact()
    prefix = topic.catalog.keys.times(TOPIC)
    rows = setup.backend.kv.range(prefix, after_prefix(prefix), limit=100)
    assert len(rows) == 2


def test_lookups_go_from_object_to_object_where_a_descriptor_has_no_time(setup: Setup) -> None:
    topic = TimedTopic(setup)
    topic.commit([10])
    unknown = topic.commit([99], named=False)
    topic.commit([20])
    chain = topic.catalog.chain(TOPIC)
    assert chain.first_at(10) == 0
    assert chain.first_at(11) == chain.first_at(50) == unknown.start_offset
    assert chain.index(5)  # nothing more can be done
    found = descriptor_of(1, 1, unknown.object_id, highest_publish_time=99)
    assert topic.catalog.replace_descriptor(TOPIC, unknown, found)
    topic.index()
    topic.require_exact()


def test_a_catalog_of_an_earlier_release_gets_its_rows_in_the_background(setup: Setup) -> None:
    topic = TimedTopic(setup)
    for at in range(80):
        topic.commit([10 * at])
    topic.forget()
    assert topic.catalog.chain(TOPIC).first_at(300) == 0
    topic.index()
    topic.require_exact()
    prefix = topic.catalog.keys.times(TOPIC)
    rows = setup.backend.kv.range(prefix, after_prefix(prefix), limit=1000)
    assert len(rows) == 80, "rows of the former series are removed"


def test_a_lookup_whose_rows_are_replaced_meanwhile_skips_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = TimedTopic(setup)
    for at in range(5):
        topic.commit([10 * at])
    chain = topic.catalog.chain(TOPIC)
    before = chain.totals()
    topic.forget()
    topic.index()  # and the rows that `before` names are gone
    answers = iter([before])
    now = type(chain).totals
    monkeypatch.setattr(type(chain), "totals", lambda self: next(answers, None) or now(self))
    assert chain.first_at(20) == 2


def test_a_catalog_without_totals_gets_end_rows_and_then_time_rows(setup: Setup) -> None:
    topic = TimedTopic(setup)
    for at in range(5):
        topic.commit([10 * at])
    assert setup.backend.kv.commit([], [Remove(topic.catalog.keys.totals(TOPIC))]) is not None
    topic.index()
    topic.require_exact()


def test_damaged_times_in_the_totals_are_made_anew(setup: Setup) -> None:
    topic = TimedTopic(setup)
    topic.commit([10])
    for damage in (b'"times":7', b'"times":{"series":"a/b"}', b'"times":{"series":"a","next":-1}'):
        setup.put(
            topic.catalog.keys.totals(TOPIC), b'{"bytes":50,"next":null,"objects":1,%b}' % damage
        )
        assert topic.catalog.chain(TOPIC).first_at(5) == 0
        topic.index()
        topic.require_exact()


@pytest.mark.parametrize("seed", range(3))
def test_no_lookup_misses_a_message_whoever_changes_the_chain(seed: int) -> None:
    rng = random.Random(seed)
    setup = Setup(Backend(SqliteKv(None), 1.0))
    setup.create()
    topic = TimedTopic(setup)
    undoable: list[str] = []
    for _ in range(40):
        base = 10 * len(topic.times)
        match rng.randrange(9):
            case 0 | 1 | 2:
                spread = rng.choice([5, 200, 5000])
                times = [max(base + rng.randrange(-spread, spread), 0) for _ in range(COUNT)]
                topic.commit(times, named=rng.random() > 0.05)
            case 3 if topic.times:
                name = topic.compact(rng.randrange(4), rng.randrange(2, 6))
                undoable += [name] if name else []
            case 4 if undoable:
                name = undoable.pop()
                if any(each.object_id == name for each in topic.chain()):
                    swap_back(setup.catalog, TOPIC, name, clock=setup.clock)
            case 5 if len(topic.chain()) > 3:
                topic.retire()
            case 6 if rng.random() < 0.3 and len(topic.chain()) > 1:
                topic.restore(rng.randrange(len(topic.chain())))
            case 7:
                setup.catalog.chain(TOPIC).index(1)
            case 8 if rng.random() < 0.3:
                topic.forget()
        topic.require_right()
    topic.index()
    topic.require_right()
    setup.backend.kv.close()
