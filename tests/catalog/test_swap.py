"""One object in the place of several, and back: on every backend, with others at work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.catalog import Intent
from forebay.catalog.chain import stored
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
from support.catalog_swaps import LARGE, fill, kept, planned, swapped
from support.catalogs import TOPIC, Setup, descriptor_of
from support.kv_stores import requested_backend


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    backend = requested_backend(request, tmp_path)
    setup = Setup(backend)
    setup.create()
    yield setup
    backend.kv.close()


# ---- swap ----


def test_the_large_object_takes_the_place_of_the_small_ones(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20, 30)
    before = setup.record()
    setup.clock.advance(60)
    large = swapped(setup, made[:3])
    assert list(setup.catalog.get_object_descriptors(TOPIC)) == [large, made[3]]
    assert setup.record() == before
    assert setup.state(LARGE) is State.COMMITTED
    for each in made[:3]:
        life = setup.catalog.life(TOPIC, each.object_id)
        assert life is not None
        assert (life.state, life.updated_ms) == (State.REPLACED, setup.clock.now_ms())
    assert kept(setup) == [(each.object_id, LARGE) for each in made[:3]]
    assert setup.catalog.get_current_pointer(TOPIC) == 30


def test_the_pointer_to_the_newest_object_follows(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20)
    swapped(setup, made[1:])
    assert setup.catalog.get_current_pointer(TOPIC) == 10
    swap_back(setup.catalog, TOPIC, "data-10-29.dnb1", clock=setup.clock)
    assert setup.catalog.get_current_pointer(TOPIC) == 20


def test_appending_to_the_chain_goes_on_behind_it(setup: Setup) -> None:
    swapped(setup, fill(setup, 0, 10))
    setup.add(20, 29)
    assert setup.chain() == [(0, 19), (20, 29)]


def test_a_swap_that_was_done_before_succeeds(setup: Setup) -> None:
    intent, large, made = planned(setup, fill(setup, 0, 10, 20))
    for _ in range(2):
        swap(setup.catalog, TOPIC, intent, large, made, clock=setup.clock)
    assert setup.chain() == [(0, 29)]


def test_a_swap_whose_answer_was_lost_finds_itself_done(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20)
    intent, large, _ = planned(setup, made)
    setup.lose_answers(2)
    swap(setup.catalog, TOPIC, intent, large, made, clock=setup.clock)
    assert setup.chain() == [(0, 29)]
    setup.lose_answers(2)
    assert swap_back(setup.catalog, TOPIC, LARGE, clock=setup.clock) == made
    assert setup.chain() == [(0, 9), (10, 19), (20, 29)]


def test_a_catalog_that_does_not_answer_is_told_and_asked_again_later(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20)
    intent, large, _ = planned(setup, made)
    setup.kv.fail("commit", times=3)
    with pytest.raises(ServiceUnavailable):
        swap(setup.catalog, TOPIC, intent, large, made, clock=setup.clock)
    assert len(setup.chain()) == 3
    swap(setup.catalog, TOPIC, intent, large, made, clock=setup.clock)
    assert setup.chain() == [(0, 29)]


def test_the_largest_swap_fits_into_a_transaction(setup: Setup) -> None:
    """The longest names, the largest index, and as many kept bytes as a plan allows."""
    topic = TopicName("n" * 255, "t" * 255)
    count = OBJECTS_PER_SWAP_MAX
    setup.create(topic)
    each_bytes = SWAP_BYTES_MAX // count - 1 * KIB
    made = []
    for at in range(count):
        start = at * 10**15
        name = f"data-{start}-{start + 10**15 - 1}.dnb1"
        intent = setup.catalog.intend(topic, 1, name)
        made.append(descriptor_of(start, start + 10**15 - 1, name, etag="e" * each_bytes))
        setup.catalog.put_object_descriptor(topic, intent, made[-1])
        setup.catalog.mark_verified(topic, made[-1])
    first, last = made[0].start_offset, made[-1].end_offset
    step = (last - first) // OBJECT_INDEX_ENTRIES_MAX
    index = tuple((at * step, at * step * 50) for at in range(OBJECT_INDEX_ENTRIES_MAX))
    intent = setup.catalog.intend(topic, 1, f"data-{first}-{last}.dnb1")
    large = replace(descriptor_of(first, last), offset_index=index)
    swap(setup.catalog, topic, intent, large, made, clock=setup.clock)
    assert list(setup.catalog.get_object_descriptors(topic)) == [stored(large)]
    assert swap_back(setup.catalog, topic, large.object_id, clock=setup.clock) == made
    assert list(setup.catalog.get_object_descriptors(topic)) == made


def test_objects_without_a_row_are_replaced_too(setup: Setup) -> None:
    made = fill(setup, 0, 10)
    setup.kv.commit([], [Remove(setup.catalog.keys.life(TOPIC, made[1].object_id))])
    swapped(setup, made)
    assert setup.state(made[1].object_id) is State.REPLACED


# ---- refusals ----


def refused(setup: Setup, intent: Intent, large: ObjectDescriptor, made: object, why: str) -> None:
    before = setup.chain()
    with pytest.raises(CommitRefused, match=why):
        swap(setup.catalog, TOPIC, intent, large, made, clock=setup.clock)  # type: ignore[arg-type]
    assert setup.chain() == before
    assert kept(setup) == []


def test_it_is_refused_when_retention_took_one(setup: Setup) -> None:
    plan = planned(setup, fill(setup, 0, 10, 20))
    assert setup.catalog.retire(TOPIC, 1, plan[2][0]) is not None
    refused(setup, *plan, "changed")


def test_it_is_refused_when_another_compaction_was_faster(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20)
    plan = planned(setup, made)
    intent, large, _ = planned(setup, made[1:])
    swap(setup.catalog, TOPIC, intent, large, made[1:], clock=setup.clock)
    with pytest.raises(CommitRefused, match="changed"):
        swap(setup.catalog, TOPIC, *plan, clock=setup.clock)
    assert setup.chain() == [(0, 9), (10, 29)]


def test_it_is_refused_when_the_same_compaction_runs_twice(setup: Setup) -> None:
    """The second one took over the name, so the object belongs to it."""
    made = fill(setup, 0, 10, 20)
    first, second = planned(setup, made), planned(setup, made)
    assert first[0].object_id == second[0].object_id
    refused(setup, *first, "revoked")
    swap(setup.catalog, TOPIC, *second, clock=setup.clock)
    assert setup.chain() == [(0, 29)]


def test_it_is_refused_when_the_topic_has_a_new_owner(setup: Setup) -> None:
    plan = planned(setup, fill(setup, 0, 10))
    record = replace(setup.record(), epoch=2)
    setup.put(setup.catalog.keys.record(TOPIC), encode_record(record))
    refused(setup, *plan, "epoch is 2")


def test_it_is_refused_when_a_sweep_took_the_intent_back(setup: Setup) -> None:
    plan = planned(setup, fill(setup, 0, 10))
    seen = setup.catalog.life(TOPIC, plan[0].object_id)
    assert setup.catalog.condemn(TOPIC, plan[0].object_id, seen) is not None
    refused(setup, *plan, "revoked")


def test_it_is_refused_for_what_was_not_read_back(setup: Setup) -> None:
    made = [*fill(setup, 0), setup.add(10, 19)]
    refused(setup, *planned(setup, made), "offset 10")


def test_what_cannot_be_one_swap_is_a_wrong_call(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20)
    intent, large, _ = planned(setup, made)
    for wrong in (made[:2], made[1:], [made[0], made[2]], made[:1], [], made * 11):
        with pytest.raises(UsageError):
            swap(setup.catalog, TOPIC, intent, large, wrong)
    with pytest.raises(UsageError, match=r"data-0-9\.dnb1"):
        swap(setup.catalog, TOPIC, replace(intent, object_id="data-0-9.dnb1"), large, made)
    assert len(setup.chain()) == 3


# ---- undo ----


def test_a_swap_is_taken_back(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20, 30)
    large = swapped(setup, made[:3])
    assert swap_back(setup.catalog, TOPIC, large.object_id, clock=setup.clock) == made[:3]
    assert list(setup.catalog.get_object_descriptors(TOPIC)) == made
    assert {setup.state(each.object_id) for each in made} == {State.COMMITTED}
    assert setup.state(LARGE) is State.REPLACED
    assert kept(setup) == []
    again = swapped(setup, made[:3])
    assert again.object_id == "data-0-29-1.dnb1", "the name is taken until a sweep frees it"
    with pytest.raises(CommitRefused, match=large.object_id):
        swap_back(setup.catalog, TOPIC, large.object_id)


def test_swaps_of_swaps_are_taken_back_one_by_one(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20, 30)
    halves = [swapped(setup, made[:2]), swapped(setup, made[2:])]
    whole = swapped(setup, halves)
    with pytest.raises(CommitRefused, match=halves[0].object_id):
        swap_back(setup.catalog, TOPIC, halves[0].object_id)
    assert swap_back(setup.catalog, TOPIC, whole.object_id) == halves
    assert swap_back(setup.catalog, TOPIC, halves[1].object_id) == made[2:]
    assert setup.chain() == [(0, 19), (20, 29), (30, 39)]
    assert setup.catalog.get_current_pointer(TOPIC) == 30


@pytest.mark.parametrize("buried", [False, True])
def test_it_cannot_be_taken_back_once_one_of_the_objects_is_being_deleted(
    setup: Setup, buried: bool
) -> None:
    made = fill(setup, 0, 10, 20)
    swapped(setup, made)
    name = made[1].object_id
    token = setup.catalog.condemn(TOPIC, name, setup.catalog.life(TOPIC, name))
    assert token is not None
    if buried:
        setup.catalog.bury(TOPIC, name, token, certain=True)
    assert len(kept(setup)) == 2, "its descriptor went with its life"
    with pytest.raises(CommitRefused, match=LARGE):
        swap_back(setup.catalog, TOPIC, LARGE)
    assert setup.chain() == [(0, 29)]


def test_what_was_never_swapped_cannot_be_taken_back(setup: Setup) -> None:
    fill(setup, 0, 10)
    with pytest.raises(CommitRefused, match=r"data-0-9\.dnb1"):
        swap_back(setup.catalog, TOPIC, "data-0-9.dnb1")
    with pytest.raises(UsageError):
        swap_back(setup.catalog, TOPIC, "orders")


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


def test_kept_descriptors_are_read_page_by_page(setup: Setup) -> None:
    count = 300
    puts = [
        Put(
            setup.catalog.keys.replaced_descriptor(TOPIC, at, f"data-{at}-{at}.dnb1"),
            encode_kept(Kept("by", descriptor_of(at, at))),
        )
        for at in range(count)
    ]
    for at in range(0, count, 50):
        setup.kv.commit([], puts[at : at + 50])
    found = [
        each.descriptor.start_offset
        for each in replaced_descriptors(setup.catalog, TOPIC, 7, count - 1)
    ]
    assert found == list(range(7, count - 1))
