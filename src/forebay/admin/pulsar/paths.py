"""Names in Pulsar's paths, and the form of its errors.

Forebay's topic `/default/orders` is Pulsar's `persistent://public/default/orders`: there is one
tenant, `public`. The partition `orders-part-3` is Pulsar's `orders-partition-3`.

Pulsar's clients show the `reason` of an error. What other clients of this server read is beside it:
`{"reason": "...", "error": {"kind": "...", "message": "..."}}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta
from starlette.requests import Request

from forebay.admin.errors import ErrorFields, Refused
from forebay.admin.operations import Operation, Reply
from forebay.admin.records import Record
from forebay.errors import InvalidTopicName
from forebay.format.names import DEFAULT_NAMESPACE, PULSAR_TENANT, TopicName, parse_topic

NAMESPACE_PATH: Final = "/admin/v2/namespaces/{tenant}/{namespace}"
TOPIC_PATH: Final = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"
BODY_BYTES_MAX: Final = 32 * 1024
_PARTITION: Final = re.compile(r"(?P<base>.+)-partition-(?P<number>0|[1-9][0-9]{0,8})")
_SHOWN: Final = 80


class PulsarError(Record, frozen=True):
    """An error as Pulsar's clients read it, and as Forebay's do."""

    reason: Annotated[str, Meta(description="What is wrong, where, and what to do.")]
    error: ErrorFields


def operation(
    name: str,
    summary: str,
    replies: Mapping[int, Reply],
    *,
    errors: tuple[int, ...] = (),
    method: str = "GET",
    body: object = None,
    query: type | None = None,
) -> Operation:
    """An operation of Pulsar's API. All of them can find the path wrong, with 400, 404 and 412."""
    return Operation(
        name,
        "pulsar",
        summary,
        replies,
        errors=tuple(sorted({400, 404, 412, 502, *errors})),
        method=method,
        query=query,
        body={} if body is None else {"application/json": body},
        error=PulsarError,
    )


def namespace_of(request: Request) -> str:
    """The namespace that a path names; Refused if there is none."""
    _require_tenant(request)
    namespace: str = request.path_params["namespace"]
    try:
        return parse_topic(f"/{namespace}/{DEFAULT_NAMESPACE}").namespace
    except InvalidTopicName as error:
        raise Refused(412, f"Namespace name is not valid: {namespace[:_SHOWN]!r}") from error


def topic_of(request: Request) -> TopicName:
    """The topic that a path names; Refused if it cannot be one."""
    namespace = namespace_of(request)
    local: str = request.path_params["topic"]
    partition = _PARTITION.fullmatch(local)
    if partition is not None:
        local = f"{partition['base']}-part-{partition['number']}"
    try:
        return parse_topic(f"/{namespace}/{local}")
    except InvalidTopicName as error:
        raise Refused(412, f"Topic name is not valid: {error}") from error


def _require_tenant(request: Request) -> None:
    tenant: str = request.path_params["tenant"]
    if tenant != PULSAR_TENANT:
        raise Refused(
            404, f"Tenant does not exist: {tenant[:_SHOWN]!r}; the only one is {PULSAR_TENANT!r}"
        )
