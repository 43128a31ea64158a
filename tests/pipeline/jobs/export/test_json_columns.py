"""JSON values become columns, columns are added, and records that do not fit are kept aside."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forebay.errors import UsageError
from forebay.pipeline.jobs.export.job import Format, export
from forebay.pipeline.jobs.export.json_values import NESTING_MAX
from support import exported_tables
from support.exported_tables import FORMATS, append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST: list[Any] = [
    {"id": 1, "price": 2, "name": "a", "tags": ["x", "y"], "at": {"city": "Ulm"}, "ok": True},
    {"id": 2, "price": 2.5, "name": None, "offset": "mine", "a b": 1, "empty": [], "none": {}},
    {"id": 3, "mixed": 1, "big": 12345678901234567890},
    {"id": 4, "mixed": {"deep": [1]}},
]
SECOND: list[Any] = [
    {"id": 5, "new": [{"p": 1}], "at": {"zip": 89073}, "price": 7, "mixed": [1]},
    {"id": "six"},
    {"id": 7.5},
    {"id": 8, "NAME": "twin"},
    {"id": 9, "at": {"City": "twin"}},
    {"id": 10, "NAME": None},
]
BROKEN = [
    (b"", "the value is empty"),
    (b"{", "the value is not one JSON document"),
    (b'{"id": 1} more', "the value is not one JSON document"),
    (b'{"id": 1}{"id": 2}', "the value is not one JSON document"),
    (b'{"id": 1, "id": 2}', "the value has a field twice"),
    (b"[1, 2]", "the value is not a JSON object"),
    (b"5", "the value is not a JSON object"),
    (b'{"name": "\xff"}', "the value is not UTF-8"),
]


def encoded(values: list[Any]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def rows(kind: Format, location: Path) -> list[dict[str, Any]]:
    found = exported_tables.arrow_table(kind, location).sort_by("offset").to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in found]


def fields(kind: Format, location: Path) -> list[dict[str, Any]]:
    ours = {"timestamp", "key", "value", "headers", "topic", "partition", "batch"}
    return [
        {name: value for name, value in row.items() if name not in ours}
        for row in rows(kind, location)
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_fields_become_columns_and_what_does_not_fit_is_kept_aside(
    kind: Format, spark: SparkSession, tmp_path: Path
) -> None:
    data, table = tmp_path / "data", tmp_path / "lake" / "orders"
    append(data, [*encoded(FIRST), *(value for value, _ in BROKEN)])
    report = export(data, "orders", table, format=kind, value="json", spark=spark)
    assert (report.records, report.rejected) == (4, len(BROKEN))
    assert fields(kind, table) == [
        {"offset": 0, "id": 1, "price": 2.0, "name": "a", "tags": ["x", "y"], "ok": True}
        | {"at": {"city": "Ulm"}},
        {"offset": 1, "id": 2, "price": 2.5, "json_offset": "mine", "a_x20_b": 1},
        {"offset": 2, "id": 3, "mixed": "1", "big": 12345678901234567890},
        {"offset": 3, "id": 4, "mixed": '{"deep":[1]}'},
    ]
    aside = Path(str(report.rejected_table))
    assert [(row["value"], row["reason"]) for row in rows(kind, aside)] == BROKEN

    append(data, encoded(SECOND))
    report = export(data, "orders", table, format=kind, value="json", spark=spark)
    assert (report.records, report.rejected) == (2, 4)
    first = 4 + len(BROKEN)
    good = fields(kind, table)[4:]
    assert [row["offset"] for row in good] == [first, first + 5]
    new = good[0]
    assert (new["new"], new["price"], new["mixed"]) == ([{"p": 1}], 7.0, "[1]")
    assert new["at"]["zip"] == 89073
    assert [(row["offset"] - first, row["reason"]) for row in rows(kind, aside)[len(BROKEN) :]] == [
        (1, "$['id'] is a string, which does not fit the type bigint"),
        (2, "$['id'] is a number that does not fit the type bigint exactly"),
        (3, "$['NAME'] differs from another field in case alone"),
        (4, "$['at']['City'] differs from another field in case alone"),
    ]
    assert export(data, "orders", table, format=kind, value="json", spark=spark).rows == ()
    assert exported_tables.spark_table(spark, kind, table).count() == 6


def test_a_batch_without_a_good_record_moves_the_table_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    append(data, [b"no", b"json"])
    for kind in FORMATS:
        table = tmp_path / kind
        report = export(data, "orders", table, format=kind, value="json", spark=spark)
        assert (report.records, report.rejected, report.next_offset) == (0, 2, 2)
        assert export(data, "orders", table, format=kind, value="json", spark=spark).rows == ()
        assert len(rows(kind, table.with_name(f"{kind}_rejected"))) == 2


def test_a_table_is_either_raw_or_of_json(spark: SparkSession, tmp_path: Path) -> None:
    data, table = tmp_path / "data", tmp_path / "t"
    append(data, [b"{}"])
    assert export(data, "orders", table, value="json", spark=spark).records == 1
    assert fields("parquet", table) == [{"offset": 0}]
    with pytest.raises(UsageError, match="JSON values"):
        export(data, "orders", table, spark=spark)
    assert export(data, "orders", tmp_path / "raw", spark=spark).records == 1
    with pytest.raises(UsageError, match="raw values"):
        export(data, "orders", tmp_path / "raw", value="json", spark=spark)
    with pytest.raises(UsageError, match="for JSON values only"):
        export(data, "orders", tmp_path / "raw", keep_value=False, spark=spark)


# ---- numbers and values that do not change ------------------------------------------------------

EXACT = """
    {"mixed": 9007199254740993, "price": 12345678901234567.89, "id": 12345678901234567890}
    {"mixed": 1.5, "price": 0.1, "id": 1, "half": 0.5, "list": [0.1, 1e23]}
    {"half": 9007199254740992, "list": [2], "huge": 1e400, "tiny": 1e-30}
    {"half": -0.0, "text": {"deep": [12345678901234567.890]}, "in": {"a": [{"b": 1e16}]}}
    {"text": 1.50, "yes": true, "in": {"a": [{"b": 9007199254740993}]}, "tiny": 12345678.1}
    {"yes": 1.0, "text": "x", "tiny": 12345678901234567.5}
