"""JSON values become columns, columns are added, and records that do not fit are kept aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forebay.errors import UsageError
from forebay.pipeline.jobs.export.job import Format, export
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
    (b"{", "the value is not one JSON document, or has a field twice"),
    (b'{"id": 1} more', "the value is not one JSON document, or has a field twice"),
    (b'{"id": 1}{"id": 2}', "the value is not one JSON document, or has a field twice"),
    (b'{"id": 1, "id": 2}', "the value is not one JSON document, or has a field twice"),
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
    ours = {"timestamp", "key", "headers", "topic", "partition", "batch"}
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
        {"offset": 2, "id": 3, "mixed": "1", "big": "12345678901234567890"},
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
        (1, "a field is not of the type of its column"),
        (2, "a field is not of the type of its column"),
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
