"""What a reader says at offsets without messages."""

from __future__ import annotations

from forebay.catalog.records import TopicRecord
from forebay.read.holes import lost_error

TOPIC = "/default/orders"


def said(record: TopicRecord, offset: int, skip: str | None = None) -> str:
    hole = record.lost_range(offset)
    assert hole is not None
    error = lost_error(TOPIC, record, hole, skip)
    assert (error.start, error.end) == hole
    return str(error)


def test_one_kind_is_said_in_one_sentence() -> None:
    record = TopicRecord(lost=((10, 20),), unknown=((30, 2**40),))
    assert said(record, 12) == (
        "/default/orders: offsets 10 to 19 are lost. Accept this with `forebay accept-loss "
        "/default/orders`, or continue at offset 20"
    )
    assert said(record, 30, "skip it with --skip-lost") == (
        f"/default/orders: offsets 30 to {2**40 - 1} are unknown: they may never have been used, "
        "and are lost if they were. Accept this with `forebay accept-loss /default/orders`, or "
        "skip it with --skip-lost"
    )


def test_of_a_joined_run_the_kinds_are_told_apart() -> None:
    record = TopicRecord(lost=((10, 20), (40, 50)), unknown=((20, 40),), accepted=((50, 60),))
    words = said(record, 33)
    assert "offsets 10 to 49 have no messages: 10 to 19, 40 to 49 are lost; 20 to 39 are" in words
    assert "continue at offset 50" in words


def test_a_long_list_of_ranges_is_cut() -> None:
    lost = tuple((first, first + 1) for first in range(0, 20, 2))
    unknown = tuple((first + 1, first + 2) for first in range(0, 20, 2))
    words = said(TopicRecord(lost=lost, unknown=unknown), 7)
    assert "0 to 0, 2 to 2, 4 to 4 and 7 more ranges are lost" in words
