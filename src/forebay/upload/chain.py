"""Which of the objects in a bucket make the chain: a pure decision, for restores.

More objects may be there than count: what a compaction replaced, or has not yet replaced; orphans
of uploads that were planned anew; the same range under two names. The bytes of an offset are the
same in all of them, so any chain without a gap is right. The one with the fewest objects is
chosen, which is the compacted one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

Range: TypeAlias = tuple[int, int]


class Chain(NamedTuple):
    ranges: tuple[Range, ...]
    """Of the chosen objects, the ends included, ascending and without overlap."""
    gaps: tuple[Range, ...]
    """Offsets, the ends not included, that no chosen object holds."""


def choose_chain(
    ranges: Iterable[Range], start: int | None = None, until: int | None = None
) -> Chain:
    """The chain with the fewest offsets missing, and then with the fewest objects.

    It runs from `start`, or else from the lowest offset there is, to the highest one, or to
    `until` if that is beyond it. Ranges that begin before `start` are left out.
    """
    wanted = sorted({each for each in ranges if start is None or each[0] >= start})
    first = start if start is not None else (wanted[0][0] if wanted else 0)
    stop = max([first, until or 0, *(end + 1 for _, end in wanted)])
    starts = sorted({first, *(begin for begin, _ in wanted)})
    places = [*starts, stop]
    best: list[tuple[int, int]] = [(0, 0)] * len(places)
    """For each place: offsets missing and objects used from there to the end."""
    picks: list[int | None] = [None] * len(starts)
    ends: dict[int, list[int]] = {}
    for begin, end in wanted:
        ends.setdefault(begin, []).append(end)
    for at in range(len(starts) - 1, -1, -1):
        best[at] = (best[at + 1][0] + places[at + 1] - places[at], best[at + 1][1])
        for end in ends.get(places[at], ()):
            then = bisect_left(places, end + 1)
            cost = (best[then][0] + places[then] - end - 1, best[then][1] + 1)
            if cost <= best[at]:
                best[at], picks[at] = cost, end
    return _followed(places, picks)


def _followed(places: list[int], picks: list[int | None]) -> Chain:
    ranges: list[Range] = []
    gaps: list[Range] = []
    position = places[0]
    at = 0
    while at < len(picks):
        end = picks[at]
        if end is None:
            at += 1
            continue
        if places[at] > position:
            gaps.append((position, places[at]))
        ranges.append((places[at], end))
        position = end + 1
        at = bisect_left(places, position)
    if places[-1] > position:
        gaps.append((position, places[-1]))
    return Chain(tuple(ranges), tuple(gaps))
