"""`SchemaGuard`: whether a message fits the schema of its topic.

A topic has a subject, and a policy: `none`, `warn` or `enforce`. With a policy, each message must
carry the id of that subject and one of its versions; and, if the topic says so, its payload must be
as that version says. `warn` counts and logs what does not fit, and takes it. `enforce` refuses it.

What the catalog says is read again in the background while messages come, so that none waits for
it. A change by another process therefore takes some seconds. A change by this process counts at
once: `changed`. If the catalog does not respond, what was known goes on to hold.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from forebay.errors import ForebayError, InvalidPayload, SchemaMismatch, ServiceError, UnknownSchema
from forebay.format.names import TopicName
from forebay.format.schema import SubjectRow, TopicSchemaRow
from forebay.limits import KIB, SCHEMAS_CACHED_MAX, TOPIC_NAMES_KNOWN_MAX
from forebay.logs import event
from forebay.metrics import SECONDS, Counter, Histogram
from forebay.schemas.kinds import Parsed, check_payload, parse
from forebay.schemas.registry import SchemaRegistry

_log: Final = logging.getLogger("forebay.schemas")
UNFIT: Final = Counter(
    "forebay_schema_unfit_messages_total",
    "Messages that do not fit the schema of their topic, by policy (warn, enforce) and reason.",
    ["policy", "reason"],
)
CHECK_SECONDS: Final = Histogram(
    "forebay_schema_payload_check_seconds",
    "Time to check the payload of a message against its schema.",
    SECONDS,
)
_FRESH_SECONDS: Final = 5.0
"""What is older is read again in the background."""
_HELD_SECONDS: Final = 30.0
"""What is older is read again before it is used."""
_LINE_SECONDS: Final = 1.0
INLINE_BYTES: Final = 4 * KIB
"""Larger payloads are checked on a thread of their own."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the catalog says about a topic."""

    row: TopicSchemaRow | None
    subject: SubjectRow | None
    read_at: float


