"""Sizes and durations: what is written is read back exactly, and nothing else is read."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.quantities import (
    BYTES,
    MEGABYTES,
    MINUTES,
    SECONDS,
    as_number,
    format_duration,
    format_size,
    parse_duration,
    parse_number,
    parse_quantity,
    parse_size,
    unit_of,
)

SIZES = ["", "k", "K", "kB", "KB", "KiB", "kib", "m", "MB", "MiB", "G", "GB", "GiB", "t", "TiB"]


@given(st.integers(0, 2**63) | st.integers(0, 2**20).map(lambda n: n * 1024**3))
def test_a_size_is_read_as_it_was_written(size: int) -> None:
    assert parse_quantity(format_size(size), BYTES) == size


@given(st.integers(0, 2**50), st.sampled_from([1, 1000, 60_000, 3_600_000, 86_400_000]))
def test_a_duration_is_read_as_it_was_written(amount: int, scale: int) -> None:
    seconds = Fraction(amount * scale, 1000)
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(0, 10**15), st.sampled_from(SIZES), st.sampled_from(["", " ", "  "]))
def test_every_spelling_of_a_unit_is_a_power_of_1024(amount: int, unit: str, space: str) -> None:
    power = " kmgt".index(unit[:1].lower() or " ")
    assert parse_quantity(f"{amount}{space}{unit}".strip(), BYTES) == amount * 1024**power


@given(*[st.integers(0, 1000)] * 5)
def test_a_duration_may_have_several_units(d: int, h: int, m: int, s: int, ms: int) -> None:
    total = Fraction(ms, 1000) + s + 60 * m + 3600 * h + 86400 * d
    assert parse_duration(f"{d}d{h}h{m}m{s}s{ms}ms") == total
    assert parse_duration(f"{d}d {h}h {m}m {s}s {ms}ms") == total


@given(st.integers(-(10**18), 10**18))
def test_a_plain_number_is_in_the_unit_of_its_key(number: int) -> None:
    for unit in (BYTES, MEGABYTES, SECONDS, MINUTES):
        assert parse_quantity(str(number), unit) == number * unit.scale


@given(st.decimals(0, 10**6, places=3))
def test_fractions_are_exact(number: object) -> None:
    assert parse_size(f"{number}MiB") == Fraction(str(number)) * 1024**2
    assert parse_duration(f"{number}h") == Fraction(str(number)) * 3600


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_is_not(text: str) -> None:
    for unit in (BYTES, SECONDS):
        found = parse_quantity(text, unit)
        assert found is None or isinstance(as_number(found), int | float)


@pytest.mark.parametrize(
    "text", ["", "k", "MiB", "1x", "-1k", "1 2", "1ki", "1kk", "0x10", "1,5k", "\u0663k", "1" * 65]
)
def test_what_is_no_size_is_none(text: str) -> None:
    assert parse_size(text) is None


@pytest.mark.parametrize(
    "text", ["", "s", "1", "1x", "-1s", "1m1h", "1s1s", "1:30", "1 month", "5M", "1s" * 33]
)
def test_what_is_no_duration_is_none(text: str) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize(
    "text", ["", "-", "1.", ".5", "1e999", "nan", "inf", "1__0", "_1", "\u0663", "9" * 5000]
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("max_object_bytes", "bytes"),
        ("stream_chunk_size", "bytes"),
        ("size_mb", "MiB"),
        ("fsync_interval_ms", "milliseconds"),
        ("lease_seconds", "seconds"),
        ("time_minutes", "minutes"),
    ],
)
def test_a_name_ends_with_its_unit(name: str, unit: str) -> None:
    found = unit_of(name)
    assert found is not None
    assert found.name == unit
    assert unit_of("cache_capacity") is None


def test_sizes_and_durations_are_written_in_the_largest_unit() -> None:
    assert [format_size(size) for size in (0, 1, 1023, 1024, 1536, 10 * 1024**3)] == [
        "0", "1", "1023", "1KiB", "1536", "10GiB",
    ]  # fmt: skip
    seconds = [Fraction(0), Fraction(1, 4), Fraction(90), Fraction(3600), Fraction(172800)]
    assert [format_duration(each) for each in seconds] == ["0s", "250ms", "90s", "1h", "2d"]
