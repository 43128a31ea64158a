"""The options of `spark.read.format("forebay")` and of `readStream`, parsed and checked.

Names and meanings are those of Spark's Kafka source where both have the option, so that a query
moves from one to the other by changing its format and its address. An option that only the Kafka
source has raises UsageError, which says what to use instead. So does an unknown option: none is
ignored silently.

Beware: option names are case-insensitive, and Spark passes them in lower case.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from forebay.config.quantities import BYTES, parse_quantity
from forebay.errors import InvalidTopicName, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import GIB, KIB, OFFSET_MAX
from forebay.logs import event
from forebay.pipeline.location import ADDRESS_NAMES, is_address, store_settings
from forebay.pipeline.source.plan import EARLIEST, LATEST, SPLIT_BYTES
from forebay.settings import StoreSettings

_log: Final = logging.getLogger("forebay.pipeline")


# ---- startingOffsets and endingOffsets

_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


@dataclass(frozen=True, slots=True)
class Offsets:
    """One bound for all topics, or one for each named partition."""

    every: int | None = None
    """EARLIEST or LATEST, for all topics; None if partitions are named."""
    named: tuple[tuple[str, int, int], ...] = ()
    """(topic, partition, offset)"""

    def of(self, topic: TopicName) -> int | None:
        """The bound of the topic; None if partitions are named and this one is not."""
        if self.every is not None:
            return self.every
        for base, partition, offset in self.named:
            if (base, partition) == (topic.base, topic.partition):
                return offset
        return None

    def has(self, bound: int) -> bool:
        """Whether any bound is `bound`, which is EARLIEST or LATEST."""
        return self.every == bound or any(offset == bound for _, _, offset in self.named)

    def require_named(self, name: str, topics: list[TopicName]) -> None:
        """Raises UsageError unless exactly these topics are named, each once, as Kafka requires.

        `name` is the option, for the message.
        """
        if self.every is not None:
            return
        there = [(topic.base, topic.partition) for topic in topics]
        named = {(base, partition) for base, partition, _ in self.named}
        missing = [f"{base} {number}" for base, number in there if (base, number) not in named]
        unknown = [f"{base} {number}" for base, number in sorted(named - set(there))]
        if missing or unknown:
            said = [f"it leaves out {', '.join(missing)}"] if missing else []
            said += [f"it names {', '.join(unknown)}, which is not subscribed"] if unknown else []
            raise UsageError(
                f"{name} must name every partition that is read, and no other: {'; '.join(said)}"
            )


def parse_offsets(name: str, text: str) -> Offsets:
    """Parses `earliest`, `latest`, or Kafka's JSON: `{"orders": {"0": 23, "1": -2}}`.

    In the JSON, -2 is the earliest offset and -1 the latest. A partition is the number after
    `-part-`; a topic without partitions has the number 0. An ending offset is not included.
    UsageError, with the name of the option, for anything else.
    """
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return Offsets(word)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(name, text, str(error)) from error
    if not isinstance(body, dict) or not body:
        raise _wrong(name, text, "it is not a JSON object with topics in it")
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
            # Also accept the full name of a partition, as it is in the checkpoint of a stream.
            whole = base.base != str(base) and number == base.partition
            named[base.base if whole else str(base), number] = _offset(name, text, offset)
    return Offsets(None, tuple((base, number, offset) for (base, number), offset in named.items()))


def _partition(name: str, text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit() and len(number) <= 9):
        raise _wrong(name, text, f"{number!r} is not a partition number")
    return int(number)


def _offset(name: str, text: str, offset: Any) -> int:
    if type(offset) is not int or not EARLIEST <= offset <= OFFSET_MAX:
        raise _wrong(name, text, f"{offset!r} is not an offset, -2 or -1")
    return offset


def _wrong(name: str, text: str, why: str) -> UsageError:
    return UsageError(
        f"{name} is {text!r}; it must be earliest, latest, or JSON such as "
        f'{{"orders": {{"0": 23}}}}: {why}'
    )


# ---- all options

COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
"""In the order of the schema."""
HEADERS: Final = "headers"

_NAMES: Final = (
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "failOnDataLoss",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minPartitions",
    "includeHeaders",
    "columns",
    "splitBytes",
)
_PER_TRIGGER: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger")
_KAFKA_ONLY: Final = {
    "assign": "name the partitions in subscribe, as in 'orders-part-0,orders-part-1'",
    "startingOffsetsByTimestamp": "use startingTimestamp, which applies to all topics",
    "endingOffsetsByTimestamp": "use endingTimestamp, which applies to all topics",
    "startingOffsetsByTimestampStrategy": "a time after the last message always means the end",
    "minOffsetsPerTrigger": "use the query's trigger interval",
    "maxTriggerDelay": "use the query's trigger interval",
    "maxRecordsPerPartition": "use splitBytes, which bounds a task by its bytes",
    "groupIdPrefix": "there are no consumer groups: the position is in the query's checkpoint",
    "kafkaConsumer.pollTimeoutMs": "this source does not poll: leave it out",
    "fetchOffset.numRetries": "Spark retries tasks itself: leave it out",
    "fetchOffset.retryIntervalMs": "Spark retries tasks itself: leave it out",
}
_SINK: Final = ("topic", "sinkId", "batchId")


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """The options of a scan, parsed. Can be pickled."""

    settings: StoreSettings = field(repr=False)
    """The settings of the store; every path in them is absolute."""
    topics: tuple[TopicName, ...] = ()
    """The topics that are subscribed by name."""
    pattern: str | None = None
    """The regular expression of the topics, if they are not subscribed by name."""
    starting: Offsets = field(default_factory=lambda: Offsets(EARLIEST))
    ending: Offsets = field(default_factory=lambda: Offsets(LATEST))
    starting_time: int | None = None
    """Milliseconds since 1970; replaces `starting`."""
    ending_time: int | None = None
    fail_on_data_loss: bool = True
    offsets_per_trigger: int | None = None
    bytes_per_trigger: int | None = None
    partitions_min: int = 1
    columns: tuple[str, ...] = COLUMNS
    split_bytes: int = SPLIT_BYTES

    def chosen(self, names: list[str]) -> list[TopicName]:
        """The subscribed topics among `names`, with their partitions, sorted.

        UsageError if a topic that is subscribed by name is missing, or if two of them would be the
        same partition. A pattern may match none.
        """
        there = [parse_topic(name) for name in sorted(names)]
        if self.pattern is not None:
            return require_apart([topic for topic in there if _matches(self.pattern, topic)])
        for wanted in self.topics:
            if not any(str(wanted) in (str(topic), topic.base) for topic in there):
                near = difflib.get_close_matches(str(wanted), names, n=1)
                hint = f"; the nearest is {near[0]}" if near else ""
                raise UsageError(f"there is no topic {wanted} in the store{hint}")
        wanted_names = {str(wanted) for wanted in self.topics}
        return require_apart([topic for topic in there if wanted_names & {str(topic), topic.base}])


def require_apart(topics: list[TopicName]) -> list[TopicName]:
    """Returns the topics; UsageError if two of them are the same partition of one topic.

    Their rows would have the same topic, partition and offset.
    """
    for topic in topics:
        twin = topic.twin
        if twin is not None and topic.is_partition and twin in topics:
            raise UsageError(
                f"{twin} and {topic} are both partition 0 of {twin}: rows of both would have the "
                f"same topic, partition and offset. Read {topic} alone, or copy one of them to a "
                f"topic of another name (forebay replay {twin} NAME) and read that"
            )
    return topics


def _require_ascending(starting: Offsets, ending: Offsets, times: tuple[int | None, ...]) -> None:
    """Raises UsageError if the end is before the start, as far as the options themselves tell."""
    ends = {(base, partition): offset for base, partition, offset in ending.named}
    for base, partition, start in starting.named:
        end = ends.get((base, partition), LATEST)
        if 0 <= end < start:
            raise UsageError(
                f"{base}, partition {partition}: startingOffsets is {start}, after endingOffsets, "
                f"which is {end}: choose an end that is not before the start"
            )
    first, last = times
    if first is not None and last is not None and last < first:
        raise UsageError(
            f"startingTimestamp is {first}, after endingTimestamp, which is {last}: choose an end "
            "that is not before the start"
        )


def scan_options(options: Mapping[str, str], *, streaming: bool = False) -> ScanOptions:
    """Parses the options; UsageError or InvalidTopicName, which say what to write instead."""
    given = GivenOptions(options)
    _refuse_unknown(options)
    topics, pattern = _subscription(given)
    starting, starting_time = _start(given, streaming=streaming)
    ending, ending_time = _end(given, streaming=streaming)
    _require_ascending(starting, ending, (starting_time, ending_time))
    offsets = given.number("maxOffsetsPerTrigger", least=1)
    size = given.size("maxBytesPerTrigger", least=1)
    if not streaming:
        for name in _PER_TRIGGER:
            if given.text(name) is not None:
                event(_log, logging.WARNING, "option ignored by a batch query", option=name)
    return ScanOptions(
        store_settings(options),
        topics,
        pattern,
        starting,
        ending,
        starting_time,
        ending_time,
        fail_on_data_loss=given.flag("failOnDataLoss", default=True),
        offsets_per_trigger=offsets,
        bytes_per_trigger=size,
        partitions_min=given.number("minPartitions", least=1, most=1_000_000) or 1,
        columns=_columns(given),
        split_bytes=given.size("splitBytes", least=64 * KIB, most=1024 * GIB) or SPLIT_BYTES,
    )


# ---- single values


class GivenOptions:
    """The options by name, case-insensitive. Its methods raise UsageError for a bad value."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}

    def text(self, name: str) -> str | None:
        return self._values.get(name.lower())

    def number(self, name: str, *, least: int = 0, most: int = OFFSET_MAX) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"\s*\d{1,19}\s*", text, re.ASCII) or not least <= int(text) <= most:
            raise UsageError(f"{name} is {text!r}; it must be a whole number in {least}..{most}")
        return int(text)

    def size(self, name: str, *, least: int, most: int = OFFSET_MAX) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        size = parse_quantity(text.strip(), BYTES)
        if size is None or size.denominator != 1 or not least <= size <= most:
            raise UsageError(
                f"{name} is {text!r}; it must be a size such as '64MiB', or a number of bytes, in "
                f"{least}..{most}"
            )
        return int(size)

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in ("true", "false"):
            raise UsageError(f"{name} is {text!r}; it must be true or false")
        return text.strip().lower() == "true"

    def listed(self, name: str) -> list[str] | None:
        text = self.text(name)
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise UsageError(f"{name} is {text!r}; it must be a comma-separated list of names")
        return parts


