"""YAML to nodes: mappings, lists and texts that know the file, the line and the key they are at.

Only the events of the YAML parser are used. No tag creates an object, a text stays as it was
written (`password: 0123` is "0123"), and everything has a limit: bytes, nodes (an alias counts each
time it is used) and depth. A key that is given twice is refused.

`substitute` replaces `${NAME}` and `${NAME:-default}`; `$${` stands for `${`. The default is used
if the variable is unset or empty, as in the shell. It cannot contain braces: nothing is nested.

Beware: error messages must never quote a line of the file, because it may contain a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from forebay.config.quantities import Unit
from forebay.errors import InvalidSetting
from forebay.limits import MIB
from forebay.settings import is_secret

FILE_BYTES_MAX: Final = 1 * MIB
NODES_MAX: Final = 10_000
DEPTH_MAX: Final = 16
_SHOWN_MAX: Final = 200
_NULLS: Final = {"", "~", "null", "Null", "NULL"}
_QUOTED: Final = re.compile(r"'[^']*'|\"[^\"]*\"")
_TOKEN: Final = re.compile(r"'(.|<[a-z ]+>)'")
_KEY: Final = re.compile(r"[\w.\-]{1,100}|<<", re.ASCII)
_USE: Final = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_]\w*)(?::-([^{}]*))?\})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file. `str` is `forebay.yml:7: storage.wal.dir`, or without a file the key."""

    file: str
    line: int
    path: str = ""

    def __str__(self) -> str:
        if not self.file:
            return self.path
        return f"{self.file}:{self.line}: {self.path}" if self.path else f"{self.file}:{self.line}"

    def below(self, name: str, line: int) -> Where:
        return Where(self.file, line, f"{self.path}.{name}" if self.path else name)


@dataclass(slots=True)
class Text:
    where: Where
    text: str
    plain: bool
    """Whether it is not quoted, and can therefore be null."""
    shown: str | None = None
    """What errors show instead of the text."""
    unit: Unit | None = None
    """The unit of a plain number, if it is not that of the key."""

    @property
    def is_null(self) -> bool:
        return self.plain and self.text in _NULLS

    def __str__(self) -> str:
        shown = repr(self.text) if self.shown is None else self.shown
        return shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}..."


@dataclass(slots=True)
class Items:
    where: Where
    values: list[Node] = field(default_factory=list)

    def __str__(self) -> str:
        return "a list"


@dataclass(slots=True)
class Table:
    where: Where
    items: dict[str, Node] = field(default_factory=dict)

    def __str__(self) -> str:
        return "a mapping"


Node: TypeAlias = Text | Items | Table


def read_document(text: str, file: str) -> Table:
    """The top level of the document, which may be empty. InvalidSetting if it is not a mapping."""
    import yaml

    top = Where(file, 1)
    if len(text.encode(errors="surrogatepass")) > FILE_BYTES_MAX:
        raise InvalidSetting(f"{file}: larger than {FILE_BYTES_MAX} bytes")
    try:
        node = _Composer(yaml.parse(text, Loader=yaml.SafeLoader), top).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = _QUOTED.sub(_only_tokens, error.problem or "not YAML")
        raise InvalidSetting(
            f"{file}{at}: {problem}; put quotes around a text that starts with a special character"
        ) from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        position = getattr(error, "position", None)
        line = "" if position is None else f":{text.count(chr(10), 0, position) + 1}"
        raise InvalidSetting(f"{file}{line}: not YAML: a character that is not allowed") from None
    return as_table(node) if node is not None else Table(top)


def _only_tokens(quoted: re.Match[str]) -> str:
    return quoted[0] if _TOKEN.fullmatch(quoted[0]) else "'...'"


def as_table(node: Node) -> Table:
    """The node as a mapping; null is an empty one."""
    if isinstance(node, Table):
        return node
    if isinstance(node, Text) and node.is_null:
        return Table(node.where)
    raise InvalidSetting(f"{node.where} is {node}; it must be a mapping of keys to values")


