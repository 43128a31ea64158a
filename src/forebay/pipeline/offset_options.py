"""`startingOffsets` and `endingOffsets`: words, or Kafka's JSON.

    earliest
    latest
    {"orders": {"0": 23, "1": -2}, "/eu/returns": {"0": -1}}

In the JSON -2 is the earliest offset and -1 the latest, and a partition is the number behind
`-part-`; a topic without partitions has the number 0. Ends are not included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from forebay.errors import InvalidTopicName, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import OFFSET_MAX
from forebay.pipeline.scan_plan import EARLIEST, LATEST

_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


@dataclass(frozen=True, slots=True)
class Offsets:
    """One bound for every topic, or one for each partition that is named."""

    every: int | None = None
    """For all topics: EARLIEST or LATEST; None where partitions are named."""
    named: tuple[tuple[str, int, int], ...] = ()
    """Topic, partition, offset."""

    def of(self, topic: TopicName) -> int | None:
        """None if the topic is not named, and has to be."""
        if self.every is not None:
            return self.every
        for base, partition, offset in self.named:
            if (base, partition) == (topic.base, topic.partition):
                return offset
        return None

    def has(self, bound: int) -> bool:
        """Whether any of them is EARLIEST, or LATEST."""
        return self.every == bound or any(offset == bound for _, _, offset in self.named)

    def require_named(self, name: str, topics: list[TopicName]) -> None:
        """UsageError unless exactly these topics are named, each once, as in Kafka."""
        if self.every is not None:
            return
        there = [(topic.base, topic.partition) for topic in topics]
        twice = {each for each in there if there.count(each) > 1}
        if twice:
            base, partition = min(twice)
            raise UsageError(
                f"{name}: {base} and {base}-part-{partition} are both partition {partition} of "
                f"{base}: subscribe to one of them"
            )
        named = {(base, partition) for base, partition, _ in self.named}
        missing = [f"{base} {number}" for base, number in there if (base, number) not in named]
        unknown = [f"{base} {number}" for base, number in sorted(named - set(there))]
        if missing or unknown:
            said = [f"it leaves out {', '.join(missing)}"] if missing else []
            said += [f"it names {', '.join(unknown)}, which is not subscribed"] if unknown else []
            raise UsageError(
                f"{name} has to name every partition that is read, and no other: {'; '.join(said)}"
            )


def parse_offsets(name: str, text: str) -> Offsets:
    """UsageError, with the name of the option, for anything else."""
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return Offsets(word)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(name, text, str(error)) from error
    if not isinstance(body, dict) or not body:
        raise _wrong(name, text, "it is no object with topics in it")
    named: dict[tuple[str, int], int] = {}
    for topic, partitions in body.items():
        try:
            base = parse_topic(topic)
        except InvalidTopicName as error:
            raise _wrong(name, text, str(error)) from error
        if not isinstance(partitions, dict) or not partitions:
            raise _wrong(name, text, f"{topic} has no partitions in it")
        for digits, offset in partitions.items():
            number = _partition(name, text, digits)
            # The whole name of a partition, as the checkpoint of a stream has it, is one too.
            whole = base.base != str(base) and number == base.partition
            named[base.base if whole else str(base), number] = _offset(name, text, offset)
    return Offsets(None, tuple((base, number, offset) for (base, number), offset in named.items()))


def _partition(name: str, text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit() and len(number) <= 9):
        raise _wrong(name, text, f"{number!r} is no number of a partition")
    return int(number)


def _offset(name: str, text: str, offset: Any) -> int:
    if type(offset) is not int or not EARLIEST <= offset <= OFFSET_MAX:
        raise _wrong(name, text, f"{offset!r} is no offset, and neither -2 nor -1")
    return offset


def _wrong(name: str, text: str, why: str) -> UsageError:
    return UsageError(
        f"{name} is {text!r}; it must be earliest, latest, or JSON such as "
        f'{{"orders": {{"0": 23}}}}: {why}'
    )
