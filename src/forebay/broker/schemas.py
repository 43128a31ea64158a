"""`danube_schema.SchemaRegistry`: the schema registry as Danube's clients call it.

The number of a subject is the `schema_id`; a version is a number below it. A call for a subject,
a version or an id that does not exist is NOT_FOUND, a definition that is not valid is
INVALID_ARGUMENT, and a schema that breaks the mode of its subject is FAILED_PRECONDITION.

`references` is for CreateProducer: what a producer says about the schema of its messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import grpc
from google.protobuf.message import DecodeError

from forebay.broker import danube_pb2
from forebay.broker import schemas_pb2 as pb
from forebay.broker.calls import Calls, Context, service
from forebay.broker.context import BrokerContext
from forebay.broker.requests import parse_topic_name
from forebay.errors import SchemaMismatch, UnknownSchema
from forebay.format.names import TopicName
from forebay.format.schema import SubjectRow, VersionRow
from forebay.schemas.registry import NewSchema

_PARSED_AT_ONCE: Final = 4
"""Definitions; others wait, so that threads are left for topics."""
_LISTED_MAX: Final = 10_000
"""Subjects in one response, which has no pages."""
_Result = TypeVar("_Result")


class SchemaService:
    def __init__(self, context: BrokerContext) -> None:
        self._registry = context.schemas
        self._guard = context.guard
        self._places = asyncio.Semaphore(_PARSED_AT_ONCE)

    async def _changed(self, change: Callable[[], _Result]) -> _Result:
        try:
            return await asyncio.to_thread(change)
        finally:
            self._guard.changed()

    async def register(
        self, request: pb.RegisterSchemaRequest, _call: Context
    ) -> pb.RegisterSchemaResponse:
        new = NewSchema(
            request.subject,
            request.schema_type,
            request.schema_definition,
            request.description,
            request.created_by,
            tuple(request.tags),
        )
        async with self._places:
            found = await self._changed(lambda: self._registry.register(new))
        return pb.RegisterSchemaResponse(
            schema_id=found.subject.id,
            version=found.version.version,
            is_new_version=found.is_new,
            fingerprint=found.version.fingerprint,
        )

    async def get(self, request: pb.GetSchemaRequest, _call: Context) -> pb.GetSchemaResponse:
        version = request.version if request.HasField("version") else None

        def read() -> tuple[SubjectRow, VersionRow]:
            subject = self._registry.subject_of(request.schema_id)
            return subject, self._registry.version(subject, version)

        return _schema(*await asyncio.to_thread(read))

    async def latest(
        self, request: pb.GetLatestSchemaRequest, _call: Context
    ) -> pb.GetSchemaResponse:
        def read() -> tuple[SubjectRow, VersionRow]:
            subject = self._registry.subject(request.subject)
            return subject, self._registry.version(subject)

        return _schema(*await asyncio.to_thread(read))

    async def versions(
        self, request: pb.ListVersionsRequest, _call: Context
    ) -> pb.ListVersionsResponse:
        def read() -> list[pb.SchemaVersionInfo]:
            subject = self._registry.subject(request.subject)
            return [
                pb.SchemaVersionInfo(
                    version=each.version,
                    created_at=each.created_ms // 1000,
                    created_by=each.created_by,
                    description=each.description,
                    fingerprint=each.fingerprint,
                    schema_id=subject.id,
                )
                for each in self._registry.versions(subject)
            ]

        return pb.ListVersionsResponse(versions=await asyncio.to_thread(read))

    async def check(
        self, request: pb.CheckCompatibilityRequest, _call: Context
    ) -> pb.CheckCompatibilityResponse:
        mode = request.compatibility_mode if request.HasField("compatibility_mode") else None
        async with self._places:
            errors = await asyncio.to_thread(
                self._registry.check,
                request.subject,
                request.schema_type,
                request.new_schema_definition,
                mode,
            )
        return pb.CheckCompatibilityResponse(is_compatible=not errors, errors=errors)

    async def delete(
        self, request: pb.DeleteSchemaVersionRequest, _call: Context
    ) -> pb.DeleteSchemaVersionResponse:
        await self._changed(lambda: self._registry.delete(request.subject, request.version))
        return pb.DeleteSchemaVersionResponse(
            success=True, message=f"deleted version {request.version} of {request.subject}"
        )

    async def set_mode(
        self, request: pb.SetCompatibilityModeRequest, _call: Context
    ) -> pb.SetCompatibilityModeResponse:
        row = await self._changed(
            lambda: self._registry.set_mode(request.subject, request.compatibility_mode)
        )
        return pb.SetCompatibilityModeResponse(
            success=True, message=f"the mode of {row.name} is {row.mode}"
        )

    async def configure(
        self, request: pb.ConfigureTopicSchemaRequest, _call: Context
    ) -> pb.ConfigureTopicSchemaResponse:
        topic = parse_topic_name(request.topic_name)
        row = await self._changed(
            lambda: self._registry.configure_topic(
                topic,
                request.schema_subject,
                request.validation_policy or "none",
                payload=request.enable_payload_validation,
            )
        )
        return pb.ConfigureTopicSchemaResponse(
            success=True, message=f"{topic} has the schema {row.subject}, policy {row.policy}"
        )

    async def set_policy(
        self, request: pb.UpdateTopicValidationPolicyRequest, _call: Context
    ) -> pb.UpdateTopicValidationPolicyResponse:
        topic = parse_topic_name(request.topic_name)
        row = await self._changed(
            lambda: self._registry.set_policy(
                topic, request.validation_policy, payload=request.enable_payload_validation
            )
        )
        return pb.UpdateTopicValidationPolicyResponse(
            success=True, message=f"the policy of {topic} is {row.policy}"
        )

    async def topic(
        self, request: pb.GetTopicSchemaConfigRequest, _call: Context
    ) -> pb.GetTopicSchemaConfigResponse:
        topic = parse_topic_name(request.topic_name)

        def read() -> pb.GetTopicSchemaConfigResponse:
            row = self._registry.topic_schema(topic)
            if row is None:
                raise UnknownSchema(f"{topic} has no schema")
            return pb.GetTopicSchemaConfigResponse(
                schema_subject=row.subject,
                validation_policy=row.policy,
                enable_payload_validation=row.payload,
                schema_id=self._registry.subject(row.subject).id,
            )

        return await asyncio.to_thread(read)

    async def subjects(
        self, _request: pb.ListSubjectsRequest, _call: Context
    ) -> pb.ListSubjectsResponse:
        def read() -> list[pb.SubjectSummary]:
            found: list[pb.SubjectSummary] = []
            for row in self._registry.subjects():
                if len(found) >= _LISTED_MAX:
                    break
                latest = self._registry.version(row)
                found.append(
                    pb.SubjectSummary(
                        subject=row.name,
                        schema_type=latest.kind,
                        latest_version=row.latest,
                        compatibility_mode=row.mode,
                        schema_id=row.id,
                        tags=latest.tags,
                    )
                )
            return found

        return pb.ListSubjectsResponse(subjects=await asyncio.to_thread(read))


def _schema(subject: SubjectRow, row: VersionRow) -> pb.GetSchemaResponse:
    return pb.GetSchemaResponse(
        schema_id=subject.id,
        version=row.version,
        subject=row.subject,
        schema_type=row.kind,
        schema_definition=row.definition,
        description=row.description,
        created_at=row.created_ms // 1000,
        created_by=row.created_by,
        tags=row.tags,
        fingerprint=row.fingerprint,
        compatibility_mode=subject.mode,
    )


def services(context: BrokerContext, calls: Calls) -> Sequence[grpc.GenericRpcHandler]:
    own = SchemaService(context)
    methods = {
        "RegisterSchema": calls.unary(
            "RegisterSchema", pb.RegisterSchemaRequest.FromString, own.register
        ),
        "GetSchema": calls.unary("GetSchema", pb.GetSchemaRequest.FromString, own.get),
        "GetLatestSchema": calls.unary(
            "GetLatestSchema", pb.GetLatestSchemaRequest.FromString, own.latest
        ),
        "ListVersions": calls.unary(
            "ListVersions", pb.ListVersionsRequest.FromString, own.versions
        ),
        "CheckCompatibility": calls.unary(
            "CheckCompatibility", pb.CheckCompatibilityRequest.FromString, own.check
        ),
        "DeleteSchemaVersion": calls.unary(
            "DeleteSchemaVersion", pb.DeleteSchemaVersionRequest.FromString, own.delete
        ),
        "SetCompatibilityMode": calls.unary(
            "SetCompatibilityMode", pb.SetCompatibilityModeRequest.FromString, own.set_mode
        ),
        "ConfigureTopicSchema": calls.unary(
            "ConfigureTopicSchema", pb.ConfigureTopicSchemaRequest.FromString, own.configure
        ),
        "UpdateTopicValidationPolicy": calls.unary(
            "UpdateTopicValidationPolicy",
            pb.UpdateTopicValidationPolicyRequest.FromString,
            own.set_policy,
        ),
        "GetTopicSchemaConfig": calls.unary(
            "GetTopicSchemaConfig", pb.GetTopicSchemaConfigRequest.FromString, own.topic
        ),
        "ListSubjects": calls.unary(
            "ListSubjects", pb.ListSubjectsRequest.FromString, own.subjects
        ),
    }
    return [service("danube_schema.SchemaRegistry", methods)]


# ---- producers ---------------------------------------------------------------------------------


class SchemaReferences:
    """Decides whether a producer may be created with what it says about its schema."""

    def __init__(self, context: BrokerContext) -> None:
        self._registry = context.schemas
        self._guard = context.guard

    async def require(self, topic: TopicName, raw: bytes) -> bool:
        """Raises SchemaMismatch and UnknownSchema; returns False for a schema that is ignored.

        The first producer with a reference gives the topic its subject. Danube 0.5.0 sent a whole
        schema in place of a reference, which is ignored; it may look like the reference to a
        subject that does not exist.
        """
        reference = _reference(raw)
        named = False
        if reference is not None:
            try:
                named = await asyncio.to_thread(self._require, topic, reference)
            finally:
                self._guard.changed()
        if not named:
            await asyncio.to_thread(self._guard.require_free, topic)
        return named or not raw

    def _require(self, topic: TopicName, reference: danube_pb2.SchemaReference) -> bool:
        try:
            subject = self._registry.subject(reference.subject)
        except UnknownSchema:
            if reference.WhichOneof("version_ref") in {"use_latest", "min_version"}:
                raise
            return False
        _require_version(subject, reference)
        row = self._registry.assign(topic, subject.name)
        if row.subject != subject.name:
            raise SchemaMismatch(
                f"{topic} has the schema {row.subject!r}, and the producer names {subject.name!r}"
            )
        return True


def _reference(raw: bytes) -> danube_pb2.SchemaReference | None:
    """The reference; None for a whole schema of Danube 0.5.0: its field 2 is bytes."""
    try:
        found = danube_pb2.SchemaReference.FromString(raw)
    except DecodeError:
        return None
    found.DiscardUnknownFields()
    return found if found.subject and found.ByteSize() == len(raw) else None


def _require_version(subject: SubjectRow, reference: danube_pb2.SchemaReference) -> None:
    match reference.WhichOneof("version_ref"):
        case "pinned_version" if not subject.has(reference.pinned_version):
            raise SchemaMismatch(
                f"the subject {subject.name!r} has no version {reference.pinned_version}"
            )
        case "min_version" if subject.latest < reference.min_version:
            raise SchemaMismatch(
                f"the latest version of {subject.name!r} is {subject.latest}, and the producer "
                f"needs at least {reference.min_version}"
            )
