"""Settings: the documented defaults, and a bad value refused by the setting's name."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.errors import InvalidSetting, UsageError
from forebay.limits import INTERVAL_SECONDS_MAX, MIB, WRITER_THREADS_MAX
from forebay.settings import DeleterSettings, StoreSettings, WalSettings
from forebay.wal.log import Wal

WHOLE: Final = [
    "cache_capacity",
    "cache_max_bytes",
    "queue_max_bytes",
    "fsync_interval_ms",
    "fsync_max_batch_bytes",
]
NO_NUMBERS: Final = ["5000", "", b"1", [], {}, True, False, 1j]
NO_RANGE: Final = [-1, -(10**30), 2**63, 10**400, math.inf, -math.inf, math.nan]


def test_the_defaults_of_a_log_are_those_of_the_configuration_file() -> None:
    settings = WalSettings()
    assert settings.dir is None
    assert settings.file_name == "wal.log"
    assert settings.cache_capacity == 1024
    assert settings.fsync_interval_ms == 5000
    assert settings.fsync_max_batch_bytes == 10 * MIB
    assert settings.rotate_max_bytes == 64 * MIB
    assert settings.rotate_max_seconds == 3600


def test_the_defaults_of_retention_are_those_of_the_configuration_file() -> None:
    settings = DeleterSettings()
    assert settings.check_interval_minutes == 5
    assert settings.retention_time_minutes == 1440
    assert settings.retention_size_mb == 10240


def test_a_store_takes_the_defaults_of_its_components() -> None:
    settings = StoreSettings(data=Path("data"))
    assert settings.wal == WalSettings()
    assert settings.deleter == DeleterSettings()


def test_settings_do_not_change() -> None:
    settings = WalSettings()
    with pytest.raises(FrozenInstanceError):
        settings.cache_capacity = 1  # type: ignore[misc]


def short(value: object) -> str:
    return repr(value)[:20]


def refused(kind: type[Any], name: str, value: object, **others: object) -> None:
    """Asserts that the setting is refused, by its name, as a mistake of the caller."""
    with pytest.raises(InvalidSetting, match=rf"^{name} is ") as raised:
        kind(**{name: value}, **others)
    assert isinstance(raised.value, UsageError)


@pytest.mark.parametrize("value", [None, 1.5, 1.0, *NO_NUMBERS, *NO_RANGE], ids=short)
def test_a_whole_number_is_nothing_else(value: object) -> None:
    for name in WHOLE:
        refused(WalSettings, name, value)
    refused(StoreSettings, "writer_threads", value, data=None)


@pytest.mark.parametrize("value", [1.5, *NO_NUMBERS, *NO_RANGE], ids=short)
def test_an_optional_whole_number_is_nothing_else(value: object) -> None:
    refused(WalSettings, "rotate_max_bytes", value)


@pytest.mark.parametrize("value", [*NO_NUMBERS, *NO_RANGE], ids=short)
def test_a_number_is_nothing_else(value: object) -> None:
    refused(WalSettings, "rotate_max_seconds", value)
    for name in ("check_interval_minutes", "retention_time_minutes", "retention_size_mb"):
        refused(DeleterSettings, name, value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (WalSettings, "queue_max_bytes"),
        (WalSettings, "fsync_interval_ms"),
        (WalSettings, "fsync_max_batch_bytes"),
        (WalSettings, "rotate_max_bytes"),
        (WalSettings, "rotate_max_seconds"),
        (DeleterSettings, "check_interval_minutes"),
    ],
)
def test_what_has_to_be_above_zero_is(kind: type[Any], name: str) -> None:
    refused(kind, name, 0)


def test_an_interval_is_one_that_can_be_waited_for() -> None:
    refused(WalSettings, "fsync_interval_ms", INTERVAL_SECONDS_MAX * 1000 + 1)
    refused(WalSettings, "rotate_max_seconds", INTERVAL_SECONDS_MAX * 1.01)
    refused(DeleterSettings, "check_interval_minutes", INTERVAL_SECONDS_MAX)


def test_values_at_the_limits_are_taken() -> None:
    WalSettings(
        dir=Path("x"),
        cache_capacity=0,
        cache_max_bytes=0,
        queue_max_bytes=1,
        fsync_interval_ms=1,
        fsync_max_batch_bytes=1,
        rotate_max_bytes=1,
        rotate_max_seconds=0.001,
    )
    WalSettings(
        fsync_interval_ms=INTERVAL_SECONDS_MAX * 1000, rotate_max_seconds=INTERVAL_SECONDS_MAX
    )
    DeleterSettings(0.01, 0, 0)
    StoreSettings(None, writer_threads=1)
    StoreSettings(None, writer_threads=WRITER_THREADS_MAX)


def test_more_threads_than_the_limit_are_refused() -> None:
    refused(StoreSettings, "writer_threads", 0, data=None)
    refused(StoreSettings, "writer_threads", WRITER_THREADS_MAX + 1, data=None)


def test_none_switches_off_what_can_be_switched_off() -> None:
    WalSettings(rotate_max_bytes=None, rotate_max_seconds=None)
    DeleterSettings(retention_time_minutes=None, retention_size_mb=None)
    refused(DeleterSettings, "check_interval_minutes", None)


def test_a_log_in_memory_has_a_cache() -> None:
    with pytest.raises(InvalidSetting, match="cache_capacity"):
        Wal(WalSettings(dir=None, cache_capacity=0))
