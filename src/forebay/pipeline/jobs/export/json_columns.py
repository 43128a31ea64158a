"""Columns from JSON values: which columns a table gets, and which records do not fit them.

Spark finds the fields of a batch in all of its records. A new field becomes a column of the type
that fits all its values in the batch. Long and double give double; other different types give a
string with the JSON text. A column keeps its type: a record with a value of another type is
rejected. Every value fits a string.

A field gets the prefix `json_` if its name is that of one of our columns, or begins with `json_`.
Characters that tables do not allow in names are written as `_x<hex>_`.

Beware: a field that has only been null, [] or {} has no type and no column yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from forebay.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType


COLUMNS_MAX: Final = 1000
"""The most columns of a table: JSON with identifiers as keys would add columns without end."""

RESERVED: Final = frozenset(
    {"offset", "timestamp", "key", "value", "headers", "topic", "partition", "batch"}
)
_PREFIX: Final = "json_"
_ESCAPE: Final = re.compile(r"_x([0-9a-f]*)_")
_END: Final = "b0e6ff2a-end-of-value"
"""Put after a value before it is parsed, because Spark's parsers ignore what follows a document."""


# ---- names ------------------------------------------------------------------------------------


def column_of(field: str, *, top: bool = True) -> str:
    """The column for a top-level field, or the name for a nested one; unique for each field."""
    lower = field.lower()
    prefix = _PREFIX if top and (lower in RESERVED or lower.startswith(_PREFIX)) else ""
    if not field:
        return "_x_"
    kept = _ESCAPE.sub(lambda match: f"_x5f_{match[0][1:]}", field)
    return prefix + "".join(
        each if each.isalnum() or each in "_-" else f"_x{ord(each):x}_" for each in kept
    )


def field_of(column: str, *, top: bool = True) -> str:
    """The inverse of `column_of`."""
    name = column.removeprefix(_PREFIX) if top else column
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else "", name)


class _Rename(Protocol):
    def __call__(self, name: str, /, *, top: bool = True) -> str: ...


# ---- types ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fields:
    """The fields by which the values of a batch are parsed."""

    schema: StructType
    """The fields of the table and the new ones, under their names in JSON."""
    twins: tuple[str, ...] = ()
    """JSON paths of fields that differ from another one only in case; a table cannot have both."""


def encode_fields(fields: Fields) -> str:
    return json.dumps({"schema": fields.schema.jsonValue(), "twins": fields.twins})


def decode_fields(text: str) -> Fields:
    from pyspark.sql.types import StructType

    body = json.loads(text)
    return Fields(StructType.fromJson(body["schema"]), tuple(body["twins"]))


def known_fields(table: StructType) -> StructType:
    """The fields that the columns of a table came from."""
    from pyspark.sql.types import StructField, StructType

    return StructType(
        [
            StructField(field_of(each.name), _renamed(each.dataType, field_of))
            for each in table.fields
            if each.name.lower() not in RESERVED
        ]
    )


def columns_for(fields: StructType) -> StructType:
    """The columns for the fields: the inverse of `known_fields`."""
    from pyspark.sql.types import StructField, StructType

    return StructType(
        [
            StructField(column_of(each.name), _renamed(each.dataType, column_of))
            for each in fields.fields
        ]
    )


def merge(known: StructType, found: StructType) -> Fields:
    """The fields of the table, and those that a batch adds; UsageError if they are too many."""
    twins: list[str] = []
    merged = _merge_struct(known, found, "$", twins)
    if len(merged.fields) > COLUMNS_MAX:
        raise UsageError(
            f"the values have {len(merged.fields)} different fields, and a table can have "
            f"{COLUMNS_MAX}: export them as raw values"
        )
    return Fields(merged, tuple(twins))


def _merge_struct(known: StructType, found: StructType, path: str, twins: list[str]) -> StructType:
    from pyspark.sql.types import StructField, StructType

    types = {each.name: each.dataType for each in known.fields}
    taken = {name.lower(): name for name in types}
    for each in found.fields:
        place = f"{path}['{each.name}']"
        if taken.setdefault(each.name.lower(), each.name) != each.name:
            if set(place) & set("\\") or "'" in each.name:
                raise UsageError(f"the field {place} differs from another one only in case")
            twins.append(place)
            continue
        kind = _merge_type(types.get(each.name), each.dataType, place, twins)
        if kind is not None:
            types[each.name] = kind
    return StructType([StructField(name, kind) for name, kind in types.items()])


