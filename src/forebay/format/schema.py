"""The rows of the schema registry, as JSON for the catalog.

    {"id":1,"mode":"backward","name":"orders","next":3,"versions":[[1,"<sha256>"],[2,"<sha256>"]]}
    {"created_by":"ann","created_ms":1790000000000,"definition":"<base64>","description":"",
     "fingerprint":"<sha256>","kind":"avro","subject":"orders","tags":[],"version":2}
    {"payload":true,"policy":"enforce","subject":"orders"}

A subject, one version of it, and what a topic says about its schema. The layout of the keys:
`docs/formats/catalog.md`. A subject keeps its number and `next` when its last version is deleted,
so neither a number nor a version is ever given twice. Fields that a release does not know are
ignored and lost with the next change.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from forebay.errors import DescriptorError, UsageError
from forebay.limits import (
    OFFSET_MAX,
    SCHEMA_BYTES_MAX,
    SCHEMA_NAME_BYTES_MAX,
    SCHEMA_ROW_BYTES_MAX,
    SCHEMA_SUBJECT_BYTES_MAX,
    SCHEMA_TAGS_MAX,
    SCHEMA_TEXT_BYTES_MAX,
    SCHEMA_VERSION_MAX,
    SCHEMA_VERSIONS_MAX,
)

MODES: Final = ("none", "backward", "forward", "full")
DEFAULT_MODE: Final = "backward"
POLICIES: Final = ("none", "warn", "enforce")
KINDS: Final = ("avro", "json_schema", "protobuf", "string", "number", "bytes")

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
_Value = TypeVar("_Value", str, int, bool)


@dataclass(frozen=True, slots=True)
class SubjectRow:
    name: str
    id: int
    """The number of the subject: Danube's schema id. Messages carry it, with a version."""
    mode: str = DEFAULT_MODE
    next_version: int = 1
    versions: tuple[tuple[int, str], ...] = ()
    """The versions that exist, ascending, each with its fingerprint."""

    @property
    def latest(self) -> int:
        """The newest version; 0 if there is none."""
        return self.versions[-1][0] if self.versions else 0

    def has(self, version: int) -> bool:
        return any(each == version for each, _ in self.versions)

    def version_of(self, fingerprint: str) -> int | None:
        """The version with this fingerprint, if there is one."""
        return next((each for each, found in self.versions if found == fingerprint), None)


@dataclass(frozen=True, slots=True)
class VersionRow:
    subject: str
    version: int
    kind: str
    definition: bytes
    fingerprint: str
    description: str = ""
    created_ms: int = 0
    created_by: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicSchemaRow:
    """What a topic says about the schema of its messages."""

    subject: str
    policy: str = "none"
    payload: bool = False
    """Whether payloads are checked too."""


def check_version(row: VersionRow) -> None:
    """Raises UsageError if the row cannot be stored, and says which part of it is wrong."""
    check_subject(row.subject)
    if row.kind not in KINDS:
        raise UsageError(
            f"the type of a schema is {row.kind[:80]!r}; use one of {', '.join(KINDS)}"
        )
    if not 0 < len(row.definition) <= SCHEMA_BYTES_MAX:
        raise UsageError(
            f"the definition of a schema has {len(row.definition)} bytes; it must have 1 to "
            f"{SCHEMA_BYTES_MAX}"
        )
    _check_text("description", row.description, SCHEMA_TEXT_BYTES_MAX)
    _check_text("creator", row.created_by, SCHEMA_NAME_BYTES_MAX)
    if len(row.tags) > SCHEMA_TAGS_MAX:
        raise UsageError(
            f"a schema with {len(row.tags)} tags; at most {SCHEMA_TAGS_MAX} are allowed"
        )
    for tag in row.tags:
        _check_text("tag", tag, SCHEMA_NAME_BYTES_MAX)


def check_subject(subject: str) -> None:
    _check_text("subject", subject, SCHEMA_SUBJECT_BYTES_MAX, least=1)


def check_mode(mode: str) -> str:
    """Returns the mode in small letters; UsageError if there is no such mode."""
    if mode.lower() not in MODES:
        raise UsageError(f"the mode is {mode[:80]!r}; use one of {', '.join(MODES)}")
    return mode.lower()


def check_policy(policy: str) -> str:
    """Returns the policy in small letters; UsageError if there is no such policy."""
    if policy.lower() not in POLICIES:
        raise UsageError(f"the policy is {policy[:80]!r}; use one of {', '.join(POLICIES)}")
    return policy.lower()


