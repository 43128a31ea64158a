"""Counters, gauges and histograms, and the page that Prometheus reads."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from typing import Final

import pytest

from forebay import metrics
from forebay.metrics import (
    BYTES,
    MESSAGES,
    SECONDS,
    Collected,
    Counter,
    Gauge,
    Histogram,
    Metric,
    collect_from,
)
from support.disks import PATIENCE_SECONDS
from support.paths import ROOT
from support.prometheus_text import Family, parse

PAGE: Final = ROOT / "docs" / "guide" / "metrics.md"
HOSTILE: Final = 'back\\slash "quote"\nnext line, {braces}='


def read(metric: Metric) -> Family:
    """The metric as the page shows it."""
    return parse(metrics.render())[metric.name]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Metric]:
    """An empty registry, so that metrics of these tests are on no other page."""
    own: dict[str, Metric] = {}
    monkeypatch.setattr(metrics, "_registry", own)
    return own


def test_a_counter_starts_at_nothing_and_adds_up() -> None:
    counter = Counter("made_total", "Things that were made.")
    assert read(counter) == Family(
        "made_total", "Things that were made.", "counter", {("", ()): 0.0}
    )
    counter.add()
    counter.add(2.5)
    assert counter.value() == read(counter).total == 3.5


def test_labels_tell_numbers_apart() -> None:
    counter = Counter("done_total", "Done.", ["operation", "outcome"])
    assert read(counter).samples == {}
    counter.add(1, "put", "ok")
    counter.add(2, "get", "failed")
    counter.add(1, "put", "ok")
    assert counter.value("put", "ok") == 2
    assert counter.value("put", "failed") == 0
    assert read(counter).samples == {
        ("", (("operation", "get"), ("outcome", "failed"))): 2,
        ("", (("operation", "put"), ("outcome", "ok"))): 2,
    }


def test_a_gauge_goes_up_and_down_and_can_be_forgotten() -> None:
    gauge = Gauge("lag", "Behind.", ["topic"])
    gauge.set(7, "a")
    gauge.add(-3, "a")
    gauge.set(-1, "b")
    assert read(gauge).samples == {("", (("topic", "a"),)): 4, ("", (("topic", "b"),)): -1}
    gauge.forget("b")
    gauge.forget("never set")
    assert read(gauge).samples == {("", (("topic", "a"),)): 4}


def test_a_histogram_counts_what_is_at_most_so_large() -> None:
    histogram = Histogram("size_bytes", "Sizes.", (1, 10, 100))
    assert read(histogram).total == 0
    for number in (0.5, 1, 1.01, 10, 99, 1000):
        histogram.observe(number)
    samples = read(histogram).samples
    buckets = {labels[0][1]: number for (end, labels), number in samples.items() if labels}
    assert buckets == {"1.0": 2, "10.0": 4, "100.0": 5, "+Inf": 6}
    assert samples["_sum", ()] == 1111.51
    assert samples["_count", ()] == histogram.count() == 6


def test_a_histogram_with_labels_is_one_for_each_of_them() -> None:
    histogram = Histogram("wait_seconds", "Waiting.", SECONDS, ["operation"])
    histogram.observe(0.2, "get")
    histogram.observe(500, "put")
    samples = read(histogram).samples
    assert samples["_bucket", (("operation", "put"), ("le", "300.0"))] == 0
    assert samples["_count", (("operation", "put"),)] == 1
    assert samples["_count", (("operation", "get"),)] == 1


@pytest.mark.parametrize("buckets", [SECONDS, BYTES, MESSAGES], ids=["seconds", "bytes", "count"])
def test_the_bounds_on_the_page_are_exactly_those_that_are_compared(
    buckets: tuple[float, ...],
) -> None:
    histogram = Histogram("exact", "Bounds.", buckets)
    shown = [float(labels[0][1]) for end, labels in read(histogram).samples if end == "_bucket"]
    assert shown == [*buckets, float("inf")]


def test_what_texts_and_labels_hold_breaks_no_line() -> None:
    counter = Counter("hostile_total", HOSTILE, ["label"])
    counter.add(1, HOSTILE)
    found = read(counter)
    assert found.text == HOSTILE
    assert found.samples == {("", (("label", HOSTILE),)): 1}


def test_large_numbers_lose_nothing() -> None:
    counter = Counter("bytes_total", "Bytes.")
    counter.add(2**53 - 1)
    assert read(counter).total == 2**53 - 1


def test_a_metric_has_one_place_and_its_labels_are_always_given() -> None:
    counter = Counter("once_total", "Once.", ["kind"])
    with pytest.raises(AssertionError, match="once_total"):
        Gauge("once_total", "Twice.")
    gauge, histogram = Gauge("level", "Level."), Histogram("spread", "Spread.", SECONDS)
    with pytest.raises(AssertionError, match=r"^once_total "):
        counter.add()
    with pytest.raises(AssertionError, match=r"^level "):
        gauge.set(1, "surplus")
    with pytest.raises(AssertionError, match=r"^spread "):
        histogram.observe(1, "surplus")
    assert read(counter).samples == {}


def test_no_count_is_lost_between_threads_while_the_page_is_read() -> None:
    counter = Counter("shared_total", "Shared.", ["thread"])
    histogram = Histogram("shared_seconds", "Shared.", SECONDS)
    start = threading.Barrier(5)

    def count(name: str) -> None:
        start.wait(PATIENCE_SECONDS)
        for turn in range(2000):
            counter.add(1, "all")
            counter.add(1, f"{name}-{turn % 50}")
            histogram.observe(turn)

    threads = [threading.Thread(target=count, args=[str(number)]) for number in range(4)]
    for thread in threads:
        thread.start()
    start.wait(PATIENCE_SECONDS)
    while any(thread.is_alive() for thread in threads):
        parse(metrics.render())
    assert counter.value("all") == 8000
    assert read(counter).total == 16000
    assert histogram.count() == 8000


# ---- what is asked for when the page is made --------------------------------------------------


class Shop:
    """Knows how full its shelves are."""

    def __init__(self, gauge: Collected, shelves: dict[str, int]) -> None:
        self._gauge = gauge
        self.shelves = shelves
        collect_from(self)

    def collect(self) -> None:
        for name, number in self.shelves.items():
            self._gauge.set(number, name)


def test_a_collector_is_asked_for_every_page(registry: dict[str, Metric]) -> None:
    gauge = Collected("shelf", "Full.", ["name"])
    shop = Shop(gauge, {"a": 1})
    assert read(gauge).samples == {("", (("name", "a"),)): 1}
    shop.shelves = {"a": 2, "b": 3}
    assert read(gauge).samples == {("", (("name", "a"),)): 2, ("", (("name", "b"),)): 3}


def test_what_a_collector_no_longer_tells_is_on_no_page(registry: dict[str, Metric]) -> None:
    gauge = Collected("shelf", "Full.", ["name"])
    shop = Shop(gauge, {"a": 1, "b": 1})
    assert len(read(gauge).samples) == 2
    del shop.shelves["a"]
    assert read(gauge).samples == {("", (("name", "b"),)): 1}
    del shop
    assert read(gauge).samples == {}, "nobody holds it any more"


def test_what_several_collectors_tell_is_on_one_page(registry: dict[str, Metric]) -> None:
    gauge = Collected("shelf", "Full.", ["name"])
    shops = [Shop(gauge, {"a": 1}), Shop(gauge, {"b": 2})]
    assert read(gauge).total == 3
    assert len(shops) == 2


def test_pages_that_are_made_at_once_are_each_whole(registry: dict[str, Metric]) -> None:
    gauge = Collected("shelf", "Full.", ["name"])
    shop = Shop(gauge, {str(number): 1 for number in range(200)})
    start = threading.Barrier(4)
    seen: list[int] = []

    def look() -> None:
        start.wait(PATIENCE_SECONDS)
        seen.extend(len(parse(metrics.render())["shelf"].samples) for _ in range(20))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [len(shop.shelves)] * 80


# ---- the page for users -----------------------------------------------------------------------

DEFINING: Final = re.compile(
    r"^\w+(?:: Final)? = (?:Counter|Gauge|Collected|Histogram)\(", re.MULTILINE
)
LISTED: Final = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from forebay.metrics import catalogue
for each in catalogue():
    labels = ", ".join(f"`{label}`" for label in each.labels)
    print(f"| `{each.name}` | {each.kind} | {labels} | {each.text} |")
"""


