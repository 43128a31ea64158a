"""Counters, gauges and histograms of this process, in Prometheus' text format.

Metrics are module-level objects named `forebay_...`, in one registry in this module. All functions
are thread-safe. Values that exist elsewhere anyway are not counted, but collected when the page is
rendered: see `Collected`.

Counters of Spark's Python workers travel with the results of their tasks to the driver, and from
there to the server that started it: `counter_growth` there, `add_growth` here. Gauges and
histograms stay in their process.

There is no Prometheus client library here because importing it takes 150 ms in every command.

Beware: update a metric once per batch, request or object, never per message.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Protocol, TypeAlias

from forebay.interrupts import holding

SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
BYTES: Final = tuple(float(4**power) for power in range(5, 17))
MESSAGES: Final = tuple(float(10**power) for power in range(1, 9))

Counts: TypeAlias = Mapping[str, Mapping[tuple[str, ...], float]]
"""Values by the name of the counter, and by the values of its labels."""
Growth: TypeAlias = Sequence[tuple[str, tuple[str, ...], float]]

_LEFT_OUT: Final = {"forebay_errors_total"}
"""Not sent by `counter_growth`: log lines are sent themselves, and counted when logged again."""

_lock = threading.RLock()
"""Taken with `holding`, because callers may be interrupted anywhere."""
_registry: Final[dict[str, Metric]] = {}


class Collector(Protocol):
    """Provides values that are not counted."""

    def collect(self) -> None:
        """Sets `Collected` gauges. May wait for a disk; must not raise."""


_collecting = threading.RLock()
"""One page at a time; taken before `_lock`."""
_collectors: Final[weakref.WeakSet[Collector]] = weakref.WeakSet()


def _unlock_in_child() -> None:
    """Replaces the locks in a forked child: a thread of the parent may have held them.

    Collectors are dropped, because their locks may be held for ever for the same reason.
    """
    global _lock, _collecting
    _lock, _collecting = threading.RLock(), threading.RLock()
    _collectors.clear()


os.register_at_fork(after_in_child=_unlock_in_child)


class Metric:
    """A metric: one value, or histogram, for each set of label values."""

    kind = "untyped"

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.text = text
        self.labels = tuple(labels)
        holding(_lock, self._register)

    def _register(self) -> None:
        assert self.name not in _registry, f"there is a metric {self.name} already"
        _registry[self.name] = self

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """Yields (suffix of the name, labels in braces, value)."""
        raise NotImplementedError

    def _require_labels(self, values: tuple[str, ...]) -> None:
        assert len(values) == len(self.labels), f"{self.name} has the labels {self.labels}"

    def _braces(self, values: Sequence[str], *more: tuple[str, str]) -> str:
        pairs = [*zip(self.labels, values, strict=True), *more]
        return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: str) -> str:
    return _on_one_line(value).replace('"', '\\"')


def _on_one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


class Counter(Metric):
    """A number that only grows."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, *values: str) -> None:
        self._require_labels(values)
        holding(_lock, lambda: self._add(amount, values))

    def _add(self, amount: float, values: tuple[str, ...]) -> None:
        self._values[values] = self._values.get(values, 0.0) + amount

    def value(self, *values: str) -> float:
        return self._values.get(values, 0.0)

    def values(self) -> dict[tuple[str, ...], float]:
        """The value for each set of label values."""
        return self._values.copy()

    def samples(self) -> Iterator[tuple[str, str, float]]:
        for values, number in sorted(self._values.items()):
            yield "", self._braces(values) if values else "", number


class Gauge(Counter):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, number: float, *values: str) -> None:
        self._require_labels(values)
        self._values[values] = number

    def forget(self, *values: str) -> None:
        """Removes the value for these label values from the page."""
        self._values.pop(values, None)


class Collected(Gauge):
    """A gauge that collectors set while the page is rendered; without a value it is left out."""

    def clear(self) -> None:
        self._values = {} if self.labels else {(): 0.0}


class Histogram(Metric):
    """Counts observations by size, in buckets with upper bounds."""

    kind = "histogram"

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        super().__init__(name, text, labels)
        self._buckets = tuple(map(float, buckets))
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self._counts[()], self._sums[()] = self._nothing(), 0.0

    def _nothing(self) -> list[int]:
        return [0] * (len(self._buckets) + 1)

    def observe(self, number: float, *values: str) -> None:
        self._require_labels(values)
        holding(_lock, lambda: self._observe(number, values))

    def _observe(self, number: float, values: tuple[str, ...]) -> None:
        counts = self._counts.setdefault(values, self._nothing())
        counts[bisect_left(self._buckets, number)] += 1
        self._sums[values] = self._sums.get(values, 0.0) + number

    def count(self, *values: str) -> int:
        return sum(self._counts.get(values, ()))

    def samples(self) -> Iterator[tuple[str, str, float]]:
        for values, counts in sorted(self._counts.items()):
            bounds = [*(repr(bound) for bound in self._buckets), "+Inf"]
            for bound, total in zip(bounds, accumulate(counts), strict=True):
                yield "_bucket", self._braces(values, ("le", bound)), total
            labels = self._braces(values) if values else ""
            yield "_sum", labels, self._sums[values]
            yield "_count", labels, sum(counts)


def catalogue() -> list[Metric]:
    """All metrics of the modules imported so far, sorted by name."""
    return [metric for _, metric in sorted(_registry.copy().items())]


def collect_from(collector: Collector) -> None:
    """Collects from it for every page from now on, as long as it exists."""
    holding(_lock, lambda: _collectors.add(collector))


def render() -> str:
    """All metrics in Prometheus' text format. May wait for a disk, because collectors may."""
    return holding(_collecting, _render)


def _render() -> str:
    for metric in catalogue():
        if isinstance(metric, Collected):
            metric.clear()
    for collector in holding(_lock, lambda: list(_collectors)):
        collector.collect()
    return holding(_lock, lambda: "".join(_page(metric) for metric in catalogue()))


def _page(metric: Metric) -> str:
    lines = [
        f"# HELP {metric.name} {_on_one_line(metric.text)}",
        f"# TYPE {metric.name} {metric.kind}",
    ]
    lines += [
        f"{metric.name}{suffix}{labels} {number:.17g}"
        for suffix, labels, number in metric.samples()
    ]
    return "\n".join(lines) + "\n"


def counter_values() -> Counts:
    """The current values of all counters of this process."""
    return {metric.name: metric.values() for metric in _counters().values()}


def counter_growth(before: Counts) -> Growth:
    """By how much counters have grown since `before`."""
    found = []
    for name, values in counter_values().items():
        known = before.get(name, {})
        for labels, number in values.items():
            more = number - known.get(labels, 0.0)
            if more > 0:
                found.append((name, labels, more))
    return found


def add_growth(grown: Growth) -> None:
    """Adds the counts of another process. Ignores counters that this process does not have."""
    known = _counters()
    for name, labels, more in grown:
        counter = known.get(name)
        if counter is not None and len(labels) == len(counter.labels):
            counter.add(more, *labels)


def _counters() -> dict[str, Counter]:
    return {
        metric.name: metric
        for metric in catalogue()
        if isinstance(metric, Counter)
        and not isinstance(metric, Gauge)
        and metric.name not in _LEFT_OUT
    }
