"""Builds and parses every name: topics, segments, checkpoints. The list: `docs/formats/names.md`.

A topic is `/namespace/topic`; `topic` alone means `/default/topic`. Both parts are letters and
digits of any script, `_` and `-`. They become directory names as they are, which is safe because
neither a dot nor a slash can be in them.

A partition `<topic>-part-<n>` is a topic of its own on disk.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from forebay.errors import InvalidSetting, InvalidTopicName
from forebay.limits import FILE_NAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX

DEFAULT_NAMESPACE: Final = "default"
SEGMENT_FILE: Final = "wal.log"
CHECKPOINT_FILE: Final = "wal.ckpt"
UPLOADER_CHECKPOINT_FILE: Final = "uploader.ckpt"
PUBLISHED_FILE: Final = "wal.synced"
FAILED_FILE: Final = "wal.failed"

_OTHER_FILES: Final = {CHECKPOINT_FILE, UPLOADER_CHECKPOINT_FILE, PUBLISHED_FILE, FAILED_FILE}
_OTHER_ENDINGS: Final = {"idx", "tmp", "torn", "unusable"}

_RULE: Final = (
    "a topic is /namespace/topic, both parts made of letters, digits, '_' and '-' "
    f"and at most {TOPIC_NAME_BYTES_MAX} bytes long; 'topic' alone means "
    f"/{DEFAULT_NAMESPACE}/topic"
)
_PARTITION: Final = re.compile(r"(?P<base>.+)-part-(?P<number>0|[1-9][0-9]{0,8})")


class TopicName(NamedTuple):
    namespace: str
    topic: str

    def __str__(self) -> str:
        return f"/{self.namespace}/{self.topic}"

    @property
    def base(self) -> str:
        """The whole name without the partition suffix."""
        match = _PARTITION.fullmatch(self.topic)
        return f"/{self.namespace}/{match['base']}" if match else str(self)

    @property
    def partition(self) -> int:
        """The number behind `-part-`, else 0."""
        match = _PARTITION.fullmatch(self.topic)
        return int(match["number"]) if match else 0


def _valid_part(part: str) -> bool:
    return (
        bool(part)
        and len(part.encode("utf-8", "surrogatepass")) <= TOPIC_NAME_BYTES_MAX
        and all(letter.isalnum() or letter in "_-" for letter in part)
    )


def parse_topic(name: str) -> TopicName:
    """The topic that a user's `name` means, or InvalidTopicName with the rule."""
    if not isinstance(name, str):
        raise InvalidTopicName(f"{name!r} is not a topic name: it is not a str")
    parts = name.split("/")
    if len(parts) == 1:
        parts = ["", DEFAULT_NAMESPACE, name]
    if len(parts) != 3 or parts[0] or not all(_valid_part(part) for part in parts[1:]):
        raise InvalidTopicName(f"{name!r} is not a topic name: {_RULE}")
    return TopicName(parts[1], parts[2])


def is_topic(name: str) -> bool:
    """Whether `name` is a topic's."""
    try:
        parse_topic(name)
    except InvalidTopicName:
        return False
    return True


class SegmentNames:
    """Names of a topic's segments: `wal.log` for the first, then `wal.1.log`, `wal.2.log` …"""

    __slots__ = ("_pattern", "first", "stem", "suffix")

    def __init__(self, first: str = SEGMENT_FILE) -> None:
        stem, dot, suffix = first.rpartition(".")
        if not dot or not stem or not _valid_part(suffix) or not _valid_part(stem):
            raise InvalidSetting(
                f"file_name {first!r} must be like 'wal.log': a stem and an ending"
            )
        if len(first.encode()) > FILE_NAME_BYTES_MAX:
            raise InvalidSetting(f"file_name {first!r} is over {FILE_NAME_BYTES_MAX} bytes long")
        if first in _OTHER_FILES or suffix in _OTHER_ENDINGS:
            raise InvalidSetting(f"file_name {first!r} is taken by another file of the log")
        self.first = first
        self.stem = stem
        self.suffix = suffix
        self._pattern = re.compile(
            rf"{re.escape(stem)}(?:\.(?P<seq>[1-9][0-9]{{0,17}}))?\.{re.escape(suffix)}"
        )

    def segment(self, seq: int) -> str:
        return self.first if seq == 0 else f"{self.stem}.{seq}.{self.suffix}"

    def index(self, seq: int) -> str:
        return f"{self.stem}.idx" if seq == 0 else f"{self.stem}.{seq}.idx"

    def parse(self, name: str) -> int | None:
        """The number of the segment of that name, or None if it is no segment's."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        return int(match["seq"] or 0)


def aside(name: str, kind: str, position: int) -> str:
    """Where bytes that recovery cut out of `name` at `position` are kept; kind ends in `torn`."""
    return f"{name}.{position}.{kind}"
