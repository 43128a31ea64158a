"""Settings of objects, catalog and servers: a bad value refused by name, a secret never shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.errors import InvalidSetting
from forebay.settings import (
    AdminSettings,
    BrokerSettings,
    CloudSettings,
    MetadataSettings,
    SparkSettings,
    StoreSettings,
)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:6650", "localhost:65535"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    assert BrokerSettings(listen=address).listen == address
    assert AdminSettings(listen=address).listen == address


@pytest.mark.parametrize(
    "address", ["", ":1", "h", "h:", "h:x", "h:-1", "h:65536", "h:000001", "h:\u0663", 6650, None]
)
def test_anything_else_is_no_address(address: Any) -> None:
    for kind in (BrokerSettings, AdminSettings):
        with pytest.raises(InvalidSetting, match=r"^listen is .*host:port"):
            kind(listen=address)


def test_a_broker_acknowledges_at_a_known_stage() -> None:
    with pytest.raises(InvalidSetting, match=r"^ack is 'never'"):
        BrokerSettings(ack="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CloudSettings, SparkSettings])
@pytest.mark.parametrize("options", [None, [], "a", {"a": 1}, {1: "a"}, {"a": None}])
def test_options_are_texts(kind: type[Any], options: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^options must"):
        kind(options=options)


def test_options_are_the_settings_own() -> None:
    options = {"a": "b"}
    settings = CloudSettings(options=options)
    options["a"] = "c"
    assert settings.options == {"a": "b"}


@pytest.mark.parametrize(
    ("backend", "root"),
    [("fs", "s3://b"), ("s3", "gs://b"), ("gcs", "azure://c"), ("azure", "s3a://b"),
     ("s3", "file:///x"), ("s3", "memory://")],
)  # fmt: skip
def test_a_root_of_another_backend_is_refused(backend: Any, root: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^root is "):
        CloudSettings(backend=backend, root=root)


def test_a_root_has_no_password() -> None:
    with pytest.raises(InvalidSetting, match=r"^root is .*password") as raised:
        CloudSettings(backend="s3", root="s3://me:hunter2@bucket")
    assert "hunter2" not in str(raised.value)
    CloudSettings(backend="azure", root="abfs://container@account/prefix")


@pytest.mark.parametrize("endpoints", ["h:1", None, [""], [1], {"h:1"}])
def test_endpoints_are_a_list_of_texts(endpoints: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^endpoints is .*host:port"):
        MetadataSettings(backend="etcd", endpoints=endpoints)


def test_etcd_needs_an_endpoint() -> None:
    with pytest.raises(InvalidSetting, match=r"^endpoints is "):
        MetadataSettings(backend="etcd")


@pytest.mark.parametrize("name", ["prefix", "username", "password"])
def test_texts_are_texts(name: str) -> None:
    secret: Any = {name: ["hunter2"]}
    with pytest.raises(InvalidSetting, match=f"^{name} is ") as raised:
        MetadataSettings(**secret)
    assert ("hunter2" in str(raised.value)) == (name != "password")


def test_a_store_in_memory_has_no_logs_on_disk() -> None:
    assert StoreSettings(data="d", wal_root="w").wal_root == Path("w")
    with pytest.raises(InvalidSetting, match=r"^wal_root is 'w'"):
        StoreSettings(data=None, wal_root="w")


@pytest.mark.parametrize("name", ["broker", "admin", "spark", "cloud", "metadata"])
def test_a_section_is_of_its_own_class(name: str) -> None:
    wrong: Any = {name: {}}
    with pytest.raises(InvalidSetting, match=f"^{name} is "):
        StoreSettings(data=None, **wrong)