def _merge_type(
    known: DataType | None, found: DataType, path: str, twins: list[str]
) -> DataType | None:
    from pyspark.sql.types import (
        ArrayType,
        BooleanType,
        DoubleType,
        LongType,
        StringType,
        StructType,
    )

    if isinstance(found, StructType) and isinstance(known, StructType | None):
        merged = _merge_struct(known or StructType(), found, path, twins)
        return merged if merged.fields else None
    if isinstance(found, ArrayType) and isinstance(known, ArrayType | None):
        element = None if known is None else known.elementType
        kind = _merge_type(element, found.elementType, f"{path}[*]", twins)
        return None if kind is None else ArrayType(kind)
    if known is not None:
        return known
    # A number that does not fit a long is kept as text.
    return found if isinstance(found, LongType | DoubleType | BooleanType) else StringType()


def _renamed(kind: DataType, rename: _Rename) -> DataType:
    from pyspark.sql.types import ArrayType, StructField, StructType

    if isinstance(kind, StructType):
        return StructType(
            [
                StructField(rename(each.name, top=False), _renamed(each.dataType, rename))
                for each in kind.fields
            ]
        )
    if isinstance(kind, ArrayType):
        return ArrayType(_renamed(kind.elementType, rename))
    return kind


# ---- on Spark -----------------------------------------------------------------------------------


def infer(spark: SparkSession, records: DataFrame) -> StructType:
    """The fields of all values that are JSON objects. Runs one Spark job."""
    from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
    from pyspark.sql.types import StructType

    objects = records.filter(_not_an_object().isNull()).select(_text())
    unparsed = "_forebay_unparsed"
    found = spark.read.json(
        objects.select(F.col("text")), dropFieldIfAllNull=True, columnNameOfCorruptRecord=unparsed
    )
    return StructType([each for each in found.schema.fields if each.name != unparsed])


def judged(records: DataFrame, fields: Fields, kept: tuple[str, ...]) -> DataFrame:
    """The columns `kept`, `value`, `reason` and `json`, a struct of the columns of the fields.

    `reason` says why a record is rejected, and is null for a good one.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StringType, StructField, StructType

    names = {each.name for each in fields.schema.fields}
    unparsed = "_forebay_unparsed"
    while unparsed in names:
        unparsed += "_"
    # Last, so that the cast to the column names below, which goes by position, stays simple.
    schema = StructType([*fields.schema.fields, StructField(unparsed, StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": unparsed}
    parsed = records.select(*kept, "value", F.from_json(_text(), schema, options).alias("parsed"))
    target = StructType([*columns_for(fields.schema).fields, schema.fields[-1]])
    reason = _not_an_object()
    for path in fields.twins:
        twin = F.get_json_object(_text(), path).isNotNull()
        reason = F.coalesce(
            reason, F.when(twin, F.lit(f"{path} differs from another field in case alone"))
        )
    mismatch = F.col("parsed")[unparsed].isNotNull()
    reason = F.coalesce(reason, F.when(mismatch, F.lit("a field is not of the type of its column")))
    columns = F.col("parsed").cast(target)
    return parsed.select(*kept, "value", reason.alias("reason"), columns.alias("json"))


def good_columns(fields: Fields) -> Iterator[Column]:
    """The columns of `judged` that go into the table."""
    from pyspark.sql import functions as F  # noqa: N812

    for each in columns_for(fields.schema).fields:
        yield F.col("json").getField(each.name).alias(each.name)


def _text() -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    return F.col("value").cast("string").alias("text")


def _not_an_object() -> Column:
    """Why a value is not a JSON object; null if it is one."""
    from pyspark.sql import functions as F  # noqa: N812

    value = F.col("value")
    # Parsed as an array with a mark at its end, so that text after the first document is an error.
    inside = F.concat(F.lit("["), value.cast("string"), F.lit(f',"{_END}"]'))
    parsed = F.try_parse_json(inside)
    whole = F.coalesce(F.try_variant_get(parsed, "$[1]", "string") == _END, F.lit(False))  # noqa: FBT003
    kind = F.schema_of_variant(F.try_variant_get(parsed, "$[0]", "variant"))
    return (
        F.when(value.isNull() | (F.length(value) == 0), F.lit("the value is empty"))
        .when(~F.is_valid_utf8(value), F.lit("the value is not UTF-8"))
        .when(~whole, F.lit("the value is not one JSON document, or has a field twice"))
        .when(~F.startswith(kind, F.lit("OBJECT")), F.lit("the value is not a JSON object"))
    )
