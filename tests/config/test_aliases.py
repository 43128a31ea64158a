"""The configuration file: the names of Danube's own, accepted for ours."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from forebay.config import parse_config
from forebay.config.aliases import REFUSED
from forebay.errors import InvalidSetting
from forebay.limits import GIB, MIB
from forebay.settings import (
    CloudSettings,
    DeleterSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)

DANUBE: Final = """
wal_cloud:
  wal:
    dir: "./danube-data/wal"
    file_name: "wal.log"
    cache_capacity: 1024
    file_sync:
      interval_ms: 5000
      max_batch_bytes: 10485760
    rotation:
      max_bytes: 536870912
      # max_hours: 24
    retention:
      check_interval_minutes: 5
      time_minutes: 2880
      size_mb: 20480
  uploader:
    enabled: true
    interval_seconds: 300
    root_prefix: "/danube-data"
    max_object_mb: 1024
  cloud:
    backend: "s3"
    root: "s3://my-bucket/danube"
    endpoint: "http://127.0.0.1:9000"
    region: us-east-1
    access_key: minioadmin
    secret_key: minioadmin
    virtual_host_style: false
    profile: null
  cloud_reader:
    enable_ranged_reads: true
metadata:
  etcd_endpoint: "127.0.0.1:2379"
"""


def parsed(text: str) -> StoreSettings:
    return parse_config(text, base=Path("/b"), env={}, name="f.yml")


def refused(text: str) -> str:
    with pytest.raises(InvalidSetting) as raised:
        parsed(text)
    return str(raised.value)


def test_danubes_own_configuration_loads() -> None:
    assert parsed(DANUBE) == StoreSettings(
        data=Path("/b/danube-data"),
        wal_root=Path("/b/danube-data/wal"),
        wal=WalSettings(rotate_max_bytes=512 * MIB),
        uploader=UploaderSettings(root_prefix="/danube-data", max_object_bytes=GIB),
        cloud=CloudSettings(
            backend="s3",
            root="s3://my-bucket/danube",
            options={
                "endpoint": "http://127.0.0.1:9000",
                "region": "us-east-1",
                "access_key": "minioadmin",
                "secret_key": "minioadmin",
                "virtual_host_style": "false",
            },
        ),
        deleter=DeleterSettings(5, 2880, 20480),
        metadata=MetadataSettings(backend="etcd", endpoints=["127.0.0.1:2379"]),
    )


def test_danubes_catalog_may_be_beside_the_log() -> None:
    text = "wal_cloud: {metadata: {etcd_endpoint: 'e:2379', in_memory: false}}"
    assert parsed(text).metadata == MetadataSettings(backend="etcd", endpoints=["e:2379"])
    assert "it can only be false" in refused("wal_cloud: {metadata: {in_memory: true}}")


def test_the_namespace_of_etcd_is_the_prefix_of_the_keys() -> None:
    assert parsed("metadata: {namespace: /prod}").metadata.prefix == "/prod"
    message = refused("metadata:\n  namespace: /a\n  prefix: /b\n")
    assert message.startswith("f.yml:2: metadata.namespace: the same as metadata.prefix in line 3")


def test_the_grace_time_has_one_meaning_under_two_names() -> None:
    assert parsed("storage: {uploader: {sweep_grace_minutes: 2h}}").sweeper.grace_minutes == 120
    assert parsed("storage: {sweeper: {grace_minutes: 2h}}").sweeper.grace_minutes == 120
    message = refused(
        "storage:\n  sweeper: {grace_minutes: 1h}\n  uploader: {sweep_grace_minutes: 2h}\n"
    )
    assert message.startswith(
        "f.yml:3: storage.uploader.sweep_grace_minutes: the same as storage.sweeper.grace_minutes"
    )


@pytest.mark.parametrize("key", [key for keys in REFUSED for key in keys.split(", ")])
def test_keys_that_the_page_calls_refused_are_refused(key: str) -> None:
    first, _, rest = key.partition(".")
    nested = "{" + rest.replace(".", ": {") + ": x" + "}" * (rest.count(".") + 1)
    assert "unknown key" in refused(f"{first}: {nested if rest else 'x'}")


def test_the_example_for_large_objects_loads() -> None:
    settings = parsed(
        "wal_cloud:\n  uploader:\n    enabled: true\n    interval_seconds: 300\n"
        '    root_prefix: "/danube-data"\n    max_object_bytes: 1073741824  # 1 GiB\n'
    )
    assert settings.uploader == UploaderSettings(root_prefix="/danube-data")


@pytest.mark.parametrize(
    ("written", "seconds"), [("2", 7200), ("0.5", 1800), ("90m", 5400), ("null", None)]
)
def test_hours_are_seconds(written: str, seconds: float | None) -> None:
    settings = parsed(f"storage: {{wal: {{rotation: {{max_hours: {written}}}}}}}")
    assert settings.wal.rotate_max_seconds == seconds


def test_file_sync_keeps_its_units() -> None:
    settings = parsed("storage: {wal: {file_sync: {interval_ms: 250, max_batch_bytes: 1M}}}")
    assert settings.wal == WalSettings(fsync_interval_ms=250, fsync_max_batch_bytes=MIB)


@pytest.mark.parametrize(
    ("written", "size"), [("3", 3 * MIB), ("2GiB", 2 * GIB), ("0.5", MIB // 2)]
)
def test_an_object_in_mb_is_one_in_bytes(written: str, size: int) -> None:
    settings = parsed(f"storage: {{uploader: {{max_object_mb: {written}}}}}")
    assert settings.uploader.max_object_bytes == size


@pytest.mark.parametrize(("written", "backend"), [("azblob", "azure"), ("local", "fs")])
def test_backends_have_other_names(written: str, backend: str) -> None:
    assert parsed(f"storage: {{cloud: {{backend: {written}}}}}").cloud.backend == backend


def test_a_local_backend_has_its_root_beside_the_file() -> None:
    assert parsed("storage: {cloud: {backend: local, root: o}}").cloud.root == "/b/o"


def test_options_beside_the_backend_join_the_others() -> None:
    settings = parsed("storage: {cloud: {region: r, options: {a: b}}}")
    assert settings.cloud.options == {"a": "b", "region": "r"}
    assert parsed("storage: {cloud: {region: r, options: }}").cloud.options == {"region": "r"}


@pytest.mark.parametrize("group", ["file_sync", "rotation", "retention"])
def test_an_empty_group_is_nothing(group: str) -> None:
    assert parsed(f"storage: {{wal: {{{group}: }}}}") == parsed("")
    assert parsed(f"storage: {{wal: {{{group}: {{}}}}}}") == parsed("")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("storage: {}\nwal_cloud: {}", "f.yml:2: wal_cloud: the same as storage in line 1"),
        (
            "storage:\n  wal:\n    file_sync: {interval_ms: 1}\n    fsync_interval_ms: 1",
            (
                "f.yml:3: storage.wal.file_sync.interval_ms: the same as "
                "storage.wal.fsync_interval_ms in line 4"
            ),
        ),
        (
            "wal_cloud:\n  deleter: {retention_size_mb: 1}\n  wal: {retention: {size_mb: 1}}",
            (
                "f.yml:3: wal_cloud.wal.retention.size_mb: the same as "
                "wal_cloud.deleter.retention_size_mb in line 2"
            ),
        ),
        (
            "storage: {uploader: {max_object_bytes: 1, max_object_mb: 1}}",
            (
                "f.yml:1: storage.uploader.max_object_mb: the same as "
                "storage.uploader.max_object_bytes in line 1"
            ),
        ),
        (
            "storage: {cloud: {region: a, options: {region: a}}}",
            "f.yml:1: storage.cloud.region: the same as storage.cloud.options.region in line 1",
        ),
        (
            "metadata: {etcd_endpoint: a, endpoints: [a]}",
            "f.yml:1: metadata.etcd_endpoint: the same as metadata.endpoints in line 1",
        ),
    ],
)
def test_an_alias_beside_its_proper_name_is_refused(text: str, message: str) -> None:
    assert refused(text) == f"{message}; keep one"


def test_an_endpoint_of_etcd_needs_etcd() -> None:
    assert refused("metadata: {etcd_endpoint: a, backend: sqlite}") == (
        "f.yml:1: metadata.etcd_endpoint is for etcd, but metadata.backend is 'sqlite'"
    )
    settings = parsed("metadata: {etcd_endpoint: a, backend: etcd}")
    assert settings.metadata.endpoints == ("a",)


@pytest.mark.parametrize("written", ["false", "no", "null", "[]", "2"])
def test_ranged_reads_cannot_be_switched_off(written: str) -> None:
    message = refused(f"storage: {{cloud_reader: {{enable_ranged_reads: {written}}}}}")
    assert message.startswith("f.yml:1: storage.cloud_reader.enable_ranged_reads is ")
    assert "it can only be true: objects are always read by ranges" in message
