"""Protobuf: what counts as compatible keeps every value when Protobuf's own parser reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from forebay.errors import InvalidPayload, InvalidSchema, ServiceUnavailable
from forebay.schemas import protobuf
from forebay.schemas.protobuf import ProtobufSchema

_PARSED: dict[str, ProtobufSchema] = {}


def parsed(body: str, syntax: str = "proto3") -> ProtobufSchema:
    """The schema; compiled once, because that takes a process."""
    text = f'syntax = "{syntax}";\n{body}'
    if text not in _PARSED:
        _PARSED[text] = protobuf.parse(text.encode())
    return _PARSED[text]


def kept(writer: ProtobufSchema, reader: ProtobufSchema, value: Any) -> bool:
    """Whether the field `a` has the same value after it was written and read."""
    wrote: Any = message_factory.GetMessageClass(writer.root)()
    if isinstance(value, list):
        wrote.a.extend(value)
    elif isinstance(value, dict):
        wrote.a.x = value["x"]
    else:
        wrote.a = value
    read: Any = message_factory.GetMessageClass(reader.root)()
    try:
        read.MergeFromString(wrote.SerializeToString())
    except DecodeError:
        return False
    found: Any = read.a
    if isinstance(value, dict):
        return bool(found.x == value["x"])
    if isinstance(value, list):
        return bool(found == value)
    if isinstance(found, bytes):
        return found == (value if isinstance(value, bytes) else value.encode())
    if isinstance(found, str):
        return bool(found == value)
    return bool(found == value if isinstance(found, int | float) else list(found) == [value])


def one(field: str, more: str = "") -> str:
    return f"message M {{ {field} }} {more}"


ENUM = "enum E { ZERO = 0; ONE = 1; TWO = 2; }"
PART, SMALL_PART = "message P { int32 x = 1; }", "message P { string x = 1; }"

MATRIX: list[tuple[str, str, Any, bool]] = [
    (one("int32 a = 1;"), one("int64 a = 1;"), -5, True),
    (one("int64 a = 1;"), one("int32 a = 1;"), 2**40, False),
    (one("uint32 a = 1;"), one("uint64 a = 1;"), 2**32 - 1, True),
    (one("uint32 a = 1;"), one("int64 a = 1;"), 2**32 - 1, True),
    (one("int32 a = 1;"), one("uint32 a = 1;"), -1, False),
    (one("int32 a = 1;"), one("sint32 a = 1;"), 3, False),
    (one("sint32 a = 1;"), one("sint64 a = 1;"), -3, True),
    (one("bool a = 1;"), one("int32 a = 1;"), True, True),
    (one("int32 a = 1;"), one("bool a = 1;"), 5, False),
    (one("int32 a = 1;"), one("string a = 1;"), 5, False),
    (one("string a = 1;"), one("bytes a = 1;"), "x", True),
    (one("bytes a = 1;"), one("string a = 1;"), b"\xff", False),
    (one("fixed32 a = 1;"), one("sfixed32 a = 1;"), 2**32 - 1, False),
    (one("float a = 1;"), one("double a = 1;"), 1.5, False),
    (one("E a = 1;", ENUM), one("int32 a = 1;"), 2, True),
    (one("E a = 1;", ENUM), one("E a = 1;", "enum E { ZERO = 0; }"), 2, True),  # open enums
    (one("int32 a = 1;"), one("repeated int32 a = 1;"), 5, True),
    (one("repeated int32 a = 1;"), one("int32 a = 1;"), [1, 2], False),
    (one("P a = 1;", PART), one("P a = 1;", PART), {"x": 7}, True),
    (one("P a = 1;", PART), one("P a = 1;", SMALL_PART), {"x": 7}, False),
    (one("int32 a = 1;"), one("int32 a = 1; string b = 2;"), 5, True),
    (one("int32 a = 1; string b = 2;"), one("int32 a = 1;"), 5, True),
]


@pytest.mark.parametrize(("writer", "reader", "value", "works"), MATRIX)
def test_the_matrix_is_what_the_parser_keeps(
    writer: str, reader: str, value: Any, works: bool
) -> None:
    old, new = parsed(writer), parsed(reader)
    assert (new.unreadable(old) == []) is works
    assert kept(old, new, value) is works


def test_a_closed_enum_must_not_lose_values() -> None:
    both = "message M { optional E a = 1; } enum E { ZERO = 0; ONE = 1; }"
    first = "message M { optional E a = 1; } enum E { ZERO = 0; }"
    old, new = parsed(both, "proto2"), parsed(first, "proto2")
    assert new.unreadable(old) != []
    assert old.unreadable(new) == []
    assert not kept(old, new, 1)


def test_a_field_that_is_required_must_have_been_required() -> None:
    optional = parsed("message M { optional int32 a = 1; }", "proto2")
    required = parsed("message M { required int32 a = 1; }", "proto2")
    assert required.unreadable(optional) != []
    assert optional.unreadable(required) == []
    with pytest.raises(InvalidPayload, match="required"):
        required.check(b"")


def test_fields_that_could_be_set_together_must_not_become_a_oneof() -> None:
    apart = parsed("message M { int32 a = 1; int32 b = 2; }")
    together = parsed("message M { oneof which { int32 a = 1; int32 b = 2; } }")
    assert together.unreadable(apart) != []
    assert apart.unreadable(together) == []


def test_a_payload_is_a_message_of_the_first_type() -> None:
    schema = parsed("package p; message M { string a = 1; } message N { int32 b = 1; }")
    schema.check(b"\x0a\x01x")
    schema.check(b"")
    for bad in (b"\x0a\x05x", b"\xff", b"\x0a\x01\xff"):
        with pytest.raises(InvalidPayload):
            schema.check(bad)
    node = parsed("message M { M a = 1; }")
    deep = b""
    for _ in range(200):
        size = len(deep)
        deep = (
            b"\x0a" + (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])) + deep
        )
    with pytest.raises(InvalidPayload):
        node.check(deep)


def test_googles_own_files_can_be_imported_and_comments_mean_nothing() -> None:
    text = 'import "google/protobuf/timestamp.proto";'
    plain = parsed(f"{text} message M {{ google.protobuf.Timestamp at = 1; }}")
    commented = parsed(f"// about M\n{text} message M {{ google.protobuf.Timestamp at = 1; /**/ }}")
    assert plain.canonical == commented.canonical


def test_a_machine_without_room_for_the_compiler_is_no_fault_of_the_schema(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ServiceUnavailable, match="could not run"):
        protobuf.parse(b'syntax = "proto3"; message A {}')


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"message {",
        b'syntax = "proto3";',
        b'syntax = "proto3"; import "/etc/passwd"; message A {}',
        b'syntax = "proto3"; import "../x.proto"; message A {}',
        b'syntax = "proto3"; message A { B b = 1; }',
        b'syntax = "proto3"; ' + b"message A {" * 500 + b"}" * 500,
        b"\0",
        b"\xff\xfe",
    ],
)
def test_a_bad_definition_is_an_invalid_schema(text: bytes) -> None:
    with pytest.raises(InvalidSchema):
        protobuf.parse(text)
