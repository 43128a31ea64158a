"""The catalog on every backend: topics, descriptors, commits, watermarks and cursors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.catalog import Catalog, Change, Intent
from forebay.catalog.records import (
    Owner,
    State,
    TopicRecord,
    encode_record,
)
from forebay.errors import (
    CommitRefused,
    DescriptorError,
    ForebayError,
    InvalidSetting,
    ServiceUnavailable,
    TopicFenced,
    UsageError,
)
from forebay.format.descriptor import encode_descriptor
from forebay.format.names import ObjectName, TopicName, parse_topic
from forebay.limits import CATALOG_PAGE, CATALOG_VALUE_BYTES_MAX, LOST_RANGES_MAX, OFFSET_MAX
from forebay.testing.kv import FaultKv
from support.catalogs import TOPIC, Setup, descriptor_of
from support.kv_stores import Backend, Watcher, requested_backend


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def setup(backend: Backend) -> Setup:
    return Setup(backend)


# ---- topics ----


def test_a_topic_that_was_never_made_has_no_record_and_no_owner(setup: Setup) -> None:
    assert setup.catalog.record(TOPIC) is None
    assert setup.catalog.owner(TOPIC) is None
    assert setup.catalog.get_current_pointer(TOPIC) is None
    assert list(setup.catalog.topics()) == []
    assert setup.chain() == []


def test_every_topic_is_listed_once_though_names_begin_alike(setup: Setup) -> None:
    names = [
        "/a/b",
        "/a/b-part-1",
        "/a/b-part-10",
        "/a-b/c",
        "/a/b_",
        "/a/bb",
        "/größe/注文",
        "/é/é",
    ]
    for name in names:
        topic = parse_topic(name)
        setup.create(topic)
        setup.put(setup.catalog.keys.current(topic), b'{"start":"00000000000000000000"}')
        setup.put(setup.catalog.keys.life(topic, "x"), b"{}")
    assert sorted(map(str, setup.catalog.topics())) == sorted(names)


def test_what_has_no_record_is_no_topic(setup: Setup) -> None:
    setup.create(parse_topic("/a/real"))
    setup.put(setup.catalog.keys.life(parse_topic("/a/half"), "x"), b"{}")
    setup.put(setup.catalog.keys.topics() + "a/bad.name/record", b"{}")
    assert [str(each) for each in setup.catalog.topics()] == ["/a/real"]


def test_foreign_keys_among_the_topics_hide_none_of_them(setup: Setup) -> None:
    root = setup.catalog.keys.topics()
    for foreign in ("a", "a/b", "a//record", "zz/y/x/w"):
        setup.put(root + foreign, b"?")
    names = ["/a-1/t", "/a/b-part-1", "/a/b", "/zz/z"]
    for name in names:
        setup.create(parse_topic(name))
    assert sorted(map(str, setup.catalog.topics())) == sorted(names)


@pytest.mark.parametrize("root", ["", "/", "/one", "/one/", "/one/two", "/größe"])
def test_any_root_prefix_holds_a_catalog_of_its_own(backend: Backend, root: str) -> None:
    catalog = Catalog(backend.kv, backend.prefix.rstrip("/") + root)
    other = Catalog(backend.kv, backend.prefix + "elsewhere")
    Setup(backend).put(catalog.keys.record(TOPIC), encode_record(TopicRecord(epoch=1)))
    assert [*catalog.topics()] == [TOPIC]
    assert [*other.topics()] == []
    assert catalog.record(TOPIC) == TopicRecord(epoch=1)


@pytest.mark.parametrize("root", ["forebay", "a/b", "//a", "/a//b", "/a\0"])
def test_a_root_prefix_that_is_no_path_is_refused(root: str, backend: Backend) -> None:
    with pytest.raises(InvalidSetting, match="root_prefix"):
        Catalog(backend.kv, root)


# ---- update ----


def test_an_update_of_another_epoch_is_fenced_and_changes_nothing(setup: Setup) -> None:
    before = setup.create(epoch=2)
    with pytest.raises(TopicFenced, match=r"epoch is 2.* 1"):
        setup.catalog.update(TOPIC, 1, lambda record: Change(replace(record, reserved=0)))
    assert setup.record() == before
    assert setup.catalog.update(TOPIC, None, lambda r: Change(replace(r, reserved=7))).reserved == 7


def test_an_update_of_an_unknown_topic_is_refused(setup: Setup) -> None:
    with pytest.raises(CommitRefused, match=str(TOPIC)):
        setup.catalog.update(TOPIC, 1, Change)


def test_an_update_that_changes_nothing_writes_nothing(setup: Setup) -> None:
    setup.create()
    before = setup.kv.count("commit")
    assert setup.catalog.update(TOPIC, 1, Change) == setup.record()
    assert setup.kv.count("commit") == before


def test_updates_that_cross_are_all_made(setup: Setup) -> None:
    setup.create(reserved=0)

    def add(record: TopicRecord) -> Change:
        return Change(replace(record, reserved=record.reserved + 1))

    def run() -> None:
        for _ in range(10):
            setup.catalog.update(TOPIC, 1, add)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert setup.record().reserved == 30


def test_a_catalog_that_never_stands_still_is_given_up(setup: Setup) -> None:
    setup.create(reserved=0)

    def interfere(operation: str) -> None:
        if operation == "commit":
            setup.create(reserved=setup.record().reserved + 1)

    catalog = Catalog(FaultKv(setup.backend.kv, interfere), setup.backend.prefix)
    with pytest.raises(ServiceUnavailable, match=str(TOPIC)):
        catalog.update(TOPIC, 1, lambda record: Change(replace(record, tail=5)))
    assert setup.record().tail == 0


# ---- descriptors ----


def test_descriptors_are_kept_under_twenty_digits(setup: Setup) -> None:
    setup.create(tail=7)
    added = setup.add(7, 9)
    key = f"{setup.backend.prefix}storage/topics/default/orders/objects/00000000000000000007"
    entry = setup.kv.get(key)
    assert entry is not None
    assert entry.value == encode_descriptor(added)
    assert setup.catalog.get_current_pointer(TOPIC) == 7


def test_a_range_has_the_descriptor_that_holds_its_start_and_none_from_its_end_on(
    setup: Setup,
) -> None:
    setup.create()
    for start in (0, 10, 20, 30):
        setup.add(start, start + 9)

    def starts(start: int, end: int | None = None, limit: int = CATALOG_PAGE) -> list[int]:
        found = setup.catalog.get_object_descriptors_range(TOPIC, start, end, limit)
        return [each.start_offset for each in found]

    assert starts(0) == [0, 10, 20, 30]
    assert starts(10) == [10, 20, 30]
    assert starts(15) == [10, 20, 30]
    assert starts(15, 20) == [10]
    assert starts(15, 21) == [10, 20]
    assert starts(15, 16) == [10]
    assert starts(39) == [30]
    assert starts(40) == []
    assert starts(OFFSET_MAX) == []
    assert starts(15, None, 1) == [10]
    assert starts(15, None, 2) == [10, 20]
    assert starts(10, None, 2) == [10, 20]
    assert starts(0, OFFSET_MAX) == [0, 10, 20, 30]


def test_an_empty_range_has_no_descriptors(setup: Setup) -> None:
    setup.create()
    setup.add(0, 9)
    assert setup.catalog.get_object_descriptors_range(TOPIC, 5, 5) == []
    assert setup.catalog.get_object_descriptors_range(TOPIC, 5, 3) == []
    assert setup.catalog.get_object_descriptors_range(TOPIC, 0, 0) == []


def test_a_range_in_a_hole_of_the_chain_has_none_and_behind_it_the_next(setup: Setup) -> None:
    setup.create()
    setup.add(0, 9)
    setup.create(tail=50, lost=((10, 50),))
    setup.add(50, 59)
    assert setup.catalog.get_object_descriptors_range(TOPIC, 20, 40) == []
    assert [
        each.start_offset for each in setup.catalog.get_object_descriptors_range(TOPIC, 20)
    ] == [50]


def test_offsets_of_nineteen_digits_are_in_order_too(setup: Setup) -> None:
    high = 9 * 10**18
    setup.create()
    setup.add(0, 9)
    setup.create(tail=high, lost=((10, high),), reserved=OFFSET_MAX)
    setup.add(high, high + 5)
    assert setup.chain() == [(0, 9), (high, high + 5)]


def test_the_pointer_and_neighbours_are_no_descriptors(setup: Setup) -> None:
    setup.create()
    setup.add(0, 9)
    for other in ("cur", "d", "_", "~"):
        setup.put(setup.catalog.keys.objects(TOPIC) + other, b"?")
    setup.create(parse_topic("/default/orders-part-1"))
    assert setup.chain() == [(0, 9)]


def test_all_descriptors_are_read_page_by_page(setup: Setup) -> None:
    setup.create(epoch=1, tail=0)
    count = CATALOG_PAGE + 3
    for start in range(count):
        setup.put(
            setup.catalog.keys.descriptor(TOPIC, start),
            encode_descriptor(descriptor_of(start, start)),
        )
    assert len(setup.catalog.get_object_descriptors_range(TOPIC, 0)) == CATALOG_PAGE
    assert setup.chain() == [(start, start) for start in range(count)]
    rest = [each.start_offset for each in setup.catalog.get_object_descriptors(TOPIC, count - 2)]
    assert rest == [count - 2, count - 1]


# ---- commits ----


def test_commits_make_a_contiguous_chain(setup: Setup) -> None:
    setup.create()
    setup.add(0, 9)
    setup.add(10, 14)
    assert setup.chain() == [(0, 9), (10, 14)]
    assert (setup.record().tail, setup.record().verified) == (15, 0)
    assert setup.catalog.get_current_pointer(TOPIC) == 10
    assert setup.state("data-0-9.dnb1") is State.COMMITTED


@pytest.mark.parametrize("start", [0, 5, 9, 11, 20])
def test_an_object_that_does_not_begin_at_the_tail_is_refused(setup: Setup, start: int) -> None:
    setup.create()
    setup.add(0, 9)
    intent = setup.catalog.intend(TOPIC, 1, ObjectName(start, start + 30))
    with pytest.raises(CommitRefused):
        setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(start, start + 30))
    assert setup.chain() == [(0, 9)]
    assert setup.state(intent.object_id) is State.INTENDED


def test_an_owner_of_an_older_epoch_commits_nothing(setup: Setup) -> None:
    setup.create(epoch=1)
    intent = setup.intend(0, 9)
    setup.create(epoch=2)
    with pytest.raises(TopicFenced):
        setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    with pytest.raises(TopicFenced):
        setup.intend(0, 9, epoch=1)
    assert setup.chain() == []


def test_an_owner_fenced_in_the_middle_of_its_commit_commits_nothing(setup: Setup) -> None:
    setup.create(epoch=1)
    intent = setup.intend(0, 9)

    def take_over(operation: str) -> None:
        if operation == "commit":
            setup.kv.before = None
            setup.create(epoch=2)

    setup.kv.before = take_over
    with pytest.raises(TopicFenced):
        setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    assert setup.chain() == []


def test_a_commit_that_was_made_before_succeeds_whoever_owns_the_topic_now(setup: Setup) -> None:
    setup.create(epoch=1)
    intent = setup.intend(0, 9)
    setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    assert setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).tail == 10
    setup.create(epoch=2, tail=10)
    assert setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).epoch == 2
    assert setup.chain() == [(0, 9)]


def test_an_offset_that_is_in_another_object_is_refused(setup: Setup) -> None:
    setup.create()
    intent = setup.intend(0, 4)
    setup.add(0, 9)
    with pytest.raises(CommitRefused, match="offset 0"):
        setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 4))


def test_an_intent_that_somebody_took_over_commits_nothing(setup: Setup) -> None:
    setup.create()
    first = setup.intend(0, 9)
    second = setup.intend(0, 9)
    assert (first.object_id, first.token != second.token) == (second.object_id, True)
    with pytest.raises(CommitRefused, match="revoked"):
        setup.catalog.put_object_descriptor(TOPIC, first, descriptor_of(0, 9))
    setup.catalog.put_object_descriptor(TOPIC, second, descriptor_of(0, 9))
    assert setup.chain() == [(0, 9)]


def test_an_intent_that_a_sweep_took_back_commits_nothing(setup: Setup) -> None:
    setup.create()
    intent = setup.intend(0, 9)
    assert setup.catalog.condemn(
        TOPIC, intent.object_id, setup.catalog.life(TOPIC, intent.object_id)
    )
    with pytest.raises(CommitRefused):
        setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    assert setup.chain() == []


def test_a_commit_without_any_intent_is_refused(setup: Setup) -> None:
    setup.create()
    intent = setup.intend(0, 9)
    setup.catalog.withdraw(TOPIC, intent.object_id, intent.token)
    with pytest.raises(CommitRefused, match="revoked"):
        setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_whose_answers_are_lost_is_made_once(
    setup: Setup, applied: bool, times: int
) -> None:
    setup.create()
    intent = setup.intend(0, 9)
    setup.kv.fail("commit", times=times, applied=applied)
    assert setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).tail == 10
    assert setup.chain() == [(0, 9)]


def test_a_commit_is_given_up_when_no_answer_comes_and_can_be_asked_for_again(
    setup: Setup,
) -> None:
    setup.create()
    intent = setup.intend(0, 9)
    setup.kv.fail("commit", times=3)
    with pytest.raises(ServiceUnavailable):
        setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    assert setup.chain() == []
    assert setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).tail == 10


def test_a_lost_answer_and_a_takeover_still_leave_the_commit_made(setup: Setup) -> None:
    setup.create(epoch=1)
    intent = setup.intend(0, 9)
    setup.lose_answers()
    commits = 0

    def take_over(operation: str) -> None:
        nonlocal commits
        commits += operation == "commit"
        if operation == "get" and commits == 1:
            setup.kv.before = None
            setup.create(epoch=2, tail=10)

    setup.kv.before = take_over
    assert setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).epoch == 2
    assert setup.chain() == [(0, 9)]


def test_of_two_committers_for_one_tail_one_wins_at_every_interleaving(setup: Setup) -> None:
    for call in range(1, 7):
        start = (call - 1) * 10
        setup.create(tail=start)
        mine = setup.intend(start, start + 9)
        theirs = setup.intend(start, start + 4)
        calls = 0

        def other(_: str, at: int = call, start: int = start, theirs: Intent = theirs) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                setup.kv.before = None
                setup.catalog.put_object_descriptor(TOPIC, theirs, descriptor_of(start, start + 4))

        setup.kv.before = other
        try:
            setup.catalog.put_object_descriptor(TOPIC, mine, descriptor_of(start, start + 9))
            setup.kv.before = None
            end = start + 9
        except CommitRefused:
            end = start + 4
        found = setup.catalog.get_object_descriptors_range(TOPIC, start)
        assert [(each.start_offset, each.end_offset) for each in found] == [(start, end)]
        assert setup.record().tail == end + 1


def test_of_committers_in_threads_exactly_one_wins(setup: Setup) -> None:
    setup.create()
    ends = range(5, 9)
    intents = [setup.intend(0, end) for end in ends]
    barrier = threading.Barrier(len(intents))
    won: list[int] = []
    refused: list[ForebayError] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            setup.catalog.put_object_descriptor(
                TOPIC, intents[number], descriptor_of(0, ends[number])
            )
            won.append(ends[number])
        except CommitRefused as error:
            refused.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(intents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(refused) == len(intents) - 1
    assert setup.chain() == [(0, won[0])]


# ---- verified ----


def test_the_verified_watermark_moves_in_order_and_once(setup: Setup) -> None:
    setup.create()
    first, second = setup.add(0, 9), setup.add(10, 19)
    assert setup.catalog.mark_verified(TOPIC, second).verified == 0
    assert setup.catalog.mark_verified(TOPIC, first).verified == 10
    assert setup.catalog.mark_verified(TOPIC, first).verified == 10
    assert setup.catalog.mark_verified(TOPIC, second).verified == 20


def test_the_verified_watermark_crosses_lost_ranges(setup: Setup) -> None:
    setup.create()
    first = setup.add(0, 9)
    setup.create(tail=50, lost=((10, 50),))
    second = setup.add(50, 59)
    assert setup.catalog.mark_verified(TOPIC, first).verified == 50
    assert setup.catalog.mark_verified(TOPIC, second).verified == 60


def test_the_verified_watermark_crosses_what_was_compacted_meanwhile(setup: Setup) -> None:
    setup.create()
    setup.add(0, 19)
    setup.add(20, 29)
    setup.create(tail=30, verified=10)
    assert setup.catalog.mark_verified(TOPIC, descriptor_of(0, 19)).verified == 20


@pytest.mark.parametrize("applied", [True, False])
def test_a_commit_of_what_was_read_back_moves_both_watermarks_at_once(
    setup: Setup, applied: bool
) -> None:
    setup.create()
    setup.kv.fail("commit", at=2, applied=applied)  # an answer that is lost changes nothing
    record = setup.catalog.put_object_descriptor(
        TOPIC, setup.intend(0, 9), descriptor_of(0, 9), verified=True
    )
    assert (record.tail, record.verified) == (10, 10)


def test_a_commit_of_what_was_read_back_waits_for_what_is_before_it(setup: Setup) -> None:
    setup.create(tail=10, verified=5)
    commit = setup.catalog.put_object_descriptor
    record = commit(TOPIC, setup.intend(10, 19), descriptor_of(10, 19), verified=True)
    assert (record.tail, record.verified) == (20, 5)
    assert setup.catalog.mark_verified(TOPIC, descriptor_of(0, 9)).verified == 10
    assert setup.catalog.mark_verified(TOPIC, descriptor_of(10, 19)).verified == 20


def test_a_commit_of_what_was_read_back_crosses_lost_ranges(setup: Setup) -> None:
    setup.create(tail=50, verified=10, lost=((10, 50), (60, 90)))
    commit = setup.catalog.put_object_descriptor
    record = commit(TOPIC, setup.intend(50, 59), descriptor_of(50, 59), verified=True)
    assert (record.tail, record.verified) == (90, 90)


def test_nothing_beyond_the_tail_is_ever_verified(setup: Setup) -> None:
    setup.create(tail=10, verified=10)
    assert setup.catalog.mark_verified(TOPIC, descriptor_of(10, 19)).verified == 10
    setup.create(tail=15, verified=10)
    assert setup.catalog.mark_verified(TOPIC, descriptor_of(10, 19)).verified == 10


# ---- lost ranges ----


def test_lost_ranges_that_meet_are_one() -> None:
    record = TopicRecord().with_lost(5, 10).with_lost(10, 20)
    assert record.lost == ((5, 20),)
    assert record.with_lost(25, 30).lost == ((5, 20), (25, 30))
    assert record.with_lost(20, 20) == record
    assert record.with_lost(7, 9).lost == ((5, 20),), "what is lost stays lost"


def test_a_lost_range_has_its_start_and_not_its_end() -> None:
    record = TopicRecord().with_lost(5, 10)
    found = [record.lost_range(offset) for offset in (4, 5, 9, 10)]
    assert found == [None, (5, 10), (5, 10), None]


def test_a_topic_has_room_for_so_many_lost_ranges_and_no_more() -> None:
    lost = tuple((3 * n + 10**15, 3 * n + 1 + 10**15) for n in range(LOST_RANGES_MAX))
    full = TopicRecord(lost=lost)
    assert len(encode_record(full)) < CATALOG_VALUE_BYTES_MAX
    end = lost[-1][1]
    assert full.with_lost(end, end + 5).lost[-1] == (end - 1, end + 5)
    with pytest.raises(DescriptorError):
        full.with_lost(end + 1, end + 2)


# ---- cursors ----


def test_a_cursor_is_what_was_put_last(setup: Setup) -> None:
    assert setup.catalog.cursor(TOPIC, "s") is None
    for offset in (0, 7, 3, OFFSET_MAX):
        setup.catalog.put_cursor(TOPIC, "s", offset)
        assert setup.catalog.cursor(TOPIC, "s") == offset
    assert setup.catalog.cursor(TOPIC, "other") is None
    entry = setup.kv.get(f"{setup.backend.prefix}topics/default/orders/subscriptions/s/cursor")
    assert entry is not None
    assert entry.value == b"%d" % OFFSET_MAX


@pytest.mark.parametrize("wrong", [-1, OFFSET_MAX + 1, True, 1.0])
def test_what_is_no_offset_is_no_cursor(setup: Setup, wrong: int) -> None:
    with pytest.raises(UsageError, match="offset"):
        setup.catalog.put_cursor(TOPIC, "s", wrong)
    assert setup.catalog.cursor(TOPIC, "s") is None


# ---- watches ----


def test_a_watch_tells_the_changes_of_its_topic_and_of_no_other(setup: Setup) -> None:
    setup.create()
    watcher = Watcher(setup.catalog.watch(TOPIC, setup.kv.revision()))
    setup.create(parse_topic("/default/orders-part-1"))
    setup.create(parse_topic("/default/order"))
    setup.add(0, 9)
    seen = watcher.wait_for(7)
    watcher.close()
    prefix = setup.catalog.keys.topic(TOPIC)
    assert sorted(change.key.removeprefix(prefix) for change in seen) == [
        "ends/00000000000000000009",
        "keys/data-0-9.dnb1",
        "keys/data-0-9.dnb1",
        "objects/00000000000000000000",
        "objects/cur",
        "record",
        "totals",
    ]


# ---- hostile values ----

HOSTILE = [
    b"",
    b"{",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b"9" * 5000,
    b'"x"',
    b"NaN",
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value[:6]))
def test_damage_in_any_record_is_an_error_that_names_the_key(setup: Setup, value: bytes) -> None:
    catalog, keys = setup.catalog, setup.catalog.keys
    life = keys.life(TOPIC, "data-0-9.dnb1")
    reads: list[tuple[str, Callable[[], object]]] = [
        (keys.record(TOPIC), lambda: catalog.record(TOPIC)),
        (keys.owner(TOPIC), lambda: catalog.owner(TOPIC)),
        (keys.current(TOPIC), lambda: catalog.get_current_pointer(TOPIC)),
        (keys.cursor(TOPIC, "s"), lambda: catalog.cursor(TOPIC, "s")),
        (keys.descriptor(TOPIC, 3), lambda: catalog.get_object_descriptors_range(TOPIC, 0)),
        (keys.descriptor(TOPIC, 3), lambda: catalog.get_object_descriptors_range(TOPIC, 5)),
        (life, lambda: catalog.life(TOPIC, "data-0-9.dnb1")),
        (life, lambda: list(catalog.lives(TOPIC))),
        (life, lambda: catalog.condemn(TOPIC, "data-0-9.dnb1", None)),
    ]
    for key, read in reads:
        setup.put(key, value)
        with pytest.raises(DescriptorError) as raised:
            read()
        assert key in str(raised.value)


def test_a_descriptor_under_another_offset_is_an_error(setup: Setup) -> None:
    key = setup.catalog.keys.descriptor(TOPIC, 4)
    setup.put(key, encode_descriptor(descriptor_of(3, 9)))
    with pytest.raises(DescriptorError, match="0004 holds offset 3"):
        setup.catalog.get_object_descriptors_range(TOPIC, 0)


RECORD = TopicRecord(3, "id", 1, 5, 4, 9, ((2, 3),))
OWNER = Owner(3, "host:1", "lock", 5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"epoch":3', b'"epoch":-1'),
        (b'"epoch":3', b'"epoch":true'),
        (b'"epoch":3', b'"epoch":3.0'),
        (b'"epoch":3', b'"epoch":9223372036854775808'),
        (b'"epoch":3', b'"epoch":"3"'),
        (b'"epoch":3,', b""),
        (b'"log_id":"id"', b'"log_id":7'),
        (b"[[2,3]]", b"[[3,3]]"),
        (b"[[2,3]]", b"[[3,2]]"),
        (b"[[2,3]]", b"[[2]]"),
        (b"[[2,3]]", b"[2,3]"),
        (b"[[2,3]]", b"7"),
        (b"[[2,3]]", b"[[-1,3]]"),
        (b"[[2,3]]", b"[[true,3]]"),
        (b"[[2,3]]", b"[[2,9223372036854775808]]"),
    ],
)
def test_a_record_with_a_wrong_field_is_refused(setup: Setup, before: bytes, after: bytes) -> None:
    good = encode_record(RECORD)
    assert before in good
    key = setup.catalog.keys.record(TOPIC)
    setup.put(key, good)
    assert setup.catalog.record(TOPIC) == RECORD
    setup.put(key, good.replace(before, after))
    with pytest.raises(DescriptorError, match="orders/record"):
        setup.catalog.record(TOPIC)


def test_a_record_over_the_limit_is_refused(setup: Setup) -> None:
    key = setup.catalog.keys.owner(TOPIC)
    setup.put(key, encode_record(OWNER))
    assert setup.catalog.owner(TOPIC) == OWNER
    padding = b" " * (CATALOG_VALUE_BYTES_MAX - 10)
    setup.put(key, b'{"name":3}' + padding)
    with pytest.raises(DescriptorError, match="orders/owner"):
        setup.catalog.owner(TOPIC)


def test_a_topic_name_is_what_its_key_says(setup: Setup) -> None:
    for name in ("/a/b", "/größe/x-part-3"):
        topic = parse_topic(name)
        assert setup.catalog.keys.topic_of_record(setup.catalog.keys.record(topic)) == topic
    assert setup.catalog.keys.topic_of_record(setup.catalog.keys.owner(TopicName("a", "b"))) is None
