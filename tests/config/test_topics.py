"""A topic's own settings: how they are parsed, and which values are in effect."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from forebay.config import parse_config
from forebay.config.topics import (
    TOPIC_KEYS,
    changed,
    differing,
    effective,
    in_effect,
    parse_changes,
)
from forebay.errors import InvalidSetting
from forebay.limits import GIB, MIB
from forebay.settings import StoreSettings

STORE = StoreSettings(data=None)


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("max_object_bytes", "64MiB", 64 * MIB),
        ("max_object_bytes", 1000, 1000),
        ("max_open_seconds", "1h30m", 5400),
        ("max_open_seconds", 0.5, 0.5),
        ("retention_time_minutes", "7d", 10080),
        ("retention_size_mb", "1GiB", 1024),
        ("retention_size_mb", None, None),
        ("remote_retention_time_minutes", "90s", 1.5),
        ("remote_retention_keep_unread", "true", True),
        ("max_idle_seconds", "null", None),
        ("max_idle_seconds", "", None),
        ("max_object_messages", "1_000", 1000),
        ("rolling", "yes", True),
        ("rolling", False, False),
    ],
)
def test_values_are_written_as_in_the_configuration_file(
    key: str, value: object, parsed: object
) -> None:
    found = parse_changes({key: value})
    assert found == {key: parsed}
    assert type(found[key]) is type(parsed)
    assert changed(STORE, {}, found, ()) == found


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_object_byte": 1}, "did you mean max_object_bytes?"),
        ({"interval_seconds": 1}, "'interval_seconds' is not a setting of a topic"),
        ({"colour": "red"}, "known keys: rotate_max_bytes, "),
        ({"max_object_bytes": "64 apples"}, "max_object_bytes is '64 apples'; it must be a size"),
        ({"max_object_bytes": True}, "max_object_bytes is 'true'; it must be a size"),
        ({"max_object_bytes": "-1"}, "max_object_bytes is -1; it must be a whole number"),
        ({"max_object_messages": 1.5}, "it must be a whole number, or null"),
        ({"max_open_seconds": float("nan")}, "it must be a duration"),
        ({"rolling": "perhaps"}, "rolling is 'perhaps'; it must be true or false"),
        ({"rolling": [True]}, "rolling is a list; it must be true or false"),
        ({"remote_retention_size_mb": "-5"}, "remote_retention_size_mb is -5; it must be"),
    ],
)
def test_what_the_file_would_refuse_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        changed(STORE, {}, parse_changes(values), ())
    assert told in str(caught.value)


def test_the_topic_comes_before_the_file_and_the_file_before_the_default() -> None:
    store = parse_config("storage: {uploader: {max_open_seconds: 60s}}", base=Path("/"))
    values = {"max_object_bytes": MIB, "retention_size_mb": None}
    found = {each.key: each for each in in_effect(store, values)}
    assert list(found) == list(TOPIC_KEYS)
    assert (found["max_object_bytes"].value, found["max_object_bytes"].source) == (MIB, "topic")
    assert (found["retention_size_mb"].shown, found["retention_size_mb"].source) == (
        "null",
        "topic",
    )
    assert (found["max_open_seconds"].shown, found["max_open_seconds"].source) == (
        "1m",
        "configuration",
    )
    assert (found["rotate_max_bytes"].shown, found["rotate_max_bytes"].source) == (
        "64MiB",
        "default",
    )
    settings = effective(store, values)
    assert settings.uploader.max_object_bytes == MIB
    assert settings.uploader.max_open_seconds == 60
    assert settings.deleter.retention_size_mb is None
    assert settings.wal == store.wal
    assert differing(store, settings) == {"max_object_bytes": "1MiB", "retention_size_mb": "null"}


def test_every_key_is_a_setting_of_the_store() -> None:
    for section, field in TOPIC_KEYS.values():
        assert field in {each.name for each in fields(getattr(STORE, section))}


def test_keys_of_a_later_release_are_kept_shown_and_ignored() -> None:
    later = {"layout": {"kind": "avro"}, "max_object_bytes": MIB}
    after = changed(STORE, later, parse_changes({"rolling": True}), ())
    assert after == {**later, "rolling": True}
    assert effective(STORE, after).uploader.max_object_bytes == MIB
    last = in_effect(STORE, after)[-1]
    assert (last.key, last.known, last.shown) == ("layout", False, '{"kind": "avro"}')
    assert changed(STORE, after, {}, ["layout", "max_object_bytes"]) == {"rolling": True}


def test_a_value_of_a_later_release_is_refused_until_it_is_changed() -> None:
    stored = {"max_object_bytes": "unbounded"}
    with pytest.raises(InvalidSetting, match="max_object_bytes is 'unbounded'"):
        effective(STORE, stored)
    assert in_effect(STORE, stored)[3].shown == '"unbounded"'
    assert changed(STORE, stored, {"max_object_bytes": GIB}, ()) == {"max_object_bytes": GIB}
    assert changed(STORE, stored, {}, ["max_object_bytes"]) == {}


def test_a_key_is_not_both_set_and_unset() -> None:
    with pytest.raises(InvalidSetting, match="rolling is both set and unset"):
        changed(STORE, {}, {"rolling": True}, ["rolling"])
