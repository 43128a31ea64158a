"""The options of `spark.read.format("pulsar-offload")` and of `readStream`, parsed and checked.

| option                              | what it is                                               |
|-------------------------------------|----------------------------------------------------------|
| `path`                              | a directory, `s3://`, `gs://` or `azure://` with prefix  |
| `store.<name>`                      | an option of the store, such as `store.endpoint`         |
| `subscribe`, `subscribePattern`     | topics; all, if neither is given                         |
| `startingTimestamp`                 | messages published at that time or later, in ms          |
| `endingTimestamp`                   | messages published before that time; batch queries only  |
| `columns`                           | the columns that you need                                |
| `splitBytes`                        | blocks are packed into tasks of up to this size          |
| `failOnDataLoss`                    | false: skip what is damaged or gone, and log it          |
| `maxLedgersPerTrigger`              | of a stream                                              |
| `maxBytesPerTrigger`                | of a stream                                              |

Beware: option names are case-insensitive, and Spark passes them in lower case.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from forebay.errors import UsageError
from forebay.format.pulsar.topic import PulsarTopic
from forebay.limits import GIB, KIB, MIB
from forebay.pipeline.location import cloud_settings
from forebay.pipeline.source.options import GivenOptions
from forebay.settings import CloudSettings, StoreSettings

COLUMNS: Final = (
    "value",
    "__key",
    "__topic",
    "__messageId",
    "__publishTime",
    "__eventTime",
    "__messageProperties",
    "__ledgerId",
    "__entryId",
    "__batchIndex",
    "__partition",
    "__kind",
)
"""In the order of the schema. The first seven are those of pulsar-spark."""
MORE_COLUMNS: Final = (
    "__sequenceId",
    "__producerName",
    "__schemaVersion",
    "__orderingKey",
    "__index",
)
"""Only if they are named in `columns`."""

SPLIT_BYTES: Final = 64 * MIB
"""A block of Pulsar has this size by default, and is then one task."""

_NAMES: Final = (
    "path",
    "subscribe",
    "subscribePattern",
    "startingTimestamp",
    "endingTimestamp",
    "columns",
    "splitBytes",
    "failOnDataLoss",
    "maxLedgersPerTrigger",
    "maxBytesPerTrigger",
)
_ELSEWHERE: Final = {
    "service.url": "no broker is asked: the option path says where the ledgers are",
    "admin.url": "no broker is asked: the option path says where the ledgers are",
    "topic": "use subscribe",
    "topics": "use subscribe, with commas between the topics",
    "topicspattern": "use subscribePattern",
    "startingoffsets": "use startingTimestamp, or filter by __ledgerId and __entryId",
    "endingoffsets": "use endingTimestamp, or filter by __ledgerId and __entryId",
    "maxoffsetspertrigger": "use maxLedgersPerTrigger or maxBytesPerTrigger",
    "store": "use path",
}


@dataclass(frozen=True, slots=True)
class PulsarOptions:
    """The options of a scan, parsed. Can be pickled."""

    cloud: CloudSettings = field(repr=False)
    topics: tuple[str, ...] = ()
    """The topics that are subscribed by name, as given. Without these and a pattern: all."""
    pattern: str | None = None
    starting_time: int | None = None
    """Milliseconds since 1970, included."""
    ending_time: int | None = None
    """Milliseconds since 1970, not included."""
    columns: tuple[str, ...] = COLUMNS
    split_bytes: int = SPLIT_BYTES
    fail_on_data_loss: bool = True
    ledgers_per_trigger: int | None = None
    bytes_per_trigger: int | None = None

    @property
    def settings(self) -> StoreSettings:
        """Settings with which executors open the bucket."""
        return StoreSettings(data=None, cloud=self.cloud)

    def matches(self, topic: PulsarTopic) -> bool:
        if self.pattern is not None:
            return any(re.fullmatch(self.pattern, name) for name in topic.spellings)
        return not self.topics or not topic.spellings.isdisjoint(self.topics)

    def require_topics(self, there: Iterable[PulsarTopic]) -> None:
        """Raises UsageError if a topic that is subscribed by name has no ledger."""
        names = {name for topic in there for name in topic.spellings}
        for wanted in self.topics:
            if wanted not in names:
                near = difflib.get_close_matches(wanted, names, n=1)
                hint = f"; the nearest is {near[0]}" if near else ""
                raise UsageError(f"the bucket has no ledger of the topic {wanted}{hint}")


def pulsar_options(options: Mapping[str, str], *, streaming: bool = False) -> PulsarOptions:
    """Parses the options; UsageError says what to write instead."""
    given = GivenOptions(options)
    _refuse_unknown(options)
    names, pattern = given.listed("subscribe"), given.text("subscribePattern")
    if names is not None and pattern is not None:
        raise UsageError("give subscribe or subscribePattern, not both")
    if pattern is not None:
        _require_pattern(pattern)
    start, end = given.number("startingTimestamp"), given.number("endingTimestamp")
    if streaming and end is not None:
        raise UsageError(
            "endingTimestamp is for batch queries only; to end a stream, use "
            "trigger(availableNow=True)"
        )
    if start is not None and end is not None and end < start:
        raise UsageError(
            f"startingTimestamp is {start}, after endingTimestamp, which is {end}: choose an end "
            "that is not before the start"
        )
    return PulsarOptions(
        bucket_settings(options),
        tuple(names or ()),
        pattern,
        start,
        end,
        columns_of(options),
        given.size("splitBytes", least=64 * KIB, most=1024 * GIB) or SPLIT_BYTES,
        given.flag("failOnDataLoss", default=True),
        given.number("maxLedgersPerTrigger", least=1),
        given.size("maxBytesPerTrigger", least=1),
    )


def _require_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"subscribePattern is {pattern!r}, which is not a regular expression: {error}"
        ) from error


def _refuse_unknown(options: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in _NAMES}
    for given in options:
        name = given.lower()
        if name in known or name.startswith("store."):
            continue
        if name in _ELSEWHERE:
            raise UsageError(f"there is no option {given!r}: {_ELSEWHERE[name]}")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        raise UsageError(f"there is no option {given!r}; the nearest is {known[near]!r}")


def bucket_settings(options: Mapping[str, str]) -> CloudSettings:
    """Where the ledgers are."""
    given = {name.lower(): value for name, value in options.items()}
    path = given.get("path")
    if not path:
        raise UsageError(
            "the options do not say where the ledgers are: give path, a directory or the URL of a "
            "bucket, such as s3://bucket/prefix"
        )
    more = {
        name.removeprefix("store."): value
        for name, value in given.items()
        if name.startswith("store.")
    }
    return bucket_at(path, more)


def bucket_at(path: str, options: dict[str, str]) -> CloudSettings:
    """The settings of the bucket at a directory or a URL; UsageError if it cannot be one."""
    cloud = cloud_settings(path, options)
    if cloud.backend != "fs":
        return cloud
    root = Path(cloud.root or "").absolute()
    if not root.is_dir():
        raise UsageError(f"there are no ledgers at {root}: it is not a directory")
    return replace(cloud, root=str(root))


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that the options choose, in order."""
    names = GivenOptions(options).listed("columns")
    if names is None:
        return COLUMNS
    known = {name.lower(): name for name in (*COLUMNS, *MORE_COLUMNS)}
    for name in names:
        if name.lower() not in known:
            raise UsageError(
                f"there is no column {name!r}; columns are {', '.join(known.values())}"
            )
    chosen = tuple(known[name.lower()] for name in names)
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"columns is {','.join(names)!r}; name each column only once")
    return chosen
