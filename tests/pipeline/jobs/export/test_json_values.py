"""JSON values become rows without a change of any number, or are rejected with a reason."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

from forebay.pipeline.jobs.export.json_columns import column_of, columns_for, merge
from forebay.pipeline.jobs.export.json_values import (
    Shape,
    Unfit,
    parse,
    row_converter,
    text_of,
)

# ---- random documents, written as text ----------------------------------------------------------

_digits = st.text("0123456789", min_size=1, max_size=25)
_wholes = st.integers().map(str) | _digits.map(lambda text: text.lstrip("0") or "0")
_exponents = st.integers(-420, 420).map(str) | st.sampled_from(
    ["+05", "-0", "9" * 30, "-" + "9" * 9]
)
_numbers = st.one_of(
    _wholes,
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**38]).map(str),
    st.just("3" * 4400),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.tuples(st.sampled_from(["", "-"]), st.integers(0, 10**6), _digits).map(
        lambda parts: f"{parts[0]}{parts[1]}.{parts[2]}"
    ),
    st.tuples(_wholes, st.sampled_from(["", ".0", ".25"]), st.sampled_from("eE"), _exponents).map(
        "".join
    ),
)
_names = st.sampled_from(["a", "b", "c", "value"])
_scalars = st.one_of(
    _numbers,
    _numbers,
    st.sampled_from(["true", "false", "null"]),
    st.text(max_size=4).map(json.dumps),
)


def _written(pairs: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {each}" for name, each in pairs.items()) + "}"


_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: f"[{', '.join(each)}]")
        | st.dictionaries(_names, inner, max_size=3).map(_written)
    ),
    max_leaves=5,
)
documents = st.dictionaries(_names, _values, min_size=1, max_size=4).map(_written)


# ---- what a row must say ------------------------------------------------------------------------


class Literal(str):
    """A number as it is written."""

    __slots__ = ()


def read(text: str) -> Any:
    """The document by Python's own parser, with numbers as they are written."""
    return json.loads(text, parse_int=Literal, parse_float=Literal)


def is_same_number(stored: Any, literal: str) -> bool:
    if isinstance(stored, str):
        return stored == literal
    if isinstance(stored, bool):
        return False
    shown = Decimal(repr(stored)) if isinstance(stored, float) else Decimal(stored)
    mantissa = literal.lower().partition("e")[0]
    # Python's decimals have no exponents of thirty digits, and 0e999... is zero.
    return shown == Decimal(literal if Decimal(mantissa) else mantissa)


def is_same(stored: Any, told: Any) -> bool:
    """Whether a stored value says what the document does. Nothing may stand for nothing."""
    if told is None or stored is None:
        return stored is None and not any_value(told)
    if isinstance(told, Literal):
        return is_same_number(stored, told)
    if isinstance(told, bool):
        return stored is told or stored == json.dumps(told)
    if isinstance(told, str):
        return bool(stored == told)
    if isinstance(stored, str):
        return bool(read(stored) == told)
    if isinstance(told, list):
        return len(stored) == len(told) and all(map(is_same, stored, told))
    return all(is_same(stored.get(name), each) for name, each in told.items())


def any_value(told: Any) -> bool:
    inner = told.values() if isinstance(told, dict) else told
    return any(map(any_value, inner)) if isinstance(told, dict | list) else told is not None


def fields_of(texts: list[str], known: StructType | None = None) -> StructType:
    """The fields of a table with these documents, found by two tasks."""
    shapes = Shape(), Shape()
    for number, text in enumerate(texts):
        shapes[number % 2].add(parse(text.encode()))
    found = Shape.from_state(json.loads(json.dumps(shapes[0].state())))
    found.merge(shapes[1])
    return merge(known or StructType(), found.struct())


def stored(text: str, fields: StructType) -> dict[str, Any]:
    """The document as a row of an Arrow table."""
    row = row_converter(fields, column_of)(parse(text.encode()))
    return dict(pa.array([row], to_arrow_type(columns_for(fields), timezone="UTC"))[0].as_py())


def row_or_reason(text: str, fields: StructType) -> dict[str, Any] | str:
    try:
        return stored(text, fields)
    except Unfit as error:
        return error.reason


def require_same(row: dict[str, Any], text: str) -> None:
    for name, told in read(text).items():
        assert is_same(row.get(column_of(name)), told), (name, row, text)


@given(st.lists(documents, min_size=1, max_size=4), st.lists(documents, max_size=3))
def test_every_number_of_a_row_is_that_of_the_document_or_the_record_is_rejected(
    first: list[str], later: list[str]
) -> None:
    fields = fields_of(first)
    for text in first:
        require_same(stored(text, fields), text)
    grown = fields_of(later, fields)
    assert [each.name for each in grown.fields][: len(fields.fields)] == fields.names
    for text in later:
        row = row_or_reason(text, grown)
        if isinstance(row, str):
            assert row.startswith("$['")
        else:
            require_same(row, text)


@given(documents)
def test_a_value_in_a_column_of_text_keeps_the_text_of_its_numbers(text: str) -> None:
    assert read(text_of(parse(text.encode()))) == read(text)


# ---- the rule, case by case ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ("1 -0 9223372036854775807 -9223372036854775808", "bigint"),
        ("9223372036854775808 1", "decimal(38,0)"),
        ("9" * 38, "decimal(38,0)"),
        ("1" + "0" * 38, "string"),
        ("7" * 5000, "string"),
        ("1.0 2", "double"),
        ("1e5", "double"),
        ("0.1 9007199254740992 -0.0 1e23 5e-324 1.7976931348623157e308 0e999999999999", "double"),
        ("1.5 9007199254740993", "decimal(38,18)"),
        ("12345678901234567.89", "decimal(38,18)"),
        ("0.10000000000000001", "decimal(38,18)"),
        ("1.5 1234567890123456789012", "decimal(38,1)"),
        ("0.1234567890123456789012345678901234567 1", "decimal(38,37)"),
        ("0.1234567890123456789012345678901234567 10", "string"),
        ("1e400 1", "string"),
        ("1e-400", "string"),
        ("4e-324", "string"),
        ("1e999999999999999999999999", "string"),
        ("1 true", "string"),
        ('1.5 "a"', "string"),
        ("[1] [1.5]", "array<double>"),
        ("[9007199254740993] [1.5,null]", "array<decimal(38,18)>"),
        ('{"x":1} {"x":0.5}', "struct<x:double>"),
        ("{} [] null", "string"),
        ("{} null", None),
    ],
)
def test_a_new_column_has_the_type_that_holds_every_number_exactly(
    numbers: str, kind: str | None
) -> None:
    texts = [f'{{"a":{each}}}' for each in numbers.split(" ")]
    fields = fields_of(texts)
    assert [each.dataType.simpleString() for each in fields.fields] == ([kind] if kind else [])
    for text in texts:
        require_same(stored(text, fields), text)


def test_the_fast_parser_is_used_only_where_it_changes_nothing() -> None:
    tight, loose = b'{"a":[1,2.5,"x y"],"b":1e-7}', b'{"a" : [1, 2.5, "x y"],\n"b": 1e-7}'
    assert parse(tight) == parse(loose) == {"a": [1, 2.5, "x y"], "b": 1e-7}
    for text in (tight.decode(), '{"a":1E16,"b":1.50,"c":-0,"d":"é","e":1.0}'):
        assert text_of(parse(text.encode())) == text
    assert parse(b'{"a":12345678901234567.89}') == {"a": "12345678901234567.89"}
    assert parse(b'{"a":18446744073709551616}') == {"a": "18446744073709551616"}