def modules() -> list[str]:
    """The modules of the library that define metrics."""
    source = ROOT / "src"
    return [
        ".".join(path.relative_to(source).with_suffix("").parts)
        for path in sorted(source.rglob("*.py"))
        if DEFINING.search(path.read_text(encoding="utf-8"))
    ]


@pytest.fixture(scope="module")
def rows() -> list[str]:
    """A row for each metric of a process that has imported them all, and nothing else."""
    found = subprocess.run(
        [sys.executable, "-c", LISTED, *modules()], capture_output=True, text=True, check=True
    )
    return found.stdout.splitlines()


def test_the_page_lists_every_metric_as_it_is(rows: list[str]) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    shown = [line for line in lines if line.startswith("| `forebay_")]
    assert shown == rows, "the table should be:\n" + "\n".join(rows)


def test_every_metric_of_the_design_is_there(rows: list[str]) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Names of the design")[2]
    ours = re.findall(r"^\| `[\w.]+` \| `(\w+)`", text, re.MULTILINE)
    there = {re.match(r"\| `(\w+)`", row)[1] for row in rows}  # type: ignore[index] # else it fails
    assert len(ours) == 22
    assert sorted(set(ours) - there) == []


def test_names_follow_the_conventions(rows: list[str]) -> None:
    assert len(rows) > 25
    for row in rows:
        name, kind = re.match(r"\| `(\w+)` \| (\w+) \|", row).groups()  # type: ignore[union-attr] # else it fails, as it should
        assert name.startswith("forebay_")
        assert name.endswith("_total") == (kind == "counter"), name
        assert row.endswith(". |"), "a meaning is a sentence"
