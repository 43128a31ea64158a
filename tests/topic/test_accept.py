"""Accepted ranges: readers jump over them, and everything else raises as before."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from pathlib import Path

import pytest

from forebay.catalog.records import TopicRecord
from forebay.clock import SYSTEM_CLOCK
from forebay.errors import LostOffsets, UnknownTopic, UsageError
from forebay.format.names import parse_topic
from forebay.limits import OFFSET_MAX
from forebay.read.metrics import JUMPS
from forebay.topic.accept import accept_loss
from forebay.topic.describe import describe, explain
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store
from forebay.topic.view import StoreView
from support.holed_topics import END, HELD, ORDERS, accept, leave_a_wide_hole, record_of
from support.scan_stores import append, settings_of

READABLE = [*range(HELD), *range(END, END + HELD)]
PATIENCE = 60


@pytest.fixture
def data(tmp_path: Path) -> Path:
    leave_a_wide_hole(tmp_path)
    return tmp_path


def test_a_reader_raises_for_the_whole_run_and_names_the_command(data: Path) -> None:
    with Store(settings_of(data)) as store, store.topic(ORDERS).read(start=3) as reader:
        for offset in range(3, HELD):
            assert next(reader).offset == offset
        with pytest.raises(LostOffsets, match=f"forebay accept-loss {ORDERS}") as caught:
            next(reader)
    assert (caught.value.start, caught.value.end) == (HELD, END)
    assert f"continue at offset {END}" in str(caught.value)


def test_a_reader_that_raised_goes_on_after_another_process_accepted(data: Path) -> None:
    with Store(settings_of(data)) as store, store.topic(ORDERS).read(start=0) as reader:
        for _ in range(HELD):
            next(reader)
        with pytest.raises(LostOffsets):
            next(reader)
        accept(data)
        assert [message.offset for message in reader] == READABLE[HELD:]


@pytest.mark.parametrize("start", [0, 7, HELD, HELD + 1, END - 1, END])
def test_a_reader_jumps_over_what_is_accepted(
    data: Path, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    accept(data)
    before = JUMPS.value()
    with (
        Store(settings_of(data)) as store,
        caplog.at_level(logging.INFO, "forebay.read"),
        store.topic(ORDERS).read(start=start) as reader,
    ):
        found = [message.offset for message in reader]
    assert found == [offset for offset in READABLE if offset >= start]
    said = [each for each in caplog.messages if "jumped over" in each]
    assert len(said) == JUMPS.value() - before == (0 if start == END else 1)
    for line in said:
        assert f"first={max(start, HELD)} last={END - 1}" in line


async def test_a_stream_that_follows_jumps_and_waits_for_more(data: Path) -> None:
    accept(data)
    with Store(settings_of(data)) as store:
        topic = store.topic(ORDERS)
        found = []
        async with asyncio.timeout(PATIENCE):
            async with topic.stream(start=0) as stream:
                async for message in stream:
                    found.append(message.offset)
                    if len(found) == 2 * HELD:
                        append(topic, 1)
                    if len(found) > 2 * HELD:
                        break
    assert found == [*READABLE, END + HELD]


def test_a_reader_that_ends_inside_an_accepted_range_ends_there(data: Path) -> None:
    accept(data)
    with Store(settings_of(data)) as store:
        topic = store.topic(ORDERS)
        assert [each.offset for each in topic.read(start=8, end=HELD + 5)] == [8, 9]
        assert list(topic.read(start=HELD + 1, end=HELD + 5)) == []


def test_a_view_jumps_with_and_without_the_local_log(data: Path) -> None:
    with Store(settings_of(data)) as store:
        store.topic(ORDERS).upload()
    accept(data)
    read_through_a_view(data)
    (data / "wal").rename(data / "aside")
    read_through_a_view(data)


def read_through_a_view(data: Path) -> None:
    with StoreView(settings_of(data)) as view, view.topic(ORDERS).reader(0) as reader:
        assert [each.offset for each in reader] == READABLE


def test_only_the_named_part_is_accepted(data: Path) -> None:
    with Store(settings_of(data)) as store:
        topic = store.topic(ORDERS)
        done = topic.accept_loss(0, HELD + 100)
        assert done.accepted == [(HELD, HELD + 100)]
        assert (done.lost, done.unknown) != ([], [])
        with pytest.raises(LostOffsets) as caught:
            list(topic.read(start=0))
        assert (caught.value.start, caught.value.end) == (HELD + 100, END)
        assert topic.accept_loss().accepted == [(HELD, END)]
        assert topic.accept_loss().lost == topic.accept_loss().unknown == []
        assert [message.offset for message in topic.read()] == READABLE


def test_a_dry_run_changes_nothing(data: Path) -> None:
    before = record_of(data)
    with closing(StoreResources(settings_of(data), SYSTEM_CLOCK)) as resources:
        topic = parse_topic(ORDERS)
        said = accept_loss(resources.catalog, topic, dry_run=True)
        assert resources.catalog.record(topic) == before
    assert said.accepted == [(HELD, END)]
    assert said.lost == list(before.lost)
    assert said.unknown == list(before.unknown)


@pytest.mark.parametrize(
    ("start", "end"), [(5, 5), (6, 5), (-1, 5), (0, OFFSET_MAX + 1), (OFFSET_MAX, None)]
)
def test_an_empty_range_is_refused(tmp_path: Path, start: int, end: int | None) -> None:
    with Store(settings_of(tmp_path)) as store, pytest.raises(UsageError, match="no offsets"):
        store.topic(ORDERS).accept_loss(start, end)


def test_an_unknown_topic_is_refused_and_not_made(tmp_path: Path) -> None:
    with closing(StoreResources(settings_of(tmp_path), SYSTEM_CLOCK)) as resources:
        with pytest.raises(UnknownTopic, match="there is no topic /default/absent"):
            accept_loss(resources.catalog, parse_topic("absent"))
        assert list(resources.catalog.topics()) == []


# ---- what is said about it ----


def test_the_kinds_of_ranges_are_told_apart(data: Path) -> None:
    record = record_of(data)
    with StoreView(settings_of(data)) as view:
        facts = describe(view.topic(ORDERS))
    assert (facts.lost, facts.unknown, facts.accepted) == (
        list(record.lost),
        list(record.unknown),
        [],
    )
    accept(data)
    with StoreView(settings_of(data)) as view:
        facts = describe(view.topic(ORDERS))
        said = explain(view.topic(ORDERS), HELD + 7)
    assert (facts.lost, facts.unknown, facts.accepted) == ([], [], [(HELD, END)])
    assert facts.problems == []
    assert (said.state, said.go_on_at) == ("accepted", END)


def test_an_offset_says_which_kind_of_hole_it_is_in() -> None:
    record = TopicRecord(lost=((5, 9),), unknown=((9, 20),), accepted=((30, 40),))
    kinds = {offset: record.hole_kind(offset) for offset in (4, 5, 8, 9, 19, 20, 29, 30, 39, 40)}
    assert kinds == {
        4: None,
        5: "lost",
        8: "lost",
        9: "unknown",
        19: "unknown",
        20: None,
        29: None,
        30: "accepted",
        39: "accepted",
        40: None,
    }
