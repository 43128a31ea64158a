"""Builds and parses every name: topics, segments, checkpoints. The list: `docs/formats/names.md`.

A topic is `/namespace/topic`; `topic` alone means `/default/topic`. Both parts are letters and
digits of any script, `_` and `-`. They become directory names as they are, which is safe because
neither a dot nor a slash can be in them.

A partition `<topic>-part-<n>` is a topic of its own on disk.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from forebay.errors import InvalidSetting, InvalidTopicName, UsageError
from forebay.limits import FILE_NAME_BYTES_MAX, JOB_STATE_NAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX

DEFAULT_NAMESPACE: Final = "default"
SEGMENT_FILE: Final = "wal.log"
CHECKPOINT_FILE: Final = "wal.ckpt"
UPLOADER_CHECKPOINT_FILE: Final = "uploader.ckpt"
PUBLISHED_FILE: Final = "wal.synced"
FAILED_FILE: Final = "wal.failed"
LOG_ID_FILE: Final = "wal.id"
LOG_ID_COPY_FILE: Final = "wal.id.copy"
SERVER_FILE: Final = "server.json"
"""In a data directory: where the server that owns it is."""
SERVER_LOCK_FILE: Final = "server.lock"
STORE_ID_FILE: Final = "store.id"
"""In a data directory: which store it is, whatever run of a server has it."""
JOBS_FILE: Final = "jobs.ndjson"
"""In a data directory: the jobs that its server has run."""

_OTHER_FILES: Final = {
    CHECKPOINT_FILE,
    UPLOADER_CHECKPOINT_FILE,
    PUBLISHED_FILE,
    FAILED_FILE,
    LOG_ID_FILE,
}
_OTHER_ENDINGS: Final = {"idx", "id", "tmp", "torn", "unusable"}

_RULE: Final = (
    "a topic is /namespace/topic, both parts made of letters, digits, '_' and '-' "
    f"and at most {TOPIC_NAME_BYTES_MAX} bytes long; 'topic' alone means "
    f"/{DEFAULT_NAMESPACE}/topic"
)
_STAGED_SEGMENT: Final = re.compile(r"(?P<name>.+?)\.repair(?:\.[1-9][0-9]{0,8})?\.tmp")
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


def staged_segment(name: str, copy: int = 0) -> str:
    """Where a repair writes the segment `name` anew, before it takes the place of the damaged one;
    `copy` tells files apart where the name is taken."""
    return f"{name}.repair.{copy}.tmp" if copy else f"{name}.repair.tmp"


def is_staged_segment(name: str, segments: SegmentNames) -> bool:
    """Whether `name` is one of `staged_segment`, of any of the segments."""
    match = _STAGED_SEGMENT.fullmatch(name)
    return match is not None and segments.parse(match["name"]) is not None


def aside_directory(log_id: str) -> str:
    """Where a whole log is kept that is no longer the topic's."""
    return f"aside-{log_id}"


# ---- objects and the catalog -----------------------------------------------------------------

_OFFSET: Final = r"(?:0|[1-9][0-9]{0,18})"
_OBJECT: Final = re.compile(
    rf"data-(?P<start>{_OFFSET})-(?P<end>{_OFFSET})(?:-(?P<attempt>[1-9][0-9]{{0,8}}))?\.dnb1"
)
_PENDING: Final = re.compile(
    rf"data-(?P<start>{_OFFSET})-pending(?:-(?P<token>[0-9a-f]{{1,32}}))?\.dnb1"
)
SIDECAR_ENDING: Final = ".json"
_TOPICS: Final = "storage/topics/"


class ObjectName(NamedTuple):
    """What an object's name says: the range of its offsets, the end included.

    `attempt` tells names of one range apart: 0 is the plain name, and a higher one is taken when
    the plain name is being deleted.
    """

    start: int
    end: int
    attempt: int = 0

    def __str__(self) -> str:
        suffix = f"-{self.attempt}" if self.attempt else ""
        return f"data-{self.start}-{self.end}{suffix}.dnb1"


def parse_object(name: str) -> ObjectName | None:
    """The range that the object's name gives, or None if it is no finished object's."""
    match = _OBJECT.fullmatch(name)
    if match is None:
        return None
    found = ObjectName(int(match["start"]), int(match["end"]), int(match["attempt"] or 0))
    return found if found.start <= found.end else None


def pending_object(start: int, token: str) -> str:
    """The name under which an object with an end yet unknown is written."""
    return f"data-{start}-pending-{token}.dnb1"


def parse_pending(name: str) -> int | None:
    """The start that a pending object's name gives (Danube's have no token), or None."""
    match = _PENDING.fullmatch(name)
    return None if match is None else int(match["start"])


def sidecar(object_id: str) -> str:
    """The name of the small object that holds the descriptor of `object_id`."""
    return object_id + SIDECAR_ENDING


def objects_prefix(topic: TopicName) -> str:
    """What the keys of all of a topic's objects start with, in the object store."""
    return f"{_TOPICS}{topic.namespace}/{topic.topic}/objects/"


def object_key(topic: TopicName, object_id: str) -> str:
    return objects_prefix(topic) + object_id


