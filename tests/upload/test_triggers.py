"""Which ledgers the thresholds offload, beside a model that follows Pulsar's rules word by word."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.offload_policies import Thresholds
from forebay.upload.triggers import lag_has_passed, next_due_ms, select_ledgers

NOW = 1_700_000_000_000


@dataclass(frozen=True)
class Ledger:
    ledger_id: int
    size: int
    closed_ms: int | None = NOW
    offloaded: bool = False


def selected(ledgers: list[Ledger], now_ms: int = NOW, **thresholds: int | None) -> list[int]:
    return [each.ledger_id for each in select_ledgers(ledgers, Thresholds(**thresholds), now_ms)]


THREE = [Ledger(1, 100), Ledger(2, 100), Ledger(3, 100), Ledger(4, 50, closed_ms=None)]


def test_the_ledger_that_crosses_the_threshold_is_offloaded_too() -> None:
    assert selected(THREE, size_bytes=99) == [1, 2, 3]
    assert selected(THREE, size_bytes=100) == [1, 2]
    assert selected(THREE, size_bytes=199) == [1, 2]
    assert selected(THREE, size_bytes=200) == [1]


def test_a_sum_that_equals_the_threshold_is_not_over_it() -> None:
    assert selected(THREE, size_bytes=300) == []
    assert selected(THREE, size_bytes=299) == [1]


def test_zero_bytes_offload_a_ledger_as_soon_as_it_is_closed() -> None:
    assert selected(THREE, size_bytes=0) == [1, 2, 3]
    assert selected([Ledger(1, 10, closed_ms=None)], size_bytes=0) == []


def test_zero_seconds_offload_a_ledger_as_soon_as_it_is_closed() -> None:
    assert selected(THREE, age_seconds=0) == [1, 2, 3]
    assert selected([Ledger(1, 0)], age_seconds=0) == [1]


def test_an_age_is_reached_to_the_millisecond() -> None:
    ledgers = [Ledger(1, 10, closed_ms=NOW - 60_000), Ledger(2, 10, closed_ms=NOW - 59_999)]
    assert selected(ledgers, age_seconds=60) == [1]


def test_either_threshold_is_enough() -> None:
    ledgers = [Ledger(1, 1), Ledger(2, 1, closed_ms=NOW - 9_000), Ledger(3, 1)]
    assert selected(ledgers, size_bytes=2, age_seconds=9) == [1, 2]


def test_offloaded_ledgers_count_and_are_not_offloaded_again() -> None:
    ledgers = [Ledger(1, 100), Ledger(2, 100, offloaded=True), Ledger(3, 100)]
    assert selected(ledgers, size_bytes=100) == [1]
    assert selected(ledgers, size_bytes=0) == [1, 3]


@pytest.mark.parametrize("value", [None, -1, -2, -(2**63)])
def test_a_threshold_that_is_negative_or_not_set_is_off(value: int | None) -> None:
    assert selected(THREE, NOW + 10**12, size_bytes=value, age_seconds=value) == []
    assert Thresholds(value, value).off


def test_a_topic_without_ledgers_has_nothing_to_offload() -> None:
    assert selected([], size_bytes=0, age_seconds=0) == []


def test_a_clock_that_was_put_back_offloads_nothing_by_age() -> None:
    assert selected([Ledger(1, 10)], NOW - 1, age_seconds=0) == []


LEDGERS = st.lists(
    st.builds(
        Ledger,
        ledger_id=st.just(0),
        size=st.integers(0, 50),
        closed_ms=st.none() | st.integers(NOW - 10_000, NOW),
        offloaded=st.booleans(),
    ),
    max_size=8,
).map(lambda found: [replace(each, ledger_id=at) for at, each in enumerate(found)])
LIMITS = st.none() | st.integers(-3, 120)


@given(LEDGERS, LIMITS, LIMITS)
def test_what_is_selected_is_what_the_definition_says(
    ledgers: list[Ledger], size: int | None, age: int | None
) -> None:
    expected = []
    for at, ledger in enumerate(ledgers):
        newer_and_itself = sum(each.size for each in ledgers[at:] if each.closed_ms is not None)
        over = size is not None and size >= 0 and newer_and_itself > size
        aged = age is not None and age >= 0 and (ledger.closed_ms or NOW) + age * 1000 <= NOW
        if ledger.closed_ms is not None and not ledger.offloaded and (over or aged):
            expected.append(ledger.ledger_id)
    assert selected(ledgers, size_bytes=size, age_seconds=age) == expected


@given(LEDGERS, st.integers(0, 20))
def test_a_timer_set_for_the_next_ledger_finds_one_and_not_a_millisecond_earlier(
    ledgers: list[Ledger], age: int
) -> None:
    due = next_due_ms(ledgers, Thresholds(age_seconds=age))
    assert (due is None) == all(each.closed_ms is None or each.offloaded for each in ledgers)
    if due is not None:
        assert selected(ledgers, due, age_seconds=age)
        assert not selected(ledgers, due - 1, age_seconds=age)


@pytest.mark.parametrize("age", [None, -1])
def test_without_an_age_there_is_no_timer(age: int | None) -> None:
    assert next_due_ms(THREE, Thresholds(size_bytes=0, age_seconds=age)) is None


def test_a_local_copy_goes_after_the_lag_and_not_at_it() -> None:
    assert not lag_has_passed(NOW, 1000, NOW + 1000)
    assert lag_has_passed(NOW, 1000, NOW + 1001)
    assert lag_has_passed(NOW, 0, NOW + 1)


@pytest.mark.parametrize("lag", [None, -1])
def test_a_lag_that_is_negative_or_not_set_never_passes(lag: int | None) -> None:
    assert not lag_has_passed(0, lag, 2**62)
