"""The OpenAPI document tells of every call there is, and the server does as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case, SerializationContext
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from starlette.routing import Route

from forebay.admin.app import build_app
from forebay.admin.context import ServerContext
from forebay.admin.jobs import DriverStatus, JobRecord, parse_request
from forebay.admin.operations import Endpoint, document
from forebay.admin.records import LINES, Record
from forebay.errors import UsageError
from forebay.format.names import TopicName, object_key
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from support.served import Served, served


def endpoints() -> list[Endpoint]:
    with Store(StoreSettings(data=None)) as store:
        routes = build_app(ServerContext(store)).routes
    return [each for each in routes if isinstance(each, Endpoint)]


def made() -> dict[str, Any]:
    """The document as a server has it."""
    return dict(json.loads(json.dumps(document(endpoints()))))


DOCUMENT: Final = made()
METHODS: Final = ("get", "head", "post", "put", "patch", "delete")


def calls() -> set[tuple[str, str]]:
    return {
        (method.upper(), path)
        for path, item in DOCUMENT["paths"].items()
        for method in item
        if method in METHODS
    }


# ---- the document -----------------------------------------------------------------------------


def test_the_document_has_every_route_and_no_other(tmp_path: Path) -> None:
    with Store(StoreSettings(data=tmp_path)) as store:
        routes = build_app(ServerContext(store)).routes
    found: set[tuple[str, str]] = set()
    for route in routes:
        assert isinstance(route, Route)
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        # One that takes all methods answers 405 by itself.
        methods = route.methods or {method for method, known in calls() if known == path}
        found |= {(method, path) for method in methods}
        assert path in DOCUMENT["paths"]
    assert calls() <= found
    # Whoever gets may look; the document says so where it is of use.
    assert {(method, path) for method, path in found - calls() if method != "HEAD"} == set()


def test_every_reference_is_to_something_and_everything_is_referred_to() -> None:
    named = set(re.findall(r'"#/components/(\w+/\w+)"', json.dumps(DOCUMENT)))
    there = {
        f"{kind}/{name}"
        for kind in ("schemas", "parameters", "responses")
        for name in DOCUMENT["components"][kind]
    }
    lines = {"schemas/NewMessage", "schemas/MessageLine", "schemas/SinkLine"}
    assert named <= there
    assert there - named - lines == set()


def test_every_schema_is_one() -> None:
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate({**schema, **dialect})


def test_every_call_has_a_name_of_its_own_and_tells_its_errors() -> None:
    names = []
    for method, path in sorted(calls()):
        operation = DOCUMENT["paths"][path][method.lower()]
        names.append(operation["operationId"])
        assert operation["summary"].endswith(".")
        assert {"401", "403", "500", "503"} <= operation["responses"].keys()
        used = {each.get("name") for each in operation.get("parameters", ())}
        used |= {
            each["$ref"].rpartition("/")[2]
            for each in operation.get("parameters", ())
            if "$ref" in each
        }
        assert set(re.findall(r"\{(\w+)\}", path)) <= used
    assert len(set(names)) == len(names)


# ---- a server that is asked everything --------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a topic in all tiers, whose name strategies find by the document's examples."""
    data = tmp_path_factory.mktemp("data")
    with served(StoreSettings(data=data, uploader=UploaderSettings(enabled=False))) as server:
        topic = server.store.topic("/default/orders")
        topic.append_many(
            [b"text", b"\xff\xfe", b""], [{"k": "v"}, None, None], durability="synced"
        )
        topic.upload()
        topic.append(b"more", routing_key="key", durability="synced")
        server.client.json("PUT", "/v1/topics/default/orders/subscriptions/billing")
        server.client.json("POST", "/v1/schemas/subjects/value", value=STRING_SCHEMA)
        server.client.json("PUT", "/v1/topics/default/orders/schema", value={"subject": "value"})
        server.context.jobs = OneJob()
        yield server


STRING_SCHEMA: Final = {"type": "string", "definition": "text"}


class OneJob:
    """Runs nothing: what it is asked for is the one job that it knows."""

    def __init__(self) -> None:
        self._job = JobRecord("1", "offload", (), {}, "request", "done", created=1.0)

    def submit(
        self, kind: str, topics: Sequence[str], options: Mapping[str, int | bool | str]
    ) -> JobRecord:
        self._job = JobRecord("1", kind, tuple(topics), options, "request", "queued", created=1.0)
        return self._job

    def list(self) -> Sequence[JobRecord]:
        return [self._job]

    def get(self, job_id: str) -> JobRecord | None:
        return self._job if job_id == self._job.id else None

    def cancel(self, job_id: str) -> JobRecord | None:
        return self.get(job_id)

    def driver(self) -> DriverStatus:
        return DriverStatus("ready", "local[*]", since=1.0)


def check_lines(lines: Iterator[bytes], name: str) -> int:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    count = 0
    for line in lines:
        validator.validate(json.loads(line))
        count += 1
    return count


def test_messages_are_as_the_document_says(server: Served) -> None:
    lines = server.new_client().lines("/v1/topics/default/orders/messages")
    assert check_lines(lines, "MessageLine") >= 4


