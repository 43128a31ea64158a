"""The configuration file: what is refused, in which words, and what the words never show."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import describe, load_config, parse_config
from forebay.config.document import (
    DEPTH_MAX,
    FILE_BYTES_MAX,
    NODES_MAX,
    as_table,
    read_document,
    substitute,
)
from forebay.errors import InvalidSetting, UsageError
from forebay.settings import StoreSettings, is_secret

BASE: Final = Path("/etc/forebay")


def parsed(text: str, **env: str) -> StoreSettings:
    return parse_config(text, base=BASE, env=env, name="f.yml")


def refused(text: str, **env: str) -> str:
    with pytest.raises(InvalidSetting) as raised:
        parsed(text, **env)
    return str(raised.value)


# ---- keys ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "storage:\n  uploader:\n    max_objct_bytes: 1",
            ("f.yml:3: storage.uploader.max_objct_bytes: unknown key; "
            "did you mean max_object_bytes?"),
        ),
        ("storag: {}", "f.yml:1: storag: unknown key; did you mean storage?"),
        ("wal_clod: {}", "f.yml:1: wal_clod: unknown key; did you mean wal_cloud?"),
        ("storage: {wall: {}}", "f.yml:1: storage.wall: unknown key; did you mean wal?"),
        ("broker: {akc: x}", "f.yml:1: broker.akc: unknown key; did you mean ack?"),
        (
            "storage: {wal: {retention: {tme_minutes: 1}}}",
            "f.yml:1: storage.wal.retention.tme_minutes: unknown key; did you mean time_minutes?",
        ),
        (
            "storage: {cloud: {secret_kye: x}}",
            "f.yml:1: storage.cloud.secret_kye: unknown key; did you mean secret_key?",
        ),
        ("spark: {zzz: 1}", "f.yml:1: spark.zzz: unknown key; known keys: master, options"),
        ("storage: {wal_root: x}", ("f.yml:1: storage.wal_root: unknown key; known keys: cloud, "
         "cloud_reader, deleter, remote_retention, sweeper, uploader, wal, writer_threads")),
        ("<<: {}", ("f.yml:1: <<: unknown key; known keys: admin, broker, data, metadata, spark, "
         "storage")),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest_known_one(text: str, message: str) -> None:
    assert refused(text) == message


def test_a_key_that_is_given_twice_is_refused() -> None:
    message = refused("storage:\n  wal:\n    dir: a\n    file_name: b\n    dir: c\n")
    assert message == "f.yml:5: storage.wal.dir: given twice, first in line 3"


@pytest.mark.parametrize("text", ["[a]: 1", "{a: 1}: 2", "'': 1", "? !x a\n: 1", "'a b': 1"])
def test_a_key_is_a_plain_name(text: str) -> None:
    assert refused(text) == "f.yml:1: a key is not a plain name"
    assert refused(f"spark:\n  options: {{{text}}}".replace("? !x a\n: 1", "!x a: 1")) == (
        "f.yml:2: a key of spark.options is not a plain name"
    )


# ---- values ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("storage: {wal: {cache_capacity: lots}}",
         "storage.wal.cache_capacity is 'lots'; it must be a whole number"),
        ("storage: {wal: {cache_capacity: 1.5}}",
         "storage.wal.cache_capacity is '1.5'; it must be a whole number"),
        ("storage: {wal: {cache_capacity: 1k}}",
         "storage.wal.cache_capacity is '1k'; it must be a whole number"),
        ("storage: {wal: {cache_capacity: null}}",
         "storage.wal.cache_capacity is 'null'; it must be a whole number"),
        ("storage: {wal: {cache_capacity: [1]}}",
         "storage.wal.cache_capacity is a list; it must be a whole number"),
        ("storage: {wal: {rotate_max_bytes: 5m5}}",
         ("storage.wal.rotate_max_bytes is '5m5'; it must be a size such as 8MiB, or a number of "
         "bytes, or null")),
        ("storage: {wal: {rotate_max_bytes: 0.3k}}",
         ("storage.wal.rotate_max_bytes is '0.3k'; it must be a size such as 8MiB, or a number of "
         "bytes, or null")),
        ("storage: {wal: {fsync_interval_ms: 0.5ms}}",
         ("storage.wal.fsync_interval_ms is '0.5ms'; it must be a duration such as 90s, or a "
         "number of milliseconds")),
        ("storage: {uploader: {interval_seconds: 1m2h}}",
         ("storage.uploader.interval_seconds is '1m2h'; it must be a duration such as 90s, or a "
         "number of seconds")),
        ("storage: {uploader: {interval_seconds: .inf}}",
         ("storage.uploader.interval_seconds is '.inf'; it must be a duration such as 90s, or a "
         "number of seconds")),
        ("storage: {uploader: {max_object_mb: big}}",
         ("storage.uploader.max_object_mb is 'big'; it must be a size such as 8MiB, or a number "
         "of MiB, or null")),
        ("storage: {uploader: {rolling: 1}}",
         "storage.uploader.rolling is '1'; it must be true or false"),
        ("storage: {uploader: {runner: java}}",
         "storage.uploader.runner is 'java'; it must be one of inline, spark"),
        ("storage: {wal: {dir: ''}}", "storage.wal.dir is ''; it must be a path, or null"),
        ("storage: {wal: {dir: {}}}", "storage.wal.dir is a mapping; it must be a path, or null"),
        ("metadata: {endpoints: a:1}",
         "metadata.endpoints is 'a:1'; it must be a list of strings"),
        ("metadata: {endpoints: [a:1, [b]]}",
         "metadata.endpoints[1] is a list; it must be a string, in a list of strings"),
        ("metadata: {endpoints: [null]}",
         "metadata.endpoints[0] is 'null'; it must be a string, in a list of strings"),
        ("spark: {options: [a]}",
         "spark.options is a list; it must be a mapping of names to strings"),
        ("spark: {options: {a: {b: c}}}",
         "spark.options.a is a mapping; it must be a string, in a mapping of names to strings"),
        ("storage: 3", "storage is '3'; it must be a mapping of keys to values"),
        ("storage: {wal: [a]}", "storage.wal is a list; it must be a mapping of keys to values"),
        ("storage: {wal: {rotation: 1}}",
         "storage.wal.rotation is '1'; it must be a mapping of keys to values"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    assert refused(text) == f"f.yml:1: {message}"


def test_a_long_value_is_shown_in_part() -> None:
    message = refused(f"storage: {{uploader: {{rolling: {'x' * 10_000}}}}}")
    assert len(message) < 300
    assert message.endswith("xxx...; it must be true or false")


@pytest.mark.parametrize("text", ["[a]", "text", "3"])
def test_a_file_is_a_mapping(text: str) -> None:
    assert "it must be a mapping of keys to values" in refused(text)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("\nbroker: {listen: here}", "f.yml:2: broker.listen is 'here'; it must be host:port"),
        ("broker: {listen: 'h:65536'}", "f.yml:1: broker.listen is 'h:65536'; it must be"),
        ("storage: {wal: {queue_max_bytes: 0}}", "f.yml:1: storage.wal.queue_max_bytes is 0; it"),
        ("storage: {writer_threads: -1}", "f.yml:1: storage.writer_threads is -1; it must be"),
        ("wal_cloud:\n  wal:\n    rotation: {max_hours: 0}",
         "f.yml:3: wal_cloud.wal.rotation.max_hours (rotate_max_seconds) is 0; it must be"),
        ("metadata: {lease_seconds: 4}", "f.yml: metadata.lease_margin_seconds is 3; it must be"),
        ("metadata: {backend: etcd}", "f.yml: metadata.endpoints is empty; etcd needs"),
        ("storage: {cloud: {root: 's3://b'}}",
         "f.yml:1: storage.cloud.root is 's3://b', which needs backend 's3'; it is 'fs'"),
    ],
)  # fmt: skip
def test_what_the_settings_refuse_is_told_with_its_place(text: str, start: str) -> None:
    assert refused(text).startswith(start)


# ---- the environment ----


def test_a_variable_that_is_not_set_is_refused_by_its_name_and_the_keys() -> None:
    assert refused("\nmetadata: {username: 'a${NOBODY}'}") == (
        "f.yml:2: metadata.username: the environment variable NOBODY is not set; set it, or write "
        "${NOBODY:-default}"
    )


@pytest.mark.parametrize(
    "written", ["${", "${A", "${}", "${1A}", "${A-b}", "${A:-b", "${A B}", "${A:-{}"]
)
def test_a_variable_that_is_not_spelled_right_is_refused(written: str) -> None:
    message = refused(f"metadata: {{username: '{written}'}}", A="x")
    assert message.startswith("f.yml:1: metadata.username: neither ${NAME} nor ${NAME:-default};")


# ---- YAML ----


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("a: [1,\nb: }", "f.yml:2:4: "),
        ("storage:\n  wal: {\n", "f.yml:3:1: "),
        ("a: 'x", "f.yml:1:6: "),
        ("a: @b", "f.yml:1:4: "),
        ("\ta: b", "f.yml:1:1: "),
        ("a: b\nc: \x01", "f.yml:2: not YAML: a character that is not allowed"),
    ],
)
def test_broken_yaml_is_refused_with_its_line_and_column(text: str, start: str) -> None:
    assert refused(text).startswith(start)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.getcwd []", "a: !!str b", "a: ! x"])
def test_tags_are_refused(text: str) -> None:
    assert "tags are not allowed" in refused(text)


def test_a_second_document_is_refused() -> None:
    assert refused("data: a\n---\ndata: b\n") == "f.yml: more than one YAML document"


def test_an_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert f"more than {NODES_MAX} values" in refused("\n".join(lines))


def test_an_alias_of_what_contains_it_is_refused() -> None:
    assert "an alias without its anchor" in refused("a: &a [*a]")


def test_deep_nesting_is_refused() -> None:
    levels = 100_000
    assert f"nested deeper than {DEPTH_MAX} levels" in refused("a: " + "[" * levels)


def test_many_values_are_refused() -> None:
    values = ", ".join(["x"] * (NODES_MAX + 1))
    assert f"more than {NODES_MAX} values" in refused(f"a: [{values}]")


# ---- files ----


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.yml"
    file.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(InvalidSetting, match=rf"{file}: larger than {FILE_BYTES_MAX} bytes"):
        load_config(file)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.yml"
    file.write_bytes(b"a: \xff\xfe")
    with pytest.raises(InvalidSetting, match=rf"{file}: the file is not UTF-8 text"):
        load_config(file)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=rf"{tmp_path}: the file cannot be read"):
        load_config(tmp_path)


def test_errors_are_mistakes_of_the_caller_and_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "f.yml"
    file.write_text("data: a\nx: 1\n", encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        load_config(file)
    assert str(raised.value).startswith(f"{file}:2: x: unknown key")


# ---- secrets ----

SECRET: Final = "hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"metadata: {{password: [{SECRET}]}}",
        f"metadata: {{password: {{{SECRET}: 1}}}}",
        f"metadata: {{password: *{SECRET}}}",
        f"metadata: {{password: !{SECRET} x}}",
        f"metadata:\n  password: !{SECRET}!x",
        f"metadata:\n  password: '{SECRET}",
        f'metadata:\n  password: "{SECRET}\\q"',
        f"metadata:\n  password: {SECRET}: x",
        f"metadata: {{password: {SECRET}, [}}",
        f"metadata: {{password: '{SECRET}${{'}}",
        f"metadata: {{password: {SECRET}}}\nmetadata: {{}}",
        f"storage: {{cloud: {{options: {{secret_key: [{SECRET}]}}}}}}",
        f"storage: {{cloud: {{secret_key: {SECRET}, options: {{secret_key: {SECRET}}}}}}}",
        f"storage: {{cloud: {{backend: s3, root: 's3://user:{SECRET}@bucket'}}}}",
        f"metadata: {{backend: etcd, endpoints: ['http://user:{SECRET}@host:1']}}",
        "storage: {wal: {cache_capacity: '${API_TOKEN}'}}",
        "broker: {listen: '${DB_PASSWORD}'}",
        "storage: {uploader: {runner: '${AWS_SECRET_ACCESS_KEY}'}}",
    ],
)
def test_no_secret_is_in_an_error(text: str) -> None:
    env = dict.fromkeys(("API_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"), SECRET)
    with pytest.raises(InvalidSetting) as raised:
        parsed(text, **env)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_a_text_below_a_secret_name_shows_stars() -> None:
    document = read_document(f"token: {SECRET}\nx: {{account_key: {SECRET}, y: '1'}}", "f.yml")
    substitute(document, {})
    below = as_table(document.items["x"]).items
    assert [str(document.items["token"]), str(below["account_key"])] == ["***", "***"]
    assert str(below["y"]) == "'1'"


def secretive() -> StoreSettings:
    return parsed(
        f"storage: {{cloud: {{backend: s3, root: 's3://b', access_key: {SECRET}, "
        f"secret_key: {SECRET}, endpoint: 'https://u:{SECRET}@h/?sig={SECRET}', "
        f"options: {{sas: {SECRET}, session_token: {SECRET}, region: r}}}}}}\n"
        f"metadata: {{username: u, password: {SECRET}, key_file: k.pem}}\n"
        f"spark: {{options: {{spark.hadoop.fs.s3a.secret.key: {SECRET}, spark.a: b}}}}\n"
    )


def test_no_secret_is_in_the_repr_of_settings() -> None:
    assert SECRET not in repr(secretive())


def test_a_description_hides_secrets_and_shows_the_rest() -> None:
    found = describe(secretive())
    assert SECRET not in repr(found)
    assert found["storage"]["cloud"]["options"] == {
        "access_key": "***",
        "secret_key": "***",
        "endpoint": "https://***@h/?***",
        "sas": "***",
        "session_token": "***",
        "region": "r",
    }
    assert found["metadata"]["username"] == "u"
    assert found["metadata"]["password"] == "***"
    assert found["metadata"]["key_file"] == "/etc/forebay/k.pem"
    assert found["spark"]["options"] == {"spark.hadoop.fs.s3a.secret.key": "***", "spark.a": "b"}


def test_names_of_secrets_are_known() -> None:
    secrets = "secret_key access_key aws_access_key_id accessKey password token sas_token sas "
    secrets += "account_key client_secret credentials_json AWS_SECRET_ACCESS_KEY fs.s3a.secret.key"
    shown = "region endpoint key_file credentials_path username root prefix monkey sasha design"
    assert [name for name in secrets.split() if not is_secret(name)] == []
    assert [name for name in shown.split() if is_secret(name)] == []


# ---- anything ----

PIECES: Final = st.sampled_from(
    ["storage", "wal", "cloud", "metadata", "options", "dir", "password", "retention", "rotation",
     ": ", ":", "{", "}", "[", "]", "\n", "\n  ", "- ", "&a ", "*a", "!", "'", '"', "${", "$${",
     "A", "|", ">", "%", "---", "null", "1k", "\t", "\x00", "\x85", "\ud800", "<<", "? ", "#",
     ","]
)  # fmt: skip


@given(st.lists(PIECES, max_size=24).map("".join) | st.text(max_size=40))
def test_any_text_loads_or_is_refused_as_a_mistake(text: str) -> None:
    with contextlib.suppress(InvalidSetting):
        assert isinstance(parsed(text, A="a"), StoreSettings)
