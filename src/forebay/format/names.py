"""Builds and parses every name: topics, files, object keys and catalog keys.

`docs/formats/names.md` lists them. A topic is `/namespace/topic`; `topic` alone means
`/default/topic`. Both parts are letters and digits of any script, `_` and `-`. They are used as
directory names unchanged, which is safe because they contain neither dots nor slashes. A partition
`<topic>-part-<n>` is a separate topic on disk.

Beware: object names give the last offset, not one more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from forebay.errors import InvalidSetting, InvalidTopicName, UsageError
from forebay.limits import (
    CURSOR_NAME_BYTES_MAX,
    FILE_NAME_BYTES_MAX,
    JOB_STATE_NAME_BYTES_MAX,
    OFFSET_MAX,
    SCHEMA_SUBJECT_BYTES_MAX,
    SUBSCRIPTION_NAME_BYTES_MAX,
    TOPIC_NAME_BYTES_MAX,
)

DEFAULT_NAMESPACE: Final = "default"
SEGMENT_FILE: Final = "wal.log"
CHECKPOINT_FILE: Final = "wal.ckpt"
UPLOADER_CHECKPOINT_FILE: Final = "uploader.ckpt"
PUBLISHED_FILE: Final = "wal.synced"
FAILED_FILE: Final = "wal.failed"
LOG_ID_FILE: Final = "wal.id"
LOG_ID_COPY_FILE: Final = "wal.id.copy"
NONCE_FILE: Final = "wal.nonce"
SERVER_FILE: Final = "server.json"
"""In a data directory: the address of the server that owns it."""
SERVER_LOCK_FILE: Final = "server.lock"
STORE_ID_FILE: Final = "store.id"
"""In a data directory: the id of the store, the same for every run of its server."""
JOBS_FILE: Final = "jobs.ndjson"
"""In a data directory: the jobs that its server ran."""

_OTHER_FILES: Final = {
    CHECKPOINT_FILE,
    UPLOADER_CHECKPOINT_FILE,
    PUBLISHED_FILE,
    FAILED_FILE,
    LOG_ID_FILE,
}
_OTHER_ENDINGS: Final = {"idx", "id", "nonce", "tmp", "torn", "unusable"}

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
        """The full name without the partition suffix."""
        match = _PARTITION.fullmatch(self.topic)
        return f"/{self.namespace}/{match['base']}" if match else str(self)

    @property
    def partition(self) -> int:
        """The number after `-part-`; 0 if there is none."""
        match = _PARTITION.fullmatch(self.topic)
        return int(match["number"]) if match else 0

    @property
    def is_partition(self) -> bool:
        """Whether the name ends with `-part-` and a number."""
        return _PARTITION.fullmatch(self.topic) is not None

    @property
    def twin(self) -> TopicName | None:
        """The other topic that would be the same partition: `orders` and `orders-part-0`.

        Both are partition 0 of `orders`. None for a partition with another number.
        """
        match = _PARTITION.fullmatch(self.topic)
        if match is None:
            return TopicName(self.namespace, f"{self.topic}-part-0")
        return TopicName(self.namespace, match["base"]) if self.partition == 0 else None


def _valid_part(part: str) -> bool:
    return (
        bool(part)
        and len(part.encode("utf-8", "surrogatepass")) <= TOPIC_NAME_BYTES_MAX
        and all(letter.isalnum() or letter in "_-" for letter in part)
    )


def parse_topic(name: str) -> TopicName:
    """Parses a topic name as users write it; raises InvalidTopicName with the rule."""
    if not isinstance(name, str):
        raise InvalidTopicName(f"{name!r} is not a topic name: it is not a str")
    return _parsed(name)


@lru_cache(4096)  # of the same names again and again: every acknowledgement names its topic
def _parsed(name: str) -> TopicName:
    parts = name.split("/")
    if len(parts) == 1:
        parts = ["", DEFAULT_NAMESPACE, name]
    if len(parts) != 3 or parts[0] or not all(_valid_part(part) for part in parts[1:]):
        raise InvalidTopicName(f"{name!r} is not a topic name: {_RULE}")
    return TopicName(parts[1], parts[2])


def is_topic(name: str) -> bool:
    """Whether `parse_topic` accepts `name`."""
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
                f"file_name is {first!r}; it must be a stem and an ending, such as 'wal.log'"
            )
        if len(first.encode()) > FILE_NAME_BYTES_MAX:
            raise InvalidSetting(
                f"file_name is {first!r}; it must be at most {FILE_NAME_BYTES_MAX} bytes long"
            )
        if first in _OTHER_FILES or suffix in _OTHER_ENDINGS:
            raise InvalidSetting(
                f"file_name is {first!r}, which is taken by another file of the log; choose "
                "another, such as 'wal.log'"
            )
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
        """The number in a segment's name; None if `name` is not a segment's."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        return int(match["seq"] or 0)