def asked_for() -> list[tuple[str, str, bytes, type[Record]]]:
    """Every operation that returns one record: method, path, body, record."""
    values = {**THERE, "offset": "0"}
    bodies = {
        "produce": b'{"payload":"x"}',
        "startJob": b'{"kind":"offload"}',
        "configureTopic": b'{"values":{"rolling":false}}',
        "seekSubscription": b'{"start":0}',
        "skipMessages": b'{"messages":1}',
        "registerSchema": json.dumps(STRING_SCHEMA).encode(),
        "checkSchema": json.dumps({"subject": "value", **STRING_SCHEMA}).encode(),
        "setSchemaMode": b'{"mode":"full"}',
        "setTopicSchema": b'{"subject":"value"}',
    }
    bodies["forgetBatch"] = json.dumps(
        {"sink_id": "s", "batch": 0, "named": False, "parts": []}
    ).encode()
    found = []
    for endpoint in endpoints():
        for operation in endpoint.operations:
            path = re.sub(r"\{(\w+)\}", lambda at: values[at[1]], endpoint.documented_path)
            path += "?topic=orders" if operation.name == "spans" else ""
            path += "?version=1" if operation.name == "deleteSchemaVersion" else ""
            kinds = [reply.kind for reply in operation.replies.values()]
            if isinstance(kinds[0], type) and issubclass(kinds[0], Record):
                body = bodies.get(operation.name, b"")
                found.append((operation.method, path, body, kinds[0]))
    # What is deleted is there for the others, and a topic for its subscriptions.
    deleting = sorted(
        (each for each in found if each[0] == "DELETE"), key=lambda each: -len(each[1])
    )
    return [*(each for each in found if each[0] != "DELETE"), *deleting]


def test_a_response_is_the_record_that_its_operation_declares(server: Served) -> None:
    asked = [each for each in asked_for() if not (each[0] == "PUT" and "objects" in each[1])]
    assert len(asked) >= 15
    for method, path, body, kind in asked:
        response = server.client.request(method, path, body=body or None)
        assert response.status in {200, 201, 202}, path
        found = msgspec.json.decode(response.read(), type=kind)
        assert msgspec.json.decode(msgspec.json.encode(found), type=kind) == found


def test_as_many_topics_of_a_job_are_documented_as_are_taken() -> None:
    topics = DOCUMENT["components"]["schemas"]["Offload"]["properties"]["topics"]["anyOf"][0]
    most = topics["maxItems"]
    assert len(parse_request(job_for(most))[1]) == most
    with pytest.raises(UsageError, match=f"a list of at most {most} entries"):
        parse_request(job_for(most + 1))


def job_for(topics: int) -> bytes:
    names = [f"/default/t{number}" for number in range(topics)]
    return json.dumps({"kind": "offload", "topics": names}).encode()


def test_the_server_answers_the_document(server: Served) -> None:
    assert server.client.json("GET", "/openapi.json") == DOCUMENT


def test_an_answer_that_is_not_as_the_document_says_would_be_found() -> None:
    with pytest.raises(jsonschema_rs.ValidationError):
        check_lines(iter([b'{"offset": -1}']), "MessageLine")


@schemathesis.serializer(LINES)
def ndjson(_context: SerializationContext, value: Any) -> bytes:
    lines = value if isinstance(value, list) else [value]
    return b"\n".join(json.dumps(each).encode() for each in lines)


def with_plain_pairs(schema: Any) -> Any:
    """Writes a pair of two equal types without `prefixItems`, which means the same.

    Schemathesis turns `prefixItems` into an array of `items` in a response without references, and
    then refuses it, because that form is of an older draft of JSON Schema.
    """
    if isinstance(schema, list):
        return [with_plain_pairs(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: with_plain_pairs(each) for name, each in schema.items()}
    pair = found.get("prefixItems")
    if pair and all(each == pair[0] for each in pair) and found.get("items") is False:
        assert (found["minItems"], found["maxItems"]) == (len(pair), len(pair))
        del found["prefixItems"]
        found["items"] = pair[0]
    return found


def asked() -> dict[str, Any]:
    """The document with bodies of lines as lists, which can be made up."""
    found: dict[str, Any] = with_plain_pairs(made())
    body = found["paths"]["/v1/topics/{namespace}/{topic}/messages"]["post"]["requestBody"]
    message = {"$ref": "#/components/schemas/NewMessage"}
    body["content"][LINES]["schema"] = {"type": "array", "items": message, "maxItems": 5}
    shared = list(found["components"]["parameters"].values())
    operations = [each for item in found["paths"].values() for each in item.values()]
    for parameter in chain(shared, *(each.get("parameters", ()) for each in operations)):
        if parameter.get("name") in THERE:
            parameter["schema"]["examples"] = [THERE[parameter["name"]]]
    partitions = found["paths"]["/v1/topics/{namespace}/{topic}"]["put"]["parameters"][-1]
    assert partitions["name"] == "partitions"
    partitions["schema"]["maximum"] = 3  # a thousand would take a minute
    return found


THERE: Final = {
    "tenant": "public",
    "namespace": "default",
    "topic": "orders",
    "file": "wal.log",
    "key": object_key(TopicName("default", "orders"), "data-0-2.dnb1"),
    "Range": "bytes=0-9",
    "id": "1",
    "name": "index.html",
    "subscription": "billing",
    "subject": "value",
    "schema": "1",
}
"""Parameters whose values the server has something for."""
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
api = schemathesis.openapi.from_dict(asked())
EXAMPLES: Final = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@api.parametrize()
@settings(EXAMPLES, max_examples=15, derandomize=True)
def test_no_call_fails_and_answers_are_as_the_document_says(
    case: Case[Any], server: Served
) -> None:
    ask(case, server)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@api.parametrize()
@settings(EXAMPLES, max_examples=200)
def test_no_call_fails_however_long_it_is_tried(case: Case[Any], server: Served) -> None:
    ask(case, server)


def ask(case: Case[Any], server: Served) -> None:
    if "follow" in case.query:
        case.query["follow"] = "false"
    response = case.call(base_url=server.url, timeout=20)
    case.validate_response(response, checks=CHECKS)