"""
"""Lines of JSON, as a producer may write them."""

ROUNDED = """
    {"half": 12345678901234567.89} is a number that does not fit the type double exactly
    {"half": 9007199254740993} is a number that does not fit the type double exactly
    {"half": 1e400} is a number that does not fit the type double exactly
    {"half": 1e-400} is a number that does not fit the type double exactly
    {"half": 1e99999999999999999999} is a number that does not fit the type double exactly
    {"half": 0.10000000000000001} is a number that does not fit the type double exactly
    {"half": true} is a boolean, which does not fit the type double
    {"half": [1]} is a list, which does not fit the type double
    {"id": 0.5} is a number that does not fit the type decimal(38,0) exactly
    {"id": 1e38} is a number that does not fit the type decimal(38,0) exactly
    {"mixed": 1e-19} is a number that does not fit the type decimal(38,18) exactly
"""
FITTING = b'{"half": 1E5, "id": 1e37, "mixed": 2.50, "text": 1.0e1, "huge": 5, "yes": false}'


def lines(text: str) -> list[bytes]:
    return [line.strip().encode() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("kind", FORMATS)
def test_no_number_is_rounded_in_a_new_column(
    kind: Format, spark: SparkSession, tmp_path: Path
) -> None:
    data, table = tmp_path / "data", tmp_path / "orders"
    append(data, lines(EXACT))
    assert export(data, "orders", table, format=kind, value="json", spark=spark).records == 6
    found: list[dict[str, Any]] = [{"offset": offset} for offset in range(6)]
    found[0] |= {"mixed": 9007199254740993, "price": Decimal("12345678901234567.89")}
    found[0] |= {"id": 12345678901234567890}
    found[1] |= {"mixed": Decimal("1.5"), "price": Decimal("0.1"), "id": 1, "half": 0.5}
    found[1] |= {"list": [0.1, 1e23]}
    found[2] |= {"half": 9007199254740992.0, "list": [2.0], "huge": "1e400"}
    found[2] |= {"tiny": "1e-30"}
    found[3] |= {"half": 0.0, "text": '{"deep":[12345678901234567.890]}'}
    found[3] |= {"in": {"a": [{"b": Decimal(10**16)}]}}
    found[4] |= {"text": "1.50", "yes": "true", "in": {"a": [{"b": Decimal(9007199254740993)}]}}
    found[4] |= {"tiny": "12345678.1"}
    found[5] |= {"yes": "1.0", "text": "x", "tiny": "12345678901234567.5"}
    assert fields(kind, table) == found
    seen = exported_tables.spark_table(spark, kind, table)
    types = dict(seen.dtypes)
    assert (types["mixed"], types["price"]) == ("decimal(38,18)", "decimal(38,18)")
    assert (types["id"], types["half"], types["list"]) == (
        "decimal(38,0)",
        "double",
        "array<double>",
    )
    read = seen.orderBy("offset").selectExpr("cast(mixed as string)", "cast(id as string)").first()
    assert read is not None
    assert [Decimal(each) for each in read] == [9007199254740993, 12345678901234567890]
    exactly = 'count(*) filter (mixed = 9007199254740993 and "id" = 12345678901234567890)'
    assert exported_tables.query(kind, table, exactly) == [(1,)]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_record_that_an_existing_column_would_round_goes_to_the_side_table(
    kind: Format, spark: SparkSession, tmp_path: Path
) -> None:
    data, table = tmp_path / "data", tmp_path / "orders"
    append(data, lines(EXACT))
    assert export(data, "orders", table, format=kind, value="json", spark=spark).records == 6
    rounded = [line.rpartition(b"} ") for line in lines(ROUNDED)]
    append(data, [*(value + b"}" for value, _, _ in rounded), FITTING])
    report = export(data, "orders", table, format=kind, value="json", spark=spark)
    assert (report.records, report.rejected) == (1, len(rounded))
    fitting = {"half": 1e5, "id": 10**37, "mixed": Decimal("2.5"), "text": "1.0e1", "huge": "5"}
    assert fields(kind, table)[6:] == [{"offset": 6 + len(rounded), **fitting, "yes": "false"}]
    aside = rows(kind, Path(str(report.rejected_table)))
    assert [(row["value"], row["reason"].partition("] ")[2].encode()) for row in aside] == [
        (value + b"}", reason) for value, _, reason in rounded
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_the_text_of_each_message_is_kept_unless_told_otherwise(
    kind: Format, spark: SparkSession, tmp_path: Path
) -> None:
    data, table = tmp_path / "data", tmp_path / "orders"
    odd = ' {"a" : 1.50,"value":"\\u0000 \u00e4 \\ud83d\\ude00", "b":[ ]}\n'.encode()
    kept: list[str | None] = []
    for keep in (False, True, False, True):
        append(data, [odd])
        report = export(
            data, "orders", table, format=kind, value="json", keep_value=keep, spark=spark
        )
        assert report.records == 1
        kept.append(odd.decode() if keep else None)
        found = rows(kind, table)
        assert [row.get("value") for row in found] == kept
        assert {row["json_value"] for row in found} == {"\0 \u00e4 \U0001f600"}
        assert {row["a"] for row in found} == {1.5}
    query = "count(*), count(value), max(octet_length(encode(value)))"
    assert exported_tables.query(kind, table, query) == [(4, 2, len(odd))]


@pytest.mark.parametrize("kind", FORMATS)
def test_values_that_parsers_disagree_about_are_exported_exactly_or_kept_aside(
    kind: Format, spark: SparkSession, tmp_path: Path
) -> None:
    data, table = tmp_path / "data", tmp_path / "orders"
    deep = NESTING_MAX - 1
    good = [
        b'{"a": %s1%s}' % (b"[" * deep, b"]" * deep),
        b'{"s": %s1%s}' % (b'{"x":' * deep, b"}" * deep),
        b'{"a\\u0000b": "\\u0000", "n": -0}',
        b'{"long": %s}' % (b"7" * 5000),
    ]
    bad = [
        (b'{"n": NaN}', "the value is not one JSON document"),
        (b'{"n": -Infinity}', "the value is not one JSON document"),
        (b'{"n": 01}', "the value is not one JSON document"),
        (b'{"t": "\\ud800"}', "the value has a surrogate without its pair, which is no text"),
        (b'{"\\udc00": 1}', "the value has a surrogate without its pair, which is no text"),
        (b'{"a": {"n": 1, "n": 1}}', "the value has a field twice"),
        (b'{"a": %s1%s}' % (b"[" * 20, b"]" * 20), "the value is nested deeper than 20 levels"),
        (b'{"a":' + b"[" * 100_000, "the value is nested deeper than 20 levels"),
    ]
    append(data, [*good, *(value for value, _ in bad)])
    report = export(data, "orders", table, format=kind, value="json", spark=spark)
    assert (report.records, report.rejected) == (len(good), len(bad))
    found = rows(kind, table)
    assert [row["value"].encode() for row in found] == good
    assert (found[2]["a_x0_b"], found[2]["n"]) == ("\0", 0)
    assert found[3]["long"] == "7" * 5000, "more digits than Python makes an int of"
    assert str(found[0]["a"]).strip("[]") == "1"
    assert str(found[1]["s"]).count("x") == deep
    aside = rows(kind, Path(str(report.rejected_table)))
    assert [(row["value"], row["reason"]) for row in aside] == bad
