"""Items into tasks of about the same size: a pure decision.

A Python task costs Spark 10 to 35 ms whatever it does, so small items share one, and large ones
get their own. The largest come first, so that no long one is left for the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from typing import TypeVar

_Item = TypeVar("_Item")


def pack(
    items: Sequence[_Item], size: Callable[[_Item], int], target: int, *, least: int = 1
) -> list[list[_Item]]:
    """Groups of at most about `target` together; `least` groups if there are items for so many.

    Within a group items stay in the order in which they came.
    """
    if not items:
        return []
    sizes = [size(item) for item in items]
    wanted = max(-(-sum(sizes) // max(target, 1)), least)
    count = min(wanted, len(items))
    heap = [(0, number) for number in range(count)]
    heapify(heap)
    groups: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(items)), key=lambda at: -sizes[at]):
        filled, number = heap[0]
        groups[number].append(at)
        # An item without bytes is work all the same.
        heapreplace(heap, (filled + max(sizes[at], 1), number))
    return [[items[at] for at in sorted(group)] for group in groups]
