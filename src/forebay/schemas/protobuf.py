"""Protobuf: definitions in the language of .proto files, what reads what, and payloads.

grpcio-tools' compiler reads a definition, in a process of its own that has a time limit: the source
is not ours. It can import `google/protobuf/*.proto` and nothing else. Payloads are messages of the
first message type in the file.

A schema reads what another wrote if every field keeps its number and a type that holds all the
values of before. Names of fields and messages do not count, except that messages of one name are
compared although the first one does not use them. Beware: Protobuf's own parser refuses little. A
field of another type is an unknown field to it, and its value is lost without an error; therefore
such a change is incompatible here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from forebay.errors import (
    InvalidPayload,
    InvalidSchema,
    SchemasNotInstalled,
    ServiceUnavailable,
    remedy,
)
from forebay.limits import SCHEMA_COMPILE_SECONDS, SCHEMA_DEPTH_MAX, SCHEMA_NODES_MAX
from forebay.schemas.bounds import Steps, depth_of

_FILE: Final = "schema.proto"
_TYPES: Final[dict[int, str]] = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}
_WIDENED: Final = frozenset(
    {
        ("int32", "int64"),
        ("uint32", "uint64"),
        ("uint32", "int64"),
        ("sint32", "sint64"),
        ("string", "bytes"),
        *(("bool", wider) for wider in ("int32", "int64", "uint32", "uint64")),
        *(("enum", wider) for wider in ("int32", "int64")),
    }
)
"""What is written as the first has the same value when it is read as the second."""
_NAMED: Final = frozenset({"message", "group"})


@dataclass(frozen=True)
class ProtobufSchema:
    canonical: bytes
    files: descriptor_pb2.FileDescriptorSet = field(repr=False, compare=False)

    @cached_property
    def _pool(self) -> descriptor_pool.DescriptorPool:
        pool = descriptor_pool.DescriptorPool()
        for each in self.files.file:
            pool.Add(each)
        return pool

    @cached_property
    def messages(self) -> dict[str, Descriptor]:
        """The messages of the definition by their full names, the first one first."""
        return {each.full_name: each for each in _all_of(self.root.file.message_types_by_name)}

    @cached_property
    def root(self) -> Descriptor:
        own = self.files.file[-1]
        prefix = f"{own.package}." if own.package else ""
        return self._pool.FindMessageTypeByName(prefix + own.message_type[0].name)

    @cached_property
    def _class(self) -> type[Message]:
        return message_factory.GetMessageClass(self.root)

    def unreadable(self, writer: ProtobufSchema) -> list[str]:
        """Why messages of `writer` are not read, whole, with this schema; empty if they are."""
        comparison = _Comparison()
        errors = comparison.compare(writer.root, self.root)
        for name, reader in self.messages.items():
            found = writer.messages.get(name)
            if found is not None:
                errors += comparison.compare(found, reader)
        return errors

    def check(self, payload: bytes) -> None:
        """Raises InvalidPayload unless the payload is a message of the first type."""
        message = self._class()
        try:
            message.MergeFromString(payload)
        except DecodeError:
            raise InvalidPayload(
                f"the payload is not a message of the type {self.root.full_name}"
            ) from None
        if not message.IsInitialized():
            missing = message.FindInitializationErrors()  # type: ignore[attr-defined]
            raise InvalidPayload(f"the payload has no {missing[0]}, which is required")


def parse(definition: bytes) -> ProtobufSchema:
    """Compiles a .proto file; InvalidSchema says what is wrong with it."""
    if depth_of(definition.replace(b"'", b" ").replace(b'"', b" ")) > SCHEMA_DEPTH_MAX:
        raise InvalidSchema(f"the Protobuf schema is nested more than {SCHEMA_DEPTH_MAX} deep")
    if b"\0" in definition:
        raise InvalidSchema("the Protobuf schema has a zero byte: send the text of a .proto file")
    files = descriptor_pb2.FileDescriptorSet.FromString(_compiled(definition))
    own = files.file[-1]
    if not own.message_type:
        raise InvalidSchema("the Protobuf schema has no message")
    if own.ByteSize() > 16 * SCHEMA_NODES_MAX:
        raise InvalidSchema("the Protobuf schema has too many parts")
    schema = ProtobufSchema(own.SerializeToString(deterministic=True), files)
    try:
        _ = schema.messages
    except (TypeError, KeyError) as error:
        raise InvalidSchema(f"the Protobuf schema cannot be used: {error}") from error
    return schema


def _compiled(definition: bytes) -> bytes:
    found = find_spec("grpc_tools")
    if found is None or not found.submodule_search_locations:
        raise SchemasNotInstalled(
            "schemas of the type protobuf need grpcio-tools: pip install 'forebay[schemas]'"
        )
    included = Path(found.submodule_search_locations[0]) / "_proto"
    try:
        with tempfile.TemporaryDirectory(prefix="forebay-schema-") as folder:
            Path(folder, _FILE).write_bytes(definition)
            return _run_compiler(folder, included)
    except OSError as error:  # of this machine, not of the definition
        raise ServiceUnavailable(
            f"the compiler of Protobuf could not run ({error}); {remedy(error)}, and try again"
        ) from error


def _run_compiler(folder: str, included: Path) -> bytes:
    command = [
        sys.executable, "-I", "-m", "grpc_tools.protoc", f"-I{folder}", f"-I{included}",
        "--include_imports", f"--descriptor_set_out={folder}/out", _FILE,
    ]  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter and arguments
            command, capture_output=True, check=False, timeout=SCHEMA_COMPILE_SECONDS, cwd=folder
        )
    except subprocess.TimeoutExpired:
        raise InvalidSchema(
            f"the Protobuf schema was not compiled within {SCHEMA_COMPILE_SECONDS:.0f} s"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").replace(f"{folder}/", "").strip()
        raise InvalidSchema(f"the Protobuf schema is not valid: {said[:300]}")
    return Path(folder, "out").read_bytes()


def _all_of(messages: Mapping[str, Descriptor]) -> Iterator[Descriptor]:
    for each in messages.values():
        yield each
        yield from _all_of(each.nested_types_by_name)


class _Comparison:
    """Compares messages; those that were compared are not compared again."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self._steps = Steps("the comparison of two Protobuf schemas", InvalidSchema)

    def compare(self, writer: Descriptor, reader: Descriptor) -> list[str]:
        errors: list[str] = []
        waiting = [(writer, reader)]
        while waiting:
            wrote, reads = waiting.pop()
            key = wrote.full_name, reads.full_name
            if key in self._seen:
                continue
            self._seen.add(key)
            errors += self._fields(wrote, reads, waiting)
            errors += _oneofs(wrote, reads)
        return errors

    def _fields(
        self,
        writer: Descriptor,
        reader: Descriptor,
        waiting: list[tuple[Descriptor, Descriptor]],
    ) -> list[str]:
        errors: list[str] = []
        for each in reader.fields:
            self._steps.take()
            place = f"{reader.full_name}.{each.name} = {each.number}"
            found = writer.fields_by_number.get(each.number)
            if each.is_required and (found is None or not found.is_required):
                errors.append(f"{place}: is required, and was not")
            if found is None:
                continue
            why = _unlike(found, each)
            if why:
                errors.append(f"{place}: {why}")
            elif found.message_type is not None and each.message_type is not None:
                waiting.append((found.message_type, each.message_type))
        return errors


