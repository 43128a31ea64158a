"""The configuration file: what is read, where its paths are, and the documented samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.config import describe, load_config, parse_config, settings_from
from forebay.errors import InvalidSetting, UsageError
from forebay.limits import GIB, KIB, MIB
from forebay.settings import (
    CloudSettings,
    DeleterSettings,
    MetadataSettings,
    SparkSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)

BASE: Final = Path("/etc/forebay")

DESIGN: Final = """
storage:
  wal: {dir: data/wal, cache_capacity: 1024, fsync_interval_ms: 5000, fsync_max_batch_bytes: 10MiB, rotate_max_bytes: 64MiB, rotate_max_seconds: 3600}
  uploader: {runner: spark, interval_seconds: 300, max_object_bytes: 1GiB, max_open_seconds: 600, stream_chunk_size: 8MiB, concurrent_parts: 4}
  cloud: {backend: fs, root: data/objects, options: {}}        # s3 | gcs | azure | fs | memory; root "s3://bucket/prefix"
  cloud_reader: {fetch_chunk_size: 4MiB}
  remote_retention: {}                                         # unlimited; or time_minutes, size_mb
  deleter: {check_interval_minutes: 5, retention_time_minutes: 1440, retention_size_mb: 10240, deletion_lag_minutes: 240}
metadata: {backend: sqlite, path: data/catalog.db}             # or {backend: etcd, endpoints: [...], prefix: /forebay}
broker: {listen: "127.0.0.1:6650", ack: synced}
admin: {listen: "127.0.0.1:8650"}
spark: {master: "local[*,4]"}                               # local[*] alone never retries a task
"""  # noqa: E501 - as it is documented

DANUBE: Final = """
storage:
  wal:
    dir: /var/lib/danube/wal
    cache_capacity: 2048
    fsync_interval_ms: 5000
    fsync_max_batch_bytes: 10485760  # 10 MiB
    rotate_max_bytes: 52428800        # 50 MiB
    rotate_max_seconds: 3600          # 1 hour

  uploader:
    interval_seconds: 300  # 5 minutes

  cloud:
    backend: s3
    root: s3://my-bucket/danube
    options:
      region: us-east-1
      endpoint: https://s3.amazonaws.com
      access_key: ${AWS_ACCESS_KEY_ID}
      secret_key: ${AWS_SECRET_ACCESS_KEY}
