"""One object in the place of several, and back: on every ground, with others at work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from catalog_swaps import LARGE, fill, kept, planned, swapped
from catalog_worlds import TOPIC, World, descriptor_of
from forebay.catalog.catalog import Intent
from forebay.catalog.kv import Put, Remove
from forebay.catalog.records import State, encode_record
from forebay.catalog.swap import (
    OBJECTS_PER_SWAP_MAX,
    SWAP_BYTES_MAX,
    Kept,
    decode_kept,
    encode_kept,
    replaced_descriptors,
    swap,
    swap_back,
)
from forebay.errors import (
    CommitRefused,
    DescriptorError,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.limits import KIB, OBJECT_INDEX_ENTRIES_MAX
from kv_grounds import GROUNDS, Ground, etcd_ground


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    ground: Ground
    if request.param == "etcd":
        ground = etcd_ground(request.getfixturevalue("etcd"))
    else:
        ground = GROUNDS[request.param](tmp_path)
    world = World(ground)
    world.create()
    yield world
    ground.kv.close()


# ---- swap ----


def test_the_large_object_takes_the_place_of_the_small_ones(world: World) -> None:
    made = fill(world, 0, 10, 20, 30)
    before = world.record()
    world.clock.advance(60)
    large = swapped(world, made[:3])
    assert list(world.catalog.get_object_descriptors(TOPIC)) == [large, made[3]]
    assert world.record() == before
    assert world.state(LARGE) is State.COMMITTED
    for each in made[:3]:
        life = world.catalog.life(TOPIC, each.object_id)
        assert life is not None
        assert (life.state, life.updated_ms) == (State.REPLACED, world.clock.now_ms())
    assert kept(world) == [(each.object_id, LARGE) for each in made[:3]]
    assert world.catalog.get_current_pointer(TOPIC) == 30


def test_the_pointer_to_the_newest_object_follows(world: World) -> None:
    made = fill(world, 0, 10, 20)
    swapped(world, made[1:])
    assert world.catalog.get_current_pointer(TOPIC) == 10
    swap_back(world.catalog, TOPIC, "data-10-29.dnb1", clock=world.clock)
    assert world.catalog.get_current_pointer(TOPIC) == 20


def test_appending_to_the_chain_goes_on_behind_it(world: World) -> None:
    swapped(world, fill(world, 0, 10))
    world.add(20, 29)
    assert world.chain() == [(0, 19), (20, 29)]


def test_a_swap_that_was_done_before_succeeds(world: World) -> None:
    intent, large, made = planned(world, fill(world, 0, 10, 20))
    for _ in range(2):
        swap(world.catalog, TOPIC, intent, large, made, clock=world.clock)
    assert world.chain() == [(0, 29)]


def test_a_swap_whose_answer_was_lost_finds_itself_done(world: World) -> None:
    made = fill(world, 0, 10, 20)
    intent, large, _ = planned(world, made)
    world.lose_answers(2)
    swap(world.catalog, TOPIC, intent, large, made, clock=world.clock)
    assert world.chain() == [(0, 29)]
    world.lose_answers(2)
    assert swap_back(world.catalog, TOPIC, LARGE, clock=world.clock) == made
    assert world.chain() == [(0, 9), (10, 19), (20, 29)]


def test_a_catalog_that_does_not_answer_is_told_and_asked_again_later(world: World) -> None:
    made = fill(world, 0, 10, 20)
    intent, large, _ = planned(world, made)
    world.kv.fail("commit", times=3)
    with pytest.raises(ServiceUnavailable):
        swap(world.catalog, TOPIC, intent, large, made, clock=world.clock)
    assert len(world.chain()) == 3
    swap(world.catalog, TOPIC, intent, large, made, clock=world.clock)
    assert world.chain() == [(0, 29)]


def test_the_largest_swap_fits_into_a_transaction(world: World) -> None:
    """The longest names, the largest index, and as many kept bytes as a plan allows."""
    topic = TopicName("n" * 255, "t" * 255)
    count = OBJECTS_PER_SWAP_MAX
    world.create(topic)
    each_bytes = SWAP_BYTES_MAX // count - 1 * KIB
    made = []
    for at in range(count):
        start = at * 10**15
        name = f"data-{start}-{start + 10**15 - 1}.dnb1"
        intent = world.catalog.intend(topic, 1, name)
        made.append(descriptor_of(start, start + 10**15 - 1, name, etag="e" * each_bytes))
        world.catalog.put_object_descriptor(topic, intent, made[-1])
        world.catalog.mark_verified(topic, made[-1])
    first, last = made[0].start_offset, made[-1].end_offset
    step = (last - first) // OBJECT_INDEX_ENTRIES_MAX
    index = tuple((at * step, at * step * 50) for at in range(OBJECT_INDEX_ENTRIES_MAX))
    intent = world.catalog.intend(topic, 1, f"data-{first}-{last}.dnb1")
    large = replace(descriptor_of(first, last), offset_index=index)
    swap(world.catalog, topic, intent, large, made, clock=world.clock)
    assert list(world.catalog.get_object_descriptors(topic)) == [large]
    assert swap_back(world.catalog, topic, large.object_id, clock=world.clock) == made
    assert list(world.catalog.get_object_descriptors(topic)) == made


def test_objects_without_a_row_are_replaced_too(world: World) -> None:
    made = fill(world, 0, 10)
    world.kv.commit([], [Remove(world.catalog.keys.life(TOPIC, made[1].object_id))])
    swapped(world, made)
    assert world.state(made[1].object_id) is State.REPLACED


# ---- refusals ----


def refused(world: World, intent: Intent, large: ObjectDescriptor, made: object, why: str) -> None:
    before = world.chain()
    with pytest.raises(CommitRefused, match=why):
        swap(world.catalog, TOPIC, intent, large, made, clock=world.clock)  # type: ignore[arg-type]
    assert world.chain() == before
    assert kept(world) == []


def test_it_is_refused_when_retention_took_one(world: World) -> None:
    plan = planned(world, fill(world, 0, 10, 20))
    assert world.catalog.retire(TOPIC, 1, plan[2][0]) is not None
    refused(world, *plan, "have changed")


def test_it_is_refused_when_another_compaction_was_faster(world: World) -> None:
    made = fill(world, 0, 10, 20)
    plan = planned(world, made)
    intent, large, _ = planned(world, made[1:])
    swap(world.catalog, TOPIC, intent, large, made[1:], clock=world.clock)
    with pytest.raises(CommitRefused, match="have changed"):
        swap(world.catalog, TOPIC, *plan, clock=world.clock)
    assert world.chain() == [(0, 9), (10, 29)]


def test_it_is_refused_when_the_same_compaction_runs_twice(world: World) -> None:
    """The second one took the name over: the object belongs to it."""
    made = fill(world, 0, 10, 20)
    first, second = planned(world, made), planned(world, made)
    assert first[0].object_id == second[0].object_id
    refused(world, *first, "revoked")
    swap(world.catalog, TOPIC, *second, clock=world.clock)
    assert world.chain() == [(0, 29)]


def test_it_is_refused_when_the_topic_has_a_new_owner(world: World) -> None:
    plan = planned(world, fill(world, 0, 10))
    record = replace(world.record(), epoch=2)
    world.put(world.catalog.keys.record(TOPIC), encode_record(record))
    refused(world, *plan, "new owner")


def test_it_is_refused_when_a_sweep_took_the_intent_back(world: World) -> None:
    plan = planned(world, fill(world, 0, 10))
    seen = world.catalog.life(TOPIC, plan[0].object_id)
    assert world.catalog.condemn(TOPIC, plan[0].object_id, seen) is not None
    refused(world, *plan, "revoked")


def test_it_is_refused_for_what_was_not_read_back(world: World) -> None:
    made = [*fill(world, 0), world.add(10, 19)]
    refused(world, *planned(world, made), "offset 10")


def test_what_cannot_be_one_swap_is_a_wrong_call(world: World) -> None:
    made = fill(world, 0, 10, 20)
    intent, large, _ = planned(world, made)
    for wrong in (made[:2], made[1:], [made[0], made[2]], made[:1], [], made * 11):
        with pytest.raises(UsageError):
            swap(world.catalog, TOPIC, intent, large, wrong)
    with pytest.raises(UsageError, match="the intent is for"):
        swap(world.catalog, TOPIC, replace(intent, object_id="data-0-9.dnb1"), large, made)
    assert len(world.chain()) == 3


# ---- undo ----


def test_a_swap_is_taken_back(world: World) -> None:
    made = fill(world, 0, 10, 20, 30)
    large = swapped(world, made[:3])
    assert swap_back(world.catalog, TOPIC, large.object_id, clock=world.clock) == made[:3]
    assert list(world.catalog.get_object_descriptors(TOPIC)) == made
    assert {world.state(each.object_id) for each in made} == {State.COMMITTED}
    assert world.state(LARGE) is State.REPLACED
    assert kept(world) == []
    again = swapped(world, made[:3])
    assert again.object_id == "data-0-29-1.dnb1", "the name is taken until a sweep frees it"
    with pytest.raises(CommitRefused, match="is not in the topic"):
        swap_back(world.catalog, TOPIC, large.object_id)


def test_swaps_of_swaps_are_taken_back_one_by_one(world: World) -> None:
    made = fill(world, 0, 10, 20, 30)
    halves = [swapped(world, made[:2]), swapped(world, made[2:])]
    whole = swapped(world, halves)
    with pytest.raises(CommitRefused, match="is not in the topic"):
        swap_back(world.catalog, TOPIC, halves[0].object_id)
    assert swap_back(world.catalog, TOPIC, whole.object_id) == halves
    assert swap_back(world.catalog, TOPIC, halves[1].object_id) == made[2:]
    assert world.chain() == [(0, 19), (20, 29), (30, 39)]
    assert world.catalog.get_current_pointer(TOPIC) == 30


@pytest.mark.parametrize("buried", [False, True])
def test_it_cannot_be_taken_back_once_one_of_the_objects_is_being_deleted(
    world: World, buried: bool
) -> None:
    made = fill(world, 0, 10, 20)
    swapped(world, made)
    name = made[1].object_id
    token = world.catalog.condemn(TOPIC, name, world.catalog.life(TOPIC, name))
    assert token is not None
    if buried:
        world.catalog.bury(TOPIC, name, token, certain=True)
    assert len(kept(world)) == 2, "its descriptor went with its life"
    with pytest.raises(CommitRefused, match="some of the objects that it replaced are left"):
        swap_back(world.catalog, TOPIC, LARGE)
    assert world.chain() == [(0, 29)]


def test_what_was_never_swapped_cannot_be_taken_back(world: World) -> None:
    fill(world, 0, 10)
    with pytest.raises(CommitRefused, match="none of the objects"):
        swap_back(world.catalog, TOPIC, "data-0-9.dnb1")
    with pytest.raises(UsageError, match="not the name of an object"):
        swap_back(world.catalog, TOPIC, "orders")


# ---- the value that is kept ----


def test_a_kept_descriptor_is_read_as_it_was_written() -> None:
    index = ((0, 0), (5, 250))
    value = Kept("data-0-29.dnb1", replace(descriptor_of(0, 9), offset_index=index))
    assert decode_kept(encode_kept(value), "key") == value


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[]",
        b"no",
        b'{"by":1,"descriptor":{}}',
        b'{"by":"a","descriptor":{}}',
        encode_kept(Kept("a", descriptor_of(0, 9)))[:-1] + b',"more":1}',
    ],
)
def test_what_is_no_kept_descriptor_is_refused(data: bytes) -> None:
    with pytest.raises(DescriptorError, match="key"):
        decode_kept(data, "key")


def test_kept_descriptors_are_read_page_by_page(world: World) -> None:
    count = 300
    puts = [
        Put(
            world.catalog.keys.replaced_descriptor(TOPIC, at, f"data-{at}-{at}.dnb1"),
            encode_kept(Kept("by", descriptor_of(at, at))),
        )
        for at in range(count)
    ]
    for at in range(0, count, 50):
        world.kv.commit([], puts[at : at + 50])
    found = [
        each.descriptor.start_offset
        for each in replaced_descriptors(world.catalog, TOPIC, 7, count - 1)
    ]
    assert found == list(range(7, count - 1))
