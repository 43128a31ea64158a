"""Builds settings from YAML nodes: checks keys, converts values and makes paths absolute.

The keys of the file are the fields of the settings classes (`SECTIONS`, `keys_of`). The type of a
field determines which values are valid. The suffix of its name (`_ms`, `_bytes`) is the unit of a
plain number. If a class rejects a value, the error is raised again with the position in the file.

msgspec does not do the conversion. It does not support sizes and durations with units, `yes` and
`on`, paths relative to the file, line numbers in errors, or the type `Path | str | None`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from forebay.config.aliases import GROUPS, names_below, resolve
from forebay.config.document import (
    FILE_BYTES_MAX,
    Items,
    Node,
    Table,
    Text,
    Where,
    as_table,
    read_document,
    substitute,
)
from forebay.config.offload_policies import require_below_retention
from forebay.config.quantities import Unit, as_number, parse_number, parse_quantity, unit_of
from forebay.errors import InvalidSetting, UsageError
from forebay.settings import (
    AdminSettings,
    BrokerSettings,
    CloudReaderSettings,
    CloudSettings,
    DeleterSettings,
    MetadataSettings,
    RemoteRetentionSettings,
    SparkSettings,
    StoreSettings,
    SweeperSettings,
    UploaderSettings,
    WalSettings,
)

Kind: TypeAlias = Literal["flag", "choice", "number", "text", "path", "list", "options"]

SECTIONS: Final[Mapping[tuple[str, ...], type[Any]]] = {
    ("storage", "wal"): WalSettings,
    ("storage", "uploader"): UploaderSettings,
    ("storage", "cloud"): CloudSettings,
    ("storage", "cloud_reader"): CloudReaderSettings,
    ("storage", "remote_retention"): RemoteRetentionSettings,
    ("storage", "deleter"): DeleterSettings,
    ("storage", "sweeper"): SweeperSettings,
    ("metadata",): MetadataSettings,
    ("broker",): BrokerSettings,
    ("admin",): AdminSettings,
    ("spark",): SparkSettings,
}
"""Section paths and their classes. The last part of a path is the field of StoreSettings."""

LOOSE: Final[Mapping[tuple[str, ...], str]] = {
    ("data",): "data",
    ("storage", "writer_threads"): "writer_threads",
}
"""Keys outside these sections, and the field of StoreSettings that each one sets."""

_FLAGS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_ENDINGS: Final = {".yml", ".yaml"}
_DATA: Final = "data"
_S = TypeVar("_S")


def load_config(path: Path | str, env: Mapping[str, str] | None = None) -> StoreSettings:
    """Reads a configuration file. InvalidSetting names the file, the line and the key."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InvalidSetting(f"{path}: the file cannot be read: {error.strerror}") from error
    except ValueError:
        raise InvalidSetting(f"{path}: the file is not UTF-8 text") from None
    return parse_config(text, base=Path(path).absolute().parent, env=env, name=str(path))


def parse_config(
    text: str,
    *,
    base: Path,
    env: Mapping[str, str] | None = None,
    name: str = "configuration",
) -> StoreSettings:
    """Parses the text of a configuration file.

    Relative paths are resolved against `base`. Errors refer to the text as `name`. `env` defaults
    to `os.environ`.
    """
    root = read_document(text, name)
    substitute(root, os.environ if env is None else env)
    resolve(root)
    settings = _Builder(name, base).store(root)
    try:
        require_below_retention(settings)
    except InvalidSetting as error:
        raise InvalidSetting(f"{name}: {error}") from None
    return settings


def settings_from(source: str | Path | StoreSettings | None) -> StoreSettings:
    """Returns the settings for the argument of `forebay.open`.

    A directory is a data directory. Any other path that ends with .yml or .yaml is a configuration
    file. A path that does not exist is a new data directory. None is a store in memory. Raises
    UsageError for a file with another name.
    """
    if source is None or isinstance(source, StoreSettings):
        return source or StoreSettings(data=None)
    settings = StoreSettings(data=source)
    path = settings.data
    assert isinstance(path, Path)
    if path.is_dir():
        return settings
    if path.suffix.lower() in _ENDINGS:
        return load_config(path)
    if path.exists():
        raise UsageError(
            f"{path} is not a directory; a configuration file's name ends with .yml or .yaml"
        )
    return settings


