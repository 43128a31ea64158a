"""The ledgers that a stream has read, as its checkpoint stores them.

    {"persistent://public/default/orders": "5-9,14"}

For each topic the numbers of its ledgers: single ones, and runs of consecutive ones. Ledgers are
numbered by the cluster for all topics, and those of a topic are offloaded in any order, so a number
between two that were read may still come. The set therefore names each ledger, and grows by one
number with each; it has at most STREAM_LEDGERS_MAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from forebay.errors import UsageError
from forebay.limits import OFFSET_MAX, STREAM_LEDGERS_MAX

Seen: TypeAlias = dict[str, frozenset[int]]
"""For each topic, the numbers of the ledgers that were read."""

_RUN: Final = re.compile(r"(?P<first>\d{1,19})(?:-(?P<last>\d{1,19}))?", re.ASCII)
_SHAPE: Final = 'it should look like {"persistent://public/default/orders": "5-9,14"}'


def encode_seen(seen: Mapping[str, Iterable[int]]) -> dict[str, str]:
    """The set as JSON; UsageError if it has too many ledgers."""
    found = {topic: sorted(set(seen[topic])) for topic in sorted(seen)}
    count = sum(len(numbers) for numbers in found.values())
    if count > STREAM_LEDGERS_MAX:
        raise UsageError(
            f"a stream remembers at most {STREAM_LEDGERS_MAX} ledgers, and this one has {count}: "
            "subscribe to fewer topics in one query"
        )
    return {topic: ",".join(_runs(numbers)) for topic, numbers in found.items() if numbers}


def _runs(numbers: list[int]) -> Iterable[str]:
    at = 0
    while at < len(numbers):
        stop = at + 1
        while stop < len(numbers) and numbers[stop] == numbers[stop - 1] + 1:
            stop += 1
        first, last = numbers[at], numbers[stop - 1]
        yield str(first) if first == last else f"{first}-{last}"
        at = stop


def decode_seen(document: object) -> Seen:
    """The inverse of `encode_seen`; UsageError for anything else."""
    if not isinstance(document, dict):
        raise UsageError(f"{document!r} is not a position of a stream: {_SHAPE}")
    left = STREAM_LEDGERS_MAX
    found: Seen = {}
    for topic, text in document.items():
        numbers: set[int] = set()
        for part in text.split(",") if isinstance(text, str) else ("",):
            match = _RUN.fullmatch(part)
            first = int(match["first"]) if match else -1
            last = int(match["last"] or first) if match else -1
            if not 0 <= first <= last <= OFFSET_MAX or last - first >= left:
                raise UsageError(f"{topic}: {text!r} in a stream's position is wrong: {_SHAPE}")
            numbers.update(range(first, last + 1))
            left -= last - first + 1
        found[topic] = frozenset(numbers)
    return found