def _check_text(what: str, text: str, bytes_max: int, least: int = 0) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        size = -1
    if not least <= size <= bytes_max:
        raise UsageError(
            f"the {what} of a schema is {text[:80]!r}; it must be Unicode text of {least} to "
            f"{bytes_max} bytes"
        )


# ---- bytes ------------------------------------------------------------------------------------


def encode_subject(row: SubjectRow) -> bytes:
    return _json(
        {
            "id": row.id,
            "mode": row.mode,
            "name": row.name,
            "next": row.next_version,
            "versions": [list(each) for each in row.versions],
        }
    )


def decode_subject(data: bytes, what: str) -> SubjectRow:
    """Decodes a subject. `what` names it in the DescriptorError."""
    body = _body(data, what)
    versions = body.get("versions")
    if not isinstance(versions, list) or len(versions) > SCHEMA_VERSIONS_MAX:
        raise DescriptorError(f"{what}: versions is not a list of at most {SCHEMA_VERSIONS_MAX}")
    found = tuple(_pair(each, what) for each in versions)
    row = SubjectRow(
        _field(body, "name", str, what),
        _number(body, "id", what),
        _choice(body, "mode", MODES, what),
        _number(body, "next", what),
        found,
    )
    numbers = [each for each, _ in found]
    if sorted(set(numbers)) != numbers or (numbers and numbers[-1] >= row.next_version):
        raise DescriptorError(f"{what}: versions do not ascend below next")
    return row


def _pair(each: Any, what: str) -> tuple[int, str]:
    match each:
        case [int() as version, str() as fingerprint] if (
            type(version) is int
            and 0 < version <= SCHEMA_VERSION_MAX
            and _FINGERPRINT.fullmatch(fingerprint)
        ):
            return version, fingerprint
    raise DescriptorError(f"{what}: versions has an entry that is no version and fingerprint")


def encode_version(row: VersionRow) -> bytes:
    """Encodes a version; UsageError if it cannot be stored."""
    check_version(row)
    return _json(
        {
            "created_by": row.created_by,
            "created_ms": row.created_ms,
            "definition": base64.b64encode(row.definition).decode(),
            "description": row.description,
            "fingerprint": row.fingerprint,
            "kind": row.kind,
            "subject": row.subject,
            "tags": list(row.tags),
            "version": row.version,
        }
    )


def decode_version(data: bytes, what: str) -> VersionRow:
    """Decodes a version. `what` names it in the DescriptorError."""
    body = _body(data, what)
    tags = body.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(each, str) for each in tags):
        raise DescriptorError(f"{what}: tags is not a list of texts")
    try:
        definition = base64.b64decode(_field(body, "definition", str, what), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DescriptorError(f"{what}: the definition is not base64") from error
    return VersionRow(
        _field(body, "subject", str, what),
        _number(body, "version", what),
        _field(body, "kind", str, what),
        definition,
        _field(body, "fingerprint", str, what),
        _field(body, "description", str, what),
        _number(body, "created_ms", what),
        _field(body, "created_by", str, what),
        tuple(tags),
    )


def encode_topic_schema(row: TopicSchemaRow) -> bytes:
    return _json({"payload": row.payload, "policy": row.policy, "subject": row.subject})


def decode_topic_schema(data: bytes, what: str) -> TopicSchemaRow:
    """Decodes a topic's row. `what` names it in the DescriptorError."""
    body = _body(data, what)
    return TopicSchemaRow(
        _field(body, "subject", str, what),
        _choice(body, "policy", POLICIES, what),
        _field(body, "payload", bool, what),
    )


def _body(data: bytes, what: str) -> dict[str, Any]:
    if len(data) > SCHEMA_ROW_BYTES_MAX:
        raise DescriptorError(f"{what} has {len(data)} bytes, which is too large")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DescriptorError(f"{what}: {error}") from error
    if not isinstance(body, dict):
        raise DescriptorError(f"{what} is not a JSON object")
    return body


def _field(body: dict[str, Any], name: str, kind: type[_Value], what: str) -> _Value:
    value = body.get(name)
    if type(value) is not kind:
        raise DescriptorError(f"{what}: {name} is not a {kind.__name__}")
    return value


def _number(body: dict[str, Any], name: str, what: str) -> int:
    value = _field(body, name, int, what)
    if not 0 <= value <= OFFSET_MAX:
        raise DescriptorError(f"{what}: {name} is not an integer in 0..{OFFSET_MAX}")
    return value


def _choice(body: dict[str, Any], name: str, choices: tuple[str, ...], what: str) -> str:
    value = _field(body, name, str, what)
    if value not in choices:
        raise DescriptorError(f"{what}: {name} is {value[:80]!r}, not one of {', '.join(choices)}")
    return value


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
