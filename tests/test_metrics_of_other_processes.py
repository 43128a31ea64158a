"""Counters of other processes are added to those of this one."""

from __future__ import annotations

from forebay import metrics
from forebay.logs import ERRORS
from forebay.metrics import Counter, Gauge

PLAIN = Counter("test_counting_total", "Of a test.")
LABELLED = Counter("test_counting_kinds_total", "Of a test.", ["kind", "way"])
GAUGE = Gauge("test_counting_now", "Of a test.")


def test_what_was_counted_elsewhere_is_added_here() -> None:
    before = metrics.counter_values()
    PLAIN.add(2)
    LABELLED.add(3, "get", "up")
    GAUGE.set(7)
    ERRORS.add(1, "kind")
    grown = metrics.counter_growth(before)
    assert sorted(grown) == [
        (LABELLED.name, ("get", "up"), 3.0),
        (PLAIN.name, (), 2.0),
    ]
    metrics.add_growth(grown)
    assert (PLAIN.value(), LABELLED.value("get", "up")) == (4, 6)


def test_a_counter_that_is_not_here_is_left_out() -> None:
    before = metrics.counter_values()
    metrics.add_growth([("forebay_unknown_total", (), 1.0), (LABELLED.name, ("one",), 1.0)])
    assert metrics.counter_growth(before) == []