def parse_value(name: str, text: str, key: Key) -> Any:
    """Converts the text of one value as if it were in a configuration file.

    InvalidSetting calls it `name`.
    """
    return _Builder("", Path()).value(Text(Where("", 0, name), text, plain=True), key)


class _Builder:
    def __init__(self, name: str, base: Path) -> None:
        self._name = name
        self._base = base

    def store(self, root: Table) -> StoreSettings:
        known = {path[0] for path in (*SECTIONS, *LOOSE)}
        self._refuse_unknown(root, known, "")
        storage = as_table(root.items.get("storage", Table(root.where)))
        known = {path[1] for path in (*SECTIONS, *LOOSE) if path[0] == "storage"}
        self._refuse_unknown(storage, known - {"storage"}, "storage")
        nodes = {("storage", *path): node for path, node in _entries(storage)}
        nodes |= dict(_entries(root))
        values: dict[str, Any] = {}
        loose: dict[str, Node] = {}
        for path, name in LOOSE.items():
            if path in nodes:
                loose[name] = nodes[path]
                values[name] = self.value(nodes[path], STORE_KEYS[name])
        # `dir` in the file is the directory of all topics; in WalSettings it is that of one topic.
        wal = as_table(nodes.get(("storage", "wal"), Table(storage.where)))
        wal_dir = wal.items.pop("dir", None)
        if wal_dir is not None:
            loose["wal_root"] = wal_dir
            values["wal_root"] = self.value(wal_dir, STORE_KEYS["wal_root"])
        if "data" not in values:
            wal_root = values.get("wal_root")
            values["data"] = self._base / _DATA if wal_root is None else wal_root.parent
        for path, kind in SECTIONS.items():
            values[path[-1]] = self._section(nodes.get(path), path, kind)
        return self._made(StoreSettings, values, loose, "")

    def _section(self, node: Node | None, path: tuple[str, ...], kind: type[Any]) -> Any:
        keys = keys_of(kind)
        if node is None:
            return self._made(kind, {}, {}, ".".join(path))
        table = as_table(node)
        self._refuse_unknown(table, keys.keys(), ".".join(path))
        values = {name: self.value(each, keys[name]) for name, each in table.items.items()}
        if kind is SECTIONS["storage", "cloud"]:
            self._place_root(values)
        return self._made(kind, values, table.items, table.where.path or ".".join(path))

    def _place_root(self, values: dict[str, Any]) -> None:
        root = values.get("root")
        if root and values.get("backend", "fs") == "fs" and "://" not in root:
            values["root"] = str(self._base / root)

    def _made(
        self, kind: type[_S], values: Mapping[str, Any], nodes: Mapping[str, Node], section: str
    ) -> _S:
        """Returns the settings. If they reject a value, the error has its position in the file."""
        try:
            return kind(**values)
        except InvalidSetting as error:
            name, _, rest = str(error).partition(" ")
            place = f"{self._name}: {section}.{name}" if section else f"{self._name}: {name}"
            if name in nodes:
                node = nodes[name]
                where = node.where
                if isinstance(node, Text) and node.shown is not None:
                    rest = f"is {node}; {rest.partition('; ')[2]}"
                alias = "" if where.path.rpartition(".")[2] == name else f" ({name})"
                place = f"{where}{alias}"
            raise InvalidSetting(f"{place} {rest}") from None

    def _refuse_unknown(self, table: Table, known: Iterable[str], section: str) -> None:
        for name, node in table.items.items():
            if name in known:
                continue
            if f"{section}.{name}" in GROUPS and isinstance(node, Table):
                self._refuse_unknown(node, (), f"{section}.{name}")
            proper = sorted(known)
            near = get_close_matches(name, [*proper, *names_below(section)], n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(proper)}"
            raise InvalidSetting(f"{node.where}: unknown key; {hint}")

    def value(self, node: Node, key: Key) -> Any:
        if isinstance(node, Text) and node.is_null:
            if key.optional or key.kind in {"list", "options"}:
                return None if key.optional else key.default
            raise _wrong(node, key)
        if key.kind == "list" and isinstance(node, Items):
            return tuple(_text(each, key) for each in node.values)
        if key.kind == "options" and isinstance(node, Table):
            return {
                name: _text(each, key)
                for name, each in node.items.items()
                if not (isinstance(each, Text) and each.is_null)
            }
        if not isinstance(node, Text) or key.kind in {"list", "options"}:
            raise _wrong(node, key)
        return self._converted(node, key)

    def _converted(self, node: Text, key: Key) -> Any:
        if key.kind == "number":
            return _number(node, key)
        if key.kind == "flag" and node.text.lower() in _FLAGS:
            return _FLAGS[node.text.lower()]
        if key.kind == "choice" and node.text in key.choices:
            return node.text
        if key.kind == "path" and node.text and "\0" not in node.text:
            return self._base / node.text
        if key.kind == "text":
            return node.text
        raise _wrong(node, key)