class _Composer:
    """Makes nodes from events, within the limits."""

    def __init__(self, events: Iterator[Any], top: Where) -> None:
        import yaml

        self._yaml = yaml
        self._events = events
        self._top = top
        self._nodes = 0
        self._anchors: dict[str, tuple[Node, int]] = {}

    def document(self) -> Node | None:
        yaml, node = self._yaml, None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if node is not None:
                    raise InvalidSetting(f"{self._top.file}: more than one YAML document")
                node = self._node(next(self._events), self._top, 0)
        return node

    def _node(self, event: Any, where: Where, depth: int) -> Node:
        yaml, before = self._yaml, self._nodes
        self._count(1, where)
        if depth > DEPTH_MAX:
            raise InvalidSetting(f"{where}: nested deeper than {DEPTH_MAX} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event.anchor, where)
        if event.tag is not None:
            raise InvalidSetting(
                f"{where}: tags are not allowed; put quotes around a text that starts with '!'"
            )
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            node = Text(where, event.value, plain=event.style is None)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._items(where, depth)
        else:
            node = self._table(where, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node, self._nodes - before
        return node

    def _count(self, more: int, where: Where) -> None:
        self._nodes += more
        if self._nodes > NODES_MAX:
            raise InvalidSetting(f"{where.file}:{where.line}: more than {NODES_MAX} values")

    def _alias(self, anchor: str, where: Where) -> Node:
        if anchor not in self._anchors:
            raise InvalidSetting(
                f"{where}: an alias without its anchor; put quotes around a text that starts "
                "with '*'"
            )
        node, nodes = self._anchors[anchor]
        self._count(nodes, where)
        return _moved(node, where)

    def _items(self, where: Where, depth: int) -> Items:
        items = Items(where)
        while not isinstance(event := next(self._events), self._yaml.SequenceEndEvent):
            place = Where(
                where.file, event.start_mark.line + 1, f"{where.path}[{len(items.values)}]"
            )
            items.values.append(self._node(event, place, depth + 1))
        return items

    def _table(self, where: Where, depth: int) -> Table:
        table = Table(where)
        while not isinstance(event := next(self._events), self._yaml.MappingEndEvent):
            line = event.start_mark.line + 1
            key = event.value if isinstance(event, self._yaml.ScalarEvent) else ""
            if event.anchor is not None or event.tag is not None or not _KEY.fullmatch(key):
                section = f" of {where.path}" if where.path else ""
                raise InvalidSetting(f"{where.file}:{line}: a key{section} is not a plain name")
            place = where.below(key, line)
            if key in table.items:
                first = table.items[key].where.line
                raise InvalidSetting(f"{place}: given twice, first in line {first}")
            table.items[key] = self._node(next(self._events), place, depth + 1)
        return table


def _moved(node: Node, where: Where) -> Node:
    """A copy of the node at another place, with the line of that place."""
    if isinstance(node, Text):
        return replace(node, where=where)
    if isinstance(node, Items):
        places = [
            Where(where.file, where.line, f"{where.path}[{at}]") for at in range(len(node.values))
        ]
        return Items(
            where, [_moved(each, at) for each, at in zip(node.values, places, strict=True)]
        )
    below = {name: _moved(each, where.below(name, where.line)) for name, each in node.items.items()}
    return Table(where, below)


def substitute(node: Node, env: Mapping[str, str]) -> None:
    """Replaces variables in all texts below a node, and marks what errors must not show."""
    if isinstance(node, Text):
        _substitute_text(node, env)
        return
    for below in node.values if isinstance(node, Items) else node.items.values():
        substitute(below, env)


def _substitute_text(node: Text, env: Mapping[str, str]) -> None:
    written = node.text
    if is_secret(node.where.path):
        node.shown = "***"
    elif any(is_secret(use[1]) for use in _USE.finditer(written) if use[1]):
        node.shown = repr(written)
    node.text = _USE.sub(lambda use: _value(use, node.where, env), written)


def _value(use: re.Match[str], where: Where, env: Mapping[str, str]) -> str:
    if use[0] == "$${":
        return "${"
    name, default = use[1], use[2]
    if name is None:
        raise InvalidSetting(
            f"{where}: neither ${{NAME}} nor ${{NAME:-default}}; write $${{ for the characters ${{"
        )
    value = env.get(name)
    if default is not None:
        return value or default
    if value is None:
        raise InvalidSetting(
            f"{where}: the environment variable {name} is not set; set it, or write "
            f"${{{name}:-default}}"
        )
    return value