def aside(name: str, kind: str, position: int) -> str:
    """The file for bytes that recovery cut from `name` at `position`; `kind` ends in `torn`."""
    return f"{name}.{position}.{kind}"


def staged_segment(name: str, copy: int = 0) -> str:
    """The file in which a repair rewrites the segment `name` before it replaces the damaged one.

    `copy` is a number to try if the name is taken.
    """
    return f"{name}.repair.{copy}.tmp" if copy else f"{name}.repair.tmp"


def is_staged_segment(name: str, segments: SegmentNames) -> bool:
    """Whether `name` is one that `staged_segment` returns for a segment."""
    match = _STAGED_SEGMENT.fullmatch(name)
    return match is not None and segments.parse(match["name"]) is not None


def aside_directory(log_id: str) -> str:
    """What the names of the files of a log start with once it is set aside."""
    return f"aside-{log_id}"


# ---- objects and the catalog -----------------------------------------------------------------

_OFFSET: Final = r"(?:0|[1-9][0-9]{0,18})"
_ENDING: Final = ".dnb1"
_COMPRESSED_ENDING: Final = ".dnb1.zst"
_OBJECT: Final = re.compile(
    rf"data-(?P<start>{_OFFSET})-(?P<end>{_OFFSET})(?:-(?P<attempt>[1-9][0-9]{{0,8}}))?\.dnb1"
    r"(?P<compressed>\.zst)?"
)
_PENDING: Final = re.compile(
    rf"data-(?P<start>{_OFFSET})-pending(?:-(?P<token>[0-9a-f]{{1,32}}))?\.dnb1(?:\.zst)?"
)
_MARKER: Final = re.compile(rf"begin-(?P<offset>{_OFFSET})(?:-(?P<attempt>[1-9][0-9]{{0,8}}))?")
_LEDGER: Final = re.compile(
    rf"(?P<uid>[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})-ledger-(?P<id>{_OFFSET})"
    r"(?P<index>-index)?"
)
PULSAR_TENANT: Final = "public"
_METADATA_SAFE: Final = " /:@,;=+!%"
LEDGER_VERSION_NAME: Final = "s3managedledgeroffloaderformatversion"
"""The user metadata that Pulsar demands of both objects of a ledger, on every store."""
LEDGER_VERSION: Final = "1"
MARKER_START: Final = "begin-"
"""What the names of begin markers start with."""
SIDECAR_ENDING: Final = ".json"
_TOPICS: Final = "storage/topics/"


class ObjectName(NamedTuple):
    """The name of an object: its offsets `start..end`, `end` included.

    `attempt` distinguishes names with the same range. 0 is the plain name; a higher number is used
    while the object with the plain name is being deleted. The name of a compressed object
    determines its frames, but not its bytes: these depend on the library and the level.
    """

    start: int
    end: int
    attempt: int = 0
    compressed: bool = False

    def __str__(self) -> str:
        suffix = f"-{self.attempt}" if self.attempt else ""
        return f"data-{self.start}-{self.end}{suffix}{_ending(self.compressed)}"


