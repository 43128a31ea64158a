"""The rows of a job's report as a Spark DataFrame.

The rows are dataclasses. Their fields become the columns: names and types are taken from the class.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, get_type_hints

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_Row = TypeVar("_Row")


def schema_of(row: type[Any]) -> StructType:
    """The schema for a dataclass whose fields are `int`, `str`, `bool` or `float`, or optional."""
    from pyspark.sql.types import (
        BooleanType,
        DataType,
        DoubleType,
        LongType,
        StringType,
        StructField,
        StructType,
    )

    known: Final[dict[type, DataType]] = {
        int: LongType(),
        str: StringType(),
        bool: BooleanType(),
        float: DoubleType(),
    }
    hints = get_type_hints(row)
    columns = []
    for field in fields(row):
        hint = hints[field.name]
        optional = isinstance(hint, types.UnionType)
        plain = hint
        if optional:
            plain = next(kind for kind in get_args(hint) if kind is not types.NoneType)
        base = next(
            kind
            for kind in known
            if issubclass(plain, kind) and (plain is not bool or kind is bool)
        )
        columns.append(StructField(field.name, known[base], nullable=optional))
    return StructType(columns)


def to_dataframe(spark: SparkSession, row: type[_Row], rows: Sequence[_Row]) -> DataFrame:
    """The rows as a DataFrame with the columns of `row`, even if there are no rows."""
    values = [tuple(asdict(each).values()) for each in rows]  # type: ignore[call-overload]
    return spark.createDataFrame(values, schema_of(row))
