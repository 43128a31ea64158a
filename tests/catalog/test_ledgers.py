"""Ids of ledgers and attempts to write them, on every catalog: prepare and complete."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.catalog.catalog import Intent
from forebay.catalog.ledgers import LEDGER_BITS, LedgerIds
from forebay.catalog.records import State
from forebay.errors import CommitRefused, DescriptorError, ServiceUnavailable, TopicFenced
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, parse_ledger
from support.catalogs import TOPIC, Setup, descriptor_of
from support.kv_stores import Backend, requested_backend

OTHER = TopicName("default", "bills")


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def setup(backend: Backend) -> Setup:
    setup = Setup(backend)
    setup.create()
    return setup


def prepare(setup: Setup, start: int, end: int, topic: TopicName = TOPIC) -> Intent:
    return setup.catalog.intend_ledger(topic, 1, (start, end)).intent


def id_of(intent: Intent) -> int:
    name = parse_ledger(intent.object_id)
    assert name is not None
    return name.ledger_id


def ledger_of(intent: Intent, start: int, end: int) -> ObjectDescriptor:
    """The descriptor of the offsets `start..end`, the end not included."""
    about = (("block_bytes", 1024), ("id", id_of(intent)))
    return descriptor_of(start, end - 1, intent.object_id, format="pulsar", ledger=about)


def test_ids_ascend_and_topics_have_numbers_of_their_own(setup: Setup) -> None:
    setup.create(OTHER)
    found = [id_of(prepare(setup, start, start + 10)) for start in (0, 10, 20)]
    assert found == [(1 << LEDGER_BITS) + count for count in range(3)]
    assert id_of(prepare(setup, 0, 5, OTHER)) == 2 << LEDGER_BITS


def test_an_id_is_given_once_however_many_ask_at_the_same_time(setup: Setup) -> None:
    found: list[int] = []

    def ask(first: int) -> None:
        for start in range(first, first + 100, 10):
            found.append(id_of(prepare(setup, start, start + 10)))

    threads = [threading.Thread(target=ask, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(1 << LEDGER_BITS) + count for count in range(30)]


def test_a_retry_keeps_the_id_and_replaces_the_attempt_before(setup: Setup) -> None:
    first = prepare(setup, 0, 10)
    again = setup.catalog.intend_ledger(TOPIC, 1, (0, 10))
    assert again.previous is not None
    assert again.previous.object_id == first.object_id
    assert id_of(again.intent) == id_of(first)
    with pytest.raises(CommitRefused, match="another attempt"):
        setup.catalog.put_object_descriptor(TOPIC, first, ledger_of(first, 0, 10))
    setup.catalog.put_object_descriptor(TOPIC, again.intent, ledger_of(again.intent, 0, 10))
    assert setup.chain() == [(0, 9)]
    assert list(setup.catalog.ledgers(TOPIC).attempts()) == []
    life = setup.catalog.life(TOPIC, again.intent.object_id)
    assert life is not None
    assert (life.state, life.span) == (State.COMMITTED, (0, 10))


def test_a_commit_whose_answer_was_lost_can_be_asked_for_again(setup: Setup) -> None:
    intent = prepare(setup, 0, 10)
    setup.lose_answers()
    setup.catalog.put_object_descriptor(TOPIC, intent, ledger_of(intent, 0, 10))
    setup.catalog.put_object_descriptor(TOPIC, intent, ledger_of(intent, 0, 10))
    assert setup.chain() == [(0, 9)]


def test_a_preparation_whose_answer_was_lost_is_the_attempt_before_the_next_one(
    setup: Setup,
) -> None:
    setup.lose_answers()
    with pytest.raises(ServiceUnavailable):
        prepare(setup, 0, 10)
    again = setup.catalog.intend_ledger(TOPIC, 1, (0, 10))
    assert again.previous is not None
    assert id_of(again.intent) == 1 << LEDGER_BITS


def test_only_the_owner_of_the_current_epoch_prepares(setup: Setup) -> None:
    setup.create(epoch=2)
    with pytest.raises(TopicFenced):
        prepare(setup, 0, 10)
    assert setup.catalog.ledgers(TOPIC).ids() is None


def test_what_is_condemned_cannot_be_committed_and_keeps_its_id(setup: Setup) -> None:
    intent = prepare(setup, 0, 10)
    life = setup.catalog.life(TOPIC, intent.object_id)
    token = setup.catalog.condemn(TOPIC, intent.object_id, life)
    assert token is not None
    with pytest.raises(CommitRefused):
        setup.catalog.put_object_descriptor(TOPIC, intent, ledger_of(intent, 0, 10))
    setup.catalog.bury(TOPIC, intent.object_id, token, certain=True)
    assert id_of(prepare(setup, 0, 10)) == id_of(intent)


def test_a_committed_ledger_is_not_condemned_and_the_attempt_behind_the_tail_goes(
    setup: Setup,
) -> None:
    intent = prepare(setup, 0, 10)
    setup.catalog.put_object_descriptor(TOPIC, intent, ledger_of(intent, 0, 10))
    life = setup.catalog.life(TOPIC, intent.object_id)
    assert setup.catalog.condemn(TOPIC, intent.object_id, life) is None
    late = prepare(setup, 5, 10)
    life = setup.catalog.life(TOPIC, late.object_id)
    assert setup.catalog.condemn(TOPIC, late.object_id, life) is not None
    assert list(setup.catalog.ledgers(TOPIC).attempts()) == []


def test_a_ledger_that_was_written_ahead_is_known_until_another_attempt(setup: Setup) -> None:
    ledgers = setup.catalog.ledgers(TOPIC)
    first, second = prepare(setup, 0, 10), prepare(setup, 10, 20)
    descriptor = ledger_of(second, 10, 20)
    ledgers.written(descriptor)
    ledgers.written(descriptor)
    assert [each.descriptor for each in ledgers.attempts()] == [None, descriptor]
    prepare(setup, 10, 20)
    with pytest.raises(CommitRefused):
        ledgers.written(descriptor)
    assert [each.descriptor for each in ledgers.attempts()] == [None, None]
    setup.catalog.put_object_descriptor(TOPIC, first, ledger_of(first, 0, 10))


def test_ids_go_on_after_those_that_a_restore_found(setup: Setup) -> None:
    ledgers = setup.catalog.ledgers(TOPIC)
    ledgers.continue_after((7 << LEDGER_BITS) + 41)
    ledgers.continue_after((7 << LEDGER_BITS) + 3)
    ledgers.continue_after((3 << LEDGER_BITS) + 99)
    assert ledgers.ids() == LedgerIds(7, 42)
    assert id_of(prepare(setup, 0, 10)) == (7 << LEDGER_BITS) + 42
    setup.create(OTHER)
    assert id_of(prepare(setup, 0, 5, OTHER)) == 8 << LEDGER_BITS


@pytest.mark.parametrize(
    "value", [b"", b"[]", b"{}", b'{"given":-1,"number":1}', b'{"given":0,"number":0}', b"nonsense"]
)
def test_a_damaged_row_is_an_error_that_names_it(setup: Setup, value: bytes) -> None:
    key = setup.catalog.keys.ledger_ids(TOPIC)
    setup.put(key, value)
    with pytest.raises(DescriptorError, match="ledger-ids"):
        prepare(setup, 0, 10)
    setup.put(setup.catalog.keys.ledger_attempt(TOPIC, 0), value)
    with pytest.raises(DescriptorError, match="ledgers/"):
        list(setup.catalog.ledgers(TOPIC).attempts())