def _unlike(writer: FieldDescriptor, reader: FieldDescriptor) -> str:
    """Why a field is not read as it was written; empty if it is."""
    wrote, reads = _TYPES[writer.type], _TYPES[reader.type]
    if writer.is_repeated and not reader.is_repeated:
        return "was repeated"
    if wrote != reads:
        return "" if (wrote, reads) in _WIDENED else f"{reads} does not hold every {wrote}"
    if reads == "enum":
        return _unlike_enums(writer.enum_type, reader.enum_type)
    if reader.is_repeated and not writer.is_repeated and reads in _NAMED and _is_map(reader):
        return "became a map"
    return ""


def _is_map(each: FieldDescriptor) -> bool:
    return each.message_type is not None and each.message_type.GetOptions().map_entry


def _unlike_enums(writer: EnumDescriptor | None, reader: EnumDescriptor | None) -> str:
    if writer is None or reader is None or not reader.is_closed:
        return ""
    missing = sorted(set(writer.values_by_number) - set(reader.values_by_number))
    return f"the enum has no value {missing[0]}" if missing else ""


def _oneofs(writer: Descriptor, reader: Descriptor) -> list[str]:
    """Fields that could be set together, and of which a oneof now keeps the last one only."""
    errors = []
    for group in reader.oneofs:
        found = [
            writer.fields_by_number[each.number]
            for each in group.fields
            if each.number in writer.fields_by_number
        ]
        before = {each.containing_oneof.name if each.containing_oneof else "" for each in found}
        if len(found) > 1 and (len(before) > 1 or "" in before):
            names = ", ".join(each.name for each in found)
            errors.append(f"{reader.full_name}.{group.name}: {names} could be set together")
    return errors