def parse_object(name: str) -> ObjectName | None:
    """Parses the name of a finished object; None if `name` is not one."""
    match = _OBJECT.fullmatch(name)
    if match is None:
        return None
    compressed = match["compressed"] is not None
    attempt = int(match["attempt"] or 0)
    found = ObjectName(int(match["start"]), int(match["end"]), attempt, compressed)
    return found if found.start <= found.end else None


def _ending(compressed: bool) -> str:
    return _COMPRESSED_ENDING if compressed else _ENDING


def is_ledger(object_id: str) -> bool:
    """Whether it is the name of an object that is a ledger: that of its data object."""
    name = parse_ledger(object_id)
    return name is not None and not name.is_index


def object_of_file(name: str) -> str:
    """The name of the object that a file belongs to, as its data, its index or its sidecar."""
    owner = name.removesuffix(SIDECAR_ENDING)
    ledger = parse_ledger(owner)
    return owner if ledger is None else ledger.data_name


def object_files(object_id: str) -> tuple[str, ...]:
    """The names of the files of an object, without its sidecar, in the order to delete them in.

    A ledger's index object comes first: while it exists, its data object is complete.
    """
    ledger = parse_ledger(object_id)
    return (object_id,) if ledger is None else (ledger.index_name, ledger.data_name)


def is_finished(object_id: str) -> bool:
    """Whether it is the name of a finished object: not of one that is still being written to."""
    return parse_object(object_id) is not None or is_ledger(object_id)


def is_compressed(object_id: str) -> bool:
    """Whether it is the name of a compressed object, finished or pending."""
    return object_id.endswith(_COMPRESSED_ENDING)


def pending_object(start: int, token: str, *, compressed: bool = False) -> str:
    """The name of an object while it is written and its end offset is unknown."""
    return f"data-{start}-pending-{token}{_ending(compressed)}"


def parse_pending(name: str) -> int | None:
    """The start offset in a pending object's name, with or without a token; None if not one."""
    match = _PENDING.fullmatch(name)
    return None if match is None else int(match["start"])


class LedgerName(NamedTuple):
    """The name of one of the two objects of an offloaded Pulsar ledger, data or index.

    `uid` is the UUID of one attempt to offload it, in lower case: a ledger of which two attempts
    are complete has two pairs of objects with the same entries.
    """

    uid: str
    ledger_id: int
    is_index: bool = False

    def __str__(self) -> str:
        return f"{self.uid}-ledger-{self.ledger_id}{'-index' if self.is_index else ''}"

    @property
    def data_name(self) -> str:
        """The name of the data object."""
        return str(self._replace(is_index=False))

    @property
    def index_name(self) -> str:
        """The name of the index object."""
        return str(self._replace(is_index=True))


def ledger_name(uid: str, ledger_id: int) -> LedgerName:
    """The name of a ledger's data object; raises UsageError if it would not be parsed again."""
    found = parse_ledger(f"{uid}-ledger-{ledger_id}")
    if found is None or found.is_index:
        raise UsageError(
            f"a ledger is named by a UUID in lower case and a number, not by {uid!r} and "
            f"{ledger_id!r}"
        )
    return found


def parse_ledger(name: str) -> LedgerName | None:
    """Parses the name of a ledger's data or index object; None if `name` is not one."""
    match = _LEDGER.fullmatch(name)
    if match is None or int(match["id"]) > OFFSET_MAX:
        return None
    return LedgerName(match["uid"], int(match["id"]), match["index"] is not None)


class MarkerName(NamedTuple):
    """The name of a begin marker: the offset at which a log was opened.

    `attempt` distinguishes openings at the same offset. The newest marker of a topic is the
    greatest one.
    """

    offset: int
    attempt: int = 0

    def __str__(self) -> str:
        suffix = f"-{self.attempt}" if self.attempt else ""
        return f"{MARKER_START}{self.offset}{suffix}"


