"""What an export decides without Spark: batches, names, types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from forebay.catalog.records import TopicRecord
from forebay.errors import (
    FormatError,
    LostOffsets,
    OffsetOutOfRange,
    ServiceUnavailable,
    UsageError,
)
from forebay.pipeline.jobs.export.job import export, open_target, table_location
from forebay.pipeline.jobs.export.json_columns import (
    COLUMNS_MAX,
    column_of,
    columns_for,
    decode_fields,
    encode_fields,
    field_of,
    known_fields,
    merge,
)
from forebay.pipeline.jobs.export.plan import (
    Batch,
    Bounds,
    SizedRange,
    TopicOffsets,
    next_batch,
    next_start,
    only_gone,
)
from support import exported_tables

WIDE = Bounds(10**9, 10**12)


def struct(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


def batches(
    offsets: TopicOffsets,
    after: int,
    sizes: Sequence[SizedRange] = (),
    bounds: Bounds = WIDE,
    *,
    end: int | None = None,
    allow_gaps: bool = False,
) -> list[Batch]:
    found = []
    while (
        batch := next_batch(offsets, after, sizes, bounds, end=end, allow_gaps=allow_gaps)
    ) is not None:
        found.append(batch)
        after = batch.end
    return found


# ---- batches ----------------------------------------------------------------------------------


def test_a_batch_is_bounded_by_rows_and_by_bytes() -> None:
    offsets = TopicOffsets("t", 0, 100)
    assert batches(offsets, 0) == [Batch(0, 0, 100)]
    assert batches(offsets, 40, bounds=Bounds(25, 10**9)) == [
        Batch(40, 40, 65),
        Batch(65, 65, 90),
        Batch(90, 90, 100),
    ]
    sizes = [SizedRange(0, 50, 500), SizedRange(50, 100, 5000)]
    assert batches(offsets, 0, sizes, Bounds(1000, 1000)) == [
        Batch(0, 0, 55),
        *(Batch(at, at, at + 10) for at in range(55, 95, 10)),
        Batch(95, 95, 100),
    ]


def test_a_message_that_is_larger_than_a_batch_is_one() -> None:
    found = batches(TopicOffsets("t", 0, 3), 0, [SizedRange(0, 3, 3000)], Bounds(10, 1))
    assert found == [Batch(0, 0, 1), Batch(1, 1, 2), Batch(2, 2, 3)]


def test_nothing_is_planned_beyond_the_end_that_was_asked_for() -> None:
    assert batches(TopicOffsets("t", 0, 100), 0, end=30) == [Batch(0, 0, 30)]
    assert batches(TopicOffsets("t", 0, 100), 30, end=30) == []
    assert batches(TopicOffsets("t", 0, 0), 0) == []


def test_offsets_that_are_gone_stop_an_export_unless_gaps_are_allowed() -> None:
    offsets = TopicOffsets("t", 20, 100, TopicRecord(lost=((50, 60),)))
    with pytest.raises(OffsetOutOfRange, match=r"offset 10 next.* is 20.*--allow-gaps"):
        batches(offsets, 10)
    with pytest.raises(LostOffsets, match=r"50 to 59 .* lost.*accept-loss t.*--allow-gaps"):
        batches(offsets, 20)
    assert batches(offsets, 10, allow_gaps=True) == [Batch(10, 20, 50), Batch(50, 60, 100)]
    assert batches(offsets, 55, allow_gaps=True) == [Batch(55, 60, 100)]


def test_only_offsets_that_are_gone_may_be_stepped_over() -> None:
    offsets = TopicOffsets("t", 20, 100, TopicRecord(lost=((20, 25), (50, 60))))
    assert only_gone(offsets, 30, 30)
    assert only_gone(offsets, 10, 25)
    assert only_gone(offsets, 0, 15)
    assert only_gone(offsets, 50, 60)
    assert only_gone(offsets, 55, 60)
    assert not only_gone(offsets, 10, 26)
    assert not only_gone(offsets, 49, 60)
    assert not only_gone(offsets, 50, 61)
    assert not only_gone(offsets, 30, 29)


# ---- names ------------------------------------------------------------------------------------


def test_accepted_offsets_are_crossed_without_leave() -> None:
    offsets = TopicOffsets("t", 20, 2**40 + 100, TopicRecord(accepted=((50, 2**40),)))
    bounds = Bounds(1000, 10**9)
    assert next_batch(offsets, 20, [], bounds) == Batch(20, 20, 50)
    assert next_batch(offsets, 50, [], bounds) == Batch(50, 2**40, 2**40 + 100)
    assert only_gone(offsets, 50, 2**40)
    beyond = TopicOffsets("t", 2**40, 2**40 + 100, TopicRecord(accepted=((50, 2**40),)))
    assert next_start(beyond, 50, allow_gaps=False) == 2**40, "retention has deleted no message"
    with pytest.raises(OffsetOutOfRange):
        next_start(beyond, 49, allow_gaps=False)


@given(st.text(max_size=12), st.text(max_size=12))
def test_every_field_has_a_column_of_its_own(one: str, other: str) -> None:
    assert field_of(column_of(one)) == one
    assert field_of(column_of(one, top=False), top=False) == one
    assert (column_of(one) == column_of(other)) == (one == other)


def test_names_that_are_taken_or_impossible_are_changed() -> None:
    assert column_of("price") == "price"
    assert column_of("Offset") == "json_Offset"
    assert column_of("offset", top=False) == "offset"
    assert column_of("json_a") == "json_json_a"
    assert column_of("a b.c") == "a_x20_b_x2e_c"
    assert column_of("größe") == "größe"


# ---- types ------------------------------------------------------------------------------------


def test_new_fields_are_added_and_known_ones_keep_their_type() -> None:
    known = struct(a=LongType(), s=struct(x=LongType()))
    found = struct(
        a=DoubleType(),
        b=BooleanType(),
        big=DecimalType(38, 0),
        s=struct(y=StringType()),
        l=ArrayType(struct(p=DecimalType(38, 18))),
    )
    merged = merge(known, found)
    assert merged == struct(
        a=LongType(),
        s=struct(x=LongType(), y=StringType()),
        b=BooleanType(),
        big=DecimalType(38, 0),
        l=ArrayType(struct(p=DecimalType(38, 18))),
    )


def test_of_fields_that_differ_in_case_alone_the_table_gets_one() -> None:
    known = struct(a=LongType(), s=struct(x=LongType()))
    found = struct(
        A=LongType(), s=struct(X=LongType()), l=ArrayType(struct(P=LongType(), p=LongType()))
    )
    assert merge(known, found) == struct(
        a=LongType(), s=struct(x=LongType()), l=ArrayType(struct(P=LongType()))
    )


def test_fields_and_columns_are_told_apart_from_ours() -> None:
    fields = StructType(
        [StructField("offset", StringType()), StructField("a b", struct(offset=LongType()))]
    )
    columns = columns_for(fields)
    assert columns.names == ["json_offset", "a_x20_b"]
    table = StructType([StructField("offset", LongType()), *columns.fields])
    assert known_fields(table) == fields
    assert decode_fields(encode_fields(fields)) == fields


def test_a_batch_whose_records_were_rejected_by_another_rule_is_not_finished_by_this_one() -> None:
    earlier = '{"schema": {"type": "struct", "fields": []}, "twins": []}'
    with pytest.raises(FormatError, match="run the export once with that version"):
        decode_fields(earlier)


def test_values_with_too_many_fields_are_refused() -> None:
    found = StructType([StructField(f"f{at}", LongType()) for at in range(COLUMNS_MAX + 1)])
    with pytest.raises(UsageError, match="export them as raw"):
        merge(StructType(), found)


# ---- calls ------------------------------------------------------------------------------------


def test_a_place_that_spark_cannot_write_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="s3://lake/orders"):
        table_location("s3://lake/orders")
    with pytest.raises(UsageError, match="lake/orders"):
        table_location(Path("s3://lake/orders"))
    assert table_location(f"file://{tmp_path}/t") == tmp_path / "t"
    with pytest.raises(UsageError, match="catalog is for the format iceberg"):
        export(tmp_path, "orders", tmp_path / "t", format="delta", catalog="sqlite://")
    with pytest.raises(UsageError, match="'parquet', 'delta' or 'iceberg'"):
        export(tmp_path, "orders", tmp_path / "t", format="csv")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "forbidden", "fine"),
    [("parquet", "", "%#?"), ("delta", "%#?", ""), ("iceberg", "#?", "%")],
)
def test_characters_that_a_format_takes_for_parts_of_a_url_are_refused(
    kind: str, forbidden: str, fine: str, tmp_path: Path
) -> None:
    for character in forbidden:
        for place in (tmp_path / f"a{character}b", tmp_path / f"a{character}b" / "orders"):
            with pytest.raises(UsageError, match=f"'{re.escape(character)}'"):
                open_target(kind, place, "/default/orders", None)
    for character in fine:
        open_target(kind, tmp_path / f"a{character}b", "/default/orders", None).table.close()


def test_offsets_that_cannot_be_are_refused(tmp_path: Path) -> None:
    exported_tables.append(tmp_path / "data", [b"x"] * 3)
    with pytest.raises(UsageError, match="end is -1"):
        export(tmp_path / "data", "orders", tmp_path / "t", end=-1)
    with pytest.raises(UsageError, match=r"start is 4, but .* is 3"):
        export(tmp_path / "data", "orders", tmp_path / "t", start=4)
    assert export(tmp_path / "data", "orders", tmp_path / "t", start=3, dry_run=True).ok


def test_a_catalog_that_cannot_be_opened_is_told_in_one_line(tmp_path: Path) -> None:
    exported_tables.append(tmp_path / "data", [b"x"])
    data, table = tmp_path / "data", tmp_path / "t"
    with pytest.raises(UsageError, match="nonsense") as wrong:
        export(data, "orders", table, format="iceberg", catalog="nonsense://x")
    away = f"sqlite:///{tmp_path}/nowhere/catalog.db"
    with pytest.raises(ServiceUnavailable, match="catalog") as closed:
        export(data, "orders", table, format="iceberg", catalog=away)
    assert [len(str(each.value).splitlines()) for each in (wrong, closed)] == [1, 1]