"""


def parsed(text: str, **env: str) -> StoreSettings:
    return parse_config(text, base=BASE, env=env)


def refused(text: str, **env: str) -> str:
    with pytest.raises(InvalidSetting) as raised:
        parsed(text, **env)
    return str(raised.value)


# ---- whole files ----


def test_the_documented_sample_loads() -> None:
    assert parsed(DESIGN) == StoreSettings(
        data=BASE / "data",
        wal_root=BASE / "data/wal",
        uploader=UploaderSettings(runner="spark"),
        cloud=CloudSettings(root="/etc/forebay/data/objects"),
        metadata=MetadataSettings(path=BASE / "data/catalog.db"),
    )


def test_the_sample_of_danubes_design_loads() -> None:
    settings = parsed(DANUBE, AWS_ACCESS_KEY_ID="AK", AWS_SECRET_ACCESS_KEY="SK")
    assert settings == StoreSettings(
        data=Path("/var/lib/danube"),
        wal_root=Path("/var/lib/danube/wal"),
        wal=WalSettings(cache_capacity=2048, rotate_max_bytes=50 * MIB),
        cloud=CloudSettings(
            backend="s3",
            root="s3://my-bucket/danube",
            options={
                "region": "us-east-1",
                "endpoint": "https://s3.amazonaws.com",
                "access_key": "AK",
                "secret_key": "SK",
            },
        ),
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "storage:\nmetadata:\n", "~"])
def test_an_empty_file_has_the_defaults_beside_it(text: str) -> None:
    assert parsed(text) == StoreSettings(data=BASE / "data")


def test_a_file_is_read_with_the_environment_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_TEST_CACHE", "7")
    file = tmp_path / "forebay.yml"
    file.write_text("storage: {wal: {cache_capacity: '${FOREBAY_TEST_CACHE}'}}", encoding="utf-8")
    assert load_config(file).wal.cache_capacity == 7
    assert load_config(str(file), env={"FOREBAY_TEST_CACHE": "8"}).wal.cache_capacity == 8


def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "forebay.yml"
    file.write_bytes(b"\xef\xbb\xbfbroker: {ack: uploaded}\n")
    assert load_config(file).broker.ack == "uploaded"


def test_importing_forebays_configuration_imports_no_yaml() -> None:
    program = "import forebay.config, sys; print('yaml' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


# ---- where things are ----


def test_data_is_the_directory_of_the_defaults() -> None:
    assert parsed("data: store") == StoreSettings(data=BASE / "store")
    assert parsed("data: /srv/store") == StoreSettings(data=Path("/srv/store"))


def test_data_is_above_the_logs_where_only_they_are_given() -> None:
    settings = parsed("storage: {wal: {dir: x/logs}}")
    assert (settings.data, settings.wal_root) == (BASE / "x", BASE / "x/logs")
    assert settings.wal == WalSettings()


def test_data_and_the_logs_may_be_apart() -> None:
    settings = parsed("data: /srv/store\nstorage: {wal: {dir: /fast/wal}}")
    assert (settings.data, settings.wal_root) == (Path("/srv/store"), Path("/fast/wal"))


def test_null_as_the_directory_of_the_logs_is_the_default() -> None:
    assert parsed("storage: {wal: {dir: null}}") == StoreSettings(data=BASE / "data")


def test_a_store_in_memory_has_no_directory() -> None:
    assert parsed("data: null") == StoreSettings(data=None)
    message = refused("data: null\nstorage:\n  wal: {dir: wal}")
    assert message.startswith("configuration:3: storage.wal.dir (wal_root) is '/etc/forebay/wal';")


def test_paths_are_relative_to_the_directory_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "f.yml").write_text(
        "storage: {cloud: {root: objects}}\n"
        "metadata: {path: c.db, ca_file: tls/ca.pem, cert_file: /tls/c.pem, key_file: k.pem}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    settings = load_config("conf/f.yml")
    conf = tmp_path / "conf"
    assert settings.data == conf / "data"
    assert settings.cloud.root == str(conf / "objects")
    assert settings.metadata.path == conf / "c.db"
    assert settings.metadata.ca_file == conf / "tls/ca.pem"
    assert settings.metadata.cert_file == Path("/tls/c.pem")
    assert settings.metadata.key_file == conf / "k.pem"


@pytest.mark.parametrize(
    ("backend", "root"),
    [
        ("s3", "s3://b/p"),
        ("s3", "b/p"),
        ("gcs", "gs://b"),
        ("azure", "azure://c/p"),
        ("memory", "m"),
        ("fs", "file:///srv"),
        ("fs", "/srv"),
    ],
)
def test_roots_that_are_no_relative_directories_stay_as_they_are(backend: str, root: str) -> None:
    assert parsed(f"storage: {{cloud: {{backend: {backend}, root: '{root}'}}}}").cloud.root == root


# ---- values ----


@pytest.mark.parametrize(
    ("written", "size"),
    [("1", 1), ("8MiB", 8 * MIB), ("64 MB", 64 * MIB), ("512k", 512 * KIB), ("512K", 512 * KIB),
     ("2g", 2 * GIB), ("1.5GiB", 3 * GIB // 2), ("10 b", 10), ("1_000", 1000), ("1e6", 10**6),
     ("'7kib'", 7 * KIB), ("1TiB", 1024 * GIB), ("${SIZE}", 3 * MIB), ("010", 10)],
)  # fmt: skip
def test_a_size_is_bytes_or_has_a_unit(written: str, size: int) -> None:
    settings = parsed(f"storage:\n  uploader:\n    max_object_bytes: {written}", SIZE="3M")
    assert settings.uploader.max_object_bytes == size
    assert isinstance(settings.uploader.max_object_bytes, int)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("5m", 300), ("90s", 90), ("250ms", 0.25), ("4h", 14400), ("1d", 86400), ("1h30m", 5400),
     ("1h 30m", 5400), ("1.5h", 5400), ("300", 300), ("0.5", 0.5), ("2.5e2", 250)],
)  # fmt: skip
def test_a_duration_is_in_the_keys_unit_or_has_its_own(written: str, seconds: float) -> None:
    settings = parsed(f"storage: {{uploader: {{interval_seconds: {written}}}}}")
    assert settings.uploader.interval_seconds == seconds


def test_each_unit_of_a_name_counts() -> None:
    settings = parsed(
        "storage:\n"
        "  wal: {fsync_interval_ms: 2s, rotate_max_seconds: 2h}\n"
        "  cloud_reader: {fetch_chunk_size: 128k}\n"
        "  deleter: {retention_time_minutes: 90s, retention_size_mb: 1536k, "
        "check_interval_minutes: 1h}\n"
        "  remote_retention: {time_minutes: 7d, size_mb: 2GiB}\n"
    )
    assert settings.wal.fsync_interval_ms == 2000
    assert settings.wal.rotate_max_seconds == 7200
    assert settings.cloud_reader.fetch_chunk_size == 128 * KIB
    assert settings.deleter == DeleterSettings(60, 1.5, 1.5)
    assert settings.remote_retention.time_minutes == 10080
    assert settings.remote_retention.size_mb == 2048


@pytest.mark.parametrize(
    ("written", "flag"),
    [("true", True), ("False", False), ("yes", True), ("no", False), ("ON", True), ("off", False),
     ("'true'", True)],
)  # fmt: skip
def test_a_flag_is_true_or_false(written: str, flag: bool) -> None:
    assert parsed(f"storage: {{uploader: {{rolling: {written}}}}}").uploader.rolling is flag


@pytest.mark.parametrize("written", ["null", "~", "", "Null", "${NOTHING:-}"])
def test_null_switches_off_what_can_be_switched_off(written: str) -> None:
    settings = parsed(f"storage:\n  wal:\n    rotate_max_bytes: {written}\n")
    assert settings.wal.rotate_max_bytes is None


def test_lists_options_and_threads() -> None:
    settings = parsed(
        "storage: {writer_threads: 9}\n"
        "metadata: {backend: etcd, endpoints: ['a:1', b:2], username: u, password: 0123}\n"
        "spark:\n  master: spark://h:7077\n"
        "  options: {spark.executor.memory: 4g, spark.ui.enabled: false, spark.a: 1, spark.b: }\n"
    )
    assert settings.writer_threads == 9
    assert settings.metadata.endpoints == ("a:1", "b:2")
    assert settings.metadata.password == "0123"
    assert settings.spark == SparkSettings(
        "spark://h:7077",
        {"spark.executor.memory": "4g", "spark.ui.enabled": "false", "spark.a": "1"},
    )
    assert parsed("metadata: {endpoints: }\nspark: {options: }") == parsed("")


def test_an_anchor_can_be_used_again() -> None:
    settings = parsed(
        "broker: {listen: &here '127.0.0.1:0'}\nadmin: {listen: *here}\n"
        "storage: {cloud: {options: &o {a: b}}}\nspark: {options: *o}\n"
    )
    assert settings.admin.listen == "127.0.0.1:0"
    assert settings.spark.options == {"a": "b"}


# ---- the environment ----


def test_variables_are_put_into_texts_of_all_kinds() -> None:
    settings = parsed(
        'metadata: {backend: "${KIND}", endpoints: ["${HOST}:${PORT:-2379}"]}\n'
        "storage: {cloud: {backend: s3, root: 's3://${BUCKET:-b}/${EMPTY:-p}', "
        "options: {x: '${HOST}'}}}",
        KIND="etcd", HOST="h", EMPTY="",
    )  # fmt: skip
    assert settings.metadata.endpoints == ("h:2379",)
    assert settings.cloud.root == "s3://b/p"
    assert settings.cloud.options == {"x": "h"}


def test_two_dollars_stand_for_one() -> None:
    settings = parsed("metadata: {username: '$${A}', prefix: '$$x$y', password: '${A}'}", A="${B}")
    assert settings.metadata.username == "${A}"
    assert settings.metadata.prefix == "$$x$y"
    assert settings.metadata.password == "${B}", "what was put in is not looked at again"


# ---- whatever a store is opened with ----


def test_settings_come_from_files_directories_settings_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("data: d", encoding="utf-8")
    bare = tmp_path / "conf"
    bare.write_text("data: e", encoding="utf-8")
    directory = tmp_path / "dir.yml"
    directory.mkdir()
    given = StoreSettings(data="x")
    assert settings_from(None) == StoreSettings(data=None)
    assert settings_from(given) is given
    assert settings_from(file).data == tmp_path / "d"
    with pytest.raises(UsageError, match=r"not a directory; .* ends with \.yml"):
        settings_from(str(bare))
    assert settings_from(directory) == StoreSettings(data=directory)
    assert settings_from(str(tmp_path / "new")) == StoreSettings(data=tmp_path / "new")


@pytest.mark.parametrize("source", ["", "a\0b", 7, b"data"])
def test_what_is_no_path_is_refused(source: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^data is "):
        settings_from(source)


def test_a_configuration_that_is_missing_is_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"gone\.yml: the file cannot be read: No such file"):
        settings_from(tmp_path / "gone.yml")


# ---- the dump ----


def test_a_description_has_the_shape_of_the_file() -> None:
    found = describe(parsed(DESIGN))
    assert found["data"] == "/etc/forebay/data"
    assert found["storage"]["wal"]["dir"] == "/etc/forebay/data/wal"
    assert found["storage"]["uploader"]["runner"] == "spark"
    assert found["metadata"]["endpoints"] == []
    assert found["spark"] == {"master": "local[*,4]", "options": {}}


def test_a_description_loads_as_the_same_settings() -> None:
    import yaml

    settings = parsed(
        "data: null\nstorage: {writer_threads: 2, wal: {rotate_max_bytes: null}, "
        "uploader: {sidecars: no, interval_seconds: 250ms}, deleter: {retention_size_mb: 1k}}\n"
        "metadata: {backend: etcd, endpoints: [a:1], key_file: /k}\nspark: {options: {a: 'null'}}"
    )
    assert parsed(yaml.safe_dump(describe(settings))) == settings
    assert parsed(yaml.safe_dump(describe(parsed(DESIGN)))) == parsed(DESIGN)
