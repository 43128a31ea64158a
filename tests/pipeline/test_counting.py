"""What other processes counted is counted here."""

from __future__ import annotations

from forebay.logs import ERRORS
from forebay.metrics import Counter, Gauge
from forebay.pipeline import counting

PLAIN = Counter("test_counting_total", "Of a test.")
LABELLED = Counter("test_counting_kinds_total", "Of a test.", ["kind", "way"])
GAUGE = Gauge("test_counting_now", "Of a test.")


def test_what_was_counted_elsewhere_is_added_here() -> None:
    before = counting.counts()
    PLAIN.add(2)
    LABELLED.add(3, "get", "up")
    GAUGE.set(7)
    ERRORS.add(1, "kind")
    grown = counting.growth(before)
    assert sorted(grown) == [
        (LABELLED.name, ("get", "up"), 3.0),
        (PLAIN.name, (), 2.0),
    ]
    counting.add(grown)
    assert (PLAIN.value(), LABELLED.value("get", "up")) == (4, 6)


def test_a_counter_that_is_not_here_is_left_out() -> None:
    before = counting.counts()
    counting.add([("forebay_unknown_total", (), 1.0), (LABELLED.name, ("one",), 1.0)])
    assert counting.growth(before) == []
