"""Columns from JSON values: which columns a table gets, and which records do not fit them.

The fields of a batch are found in all of its records. A new field becomes a column of the type that
holds all its values in the batch exactly (`json_values.Shape`). A column keeps its type: a record
with a value that it does not hold exactly is rejected. Every value fits a string.

A field gets the prefix `json_` if its name is that of one of our columns, or begins with `json_`.
Characters that tables do not allow in names are written as `_x<hex>_`.

Beware: a field that has only been null, [] or {} has no type and no column yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from forebay.errors import FormatError, UsageError
from forebay.limits import MIB
from forebay.pipeline.jobs.export.json_values import Rename, Shape, Unfit, parse, row_converter

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType


COLUMNS_MAX: Final = 1000
"""The most columns of a table: JSON with identifiers as keys would add columns without end."""

RESERVED: Final = frozenset(
    {"offset", "timestamp", "key", "value", "headers", "topic", "partition", "batch"}
)
_PREFIX: Final = "json_"
_ESCAPE: Final = re.compile(r"_x([0-9a-f]*)_")
_RULE: Final = 2
"""The number of the rule for what is rejected: two of them must not share a batch."""

_CHUNK: Final = 4 * MIB
"""The values that are parsed at a time. Their Python objects take several times as much memory."""


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


# ---- types ------------------------------------------------------------------------------------


def encode_fields(fields: StructType) -> str:
    return json.dumps({"rule": _RULE, "schema": fields.jsonValue()})


def decode_fields(text: str) -> StructType:
    """The fields that `encode_fields` recorded; FormatError if it was by another rule."""
    from pyspark.sql.types import StructType

    body = json.loads(text)
    if body.get("rule") != _RULE:
        raise FormatError(
            "its rejected records were chosen by another version of Forebay: run the export once "
            "with that version, and then with this one"
        )
    return StructType.fromJson(body["schema"])


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


def merge(known: StructType, found: StructType) -> StructType:
    """The fields of the table, and those that a batch adds; UsageError if they are too many.

    Of new fields that differ only in case, the table gets the first.
    """
    merged = _merge_struct(known, found)
    if len(merged.fields) > COLUMNS_MAX:
        raise UsageError(
            f"the values have {len(merged.fields)} different fields, and a table can have "
            f"{COLUMNS_MAX}: export them as raw values"
        )
    return merged


def _merge_struct(known: StructType, found: StructType) -> StructType:
    from pyspark.sql.types import StructField, StructType

    types = {each.name: each.dataType for each in known.fields}
    taken = {name.lower(): name for name in types}
    for each in found.fields:
        if taken.setdefault(each.name.lower(), each.name) != each.name:
            continue
        kind = _merge_type(types.get(each.name), each.dataType)
        if kind is not None:
            types[each.name] = kind
    return StructType([StructField(name, kind) for name, kind in types.items()])


def _merge_type(known: DataType | None, found: DataType) -> DataType | None:
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(found, StructType) and isinstance(known, StructType | None):
        merged = _merge_struct(known or StructType(), found)
        return merged if merged.fields else None
    if isinstance(found, ArrayType) and isinstance(known, ArrayType | None):
        element = None if known is None else known.elementType
        kind = _merge_type(element, found.elementType)
        return None if kind is None else ArrayType(kind)
    return found if known is None else known


def _renamed(kind: DataType, rename: Rename) -> DataType:
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


def infer(records: DataFrame) -> StructType:
    """The fields of all values that are JSON objects. Runs one Spark job."""
    found = Shape()
    for row in records.select("value").mapInArrow(_shapes, "shape string").collect():
        found.merge(Shape.from_state(json.loads(row["shape"])))
    return found.struct()


def _shapes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    found = Shape()
    for batch in batches:
        if len(found.fields) > COLUMNS_MAX and _too_many(found):
            continue  # `merge` refuses them: do not collect the rest
        for chunk in _chunks(batch):
            for value in chunk.column("value").to_pylist():
                with suppress(Unfit):
                    found.add(parse(value))
    yield pa.record_batch({"shape": [json.dumps(found.state())]})


def _too_many(found: Shape) -> bool:
    return len({name.lower() for name in found.struct().names}) > COLUMNS_MAX


def good_rows(
    fields: StructType, columns: StructType, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The rows of the table, for `mapInArrow`; `columns` are all its columns.

    Those that are not from fields are in the batches.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_type

    target = to_arrow_type(columns_for(fields), timezone="UTC")
    convert = row_converter(fields, column_of)
    ours = [name for name in columns.names if name.lower() in RESERVED]
    for batch in batches:
        for chunk in _chunks(batch):
            rows, kept = [], []
            for value in chunk.column("value").to_pylist():
                try:
                    rows.append(convert(parse(value)))
                    kept.append(True)
                except Unfit:
                    kept.append(False)
            good = chunk.filter(pa.array(kept, pa.bool_()))
            known = [_as_text(good, name) for name in ours]
            made = pa.array(rows, target).flatten()
            yield pa.RecordBatch.from_arrays([*known, *made], names=columns.names)


def _as_text(batch: pa.RecordBatch, name: str) -> pa.Array:
    import pyarrow as pa

    column = batch.column(name)
    return column.cast(pa.string()) if name == "value" else column


def rejected_rows(
    fields: StructType, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The batches without the rows of the table, and with the column `reason`, for `mapInArrow`."""
    import pyarrow as pa

    convert = row_converter(fields, column_of)
    for batch in batches:
        reasons: list[str | None] = []
        for chunk in _chunks(batch):
            for value in chunk.column("value").to_pylist():
                try:
                    convert(parse(value))
                    reasons.append(None)
                except Unfit as error:
                    reasons.append(error.reason)
        column = pa.array(reasons, pa.string())
        yield batch.append_column("reason", column).filter(column.is_valid())


def _chunks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in slices, each of few bytes or of one row."""
    import pyarrow.compute as pc

    start = size = 0
    for number, length in enumerate(pc.binary_length(batch.column("value")).to_pylist()):
        size += length or 0
        if size > _CHUNK:
            yield batch.slice(start, number + 1 - start)
            start, size = number + 1, 0
    if start < batch.num_rows:
        yield batch.slice(start)
