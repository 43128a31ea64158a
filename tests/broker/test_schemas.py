"""Danube's own client uses the schema registry: subjects, versions, modes, topics and producers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from danube import CompatibilityMode, DanubeClient, SchemaRegistryClient, SchemaType
from grpc.aio import AioRpcError

from forebay.broker import danube_pb2
from forebay.broker import schemas_pb2 as pb
from support.danube_brokers import RELIABLE, DanubeBroker, DanubeUser, running_broker, within

TOPIC: Final = "/default/t1"
SERVICE: Final = "danube_schema.SchemaRegistry"


def json_schema(*required: str, **properties: str) -> bytes:
    return json.dumps(
        {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in properties.items()},
            "required": list(required),
        }
    ).encode()


FIRST: Final = json_schema("id", id="integer")
SECOND: Final = json_schema("id", id="integer", name="string")
BREAKING: Final = json_schema("id", "name", id="integer", name="string")


async def registered(
    schemas: SchemaRegistryClient,
    subject: str = "orders",
    definition: bytes = FIRST,
    kind: SchemaType = SchemaType.JSON_SCHEMA,
) -> int:
    new = schemas.register_schema(subject).with_type(kind).with_schema_data(definition)
    number: int = await within(new.execute())
    return number


async def status_of(awaited: Any) -> grpc.StatusCode:
    with pytest.raises(AioRpcError) as caught:
        await within(awaited)
    return caught.value.code()


async def test_a_schema_is_registered_and_read_by_id_version_and_subject(
    danube: DanubeUser,
) -> None:
    schemas = (await danube.client()).schema()
    new = schemas.register_schema("orders").with_type(SchemaType.JSON_SCHEMA)
    new = new.with_schema_data(FIRST).with_description("all orders").with_tags(["eu"])
    number = await within(new.with_created_by("ann").execute())
    assert await registered(schemas, definition=SECOND) == number  # an id is a subject's

    latest = await within(schemas.get_latest_schema("orders"))
    assert (latest.schema_id, latest.version, latest.subject) == (number, 2, "orders")
    assert (latest.schema_type, latest.schema_definition) == ("json_schema", SECOND)
    assert (await within(schemas.get_schema_by_id(number))).version == 2
    first = await within(schemas.get_schema_version(number, 1))
    assert first.schema_definition == FIRST
    assert first.fingerprint != latest.fingerprint
    assert await within(schemas.list_versions("orders")) == [1, 2]


async def test_all_fields_of_a_version_are_kept(broker: DanubeBroker, danube: DanubeUser) -> None:
    schemas = (await danube.client()).schema()
    new = schemas.register_schema("orders").with_type(SchemaType.AVRO).with_tags(["eu", "pii"])
    await within(new.with_schema_data(b'"long"').with_description("d").execute())
    raw = pb.GetLatestSchemaRequest(subject="orders").SerializeToString()
    found = pb.GetSchemaResponse.FromString(await broker.call(f"{SERVICE}/GetLatestSchema", raw))
    assert (found.description, found.created_by, list(found.tags)) == (
        "d",
        "danube-py",
        ["eu", "pii"],
    )
    assert found.compatibility_mode == "backward"
    assert found.created_at > 1_600_000_000


async def test_registering_the_same_schema_again_makes_no_version(danube: DanubeUser) -> None:
    schemas = (await danube.client()).schema()
    first = await registered(schemas)
    spaced = json.dumps(json.loads(FIRST), indent=4).encode()
    assert await registered(schemas, definition=spaced) == first
    assert await within(schemas.list_versions("orders")) == [1]
    other = await registered(schemas, "payments")
    assert other != first


async def test_a_schema_that_breaks_the_mode_is_refused(danube: DanubeUser) -> None:
    schemas = (await danube.client()).schema()
    await registered(schemas)
    kind = SchemaType.JSON_SCHEMA
    fits, errors = await within(schemas.check_compatibility("orders", BREAKING, kind))
    assert not fits
    assert "name" in errors[0]
    code = await status_of(registered(schemas, definition=BREAKING))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    for mode, expected in ((CompatibilityMode.FORWARD, True), (CompatibilityMode.FULL, False)):
        found = await within(schemas.check_compatibility("orders", BREAKING, kind, mode))
        assert found[0] is expected
    assert (await within(schemas.set_compatibility_mode("orders", CompatibilityMode.NONE)))[0]
    await registered(schemas, definition=BREAKING)
    assert await within(schemas.list_versions("orders")) == [1, 2]


async def test_a_deleted_version_is_gone_and_its_number_is_not_given_again(
    danube: DanubeUser,
) -> None:
    schemas = (await danube.client()).schema()
    number = await registered(schemas)
    await registered(schemas, definition=SECOND)
    assert (await within(schemas.delete_schema_version("orders", 2)))[0]
    assert (await within(schemas.get_latest_schema("orders"))).version == 1
    code = await status_of(schemas.get_schema_version(number, 2))
    assert code is grpc.StatusCode.NOT_FOUND
    await registered(schemas, definition=SECOND)
    assert await within(schemas.list_versions("orders")) == [1, 3]
    for version in (1, 3):
        await within(schemas.delete_schema_version("orders", version))
    assert await status_of(schemas.get_schema_by_id(number)) is grpc.StatusCode.NOT_FOUND
    assert await registered(schemas) == number
    assert await within(schemas.list_versions("orders")) == [4]


async def test_what_does_not_exist_is_not_found(danube: DanubeUser) -> None:
    schemas = (await danube.client()).schema()
    for awaited in (
        schemas.get_latest_schema("none"),
        schemas.get_schema_by_id(77),
        schemas.list_versions("none"),
        schemas.check_compatibility("none", FIRST, SchemaType.JSON_SCHEMA),
        schemas.delete_schema_version("none", 1),
        schemas.set_compatibility_mode("none", CompatibilityMode.FULL),
        schemas.configure_topic_schema("/default/none", "none"),
        schemas.update_topic_validation_policy("/default/none", "warn"),
        schemas.get_topic_schema_config("/default/none"),
    ):
        assert await status_of(awaited) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        ("json_schema", b'{"type": "strange"}'),
        ("json_schema", b'{"$ref": "http://127.0.0.1:1/x"}'),
        ("json_schema", b"[" * 100_000),
        ("avro", b'{"type": "record"}'),
        ("avro", b'"no_such_type"'),
        ("protobuf", b"message {"),
        ("protobuf", b'syntax = "proto3"; import "other.proto"; message A {}'),
        ("string", b""),
        ("string", b"x" * 300_000),
        ("xml", b"<a/>"),
        ("", b"x"),
    ],
)
async def test_an_invalid_schema_is_an_invalid_argument(
    broker: DanubeBroker, kind: str, definition: bytes
) -> None:
    request = pb.RegisterSchemaRequest(
        subject="s", schema_type=kind, schema_definition=definition
    ).SerializeToString()
    code = await broker.refused(f"{SERVICE}/RegisterSchema", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_bad_names_modes_and_policies_are_invalid_arguments(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    await registered((await danube.client()).schema())
    calls: list[tuple[str, Any]] = [
        ("RegisterSchema", pb.RegisterSchemaRequest(schema_type="string", schema_definition=b"x")),
        ("GetLatestSchema", pb.GetLatestSchemaRequest(subject="x" * 257)),
        ("SetCompatibilityMode", pb.SetCompatibilityModeRequest(subject="orders")),
        (
            "CheckCompatibility",
            pb.CheckCompatibilityRequest(
                subject="orders",
                new_schema_definition=FIRST,
                schema_type="json_schema",
                compatibility_mode="upward",
            ),
        ),
        ("ConfigureTopicSchema", pb.ConfigureTopicSchemaRequest(topic_name="t1")),
        (
            "UpdateTopicValidationPolicy",
            pb.UpdateTopicValidationPolicyRequest(topic_name=TOPIC, validation_policy="maybe"),
        ),
    ]
    for method, request in calls:
        code = await broker.refused(f"{SERVICE}/{method}", request.SerializeToString())
        assert code is grpc.StatusCode.INVALID_ARGUMENT, method
        assert await broker.refused(f"{SERVICE}/{method}", b"\xff\xff") is code, method


async def test_subjects_are_listed_with_their_latest_version(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    schemas = (await danube.client()).schema()
    await registered(schemas, "b/x y", b"any", SchemaType.STRING)
    await registered(schemas, "a")
    await registered(schemas, "a", SECOND)
    listed = pb.ListSubjectsResponse.FromString(await broker.call(f"{SERVICE}/ListSubjects", b""))
    assert [(each.subject, each.schema_type, each.latest_version) for each in listed.subjects] == [
        ("a", "json_schema", 2),
        ("b/x y", "string", 1),
    ]


# ---- producers and consumers --------------------------------------------------------------------


async def producer_with(client: DanubeClient, how: str, *reference: Any, topic: str = TOPIC) -> Any:
    builder = client.new_producer().with_topic(topic).with_name("p1")
    builder = getattr(builder, how)(*reference).with_dispatch_strategy(RELIABLE)
    made = builder.build()
    await within(made.create())
    return made


async def test_messages_carry_the_schema_that_their_producer_names(danube: DanubeUser) -> None:
    client = await danube.client()
    schemas = client.schema()
    number = await registered(schemas)
    await registered(schemas, definition=SECOND)
    inbox = None
    for how, reference, version in (
        ("with_schema_subject", ("orders",), 2),
        ("with_schema_version", ("orders", 1), 1),
        ("with_schema_min_version", ("orders", 2), 2),
    ):
        producer = await producer_with(client, how, *reference)
        inbox = inbox or await danube.inbox(TOPIC)
        await within(producer.send(b'{"id": 1}'))
        message = await inbox.take()
        assert (message.schema_id, message.schema_version) == (number, version)
        found = await within(schemas.get_schema_version(message.schema_id, message.schema_version))
        assert found.schema_definition == (FIRST if version == 1 else SECOND)
        await inbox.ack(message)
        await producer.close()
    config = await within(schemas.get_topic_schema_config(TOPIC))
    assert (config.schema_subject, config.validation_policy) == ("orders", "none")
    assert config.schema_id == number


async def test_a_producer_with_another_schema_or_version_is_refused(danube: DanubeUser) -> None:
    client = await danube.client()
    await registered(client.schema())
    await registered(client.schema(), "payments")
    await (await producer_with(client, "with_schema_subject", "orders")).close()
    refused = grpc.StatusCode.FAILED_PRECONDITION
    for how, reference, code in (
        ("with_schema_subject", ("payments",), refused),
        ("with_schema_version", ("orders", 9), refused),
        ("with_schema_min_version", ("orders", 2), refused),
        ("with_schema_subject", ("nobody",), grpc.StatusCode.NOT_FOUND),
    ):
        assert await status_of(producer_with(client, how, *reference)) is code


@pytest.mark.parametrize(
    "inline",
    [
        b"\x0a\x02s1",  # a name, and bytes as the type
        b"\x0a\x02s1\x18\x01",  # a string
        b"\x0a\x02s1\x12\x02{}\x18\x03",  # JSON with its definition
        b"\x0a\x02s1\x12\x02{}",
        b"\xff\xff",
    ],
)
async def test_the_whole_schema_of_an_older_client_is_ignored(
    broker: DanubeBroker, inline: bytes
) -> None:
    request = danube_pb2.ProducerRequest(
        request_id=1, producer_name="p1", topic_name=TOPIC, schema_ref=inline
    ).SerializeToString()
    assert await broker.call("danube.ProducerService/CreateProducer", request)


async def test_an_enforced_topic_takes_only_messages_of_its_schema(
    danube: DanubeUser,
) -> None:
    client = await danube.client()
    schemas = client.schema()
    number = await registered(schemas)
    plain = await danube.producer(TOPIC, "plain")
    assert (
        await within(
            schemas.configure_topic_schema(
                TOPIC, "orders", "enforce", enable_payload_validation=True
            )
        )
    )[0]
    refused = grpc.StatusCode.FAILED_PRECONDITION
    assert await status_of(plain.send(b'{"id": 1}')) is refused
    assert await status_of(danube.producer(TOPIC, "other")) is refused

    producer = await producer_with(client, "with_schema_subject", "orders")
    await within(producer.send(b'{"id": 1}'))
    for payload in (b'{"id": "one"}', b"{}", b"not json", b"[" * 10_000, b'{"id": 1}' * 2):
        assert await status_of(producer.send(payload)) is grpc.StatusCode.INVALID_ARGUMENT

    await within(
        schemas.update_topic_validation_policy(TOPIC, "warn", enable_payload_validation=True)
    )
    await within(producer.send(b"not json"))
    await within(plain.send(b"no schema"))
    await within(schemas.update_topic_validation_policy(TOPIC, "enforce"))
    await within(producer.send(b"not json either"))
    assert await status_of(schemas.delete_schema_version("orders", 1)) is refused
    assert number == 1
    await producer.close()


@pytest.mark.parametrize(
    ("kind", "definition", "good", "bad"),
    [
        (SchemaType.AVRO, b'{"type": "array", "items": "string"}', b"\x02\x02a\x00", b"\x02\x02"),
        (
            SchemaType.PROTOBUF,
            b'syntax = "proto3"; message M { string a = 1; }',
            b"\x0a\x01x",
            b"\x0a\x05x",
        ),
        (SchemaType.STRING, b"text", "ä".encode(), b"\xff"),
        (SchemaType.NUMBER, b"number", b"-1.5e3", b"many"),
    ],
)
async def test_payloads_of_every_kind_are_checked(
    danube: DanubeUser, kind: SchemaType, definition: bytes, good: bytes, bad: bytes
) -> None:
    client = await danube.client()
    await registered(client.schema(), definition=definition, kind=kind)
    producer = await producer_with(client, "with_schema_subject", "orders")
    await within(
        client.schema().configure_topic_schema(
            TOPIC, "orders", "enforce", enable_payload_validation=True
        )
    )
    await within(producer.send(good))
    assert await status_of(producer.send(bad)) is grpc.StatusCode.INVALID_ARGUMENT
    await producer.close()


async def test_the_registry_is_the_same_after_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        client = await broker.user.client()
        number = await registered(client.schema())
        await (await producer_with(client, "with_schema_subject", "orders")).close()
        await within(
            client.schema().configure_topic_schema(
                TOPIC, "orders", "enforce", enable_payload_validation=True
            )
        )
    async with running_broker(tmp_path) as broker:
        client = await broker.user.client()
        assert await registered(client.schema()) == number
        assert await registered(client.schema(), "payments") == number + 1
        producer = await producer_with(client, "with_schema_subject", "orders")
        assert await status_of(producer.send(b"[]")) is grpc.StatusCode.INVALID_ARGUMENT
        await within(producer.send(b'{"id": 2}'))
        await producer.close()


async def test_schemas_that_are_registered_at_once_get_numbers_of_their_own(
    danube: DanubeUser,
) -> None:
    client = await danube.client()
    schemas = client.schema()
    await registered(schemas)
    await within(schemas.set_compatibility_mode("orders", CompatibilityMode.NONE))
    definitions = [json_schema("id", id="integer", **{f"x{at}": "string"}) for at in range(8)]
    await asyncio.gather(*(registered(schemas, definition=each) for each in definitions))
    assert await within(schemas.list_versions("orders")) == list(range(1, 10))
    numbers = await asyncio.gather(*(registered(schemas, f"s{at}") for at in range(8)))
    assert sorted(numbers) == list(range(2, 10))
    again = await asyncio.gather(*(registered(schemas, "same") for _ in range(8)))
    assert set(again) == {10}