def _refuse_unknown(options: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in (*_NAMES, *ADDRESS_NAMES)}
    kafka = {name.lower(): (name, instead) for name, instead in _KAFKA_ONLY.items()}
    sink = {name.lower(): name for name in _SINK}
    for given in options:
        name = given.lower()
        if name in known or is_address(name):
            continue
        if name in kafka:
            raise UsageError(
                f"{kafka[name][0]} is an option of Spark's Kafka source only: {kafka[name][1]}"
            )
        if name.startswith("kafka."):
            raise UsageError(
                f"{given} is a setting of Kafka clients: use path, or catalog and store, to say "
                "where the store is"
            )
        if name in sink:
            raise UsageError(f"{sink[name]} is an option of the sink; to read, use subscribe")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        raise UsageError(f"there is no option {given!r}; the nearest is {known[near]!r}")


# ---- what to read


def _subscription(given: GivenOptions) -> tuple[tuple[TopicName, ...], str | None]:
    names, pattern = given.listed("subscribe"), given.text("subscribePattern")
    if (names is None) == (pattern is None):
        raise UsageError(
            "give exactly one of subscribe (a comma-separated list of topics) and "
            "subscribePattern (a regular expression)"
        )
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"subscribePattern is {pattern!r}, which is not a regular expression: {error}"
            ) from error
    return tuple(parse_topic(name) for name in names or ()), pattern


