"""The row with a topic's own settings, on every catalog."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.catalog.topic_settings import (
    change_namespace_policies,
    change_topic_settings,
    read_namespace_policies,
    read_topic_settings,
)
from forebay.errors import DescriptorError, UnknownTopic, UsageError
from forebay.limits import OFFLOAD_POLICIES_BYTES_MAX, TOPIC_SETTINGS_BYTES_MAX
from support.catalogs import TOPIC, Setup
from support.kv_stores import Backend, requested_backend


@pytest.fixture(params=["sqlite", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def setup(backend: Backend) -> Setup:
    setup = Setup(backend)
    setup.create()
    return setup


def put(setup: Setup, **values: Any) -> dict[str, Any]:
    return change_topic_settings(setup.catalog, TOPIC, lambda before: {**before, **values})


def test_settings_are_read_as_they_were_written(setup: Setup) -> None:
    assert read_topic_settings(setup.catalog, TOPIC) == {}
    put(setup, rolling=True, retention_size_mb=None)
    put(setup, max_open_seconds=1.5)
    expected = {"rolling": True, "retention_size_mb": None, "max_open_seconds": 1.5}
    assert read_topic_settings(setup.catalog, TOPIC) == expected
    entry = setup.kv.get(setup.catalog.keys.settings(TOPIC))
    assert entry is not None
    assert entry.value == b'{"max_open_seconds":1.5,"retention_size_mb":null,"rolling":true}'


def test_a_topic_without_settings_has_no_row(setup: Setup) -> None:
    put(setup, rolling=True)
    change_topic_settings(setup.catalog, TOPIC, lambda _: {})
    assert setup.kv.get(setup.catalog.keys.settings(TOPIC)) is None


def test_two_who_change_settings_at_once_lose_nothing(setup: Setup) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda at: put(setup, **{f"key{at}": at}), range(16)):
            pass
    expected = {f"key{at}": at for at in range(16)}
    assert read_topic_settings(setup.catalog, TOPIC) == expected


def test_a_change_that_comes_second_sees_the_first(setup: Setup) -> None:
    seen = []

    def change(before: dict[str, Any]) -> dict[str, Any]:
        seen.append(dict(before))
        if len(seen) == 1:
            put(setup, other=1)
        return {**before, "own": 2}

    assert change_topic_settings(setup.catalog, TOPIC, change) == {"other": 1, "own": 2}
    assert seen == [{}, {"other": 1}]


def test_a_topic_that_does_not_exist_gets_no_settings(backend: Backend) -> None:
    setup = Setup(backend)
    with pytest.raises(UnknownTopic, match="there is no topic /default/orders"):
        put(setup, rolling=True)
    assert setup.kv.get(setup.catalog.keys.settings(TOPIC)) is None


def test_settings_have_a_limit(setup: Setup) -> None:
    with pytest.raises(UsageError, match="at most 65536 are allowed"):
        put(setup, long="x" * TOPIC_SETTINGS_BYTES_MAX)


@pytest.mark.parametrize("value", [b"[]", b"{", b"null", b"\xff"])
def test_a_damaged_row_is_named(setup: Setup, value: bytes) -> None:
    setup.put(setup.catalog.keys.settings(TOPIC), value)
    with pytest.raises(DescriptorError, match="default/orders/settings"):
        read_topic_settings(setup.catalog, TOPIC)


# ---- policies of a namespace ------------------------------------------------------------------


def put_policies(setup: Setup, **values: Any) -> dict[str, Any]:
    return change_namespace_policies(setup.catalog, "default", lambda before: {**before, **values})


def test_a_namespace_has_policies_before_it_has_topics(backend: Backend) -> None:
    setup = Setup(backend)
    assert read_namespace_policies(setup.catalog, "default") == {}
    put_policies(setup, lag=5)
    assert read_namespace_policies(setup.catalog, "default") == {"lag": 5}
    assert read_namespace_policies(setup.catalog, "other") == {}
    assert list(setup.catalog.topics()) == []
    key = setup.catalog.keys.offload_policies("default")
    assert key.endswith("/namespaces/default/offload")
    entry = setup.kv.get(key)
    assert entry is not None
    assert entry.value == b'{"lag":5}'


def test_a_namespace_without_policies_has_no_row(setup: Setup) -> None:
    put_policies(setup, lag=5)
    change_namespace_policies(setup.catalog, "default", lambda _: {})
    assert setup.kv.get(setup.catalog.keys.offload_policies("default")) is None


def test_two_who_change_policies_at_once_lose_nothing(setup: Setup) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda at: put_policies(setup, **{f"key{at}": at}), range(16)):
            pass
    expected = {f"key{at}": at for at in range(16)}
    assert read_namespace_policies(setup.catalog, "default") == expected


def test_policies_have_a_limit_and_a_damaged_row_is_named(setup: Setup) -> None:
    with pytest.raises(UsageError, match="at most 32768 are allowed"):
        put_policies(setup, long="x" * OFFLOAD_POLICIES_BYTES_MAX)
    setup.put(setup.catalog.keys.offload_policies("default"), b"[]")
    with pytest.raises(DescriptorError, match="namespaces/default/offload"):
        read_namespace_policies(setup.catalog, "default")
