"""The keys of the file, as the settings classes declare them, and where each section goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

from forebay.config.quantities import Unit, unit_of
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
    ("metadata",): MetadataSettings,
    ("broker",): BrokerSettings,
    ("admin",): AdminSettings,
    ("spark",): SparkSettings,
}
"""The last part of each is the field of StoreSettings that it is for."""

LOOSE: Final[Mapping[tuple[str, ...], str]] = {
    ("data",): "data",
    ("storage", "writer_threads"): "writer_threads",
}
"""Keys that are fields of StoreSettings themselves."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: what its value may be."""

    name: str
    kind: Kind
    optional: bool
    whole: bool
    choices: tuple[str, ...]
    unit: Unit | None
    default: object

    @property
    def allowed(self) -> str:
        """For messages: `a whole number, or null`."""
        return f"{self._kind()}, or null" if self.optional else self._kind()

    def _kind(self) -> str:
        if self.unit is not None:
            example = "8MiB" if self.unit.measures == "size" else "90s"
            return f"a {self.unit.measures} such as {example}, or a number of {self.unit.name}"
        return {
            "flag": "true or false",
            "choice": f"one of {', '.join(self.choices)}",
            "number": "a whole number" if self.whole else "a number",
            "text": "text",
            "path": "a path",
            "list": "a list of texts",
            "options": "a mapping of names to texts",
        }[self.kind]


def keys_of(settings: type[Any]) -> Mapping[str, Key]:
    """The keys of a settings class by name, in its order; what is a section is left out."""
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