def _matches(pattern: str, topic: TopicName) -> bool:
    """Whether the pattern matches the whole name, or the name without `/default/`."""
    spelled = {str(topic), topic.base}
    spelled |= {name.removeprefix("/default/") for name in spelled}
    return any(re.fullmatch(pattern, name) for name in spelled)


def _start(given: GivenOptions, *, streaming: bool) -> tuple[Offsets, int | None]:
    text, time = given.text("startingOffsets"), given.number("startingTimestamp")
    if text is not None and time is not None:
        raise UsageError("give startingOffsets or startingTimestamp, not both")
    if text is None:
        return Offsets(LATEST if streaming else EARLIEST), time
    found = parse_offsets("startingOffsets", text)
    if not streaming and found.has(LATEST):
        raise UsageError(
            f"startingOffsets is {text!r}; a batch query that starts at the latest offset reads "
            "nothing: use earliest, or offsets"
        )
    return found, None


def _end(given: GivenOptions, *, streaming: bool) -> tuple[Offsets, int | None]:
    text, time = given.text("endingOffsets"), given.number("endingTimestamp")
    if streaming and (text is not None or time is not None):
        name = "endingTimestamp" if text is None else "endingOffsets"
        raise UsageError(
            f"{name} is for batch queries only; to end a stream, use trigger(availableNow=True)"
        )
    if text is not None and time is not None:
        raise UsageError("give endingOffsets or endingTimestamp, not both")
    if text is None:
        return Offsets(LATEST), time
    found = parse_offsets("endingOffsets", text)
    if found.has(EARLIEST):
        raise UsageError(
            f"endingOffsets is {text!r}; a query that ends at the earliest offset reads nothing: "
            "use latest, or offsets"
        )
    return found, None


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that the options choose, in order; the default ones for the options of a sink."""
    return _columns(GivenOptions(options))


def _columns(given: GivenOptions) -> tuple[str, ...]:
    headers = given.flag("includeHeaders", default=False)
    names = given.listed("columns")
    if names is None:
        return (*COLUMNS, HEADERS) if headers else COLUMNS
    known = {name.lower(): name for name in (*COLUMNS, HEADERS)}
    chosen = []
    for name in names:
        if name.lower() not in known:
            raise UsageError(
                f"there is no column {name!r}; columns are {', '.join(known.values())}"
            )
        chosen.append(known[name.lower()])
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"columns is {given.text('columns')!r}; name each column only once")
    if headers and HEADERS not in chosen:
        raise UsageError("includeHeaders is true, but columns does not name headers: add it")
    return tuple(chosen)
