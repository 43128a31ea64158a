"""Names and descriptors of Danube: its bucket, its WAL directory and its keys in etcd.

Frames and messages are those of Forebay. What differs are the names:

    storage/topics/<ns>/<topic>/objects/data-<start>-<end>.dnb1         v0.5, as Forebay's
    storage/topics/<ns>/<topic>/objects/data-<start>-<unix s>.dnb1      v0.6.2 to v0.8
    storage/topics/<ns>/<topic>/segments/data-<start>-<unix s>.dnb1     later
    <root>/storage/topics/<ns>/<topic>/{objects,segments}/<20 digits>   descriptors in etcd
    <wal dir>/<ns>/<topic>/wal.log, wal.1.log ...                       WAL files

Beware: the second number of an object's name is its last offset or the time when it was written,
and nothing in the name says which. Only the frames tell what an object holds.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from forebay.errors import DescriptorError
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.frame import FRAME_BYTES_MIN
from forebay.format.names import (
    CHECKPOINT_FILE,
    TOPICS_PREFIX,
    UPLOADER_CHECKPOINT_FILE,
    TopicName,
    is_topic,
    parse_marker,
    parse_topic,
)

FOLDERS: Final = ("objects", "segments")
DEFAULT_PREFIX: Final = "/danube"
"""The root of Danube's keys in etcd, unless its configuration says otherwise."""
OTHER_WAL_FILES: Final = frozenset(
    {CHECKPOINT_FILE, UPLOADER_CHECKPOINT_FILE, "wal.tmp", "uploader.tmp"}
)
"""Files of a WAL directory without messages. Nothing in them is needed to read the others."""

_NUMBER: Final = r"(?:0|[1-9][0-9]{0,18})"
_OBJECT: Final = re.compile(rf"data-(?P<start>{_NUMBER})-(?P<number>{_NUMBER})\.dnb1")
_PENDING: Final = re.compile(rf"data-{_NUMBER}-pending\.dnb1")
_SECONDS: Final = range(1_400_000_000, 2_600_000_000)
"""Times from 2014 to 2052 in seconds since 1970."""
_MESSAGES_MAX: Final = 10**8
"""An object with more messages would have over 2.6 GB, and most likely over 10 GB."""


class DanubeObject(NamedTuple):
    """The name of an object. `number` is its last offset, or the time when it was written."""

    start: int
    number: int


class BucketKey(NamedTuple):
    """A key in Danube's bucket, in a folder of a topic."""

    topic: TopicName
    folder: str
    name: str

    @property
    def object(self) -> DanubeObject | None:
        match = _OBJECT.fullmatch(self.name)
        return None if match is None else DanubeObject(int(match["start"]), int(match["number"]))

    @property
    def pending(self) -> bool:
        """Whether it is an upload that Danube did not finish."""
        return _PENDING.fullmatch(self.name) is not None

    @property
    def of_forebay(self) -> bool:
        """Whether only Forebay writes such a name."""
        return self.folder == "objects" and parse_marker(self.name) is not None


def parse_bucket_key(key: str) -> BucketKey | None:
    """Parses a key of the bucket; None if it is not in the folder of a topic."""
    parts = key.removeprefix(TOPICS_PREFIX).split("/")
    if not key.startswith(TOPICS_PREFIX) or len(parts) != 4 or parts[2] not in FOLDERS:
        return None
    name = f"/{parts[0]}/{parts[1]}"
    return BucketKey(parse_topic(name), parts[2], parts[3]) if is_topic(name) else None


def segments_prefix(topic: TopicName) -> str:
    """The prefix of the keys of a topic's objects, as later versions of Danube write them."""
    return f"{TOPICS_PREFIX}{topic.namespace}/{topic.topic}/segments/"


def is_named_by_time(name: str, size: int) -> bool:
    """Whether an object's name has the time of its creation in place of its last offset.

    It has if the object would otherwise hold more messages than any object does, in too few bytes.
    A damaged object of Forebay is shorter than its name says too, but never by that much.
    """
    match = _OBJECT.fullmatch(name)
    if match is None or int(match["number"]) not in _SECONDS:
        return False
    start, number = int(match["start"]), int(match["number"])
    count = number - start + 1
    return count < 1 or (count > _MESSAGES_MAX and count * FRAME_BYTES_MIN > size)


def descriptors_prefix(root: str, topic: TopicName | None = None) -> str:
    """The prefix of the keys in etcd of one topic, or of all topics."""
    own = "" if topic is None else f"{topic.namespace}/{topic.topic}/"
    return f"{root.rstrip('/')}/{TOPICS_PREFIX}{own}"


def parse_descriptor_key(root: str, key: str) -> tuple[TopicName, str, int] | None:
    """The topic, the folder and the start offset; None for other keys, such as `cur`."""
    prefix = descriptors_prefix(root)
    found = parse_bucket_key(TOPICS_PREFIX + key.removeprefix(prefix))
    if not key.startswith(prefix) or found is None or not re.fullmatch(r"[0-9]{20}", found.name):
        return None
    return found.topic, found.folder, int(found.name)


def decode_danube_descriptor(data: bytes) -> ObjectDescriptor:
    """Decodes a descriptor of any version, without its index; raises DescriptorError."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DescriptorError(f"it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise DescriptorError("it is not a JSON object")
    body.pop("offset_index", None)  # it may be too large, and is made again from the frames
    if "segment_id" in body:
        body["object_id"] = body.pop("segment_id")
    body.setdefault("completed", True)
    return decode_descriptor(json.dumps(body).encode())