def _entries(table: Table) -> list[tuple[tuple[str, ...], Node]]:
    return [((name,), node) for name, node in table.items.items()]


def _number(node: Text, key: Key) -> int | float:
    text = node.text.strip()
    if key.unit is None:
        number = parse_number(text)
    else:
        number = parse_quantity(text, node.unit or key.unit)
        number = None if number is None else number / key.unit.scale
    if number is None or (key.whole and number.denominator != 1):
        raise _wrong(node, key)
    return as_number(number)


def _text(node: Node, key: Key) -> str:
    if isinstance(node, Text) and not node.is_null:
        return node.text
    raise InvalidSetting(f"{node.where} is {node}; it must be a string, in {key.allowed}")


def _wrong(node: Node, key: Key) -> InvalidSetting:
    allowed = key.allowed
    if isinstance(node, Text) and node.unit is not None and key.unit is not None:
        allowed = allowed.replace(f"number of {key.unit.name}", f"number of {node.unit.name}")
    return InvalidSetting(f"{node.where} is {node}; it must be {allowed}")


# ---- keys ----


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the file and the values that it accepts."""

    name: str
    kind: Kind
    optional: bool
    whole: bool
    choices: tuple[str, ...]
    unit: Unit | None
    default: object

    @property
    def allowed(self) -> str:
        """The accepted values for an error message, such as `a whole number, or null`."""
        return f"{self._kind()}, or null" if self.optional else self._kind()

    def _kind(self) -> str:
        if self.unit is not None:
            example = "8MiB" if self.unit.measures == "size" else "90s"
            return f"a {self.unit.measures} such as {example}, or a number of {self.unit.name}"
        return {
            "flag": "true or false",
            "choice": f"one of {', '.join(self.choices)}",
            "number": "a whole number" if self.whole else "a number",
            "text": "a string",
            "path": "a path",
            "list": "a list of strings",
            "options": "a mapping of names to strings",
        }[self.kind]


def keys_of(settings: type[Any]) -> Mapping[str, Key]:
    """The keys of a settings class by name, in field order, without fields that are sections."""
    hints = get_type_hints(settings)
    keys = (_key(each, hints[each.name]) for each in fields(settings))
    return {key.name: key for key in keys if key is not None}


def _key(declared: Field[Any], hint: Any) -> Key | None:
    kinds = set(get_args(hint)) if get_origin(hint) not in {Literal, Sequence, Mapping} else {hint}
    kinds = kinds or {hint}
    optional = NoneType in kinds
    kinds.discard(NoneType)
    first = next(iter(kinds))
    kind = _kind_of(kinds, first)
    if kind is None:
        return None
    default = declared.default
    if declared.default_factory is not MISSING:
        default = declared.default_factory()
    return Key(
        name=declared.name,
        kind=kind,
        optional=optional,
        whole=float not in kinds,
        choices=get_args(first) if kind == "choice" else (),
        unit=unit_of(declared.name) if kind == "number" else None,
        default=None if default is MISSING else default,
    )


def _kind_of(kinds: set[Any], first: Any) -> Kind | None:
    by_origin: dict[Any, Kind] = {Literal: "choice", Sequence: "list", Mapping: "options"}
    if get_origin(first) in by_origin:
        return by_origin[get_origin(first)]
    by_type: dict[Any, Kind] = {bool: "flag", Path: "path", str: "text", int: "number"}
    by_type[float] = "number"
    return next((kind for each, kind in by_type.items() if each in kinds), None)


STORE_KEYS: Final = keys_of(StoreSettings)