class SchemaGuard:
    """Thread-safe. `known` says without waiting whether there is anything to check."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self.registry = registry
        self._lock = threading.Lock()
        self._topics: OrderedDict[TopicName, _Known] = OrderedDict()
        self._parsed: OrderedDict[tuple[int, int], Parsed] = OrderedDict()
        self._generation = 0
        self._stale: set[TopicName] = set()
        self._reading = False
        self._line_at = float("-inf")
        self._lines_left_out = 0

    def changed(self) -> None:
        """Forgets what was read: this process has changed the registry."""
        with self._lock:
            self._generation += 1
            for topic, known in self._topics.items():
                self._topics[topic] = replace(known, read_at=float("-inf"))

    def is_free(self, topic: TopicName) -> bool | None:
        """Whether the topic takes every message; None if the catalog has to be asked first."""
        known = self._topics.get(topic)
        age = float("inf") if known is None else time.monotonic() - known.read_at
        if known is None or age > _HELD_SECONDS:
            return None
        if age > _FRESH_SECONDS:
            self._read_aside(topic)
        return known.row is None or known.row.policy == "none"

    def is_quick(self, topic: TopicName, payload: bytes, version: int | None) -> bool:
        """Whether `check` neither waits nor takes long."""
        known = self._topics.get(topic)
        if self.is_free(topic) is None or known is None or known.subject is None:
            return False
        key = known.subject.id, version if version is not None else known.subject.latest
        return len(payload) <= INLINE_BYTES and key in self._parsed

    def require_free(self, topic: TopicName) -> None:
        """Raises SchemaMismatch for a topic that enforces its schema.

        For ways of producing that cannot name a schema. May wait for the catalog.
        """
        row = self._read(topic).row
        if row is not None and row.policy == "enforce":
            raise SchemaMismatch(
                f"{topic} enforces the schema {row.subject!r}: produce with a client that names it"
            )

    def check(
        self, topic: TopicName, schema_id: int | None, version: int | None, payload: bytes
    ) -> None:
        """Raises SchemaMismatch or InvalidPayload if the topic refuses the message."""
        known = self._read(topic)
        row = known.row
        if row is None or row.policy == "none":
            return
        try:
            self._require_fit(topic, row, known.subject, schema_id, version, payload)
        except (SchemaMismatch, InvalidPayload) as error:
            reason = "payload" if isinstance(error, InvalidPayload) else "schema"
            UNFIT.add(1, row.policy, reason)
            if row.policy == "enforce":
                raise
            self._warn(topic, error)

    def _require_fit(
        self,
        topic: TopicName,
        row: TopicSchemaRow,
        subject: SubjectRow | None,
        schema_id: int | None,
        version: int | None,
        payload: bytes,
    ) -> None:
        if subject is None:
            raise SchemaMismatch(f"{topic} has the schema {row.subject!r}, which does not exist")
        if schema_id is None:
            raise SchemaMismatch(
                f"{topic} takes messages of the schema {row.subject!r} alone (id {subject.id}), "
                "and the message names none"
            )
        if schema_id != subject.id:
            raise SchemaMismatch(
                f"{topic} takes messages of the schema {row.subject!r} alone (id {subject.id}), "
                f"and the message names the id {schema_id}"
            )
        wanted = subject.latest if version is None else version
        if not subject.has(wanted):
            raise SchemaMismatch(f"the schema {row.subject!r} has no version {wanted}")
        if row.payload:
            schema = self._schema(subject, wanted)
            began = time.perf_counter()
            try:
                check_payload(schema, payload)
            finally:
                CHECK_SECONDS.observe(time.perf_counter() - began)

    def _schema(self, subject: SubjectRow, version: int) -> Parsed:
        key = subject.id, version
        found = self._parsed.get(key)
        if found is None:
            stored = self.registry.version(subject, version)
            found = parse(stored.kind, stored.definition)
            with self._lock:
                self._parsed[key] = found
                while len(self._parsed) > SCHEMAS_CACHED_MAX:
                    self._parsed.popitem(last=False)
        return found

    def _read(self, topic: TopicName) -> _Known:
        known = self._topics.get(topic)
        if known is not None and time.monotonic() - known.read_at <= _HELD_SECONDS:
            return known
        return self._read_again(topic, known)

    def _read_aside(self, topic: TopicName) -> None:
        """Reads what the catalog says on a thread, which ends when there is nothing to read."""
        with self._lock:
            self._stale.add(topic)
            if self._reading:
                return
            self._reading = True
        threading.Thread(target=self._read_stale, name="forebay-schemas", daemon=True).start()

    def _read_stale(self) -> None:
        while True:
            with self._lock:
                if not self._stale:
                    self._reading = False
                    return
                topic = self._stale.pop()
                known = self._topics.get(topic)
            try:
                self._read_again(topic, known)
            except ForebayError as error:  # a damaged row, or the store was closed
                event(
                    _log,
                    logging.WARNING,
                    "the schema of a topic cannot be read",
                    topic=topic,
                    error=str(error)[:300],
                )

    def _read_again(self, topic: TopicName, known: _Known | None) -> _Known:
        now = time.monotonic()
        generation = self._generation
        try:
            row = self.registry.topic_schema(topic)
            subject = None if row is None else self._subject(row.subject)
            found = _Known(row, subject, now)
        except ServiceError:
            if known is None:
                raise
            found = _Known(known.row, known.subject, now)
        with self._lock:
            if generation == self._generation:
                self._topics[topic] = found
                while len(self._topics) > TOPIC_NAMES_KNOWN_MAX:
                    self._topics.popitem(last=False)
        return found

    def _subject(self, name: str) -> SubjectRow | None:
        try:
            return self.registry.subject(name)
        except UnknownSchema:
            return None

    def _warn(self, topic: TopicName, error: ForebayError) -> None:
        """At most one line each second, which counts those in between."""
        now = time.monotonic()
        with self._lock:
            if now < self._line_at + _LINE_SECONDS:
                self._lines_left_out += 1
                return
            more, self._lines_left_out, self._line_at = self._lines_left_out, 0, now
        event(
            _log,
            logging.WARNING,
            "a message does not fit the schema of its topic",
            topic=topic,
            error=str(error)[:300],
            more=more,
        )
