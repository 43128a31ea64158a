"""What other processes of a job counted, carried to the process whose page shows it.

Requests to the object store are counted where they are made: in Spark's Python workers. What a task
counted travels with its results to the driver, and what the driver counted, with its events, to the
server that started it. Counters alone: gauges are of one process, histograms stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from forebay.logs import ERRORS
from forebay.metrics import Counter, Gauge, catalogue

Counts: TypeAlias = Mapping[str, Mapping[tuple[str, ...], float]]
"""By the name of the counter, and by the values of its labels."""
Growth: TypeAlias = Sequence[tuple[str, tuple[str, ...], float]]

_LEFT_OUT: Final = {ERRORS.name}
"""Log lines travel themselves, and are counted where they are logged again."""


def counts() -> Counts:
    """All counters of this process as they are."""
    return {metric.name: metric.values() for metric in _counters().values()}


def growth(before: Counts) -> Growth:
    """What was counted since."""
    found = []
    for name, values in counts().items():
        known = before.get(name, {})
        for labels, number in values.items():
            more = number - known.get(labels, 0.0)
            if more > 0:
                found.append((name, labels, more))
    return found


def add(grown: Growth) -> None:
    """Counts here what was counted elsewhere; a counter that this process lacks is left out."""
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
