"""The catalog on every ground: topics, descriptors, commits, watermarks and cursors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from catalog_worlds import TOPIC, World, descriptor_of
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
from kv_grounds import GROUNDS, Ground, Watcher, etcd_ground


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    if request.param == "etcd":
        ground = etcd_ground(request.getfixturevalue("etcd"))
    else:
        ground = GROUNDS[request.param](tmp_path)
    yield ground
    ground.kv.close()


@pytest.fixture
def world(ground: Ground) -> World:
    return World(ground)


# ---- topics ----


def test_a_topic_that_was_never_made_has_no_record_and_no_owner(world: World) -> None:
    assert world.catalog.record(TOPIC) is None
    assert world.catalog.owner(TOPIC) is None
    assert world.catalog.get_current_pointer(TOPIC) is None
    assert list(world.catalog.topics()) == []
    assert world.chain() == []


def test_every_topic_is_listed_once_though_names_begin_alike(world: World) -> None:
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
        world.create(topic)
        world.put(world.catalog.keys.current(topic), b'{"start":"00000000000000000000"}')
        world.put(world.catalog.keys.life(topic, "x"), b"{}")
    assert sorted(map(str, world.catalog.topics())) == sorted(names)


def test_what_has_no_record_is_no_topic(world: World) -> None:
    world.create(parse_topic("/a/real"))
    world.put(world.catalog.keys.life(parse_topic("/a/half"), "x"), b"{}")
    world.put(world.catalog.keys.topics() + "a/bad.name/record", b"{}")
    assert [str(each) for each in world.catalog.topics()] == ["/a/real"]


def test_foreign_keys_among_the_topics_hide_none_of_them(world: World) -> None:
    root = world.catalog.keys.topics()
    for foreign in ("a", "a/b", "a//record", "zz/y/x/w"):
        world.put(root + foreign, b"?")
    names = ["/a-1/t", "/a/b-part-1", "/a/b", "/zz/z"]
    for name in names:
        world.create(parse_topic(name))
    assert sorted(map(str, world.catalog.topics())) == sorted(names)


@pytest.mark.parametrize("root", ["", "/", "/one", "/one/", "/one/two", "/größe"])
def test_any_root_prefix_holds_a_catalog_of_its_own(ground: Ground, root: str) -> None:
    catalog = Catalog(ground.kv, ground.prefix.rstrip("/") + root)
    other = Catalog(ground.kv, ground.prefix + "elsewhere")
    World(ground).put(catalog.keys.record(TOPIC), encode_record(TopicRecord(epoch=1)))
    assert [*catalog.topics()] == [TOPIC]
    assert [*other.topics()] == []
    assert catalog.record(TOPIC) == TopicRecord(epoch=1)


@pytest.mark.parametrize("root", ["forebay", "a/b", "//a", "/a//b", "/a\0"])
def test_a_root_prefix_that_is_no_path_is_refused(root: str, ground: Ground) -> None:
    with pytest.raises(InvalidSetting, match="root_prefix"):
        Catalog(ground.kv, root)


# ---- update ----


def test_an_update_of_another_epoch_is_fenced_and_changes_nothing(world: World) -> None:
    before = world.create(epoch=2)
    with pytest.raises(TopicFenced, match=r"its epoch is 2, ours was 1"):
        world.catalog.update(TOPIC, 1, lambda record: Change(replace(record, reserved=0)))
    assert world.record() == before
    assert world.catalog.update(TOPIC, None, lambda r: Change(replace(r, reserved=7))).reserved == 7


def test_an_update_of_an_unknown_topic_is_refused(world: World) -> None:
    with pytest.raises(CommitRefused, match="no such topic"):
        world.catalog.update(TOPIC, 1, Change)


def test_an_update_that_changes_nothing_writes_nothing(world: World) -> None:
    world.create()
    before = world.kv.count("commit")
    assert world.catalog.update(TOPIC, 1, Change) == world.record()
    assert world.kv.count("commit") == before


def test_updates_that_cross_are_all_made(world: World) -> None:
    world.create(reserved=0)

    def add(record: TopicRecord) -> Change:
        return Change(replace(record, reserved=record.reserved + 1))

    def run() -> None:
        for _ in range(10):
            world.catalog.update(TOPIC, 1, add)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.record().reserved == 30


def test_a_catalog_that_never_stands_still_is_given_up(world: World) -> None:
    world.create(reserved=0)

    def interfere(operation: str) -> None:
        if operation == "commit":
            world.create(reserved=world.record().reserved + 1)

    catalog = Catalog(FaultKv(world.ground.kv, interfere), world.ground.prefix)
    with pytest.raises(ServiceUnavailable, match="try again"):
        catalog.update(TOPIC, 1, lambda record: Change(replace(record, tail=5)))
    assert world.record().tail == 0


# ---- descriptors ----


def test_descriptors_are_kept_under_twenty_digits(world: World) -> None:
    world.create(tail=7)
    added = world.add(7, 9)
    key = f"{world.ground.prefix}storage/topics/default/orders/objects/00000000000000000007"
    entry = world.kv.get(key)
    assert entry is not None
    assert entry.value == encode_descriptor(added)
    assert world.catalog.get_current_pointer(TOPIC) == 7


def test_a_range_has_the_descriptor_that_holds_its_start_and_none_from_its_end_on(
    world: World,
) -> None:
    world.create()
    for start in (0, 10, 20, 30):
        world.add(start, start + 9)

    def starts(start: int, end: int | None = None, limit: int = CATALOG_PAGE) -> list[int]:
        found = world.catalog.get_object_descriptors_range(TOPIC, start, end, limit)
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


def test_an_empty_range_has_no_descriptors(world: World) -> None:
    world.create()
    world.add(0, 9)
    assert world.catalog.get_object_descriptors_range(TOPIC, 5, 5) == []
    assert world.catalog.get_object_descriptors_range(TOPIC, 5, 3) == []
    assert world.catalog.get_object_descriptors_range(TOPIC, 0, 0) == []


def test_a_range_in_a_hole_of_the_chain_has_none_and_behind_it_the_next(world: World) -> None:
    world.create()
    world.add(0, 9)
    world.create(tail=50, lost=((10, 50),))
    world.add(50, 59)
    assert world.catalog.get_object_descriptors_range(TOPIC, 20, 40) == []
    assert [
        each.start_offset for each in world.catalog.get_object_descriptors_range(TOPIC, 20)
    ] == [50]


def test_offsets_of_nineteen_digits_are_in_order_too(world: World) -> None:
    high = 9 * 10**18
    world.create()
    world.add(0, 9)
    world.create(tail=high, lost=((10, high),), reserved=OFFSET_MAX)
    world.add(high, high + 5)
    assert world.chain() == [(0, 9), (high, high + 5)]


def test_the_pointer_and_neighbours_are_no_descriptors(world: World) -> None:
    world.create()
    world.add(0, 9)
    for other in ("cur", "d", "_", "~"):
        world.put(world.catalog.keys.objects(TOPIC) + other, b"?")
    world.create(parse_topic("/default/orders-part-1"))
    assert world.chain() == [(0, 9)]


def test_all_descriptors_are_read_page_by_page(world: World) -> None:
    world.create(epoch=1, tail=0)
    count = CATALOG_PAGE + 3
    for start in range(count):
        world.put(
            world.catalog.keys.descriptor(TOPIC, start),
            encode_descriptor(descriptor_of(start, start)),
        )
    assert len(world.catalog.get_object_descriptors_range(TOPIC, 0)) == CATALOG_PAGE
    assert world.chain() == [(start, start) for start in range(count)]
    rest = [each.start_offset for each in world.catalog.get_object_descriptors(TOPIC, count - 2)]
    assert rest == [count - 2, count - 1]


# ---- commits ----


def test_commits_make_a_contiguous_chain(world: World) -> None:
    world.create()
    world.add(0, 9)
    world.add(10, 14)
    assert world.chain() == [(0, 9), (10, 14)]
    assert (world.record().tail, world.record().verified) == (15, 0)
    assert world.catalog.get_current_pointer(TOPIC) == 10
    assert world.state("data-0-9.dnb1") is State.COMMITTED


@pytest.mark.parametrize("start", [0, 5, 9, 11, 20])
def test_an_object_that_does_not_begin_at_the_tail_is_refused(world: World, start: int) -> None:
    world.create()
    world.add(0, 9)
    intent = world.catalog.intend(TOPIC, 1, ObjectName(start, start + 30))
    with pytest.raises(CommitRefused):
        world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(start, start + 30))
    assert world.chain() == [(0, 9)]
    assert world.state(intent.object_id) is State.INTENDED


def test_an_owner_of_an_older_epoch_commits_nothing(world: World) -> None:
    world.create(epoch=1)
    intent = world.intend(0, 9)
    world.create(epoch=2)
    with pytest.raises(TopicFenced):
        world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    with pytest.raises(TopicFenced):
        world.intend(0, 9, epoch=1)
    assert world.chain() == []


def test_an_owner_fenced_in_the_middle_of_its_commit_commits_nothing(world: World) -> None:
    world.create(epoch=1)
    intent = world.intend(0, 9)

    def take_over(operation: str) -> None:
        if operation == "commit":
            world.kv.before = None
            world.create(epoch=2)

    world.kv.before = take_over
    with pytest.raises(TopicFenced):
        world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    assert world.chain() == []


def test_a_commit_that_was_made_before_succeeds_whoever_owns_the_topic_now(world: World) -> None:
    world.create(epoch=1)
    intent = world.intend(0, 9)
    world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    assert world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).tail == 10
    world.create(epoch=2, tail=10)
    assert world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).epoch == 2
    assert world.chain() == [(0, 9)]


def test_an_offset_that_is_in_another_object_is_refused(world: World) -> None:
    world.create()
    intent = world.intend(0, 4)
    world.add(0, 9)
    with pytest.raises(CommitRefused, match="offset 0 is already in another object"):
        world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 4))


def test_an_intent_that_somebody_took_over_commits_nothing(world: World) -> None:
    world.create()
    first = world.intend(0, 9)
    second = world.intend(0, 9)
    assert (first.object_id, first.token != second.token) == (second.object_id, True)
    with pytest.raises(CommitRefused, match="revoked"):
        world.catalog.put_object_descriptor(TOPIC, first, descriptor_of(0, 9))
    world.catalog.put_object_descriptor(TOPIC, second, descriptor_of(0, 9))
    assert world.chain() == [(0, 9)]


def test_an_intent_that_a_sweep_took_back_commits_nothing(world: World) -> None:
    world.create()
    intent = world.intend(0, 9)
    assert world.catalog.condemn(
        TOPIC, intent.object_id, world.catalog.life(TOPIC, intent.object_id)
    )
    with pytest.raises(CommitRefused):
        world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    assert world.chain() == []


def test_a_commit_without_any_intent_is_refused(world: World) -> None:
    world.create()
    intent = world.intend(0, 9)
    world.catalog.withdraw(TOPIC, intent.object_id, intent.token)
    with pytest.raises(CommitRefused, match="revoked"):
        world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_whose_answers_are_lost_is_made_once(
    world: World, applied: bool, times: int
) -> None:
    world.create()
    intent = world.intend(0, 9)
    world.kv.fail("commit", times=times, applied=applied)
    assert world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).tail == 10
    assert world.chain() == [(0, 9)]


def test_a_commit_is_given_up_when_no_answer_comes_and_can_be_asked_for_again(
    world: World,
) -> None:
    world.create()
    intent = world.intend(0, 9)
    world.kv.fail("commit", times=3)
    with pytest.raises(ServiceUnavailable):
        world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    assert world.chain() == []
    assert world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).tail == 10


def test_a_lost_answer_and_a_takeover_still_leave_the_commit_made(world: World) -> None:
    world.create(epoch=1)
    intent = world.intend(0, 9)
    world.lose_answers()
    commits = 0

    def take_over(operation: str) -> None:
        nonlocal commits
        commits += operation == "commit"
        if operation == "get" and commits == 1:
            world.kv.before = None
            world.create(epoch=2, tail=10)

    world.kv.before = take_over
    assert world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).epoch == 2
    assert world.chain() == [(0, 9)]


def test_of_two_committers_for_one_tail_one_wins_at_every_interleaving(world: World) -> None:
    for call in range(1, 7):
        start = (call - 1) * 10
        world.create(tail=start)
        mine = world.intend(start, start + 9)
        theirs = world.intend(start, start + 4)
        calls = 0

        def other(_: str, at: int = call, start: int = start, theirs: Intent = theirs) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                world.kv.before = None
                world.catalog.put_object_descriptor(TOPIC, theirs, descriptor_of(start, start + 4))

        world.kv.before = other
        try:
            world.catalog.put_object_descriptor(TOPIC, mine, descriptor_of(start, start + 9))
            world.kv.before = None
            end = start + 9
        except CommitRefused:
            end = start + 4
        found = world.catalog.get_object_descriptors_range(TOPIC, start)
        assert [(each.start_offset, each.end_offset) for each in found] == [(start, end)]
        assert world.record().tail == end + 1


def test_of_committers_in_threads_exactly_one_wins(world: World) -> None:
    world.create()
    ends = range(5, 9)
    intents = [world.intend(0, end) for end in ends]
    barrier = threading.Barrier(len(intents))
    won: list[int] = []
    refused: list[ForebayError] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            world.catalog.put_object_descriptor(
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
    assert world.chain() == [(0, won[0])]


# ---- verified ----


def test_the_verified_watermark_moves_in_order_and_once(world: World) -> None:
    world.create()
    first, second = world.add(0, 9), world.add(10, 19)
    assert world.catalog.mark_verified(TOPIC, second).verified == 0
    assert world.catalog.mark_verified(TOPIC, first).verified == 10
    assert world.catalog.mark_verified(TOPIC, first).verified == 10
    assert world.catalog.mark_verified(TOPIC, second).verified == 20


def test_the_verified_watermark_crosses_lost_ranges(world: World) -> None:
    world.create()
    first = world.add(0, 9)
    world.create(tail=50, lost=((10, 50),))
    second = world.add(50, 59)
    assert world.catalog.mark_verified(TOPIC, first).verified == 50
    assert world.catalog.mark_verified(TOPIC, second).verified == 60


def test_the_verified_watermark_crosses_what_was_compacted_meanwhile(world: World) -> None:
    world.create()
    world.add(0, 19)
    world.add(20, 29)
    world.create(tail=30, verified=10)
    assert world.catalog.mark_verified(TOPIC, descriptor_of(0, 19)).verified == 20


@pytest.mark.parametrize("applied", [True, False])
def test_a_commit_of_what_was_read_back_moves_both_watermarks_at_once(
    world: World, applied: bool
) -> None:
    world.create()
    world.kv.fail("commit", at=2, applied=applied)  # an answer that is lost changes nothing
    record = world.catalog.put_object_descriptor(
        TOPIC, world.intend(0, 9), descriptor_of(0, 9), verified=True
    )
    assert (record.tail, record.verified) == (10, 10)


def test_a_commit_of_what_was_read_back_waits_for_what_is_before_it(world: World) -> None:
    world.create(tail=10, verified=5)
    commit = world.catalog.put_object_descriptor
    record = commit(TOPIC, world.intend(10, 19), descriptor_of(10, 19), verified=True)
    assert (record.tail, record.verified) == (20, 5)
    assert world.catalog.mark_verified(TOPIC, descriptor_of(0, 9)).verified == 10
    assert world.catalog.mark_verified(TOPIC, descriptor_of(10, 19)).verified == 20


def test_a_commit_of_what_was_read_back_crosses_lost_ranges(world: World) -> None:
    world.create(tail=50, verified=10, lost=((10, 50), (60, 90)))
    commit = world.catalog.put_object_descriptor
    record = commit(TOPIC, world.intend(50, 59), descriptor_of(50, 59), verified=True)
    assert (record.tail, record.verified) == (90, 90)


def test_nothing_beyond_the_tail_is_ever_verified(world: World) -> None:
    world.create(tail=10, verified=10)
    assert world.catalog.mark_verified(TOPIC, descriptor_of(10, 19)).verified == 10
    world.create(tail=15, verified=10)
    assert world.catalog.mark_verified(TOPIC, descriptor_of(10, 19)).verified == 10


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
    with pytest.raises(DescriptorError, match="no more room"):
        full.with_lost(end + 1, end + 2)


# ---- cursors ----


def test_a_cursor_is_what_was_put_last(world: World) -> None:
    assert world.catalog.cursor(TOPIC, "s") is None
    for offset in (0, 7, 3, OFFSET_MAX):
        world.catalog.put_cursor(TOPIC, "s", offset)
        assert world.catalog.cursor(TOPIC, "s") == offset
    assert world.catalog.cursor(TOPIC, "other") is None
    entry = world.kv.get(f"{world.ground.prefix}topics/default/orders/subscriptions/s/cursor")
    assert entry is not None
    assert entry.value == b"%d" % OFFSET_MAX


@pytest.mark.parametrize("wrong", [-1, OFFSET_MAX + 1, True, 1.0])
def test_what_is_no_offset_is_no_cursor(world: World, wrong: int) -> None:
    with pytest.raises(UsageError, match="not a valid offset"):
        world.catalog.put_cursor(TOPIC, "s", wrong)
    assert world.catalog.cursor(TOPIC, "s") is None


# ---- watches ----


def test_a_watch_tells_the_changes_of_its_topic_and_of_no_other(world: World) -> None:
    world.create()
    watcher = Watcher(world.catalog.watch(TOPIC, world.kv.revision()))
    world.create(parse_topic("/default/orders-part-1"))
    world.create(parse_topic("/default/order"))
    world.add(0, 9)
    seen = watcher.wait_for(5)
    watcher.close()
    prefix = world.catalog.keys.topic(TOPIC)
    assert sorted(change.key.removeprefix(prefix) for change in seen) == [
        "keys/data-0-9.dnb1",
        "keys/data-0-9.dnb1",
        "objects/00000000000000000000",
        "objects/cur",
        "record",
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
def test_damage_in_any_record_is_an_error_that_names_the_key(world: World, value: bytes) -> None:
    catalog, keys = world.catalog, world.catalog.keys
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
        world.put(key, value)
        with pytest.raises(DescriptorError) as raised:
            read()
        assert key in str(raised.value)


def test_a_descriptor_under_another_offset_is_an_error(world: World) -> None:
    key = world.catalog.keys.descriptor(TOPIC, 4)
    world.put(key, encode_descriptor(descriptor_of(3, 9)))
    with pytest.raises(DescriptorError, match="0004 holds offset 3"):
        world.catalog.get_object_descriptors_range(TOPIC, 0)


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
        (b'"epoch":3', b'"epoch":3,"more":1'),
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
def test_a_record_with_a_wrong_field_is_refused(world: World, before: bytes, after: bytes) -> None:
    good = encode_record(RECORD)
    assert before in good
    key = world.catalog.keys.record(TOPIC)
    world.put(key, good)
    assert world.catalog.record(TOPIC) == RECORD
    world.put(key, good.replace(before, after))
    with pytest.raises(DescriptorError, match="orders/record"):
        world.catalog.record(TOPIC)


def test_a_record_over_the_limit_is_refused(world: World) -> None:
    key = world.catalog.keys.owner(TOPIC)
    world.put(key, encode_record(OWNER))
    assert world.catalog.owner(TOPIC) == OWNER
    padding = b" " * (CATALOG_VALUE_BYTES_MAX - 10)
    world.put(key, b'{"name":3}' + padding)
    with pytest.raises(DescriptorError, match="orders/owner"):
        world.catalog.owner(TOPIC)


def test_a_topic_name_is_what_its_key_says(world: World) -> None:
    for name in ("/a/b", "/größe/x-part-3"):
        topic = parse_topic(name)
        assert world.catalog.keys.topic_of_record(world.catalog.keys.record(topic)) == topic
    assert world.catalog.keys.topic_of_record(world.catalog.keys.owner(TopicName("a", "b"))) is None