def parse_marker(name: str) -> MarkerName | None:
    """Parses the name of a begin marker; None if `name` is not one."""
    match = _MARKER.fullmatch(name)
    return None if match is None else MarkerName(int(match["offset"]), int(match["attempt"] or 0))


def sidecar(object_id: str) -> str:
    """The name of the small object that holds a copy of the descriptor of `object_id`."""
    return object_id + SIDECAR_ENDING


def objects_prefix(topic: TopicName) -> str:
    """The prefix of the keys of a topic's objects in the object store."""
    return f"{_TOPICS}{topic.namespace}/{topic.topic}/objects/"


def object_key(topic: TopicName, object_id: str) -> str:
    return objects_prefix(topic) + object_id


def managed_ledger_name(topic: TopicName) -> str:
    """The name that Pulsar would give to the topic's ledgers: all topics belong to one tenant.

    A partition has the name that Pulsar gives to partitions, such as `orders-partition-3`.
    """
    match = _PARTITION.fullmatch(topic.topic)
    local = topic.topic if match is None else f"{match['base']}-partition-{match['number']}"
    return f"{PULSAR_TENANT}/{topic.namespace}/persistent/{quote(local, safe='')}"


def ledger_metadata(extra: Mapping[str, str], *, is_index: bool) -> dict[str, str]:
    """The user metadata of an object of a ledger, with the names as S3 has them: in lower case.

    Values of `extra` are percent-encoded where they are not ASCII.
    """
    given = {name.lower(): quote(value, safe=_METADATA_SAFE) for name, value in extra.items()}
    return given | {
        LEDGER_VERSION_NAME: LEDGER_VERSION,
        "s3managedledgeroffloadersoftwareversion": "forebay",
        "role": "index" if is_index else "data",
    }


def object_metadata(topic: TopicName, object_id: str) -> dict[str, str]:
    """The user metadata of an object or a pending object, all of it from its name.

    They are for people who look into the bucket: nothing of Forebay reads them, but a broker of
    Pulsar demands the version of a ledger. The topic is percent-encoded, as metadata are ASCII. A
    pending object and its final copy do not tell their end.
    """
    ledger = parse_ledger(object_id)
    if ledger is not None:
        extra = {"ManagedLedgerName": managed_ledger_name(topic)}
        return ledger_metadata(extra, is_index=ledger.is_index)
    found = {"topic": quote(str(topic)), "format": object_id.rpartition(".")[2]}
    name = parse_object(object_id)
    start = parse_pending(object_id) if name is None else name.start
    if start is not None:
        found["start_offset"] = str(start)
    if name is not None:
        found["end_offset"] = str(name.end)
        found["messages"] = str(name.end - name.start + 1)
    return found


def topic_of_key(key: str) -> tuple[TopicName, str] | None:
    """The topic and the object name in `key`; None if it is not the key of a topic's object."""
    parts = key.removeprefix(_TOPICS).split("/")
    if not key.startswith(_TOPICS) or len(parts) != 4 or parts[2] != "objects":
        return None
    name = f"/{parts[0]}/{parts[1]}"
    return (parse_topic(name), parts[3]) if is_topic(name) else None


TOPICS_PREFIX: Final = _TOPICS
STAGING_PREFIX: Final = "staging/"
"""The prefix of the keys of files that wait to be appended; objects of topics are not below it."""


_STAGED: Final = re.compile(r"staging/[0-9a-f]{16}/[0-9]{1,19}-[0-9]{1,19}\.frames")


def staged_file(write: str, partition: int, attempt: int) -> str:
    """The key of the rows of one partition that one attempt of its task wrote."""
    return f"{STAGING_PREFIX}{write}/{partition}-{attempt}.frames"