def topic_of_key(key: str) -> tuple[TopicName, str] | None:
    """The topic and the name of the object at `key`; None if it is not where objects are."""
    parts = key.removeprefix(_TOPICS).split("/")
    if not key.startswith(_TOPICS) or len(parts) != 4 or parts[2] != "objects":
        return None
    name = f"/{parts[0]}/{parts[1]}"
    return (parse_topic(name), parts[3]) if is_topic(name) else None


TOPICS_PREFIX: Final = _TOPICS
STAGING_PREFIX: Final = "staging/"
"""What the keys of files start with that wait to be appended; no topic's are among them."""


_STAGED: Final = re.compile(r"staging/[0-9a-f]{16}/[0-9]{1,19}-[0-9]{1,19}\.frames")


def staged_file(write: str, partition: int, attempt: int) -> str:
    """The key of the rows of one partition, as one attempt of its task left them."""
    return f"{STAGING_PREFIX}{write}/{partition}-{attempt}.frames"


def staging_manifest(write: str) -> str:
    """The key of the list of the files that make one batch."""
    return f"{STAGING_PREFIX}{write}/manifest.json"


def is_staged_file(key: str) -> bool:
    """Whether the key is one of `staged_file`."""
    return _STAGED.fullmatch(key) is not None


def write_of_staged(key: str) -> str:
    """The id of the write that a file below STAGING_PREFIX belongs to."""
    return key.removeprefix(STAGING_PREFIX).partition("/")[0]


class CatalogKeys:
    """The keys of the catalog below its root, such as `/forebay`."""

    __slots__ = ("_root",)

    def __init__(self, root_prefix: str) -> None:
        root = root_prefix.rstrip("/")
        if (root and not root.startswith("/")) or "//" in root or "\0" in root:
            raise InvalidSetting(
                f"root_prefix {root_prefix!r} must be like '/forebay': parts behind slashes"
            )
        self._root = root

    def topics(self) -> str:
        """What the keys of all topics start with."""
        return f"{self._root}/{_TOPICS}"

    def topic(self, topic: TopicName) -> str:
        """What all keys of one topic start with."""
        return f"{self._root}/{_TOPICS}{topic.namespace}/{topic.topic}/"

    def record(self, topic: TopicName) -> str:
        return self.topic(topic) + "record"

    def owner(self, topic: TopicName) -> str:
        return self.topic(topic) + "owner"

    def objects(self, topic: TopicName) -> str:
        return self.topic(topic) + "objects/"

    def descriptor(self, topic: TopicName, start_offset: int) -> str:
        return f"{self.objects(topic)}{start_offset:020d}"

    def descriptor_start(self, topic: TopicName, key: str) -> int | None:
        """The start offset in a descriptor's key; None for `cur` and for anything else."""
        digits = key.removeprefix(self.objects(topic))
        return int(digits) if len(digits) == 20 and digits.isascii() and digits.isdigit() else None

    def current(self, topic: TopicName) -> str:
        return self.objects(topic) + "cur"

    def lives(self, topic: TopicName) -> str:
        """What the keys of the lives of a topic's objects start with."""
        return self.topic(topic) + "keys/"

    def life(self, topic: TopicName, object_id: str) -> str:
        return self.lives(topic) + object_id

    def job_states(self, topic: TopicName) -> str:
        """What the keys of the states that jobs keep of a topic start with."""
        return self.topic(topic) + "notes/"

    def job_state(self, topic: TopicName, name: str) -> str:
        """Of the state called `name`, any text; what is no letter, digit or slash is encoded."""
        if not 0 < len(name.encode("utf-8", "surrogatepass")) <= JOB_STATE_NAME_BYTES_MAX:
            raise UsageError(
                f"the name of a note, {name[:80]!r}, must have 1 to "
                f"{JOB_STATE_NAME_BYTES_MAX} bytes"
            )
        try:
            return self.job_states(topic) + quote(name, safe="/")
        except UnicodeEncodeError as error:
            raise UsageError(f"the name of a note, {name!r}, is not Unicode text") from error

    def job_state_name(self, topic: TopicName, key: str) -> str | None:
        """The name of the state at `key`, or None if it is none of the topic's."""
        prefix = self.job_states(topic)
        return unquote(key.removeprefix(prefix)) if key.startswith(prefix) else None

    def replaced(self, topic: TopicName, start_offset: int = 0) -> str:
        """What the keys of descriptors that were replaced start with, for one start offset."""
        return f"{self.topic(topic)}replaced/{start_offset:020d}/"

    def replaced_descriptor(self, topic: TopicName, start_offset: int, object_id: str) -> str:
        """Where the descriptor of an object is kept that a compaction replaced."""
        return self.replaced(topic, start_offset) + object_id

    def cursors(self, topic: TopicName) -> str:
        return f"{self._root}/topics/{topic.namespace}/{topic.topic}/subscriptions/"

    def cursor(self, topic: TopicName, subscription: str) -> str:
        return f"{self.cursors(topic)}{subscription}/cursor"

    def topic_of_record(self, key: str) -> TopicName | None:
        """The topic whose record is at `key`, or None if it is none."""
        parts = key.removeprefix(self.topics()).split("/")
        if not key.startswith(self.topics()) or len(parts) != 3 or parts[2] != "record":
            return None
        name = f"/{parts[0]}/{parts[1]}"
        return parse_topic(name) if is_topic(name) else None


def after_prefix(prefix: str) -> str:
    """The first key, in order of bytes, that does not start with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
