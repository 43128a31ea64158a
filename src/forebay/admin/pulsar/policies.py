"""Offload policies over HTTP, by Pulsar's paths: those of a namespace, and those of a topic.

    GET, PUT          /admin/v2/namespaces/{tenant}/{namespace}/offloadThreshold
    GET, PUT          …/offloadThresholdInSeconds
    GET, PUT, DELETE  …/offloadDeletionLagMs
    GET, POST         …/offloadPolicies
    DELETE            …/removeOffloadPolicies
    GET, POST, DELETE /admin/v2/persistent/{tenant}/{namespace}/{topic}/offloadPolicies

Bodies are Pulsar's: bare numbers, and the JSON of `OffloadPoliciesImpl`. What they mean here is in
`forebay.config.offload_policies`. A namespace need not have topics.

Beware: what is not set is no body: status 204, as Pulsar's clients expect. Only a threshold that is
not set is -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from msgspec.json import Decoder
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from forebay.admin.context import ServerContext
from forebay.admin.errors import Refused
from forebay.admin.operations import Endpoint, Reply
from forebay.admin.pulsar.paths import (
    BODY_BYTES_MAX,
    NAMESPACE_PATH,
    TOPIC_PATH,
    namespace_of,
    operation,
    topic_of,
)
from forebay.admin.records import decode_body, json_response
from forebay.admin.request import read_body, read_query
from forebay.catalog.catalog import Catalog
from forebay.catalog.topic_settings import (
    change_namespace_policies,
    change_topic_settings,
    read_namespace_policies,
    read_topic_settings,
)
from forebay.config.offload_policies import (
    DELETION_LAG,
    POLICY_KEYS,
    SETTING_FIELDS,
    THRESHOLD_BYTES,
    THRESHOLD_SECONDS,
    fields_of,
    merged,
    parse_policies,
    parse_policy,
    require_below_retention,
    store_policies,
    values_of,
)
from forebay.config.topics import OFFLOAD_POLICIES, effective
from forebay.errors import ForebayError, InvalidSetting, UsageError
from forebay.format.names import TopicName, parse_topic

_UNSET_THRESHOLD: Final = -1
_KEPT: Final = (THRESHOLD_BYTES, THRESHOLD_SECONDS, DELETION_LAG)
"""Fields that stay as they are if new policies do not have them, as in Pulsar."""

# ---- operations -------------------------------------------------------------------------------

_Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Policies = Annotated[
    dict[str, Any], Meta(description="By the names of Pulsar's `OffloadPoliciesImpl`.")
]
_NUMBER: Final = Decoder(_Number)
_POLICIES: Final = Decoder(Any)
_DONE: Final = {204: Reply("The change is in the catalog.")}
_NOT_SET: Final = Reply("None are set.")


class AppliedQuery(Struct, frozen=True, rename="camel"):
    applied: Annotated[
        bool, Meta(description="With what the namespace and the store add to it.")
    ] = False
    is_global: Annotated[bool, Meta(description="Ignored: there is one cluster.")] = False


class GlobalQuery(Struct, frozen=True, rename="camel"):
    is_global: Annotated[bool, Meta(description="Ignored: there is one cluster.")] = False


def _get_number(name: str, what: str, *, optional: bool = False) -> Any:
    replies = {200: Reply("The number.", _Number)}
    if optional:
        replies[204] = _NOT_SET
    return operation(name, f"Returns {what} of a namespace.", replies)


def _put_number(name: str, what: str) -> Any:
    summary = f"Sets {what} of a namespace."
    return operation(name, summary, _DONE, errors=(409,), method="PUT", body=_Number)


_THRESHOLD: Final = "how many bytes of a topic stay without being offloaded"
_SECONDS: Final = "after how many seconds closed ledgers are offloaded"
_LAG: Final = "how long offloaded ledgers stay local, in milliseconds,"
GET_THRESHOLD: Final = _get_number("getOffloadThreshold", _THRESHOLD)
SET_THRESHOLD: Final = _put_number("setOffloadThreshold", _THRESHOLD)
GET_SECONDS: Final = _get_number("getOffloadThresholdInSeconds", _SECONDS)
SET_SECONDS: Final = _put_number("setOffloadThresholdInSeconds", _SECONDS)
GET_LAG: Final = _get_number("getOffloadDeletionLag", _LAG, optional=True)
SET_LAG: Final = _put_number("setOffloadDeletionLag", _LAG)
CLEAR_LAG: Final = operation(
    "clearOffloadDeletionLag", f"Unsets {_LAG} of a namespace.", _DONE, method="DELETE"
)
_FOUND: Final = {200: Reply("The policies.", _Policies), 204: _NOT_SET}
GET_POLICIES: Final = operation(
    "getOffloadPolicies", "Returns the offload policies of a namespace.", _FOUND
)
SET_POLICIES: Final = operation(
    "setOffloadPolicies",
    "Sets the offload policies of a namespace.",
    _DONE,
    method="POST",
    body=_Policies,
)
REMOVE_POLICIES: Final = operation(
    "removeOffloadPolicies",
    "Removes all offload policies of a namespace.",
    _DONE,
    method="DELETE",
)
GET_TOPIC_POLICIES: Final = operation(
    "getTopicOffloadPolicies",
    "Returns the offload policies of a topic.",
    _FOUND,
    query=AppliedQuery,
)
SET_TOPIC_POLICIES: Final = operation(
    "setTopicOffloadPolicies",
    "Sets the offload policies of a topic.",
    _DONE,
    method="POST",
    body=_Policies,
    query=GlobalQuery,
)
REMOVE_TOPIC_POLICIES: Final = operation(
    "removeTopicOffloadPolicies",
    "Removes all offload policies of a topic.",
    _DONE,
    method="DELETE",
    query=GlobalQuery,
)


def routes(context: ServerContext) -> list[Endpoint]:
    return [*_numbers(context), *_of_namespaces(context), *_of_topics(context)]


def _numbers(context: ServerContext) -> Iterator[Endpoint]:
    def getting(field: str, unset: int | None) -> Callable[[Request], Any]:
        async def get(request: Request) -> Response:
            found = await run_in_threadpool(_read, context, namespace_of(request))
            value = found.get(field, unset)
            return Response(status_code=204) if value is None else json_response(value)

        return get

    def setting(field: str) -> Callable[[Request], Any]:
        async def put(request: Request) -> Response:
            namespace = namespace_of(request)
            value = decode_body(await read_body(request, BODY_BYTES_MAX), _NUMBER)
            with _refusing():
                known = parse_policy(field, value)
            await run_in_threadpool(_change, context, namespace, lambda old: {**old, field: known})
            return Response(status_code=204)

        return put

    async def clear_lag(request: Request) -> Response:
        def change(old: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in old.items() if name != DELETION_LAG}

        await run_in_threadpool(_change, context, namespace_of(request), change)
        return Response(status_code=204)

    path = f"{NAMESPACE_PATH}/offloadThreshold"
    yield Endpoint(path, getting(THRESHOLD_BYTES, _UNSET_THRESHOLD), GET_THRESHOLD)
    yield Endpoint(path, setting(THRESHOLD_BYTES), SET_THRESHOLD)
    path = f"{NAMESPACE_PATH}/offloadThresholdInSeconds"
    yield Endpoint(path, getting(THRESHOLD_SECONDS, _UNSET_THRESHOLD), GET_SECONDS)
    yield Endpoint(path, setting(THRESHOLD_SECONDS), SET_SECONDS)
    path = f"{NAMESPACE_PATH}/offloadDeletionLagMs"
    yield Endpoint(path, getting(DELETION_LAG, None), GET_LAG)
    yield Endpoint(path, setting(DELETION_LAG), SET_LAG)
    yield Endpoint(path, clear_lag, CLEAR_LAG)


def _of_namespaces(context: ServerContext) -> Iterator[Endpoint]:
    async def get(request: Request) -> Response:
        return _answer(await run_in_threadpool(_read, context, namespace_of(request)))

    async def post(request: Request) -> Response:
        namespace, new = namespace_of(request), await _sent(request)

        def change(old: Mapping[str, Any]) -> dict[str, Any]:
            return {**{name: old[name] for name in _KEPT if name in old}, **new}

        await run_in_threadpool(_change, context, namespace, change)
        return Response(status_code=204)

    async def remove(request: Request) -> Response:
        await run_in_threadpool(_change, context, namespace_of(request), lambda _: {})
        return Response(status_code=204)

    yield Endpoint(f"{NAMESPACE_PATH}/offloadPolicies", get, GET_POLICIES)
    yield Endpoint(f"{NAMESPACE_PATH}/offloadPolicies", post, SET_POLICIES)
    yield Endpoint(f"{NAMESPACE_PATH}/removeOffloadPolicies", remove, REMOVE_POLICIES)


def _of_topics(context: ServerContext) -> Iterator[Endpoint]:
    async def get(request: Request) -> Response:
        topic = topic_of(request)
        query = read_query(request.scope["query_string"], AppliedQuery, lenient=True)
        return _answer(await run_in_threadpool(_read_topic, context, topic, applied=query.applied))

    async def post(request: Request) -> Response:
        topic, new = topic_of(request), await _sent(request)
        await run_in_threadpool(_change_topic, context, topic, new)
        return Response(status_code=204)

    async def remove(request: Request) -> Response:
        await run_in_threadpool(_change_topic, context, topic_of(request), {})
        return Response(status_code=204)

    yield Endpoint(f"{TOPIC_PATH}/offloadPolicies", get, GET_TOPIC_POLICIES)
    yield Endpoint(f"{TOPIC_PATH}/offloadPolicies", post, SET_TOPIC_POLICIES)
    yield Endpoint(f"{TOPIC_PATH}/offloadPolicies", remove, REMOVE_TOPIC_POLICIES)


async def _sent(request: Request) -> dict[str, Any]:
    """The policies in a body, checked."""
    body = await read_body(request, BODY_BYTES_MAX)
    if not body or body == b"null":
        raise Refused(412, "OffloadPolicies is empty or driver is not supported")
    with _refusing():
        return parse_policies(decode_body(body, _POLICIES))


@contextmanager
def _refusing() -> Iterator[None]:
    """Answers 412 to wrong values, as Pulsar does."""
    try:
        yield
    except InvalidSetting as error:
        raise Refused(412, str(error)) from error


def _answer(policies: Mapping[str, Any]) -> Response:
    return json_response(policies) if policies else Response(status_code=204)


# ---- on threads -------------------------------------------------------------------------------


def _catalog(context: ServerContext) -> Catalog:
    catalog = context.store.catalog
    if catalog is None:
        raise UsageError("a store in memory has no offload policies")
    return catalog


def _read(context: ServerContext, namespace: str) -> dict[str, Any]:
    return read_namespace_policies(_catalog(context), namespace)


def _change(
    context: ServerContext,
    namespace: str,
    change: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Changes the policies of a namespace, if they do not contradict the store's settings."""

    def checked(old: Mapping[str, Any]) -> dict[str, Any]:
        after = change(old)
        require_below_retention(effective(context.settings, values_of(after)))
        return after

    with _refusing():
        change_namespace_policies(_catalog(context), namespace, checked)
    for name in context.store.topics():
        if parse_topic(name).namespace == namespace:
            _refresh(context, name)


