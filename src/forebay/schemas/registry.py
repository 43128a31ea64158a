"""`SchemaRegistry`: the subjects of a store, their versions, and the schemas of topics.

Everything is in the catalog, and every change is one transaction that compares what it read. So
processes need not know of each other: two that register at the same time get two versions, and one
of them is compared with the other's. Numbers of subjects and versions are never given twice, also
after a deletion: messages in the log keep theirs. A registration is idempotent: a definition whose
fingerprint the subject has gets that version.

Beware: methods wait for the catalog, and parsing may start a process. Call them on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.catalog.nonreliable import find_nonreliable
from forebay.catalog.records import decode_json
from forebay.clock import SYSTEM_CLOCK, Clock, since_1970
from forebay.errors import (
    DescriptorError,
    IncompatibleSchema,
    SchemaMismatch,
    ServiceUnavailable,
    UnknownSchema,
    UnknownTopic,
    UsageError,
)
from forebay.format.names import TopicName, after_prefix
from forebay.format.schema import (
    SubjectRow,
    TopicSchemaRow,
    VersionRow,
    check_mode,
    check_policy,
    check_subject,
    check_version,
    decode_subject,
    decode_topic_schema,
    decode_version,
    encode_subject,
    encode_topic_schema,
    encode_version,
)
from forebay.limits import (
    CATALOG_PAGE,
    OFFSET_MAX,
    SCHEMA_VERSION_MAX,
    SCHEMA_VERSIONS_MAX,
    SCHEMAS_PAGE,
)
from forebay.metrics import Counter
from forebay.schemas.kinds import fingerprint, incompatible, kind_named, parse

REGISTERED: Final = Counter(
    "forebay_schema_registrations_total",
    "Schemas that were registered, by outcome: new, known or refused.",
    ["outcome"],
)
_NEXT_KEY: Final = "\1"
_TRIES: Final = 100


class Registered(NamedTuple):
    subject: SubjectRow
    version: VersionRow
    is_new: bool


@dataclass(frozen=True, slots=True)
class NewSchema:
    """A schema to register."""

    subject: str
    kind: str
    definition: bytes
    description: str = ""
    created_by: str = ""
    tags: tuple[str, ...] = ()


class SchemaRegistry:
    """Thread-safe. Every method may raise ServiceError, and DescriptorError for a damaged row."""

    def __init__(self, catalog: Catalog | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._stored = catalog
        self._clock = since_1970(clock)

    @property
    def _catalog(self) -> Catalog:
        if self._stored is None:
            raise UsageError("this store has no catalog, so it keeps no schemas: set `metadata`")
        return self._stored

    # -- subjects and versions ------------------------------------------------------------------

    def register(self, new: NewSchema) -> Registered:
        """Adds a version, unless the subject has this schema.

        Raises InvalidSchema, and IncompatibleSchema if it breaks the subject's mode.
        """
        kind = kind_named(new.kind)
        row = VersionRow(
            new.subject, 0, kind, new.definition, "", new.description, 0, new.created_by, new.tags
        )
        check_version(row)
        parsed = parse(kind, new.definition)
        row = replace(row, fingerprint=fingerprint(kind, parsed))
        for _ in range(_TRIES):
            entry, subject = self._find(new.subject)
            known = subject and subject.version_of(row.fingerprint)
            if subject is not None and known:
                REGISTERED.add(1, "known")
                return Registered(subject, self.version(subject, known), is_new=False)
            if subject is not None:
                self._require_compatible(subject, row)
            done = self._add(entry, subject, row)
            if done is not None:
                REGISTERED.add(1, "new")
                return done
        raise self._contended(new.subject)

    def _require_compatible(self, subject: SubjectRow, new: VersionRow) -> None:
        errors = self._incompatible(subject, subject.mode, new.kind, new.definition)
        if errors:
            REGISTERED.add(1, "refused")
            raise IncompatibleSchema(
                f"the schema breaks the mode {subject.mode} of {subject.name!r}: "
                f"{'; '.join(errors[:3])}"
            )
        if (
            len(subject.versions) >= SCHEMA_VERSIONS_MAX
            or subject.next_version > SCHEMA_VERSION_MAX
        ):
            raise UsageError(
                f"{subject.name!r} has {len(subject.versions)} versions, and cannot have more: "
                "delete old ones"
            )

    def _add(
        self, entry: Entry | None, subject: SubjectRow | None, row: VersionRow
    ) -> Registered | None:
        """One attempt; None if another process changed something first."""
        keys, writes, compares = self._catalog.keys, list[Put](), list[Compare]()
        if subject is None:
            numbers = self._catalog.kv.get(keys.schema_numbers())
            number = _next_number(numbers)
            subject = SubjectRow(row.subject, number)
            compares.append(_unchanged(keys.schema_numbers(), numbers))
            writes.append(Put(keys.schema_numbers(), b'{"next":%d}' % (number + 1)))
            writes.append(Put(keys.schema_id(number), keys.schema_subject(row.subject).encode()))
        row = replace(row, version=subject.next_version, created_ms=self._clock.now_ms())
        after = replace(
            subject,
            next_version=row.version + 1,
            versions=(*subject.versions, (row.version, row.fingerprint)),
        )
        key = keys.schema_subject(row.subject)
        compares.append(_unchanged(key, entry))
        writes.append(Put(key, encode_subject(after)))
        writes.append(Put(keys.schema_version(subject.id, row.version), encode_version(row)))
        if self._catalog.kv.commit(compares, writes) is None:
            return None
        return Registered(after, row, is_new=True)

    def check(
        self, subject: str, kind: str, definition: bytes, mode: str | None = None
    ) -> list[str]:
        """Why the schema could not be registered with the mode, which is the subject's by default.

        Empty if it could. Raises UnknownSchema if there is no such subject, and InvalidSchema.
        """
        kind = kind_named(kind)
        check_version(VersionRow(subject, 0, kind, definition, ""))
        found = self.subject(subject)
        return self._incompatible(
            found, found.mode if mode is None else check_mode(mode), kind, definition
        )

    def _incompatible(
        self, subject: SubjectRow, mode: str, kind: str, definition: bytes
    ) -> list[str]:
        new = parse(kind, definition)
        if mode == "none" or not subject.versions:
            return []
        latest = self.version(subject)
        if latest.kind != kind:
            return [f"{subject.name!r} is of the type {latest.kind}, and the schema of {kind}"]
        return incompatible(mode, new, parse(latest.kind, latest.definition))

    def subject(self, name: str) -> SubjectRow:
        """Returns a subject; UnknownSchema if it does not exist, or all versions were deleted."""
        check_subject(name)
        found = self._find(name)[1]
        if found is None or not found.versions:
            raise UnknownSchema(f"there is no subject {name[:80]!r}: register a schema first")
        return found

    def subject_of(self, number: int) -> SubjectRow:
        """Returns the subject with this number, which is Danube's schema id."""
        keys = self._catalog.keys
        entry = self._catalog.kv.get(keys.schema_id(number)) if 0 < number <= OFFSET_MAX else None
        if entry is None:
            raise UnknownSchema(f"there is no schema with the id {number}")
        return self.subject(keys.schema_subject_name(entry.value.decode(errors="replace")))

    def version(self, subject: SubjectRow, version: int | None = None) -> VersionRow:
        """Returns a version of a subject, the latest by default; UnknownSchema if there is none."""
        wanted = subject.latest if version is None else version
        key = self._catalog.keys.schema_version(subject.id, wanted)
        entry = self._catalog.kv.get(key) if subject.has(wanted) else None
        if entry is None:
            raise UnknownSchema(f"the subject {subject.name!r} has no version {wanted}")
        return decode_version(entry.value, key)

    def versions(self, subject: SubjectRow) -> Iterator[VersionRow]:
        """Yields the versions of a subject, ascending, reading a page at a time."""
        prefix = self._catalog.keys.schema_versions(subject.id)
        for entry in self._entries(prefix, SCHEMAS_PAGE):
            yield decode_version(entry.value, entry.key)

    def subjects(
        self, damaged: Callable[[DescriptorError], None] | None = None, *, after: str = ""
    ) -> Iterator[SubjectRow]:
        """Yields the subjects that have a version, ordered by the key, reading a page at a time.

        With `after`, only those after that subject.
        A row that cannot be decoded is passed to `damaged` as an error, or raised.
        """
        keys = self._catalog.keys
        start = keys.schema_subject(after) + _NEXT_KEY if after else ""
        for entry in self._entries(keys.schema_subjects(), SCHEMAS_PAGE, start):
            try:
                found = decode_subject(entry.value, entry.key)
            except DescriptorError as error:
                if damaged is None:
                    raise
                damaged(error)
                continue
            if found.versions:
                yield found

    def delete(self, name: str, version: int) -> SubjectRow:
        """Deletes a version, and returns what is left. Its number is not given again.

        Raises SchemaMismatch for the last version of a subject that a topic has.
        """

        def change(row: SubjectRow) -> tuple[SubjectRow, list[Put | Remove]]:
            if not row.has(version):
                raise UnknownSchema(f"the subject {name!r} has no version {version}")
            left = tuple(each for each in row.versions if each[0] != version)
            if not left:
                self._require_unused(name)
            key = self._catalog.keys.schema_version(row.id, version)
            return replace(row, versions=left), [Remove(key)]

        return self._change(name, change)

    def _require_unused(self, subject: str) -> None:
        for topic in self._catalog.topics():
            row = self.topic_schema(topic)
            if row is not None and row.subject == subject and row.policy != "none":
                raise SchemaMismatch(
                    f"{topic} has the subject {subject!r} and the policy {row.policy}: set its "
                    "policy to none before you delete the last version"
                )

    def set_mode(self, name: str, mode: str) -> SubjectRow:
        """Sets the compatibility mode of a subject, for the versions that are registered next."""
        wanted = check_mode(mode)
        return self._change(name, lambda row: (replace(row, mode=wanted), []))

    def _change(
        self,
        name: str,
        change: Callable[[SubjectRow], tuple[SubjectRow, list[Put | Remove]]],
    ) -> SubjectRow:
        for _ in range(_TRIES):
            self.subject(name)
            entry, row = self._find(name)
            if entry is None or row is None:
                continue
            after, writes = change(row)
            if after == row:
                return row
            writes.append(Put(entry.key, encode_subject(after)))
            if self._catalog.kv.commit([_unchanged(entry.key, entry)], writes) is not None:
                return after
        raise self._contended(name)

    def _find(self, name: str) -> tuple[Entry | None, SubjectRow | None]:
        key = self._catalog.keys.schema_subject(name)
        entry = self._catalog.kv.get(key)
        return entry, None if entry is None else decode_subject(entry.value, key)

    def _entries(self, prefix: str, limit: int, start: str = "") -> Iterator[Entry]:
        at, end = start or prefix, after_prefix(prefix)
        while page := self._catalog.kv.range(at, end, limit=min(limit, CATALOG_PAGE)):
            yield from page
            at = page[-1].key + _NEXT_KEY

    def _contended(self, name: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"other processes kept changing the subject {name!r} in {self._catalog.name}; try again"
        )

    # -- topics ---------------------------------------------------------------------------------

    def topic_schema(self, topic: TopicName) -> TopicSchemaRow | None:
        """What a topic says about its schema; None if it says nothing, or there is no catalog."""
        if self._stored is None:
            return None
        key = self._stored.keys.topic_schema(topic)
        entry = self._stored.kv.get(key)
        return None if entry is None else decode_topic_schema(entry.value, key)

    def configure_topic(
        self, topic: TopicName, subject: str, policy: str = "none", *, payload: bool = False
    ) -> TopicSchemaRow:
        """Gives a topic a subject and a policy. Raises UnknownTopic and UnknownSchema."""
        wanted = TopicSchemaRow(self.subject(subject).name, check_policy(policy), payload)
        return self._change_topic(topic, lambda _: wanted)

    def set_policy(self, topic: TopicName, policy: str, *, payload: bool = False) -> TopicSchemaRow:
        """Changes the policy of a topic that has a subject; UnknownSchema if it has none."""
        wanted = check_policy(policy)

        def change(before: TopicSchemaRow | None) -> TopicSchemaRow:
            if before is None:
                raise UnknownSchema(f"{topic} has no schema: configure its subject first")
            return replace(before, policy=wanted, payload=payload)

        return self._change_topic(topic, change)

    def assign(self, topic: TopicName, subject: str) -> TopicSchemaRow:
        """Gives the topic this subject if it has none; returns what it has."""
        return self._change_topic(topic, lambda before: before or TopicSchemaRow(subject))

    def clear_topic(self, topic: TopicName) -> bool:
        """Takes the schema of a topic away; returns whether it had one."""
        key = self._catalog.keys.topic_schema(topic)
        gone = self._catalog.kv.get(key) is not None
        self._catalog.kv.commit([], [Remove(key)])
        return gone

    def _change_topic(
        self, topic: TopicName, change: Callable[[TopicSchemaRow | None], TopicSchemaRow]
    ) -> TopicSchemaRow:
        catalog = self._catalog
        key, record_key = catalog.keys.topic_schema(topic), catalog.keys.record(topic)
        for _ in range(_TRIES):
            record = catalog.kv.get(record_key)  # compared too: nothing is added to a deleted topic
            if catalog.record(topic) is None and find_nonreliable(catalog, topic) is None:
                raise UnknownTopic(f"there is no topic {topic} in {catalog.name}")
            entry = catalog.kv.get(key)
            before = None if entry is None else decode_topic_schema(entry.value, key)
            after = change(before)
            if after == before:
                return after
            compares = [_unchanged(record_key, record), _unchanged(key, entry)]
            if catalog.kv.commit(compares, [Put(key, encode_topic_schema(after))]) is not None:
                return after
        raise ServiceUnavailable(
            f"{topic}: other processes kept changing it in {catalog.name}; try again"
        )


def _next_number(entry: Entry | None) -> int:
    if entry is None:
        return 1
    match decode_json(entry.value, entry.key):
        case {"next": int() as number} if 0 < number < OFFSET_MAX:
            return number
    raise DescriptorError(f"{entry.key} does not hold the next number of a subject")


def _unchanged(key: str, entry: Entry | None) -> Compare:
    return Compare(key, ABSENT if entry is None else entry.revision)