def staging_manifest(write: str) -> str:
    """The key of the list of files of one batch."""
    return f"{STAGING_PREFIX}{write}/manifest.json"


def is_staged_file(key: str) -> bool:
    """Whether the key is one that `staged_file` returns."""
    return _STAGED.fullmatch(key) is not None


def write_of_staged(key: str) -> str:
    """The id of the write in the key of a file below STAGING_PREFIX."""
    return key.removeprefix(STAGING_PREFIX).partition("/")[0]


_SUBSCRIPTION_CURSOR: Final = "sub/"


def subscription_cursor(name: str) -> str:
    """The name of the cursor of a subscription. No other cursor has such a name."""
    return _SUBSCRIPTION_CURSOR + name


def subscription_of_cursor(name: str) -> str | None:
    """The name of the subscription whose cursor has this name; None for any other cursor."""
    found = name.startswith(_SUBSCRIPTION_CURSOR)
    return name.removeprefix(_SUBSCRIPTION_CURSOR) if found else None


class CatalogKeys:
    """The keys of the catalog below its root, such as `/forebay`.

    Methods with a plural name return the prefix of the keys of that kind.
    """

    __slots__ = ("_root",)

    def __init__(self, root_prefix: str) -> None:
        root = root_prefix.rstrip("/")
        if (root and not root.startswith("/")) or "//" in root or "\0" in root:
            raise InvalidSetting(
                f"root_prefix is {root_prefix!r}; it must be '/' and parts separated by single "
                "slashes, such as '/forebay'"
            )
        self._root = root

    def topics(self) -> str:
        """The prefix of the keys of all topics."""
        return f"{self._root}/{_TOPICS}"

    def sweep(self) -> str:
        """The key of the row that says when the last sweep of the store began."""
        return f"{self._root}/storage/sweep"

    def offload_policies(self, namespace: str) -> str:
        """The key of the offload policies of a namespace."""
        return f"{self._root}/namespaces/{namespace}/offload"

    def topic(self, topic: TopicName) -> str:
        """The prefix of all keys of one topic."""
        return f"{self._root}/{_TOPICS}{topic.namespace}/{topic.topic}/"

    def record(self, topic: TopicName) -> str:
        return self.topic(topic) + "record"

    def owner(self, topic: TopicName) -> str:
        return self.topic(topic) + "owner"

    def settings(self, topic: TopicName) -> str:
        return self.topic(topic) + "settings"

    def ledger_topics(self) -> str:
        """The key of the row that says how many topics have a number for their ledgers."""
        return f"{self._root}/storage/ledger-topics"

    def ledger_ids(self, topic: TopicName) -> str:
        """The key of the row with the topic's number, and how many ledger ids it has given."""
        return self.topic(topic) + "ledger-ids"

    def ledger_attempts(self, topic: TopicName) -> str:
        """The prefix of the keys of the attempts to write ledgers that are not committed."""
        return self.topic(topic) + "ledgers/"

    def ledger_attempt(self, topic: TopicName, start_offset: int) -> str:
        """The key of the last attempt to write a ledger that begins at this offset."""
        return f"{self.ledger_attempts(topic)}{start_offset:020d}"

    def objects(self, topic: TopicName) -> str:
        return self.topic(topic) + "objects/"

    def descriptor(self, topic: TopicName, start_offset: int) -> str:
        return f"{self.objects(topic)}{start_offset:020d}"

    def descriptor_start(self, topic: TopicName, key: str) -> int | None:
        """The start offset in a descriptor's key; None for any other key, such as `cur`."""
        digits = key.removeprefix(self.objects(topic))
        return int(digits) if len(digits) == 20 and digits.isascii() and digits.isdigit() else None

    def current(self, topic: TopicName) -> str:
        return self.objects(topic) + "cur"

    def ends(self, topic: TopicName) -> str:
        """The prefix of the keys of a topic's end rows."""
        return self.topic(topic) + "ends/"

    def end(self, topic: TopicName, end_offset: int) -> str:
        """The key of the row that says where the object with this last offset begins."""
        return f"{self.ends(topic)}{end_offset:020d}"

    def end_offset(self, topic: TopicName, key: str) -> int:
        """The last offset in the key of an end row."""
        return int(key.removeprefix(self.ends(topic)))

    def times(self, topic: TopicName, series: str = "") -> str:
        """The prefix of the keys of a topic's time rows, of all series or of one."""
        return f"{self.topic(topic)}times/" + (f"{series}/" if series else "")

    def time(self, topic: TopicName, series: str, time_ms: int) -> str:
        """The key of the row of the first object with a message of this time or later."""
        return f"{self.times(topic, series)}{time_ms:020d}"

    def time_of(self, topic: TopicName, series: str, key: str) -> int:
        """The time in the key of a time row."""
        return int(key.removeprefix(self.times(topic, series)))

    def totals(self, topic: TopicName) -> str:
        return self.topic(topic) + "totals"

    def lives(self, topic: TopicName) -> str:
        """The prefix of the keys of the lives of a topic's objects."""
        return self.topic(topic) + "keys/"

    def life(self, topic: TopicName, object_id: str) -> str:
        return self.lives(topic) + object_id

    def job_states(self, topic: TopicName) -> str:
        """The prefix of the keys of the states that jobs keep for a topic."""
        return self.topic(topic) + "notes/"

    def job_state(self, topic: TopicName, name: str) -> str:
        """The key of the state `name`, which may be any text: special characters are encoded."""
        own = _quoted("a job state", name, JOB_STATE_NAME_BYTES_MAX, safe="/")
        return self.job_states(topic) + own

    def job_state_name(self, topic: TopicName, key: str) -> str | None:
        """The name of the job state at `key`; None if it is not one of the topic's."""
        prefix = self.job_states(topic)
        return unquote(key.removeprefix(prefix)) if key.startswith(prefix) else None

    def replaced(self, topic: TopicName, start_offset: int = 0) -> str:
        """The prefix of the keys of replaced descriptors with one start offset."""
        return f"{self.topic(topic)}replaced/{start_offset:020d}/"

    def replaced_descriptor(self, topic: TopicName, start_offset: int, object_id: str) -> str:
        """The key of the descriptor of an object that a compaction replaced."""
        return self.replaced(topic, start_offset) + object_id

    def cursor_rows(self, topic: TopicName) -> str:
        """The prefix of the keys of a topic's cursors."""
        return self.topic(topic) + "cursors/"

    def cursor_row(self, topic: TopicName, name: str) -> str:
        """The key of the cursor `name`, which may be any text: special characters are encoded."""
        return self.cursor_rows(topic) + _quoted("a cursor", name, CURSOR_NAME_BYTES_MAX)

    def cursor_row_name(self, topic: TopicName, key: str) -> str:
        """The name of the cursor at `key`."""
        return unquote(key.removeprefix(self.cursor_rows(topic)))

    def subscription_cursor_rows(self, topic: TopicName) -> str:
        """The prefix of the keys of the cursors of a topic's subscriptions."""
        return self.cursor_rows(topic) + quote(_SUBSCRIPTION_CURSOR, safe="")

    def all_subscriptions(self) -> str:
        """The prefix of the keys of the subscriptions of all topics."""
        return f"{self._root}/subscriptions/"

    def subscriptions(self, topic: TopicName) -> str:
        """The prefix of the keys of a topic's subscriptions."""
        return f"{self.all_subscriptions()}{topic.namespace}/{topic.topic}/"

    def subscription(self, topic: TopicName, name: str) -> str:
        """The key of a subscription, whose name may be any text: special characters are encoded."""
        own = _quoted("a subscription", name, SUBSCRIPTION_NAME_BYTES_MAX)
        return self.subscriptions(topic) + own

    def subscription_of(self, key: str) -> tuple[TopicName, str] | None:
        """The topic and the name of the subscription at `key`; None if it is not such a key."""
        found = _topic_below(self.all_subscriptions(), key)
        return None if found is None or not found[1] else (found[0], unquote(found[1]))

    def nonreliable_topics(self) -> str:
        """The prefix of the keys of the topics that are not stored."""
        return f"{self._root}/nonreliable/"

    def nonreliable(self, topic: TopicName) -> str:
        """The key of the row of a topic that is not stored."""
        return f"{self.nonreliable_topics()}{topic.namespace}/{topic.topic}"

    def nonreliable_of(self, key: str) -> TopicName | None:
        """The topic whose row is at `key`; None if it is not the key of such a row."""
        found = _topic_below(self.nonreliable_topics(), key)
        return None if found is None or found[1] is not None else found[0]

    def schema_numbers(self) -> str:
        """The key of the row with the next number of a subject."""
        return f"{self._root}/schemas/numbers"

    def schema_subjects(self) -> str:
        """The prefix of the keys of all subjects."""
        return f"{self._root}/schemas/subjects/"

    def schema_subject(self, subject: str) -> str:
        """The key of a subject, which may be any text: special characters are encoded."""
        own = _quoted("a subject", subject, SCHEMA_SUBJECT_BYTES_MAX)
        return self.schema_subjects() + own

    def schema_subject_name(self, key: str) -> str:
        """The name of the subject at `key`."""
        return unquote(key.removeprefix(self.schema_subjects()))

    def schema_id(self, number: int) -> str:
        """The key of the row that says which subject has this number."""
        return f"{self._root}/schemas/ids/{number:020d}"

    def schema_versions(self, number: int) -> str:
        """The prefix of the keys of the versions of the subject with this number."""
        return f"{self._root}/schemas/versions/{number:020d}/"

    def schema_version(self, number: int, version: int) -> str:
        """The key of one version of a subject."""
        return f"{self.schema_versions(number)}{version:010d}"

    def topic_schema(self, topic: TopicName) -> str:
        """The key of the row that says which schema a topic has."""
        return self.topic(topic) + "schema"

    def cursors(self, topic: TopicName) -> str:
        return f"{self._root}/topics/{topic.namespace}/{topic.topic}/subscriptions/"

    def cursor(self, topic: TopicName, subscription: str) -> str:
        return f"{self.cursors(topic)}{subscription}/cursor"

    def topic_of_record(self, key: str) -> TopicName | None:
        """The topic whose record is at `key`; None if it is not a record's key."""
        found = _topic_below(self.topics(), key)
        return None if found is None or found[1] != "record" else found[0]


def _topic_below(prefix: str, key: str) -> tuple[TopicName, str | None] | None:
    """The topic in `<prefix><namespace>/<topic>[/<rest>]`, and the rest, which has no slash."""
    parts = key.removeprefix(prefix).split("/")
    if not key.startswith(prefix) or not 2 <= len(parts) <= 3:
        return None
    name = f"/{parts[0]}/{parts[1]}"
    return (parse_topic(name), parts[2] if len(parts) == 3 else None) if is_topic(name) else None


def _quoted(what: str, name: str, bytes_max: int, safe: str = "") -> str:
    """The name, percent-encoded; UsageError, which says `what` it names, if it cannot be one."""
    if not 0 < len(name.encode("utf-8", "surrogatepass")) <= bytes_max:
        raise UsageError(
            f"the name of {what} is {name[:80]!r}; it must have 1 to {bytes_max} bytes"
        )
    try:
        return quote(name, safe=safe)
    except UnicodeEncodeError as error:
        raise UsageError(f"the name of {what} is {name!r}; it must be Unicode text") from error


def after_prefix(prefix: str) -> str:
    """The first key after all keys that start with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