def _refresh(context: ServerContext, name: str) -> None:
    """Has the owner of a topic read its settings now, instead of before its next cycle."""
    topic = context.store.opened(name)
    if topic is not None:
        # The change is in the catalog, and a topic that cannot read it now does so later.
        with suppress(ForebayError):
            topic.configure({})


def _read_topic(context: ServerContext, topic: TopicName, *, applied: bool) -> dict[str, Any]:
    catalog = _catalog(context)
    with context.store.view() as view:
        view.topic(str(topic))  # UnknownTopic, instead of policies of a topic that is not there
    own = _policies_of(read_topic_settings(catalog, topic))
    if not applied:
        return own
    of_namespace = read_namespace_policies(catalog, topic.namespace)
    return merged(own, of_namespace, store_policies(context.settings))


def _policies_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The policies that a topic's own settings amount to."""
    rest = settings.get(OFFLOAD_POLICIES)
    return {**(rest if isinstance(rest, dict) else {}), **fields_of(settings)}


def _change_topic(context: ServerContext, topic: TopicName, new: Mapping[str, Any]) -> None:
    """Replaces the policies of a topic. Those that have an effect are settings of its own."""
    catalog = _catalog(context)
    of_namespace = read_namespace_policies(catalog, topic.namespace)
    rest = {name: value for name, value in new.items() if name not in SETTING_FIELDS}

    def change(old: dict[str, Any]) -> dict[str, Any]:
        after = {name: value for name, value in old.items() if name not in POLICY_KEYS}
        after.pop(OFFLOAD_POLICIES, None)
        after |= values_of(new)
        if new:
            require_below_retention(
                effective(context.settings, {**values_of(of_namespace), **after})
            )
        return {**after, OFFLOAD_POLICIES: rest} if rest else after

    with _refusing():
        change_topic_settings(catalog, topic, change)
    _refresh(context, str(topic))
