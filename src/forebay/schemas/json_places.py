"""How often a JSON schema looks at one place of a payload, found without a payload.

A schema is a graph: its parts, and edges to the parts that are applied to the same value (`allOf`,
`$ref` and so on) or to a value inside it (`properties`, `items`). Three things are refused. A part
that is applied to the same value again and again, because no check of it ends. A recursive part
that reaches the same inner value in two ways, because each level doubles the work. And references
that this module does not follow: to other documents, to anchors, and dynamic ones.

What remains looks at one place as often as the parts that can be applied there add up to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from forebay.errors import InvalidSchema
from forebay.limits import SCHEMA_NODES_MAX

Subschema: TypeAlias = dict[str, Any] | bool

_SAME: Final = ("allOf", "anyOf", "oneOf")
_SAME_ONE: Final = ("not", "if", "then", "else")
_INNER: Final = {
    "items": "[]",
    "additionalItems": "[]",
    "contains": "[]",
    "unevaluatedItems": "[]",
    "additionalProperties": "*",
    "unevaluatedProperties": "*",
    "propertyNames": "name",
}
_REFUSED: Final = ("$dynamicRef", "$recursiveRef")
_LOOKS_MAX: Final = 4096
_DEPTH_MAX: Final = 256
"""Parts that lead to each other one after the other, by references too."""
HERE: Final = ""
"""The slot of an edge to a part that is applied to the same value."""


@dataclass(slots=True)
class _Node:
    schema: dict[str, Any]
    edges: list[tuple[str, int]] = field(default_factory=list)
    """The slot, and the part that is applied there."""


def target_of(root: Subschema, reference: object) -> Subschema:
    """The part that a `$ref` within the document names; InvalidSchema if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise InvalidSchema(
            f"the JSON schema has the reference {str(reference)[:80]!r}; only those within the "
            "document are followed: # and #/..."
        )
    found: Any = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isascii() and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            raise InvalidSchema(f"the JSON schema has nothing at {reference[:80]!r}")
    if not isinstance(found, dict | bool):
        raise InvalidSchema(f"the JSON schema has no schema at {reference[:80]!r}")
    return found


def looks_of(root: Subschema) -> int:
    """How often a place is looked at, at most. InvalidSchema if that is too often."""
    if isinstance(root, bool):
        return 1
    nodes = _graph(root)
    groups = _groups(nodes)
    group_of = {each: number for number, group in enumerate(groups) for each in group}
    for number, group in enumerate(groups):
        _require_single(nodes, group, group_of, number)
    looks: list[int] = []
    depths: list[int] = []
    for number, group in enumerate(groups):  # a group comes after all that it leads to
        looks.append(_looks_at(nodes, group, group_of, number, looks))
        below = [group_of[target] for each in group for _, target in nodes[each].edges]
        depths.append(
            len(group) + max((depths[each] for each in below if each != number), default=0)
        )
        if looks[number] > _LOOKS_MAX or depths[number] > _DEPTH_MAX:
            raise InvalidSchema(
                "the JSON schema combines too many of its parts: say it with fewer references"
            )
    return looks[group_of[0]]


def _looks_at(
    nodes: list[_Node], group: list[int], group_of: dict[int, int], number: int, known: list[int]
) -> int:
    """An upper bound for one group: at the value itself, or at any value inside it."""
    total = 0
    for each in group:
        slots: Counter[str] = Counter()
        for slot, target in nodes[each].edges:
            if group_of[target] != number:
                slots[slot] += known[group_of[target]]
        here = slots.pop(HERE, 0)
        if len(group) > 1:
            total += 1 + here + sum(slots.values())
            continue
        every = {"/": slots["*"], "[": slots["[]"]}
        inner = max(
            (
                count + (every.get(slot[0], 0) if slot not in {"*", "[]"} else 0)
                for slot, count in slots.items()
            ),
            default=0,
        )
        total += here + max(1, inner)
    return total


def _graph(root: dict[str, Any]) -> list[_Node]:
    nodes = [_Node(root)]
    numbers = {id(root): 0}
    at = 0
    while at < len(nodes):
        for slot, target in _edges(root, nodes[at].schema, top=at == 0):
            if isinstance(target, bool):
                continue
            if id(target) not in numbers:
                numbers[id(target)] = len(nodes)
                nodes.append(_Node(target))
                if len(nodes) > SCHEMA_NODES_MAX:
                    raise InvalidSchema(f"the JSON schema has more than {SCHEMA_NODES_MAX} parts")
            nodes[at].edges.append((slot, numbers[id(target)]))
        at += 1
    return nodes


def _edges(
    root: dict[str, Any], schema: dict[str, Any], *, top: bool
) -> Iterator[tuple[str, Subschema]]:
    for word in _REFUSED:
        if word in schema:
            raise InvalidSchema(f"the JSON schema has {word}, which is not followed: use $ref")
    if "$id" in schema and not top:
        raise InvalidSchema("the JSON schema has a part with an $id of its own: use $ref: #/...")
    if "$ref" in schema:
        yield HERE, target_of(root, schema["$ref"])
    for word in _SAME:
        yield from ((HERE, each) for each in schema.get(word, ()))
    for word in _SAME_ONE:
        if word in schema:
            yield HERE, schema[word]
    for name, each in schema.get("properties", {}).items():
        yield f"/{name}", each
    for each in schema.get("patternProperties", {}).values():
        yield "*", each
    for word in ("dependentSchemas", "dependencies"):
        for each in schema.get(word, {}).values():
            if not isinstance(each, list):
                yield HERE, each
    for word, slot in _INNER.items():
        found = schema.get(word)
        if isinstance(found, list):
            yield from ((f"[{at}]", each) for at, each in enumerate(found))
        elif found is not None:
            yield slot, found
    yield from ((f"[{at}]", each) for at, each in enumerate(schema.get("prefixItems", ())))


def _groups(nodes: list[_Node]) -> list[list[int]]:
    """The strongly connected parts of the graph, each after those that it leads to (Tarjan)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    waiting: set[int] = set()
    groups: list[list[int]] = []
    work: list[tuple[int, int]] = [(0, 0)]
    while work:
        at, edge = work.pop()
        if edge == 0:
            order[at] = low[at] = len(order)
            stack.append(at)
            waiting.add(at)
        edges = nodes[at].edges
        while edge < len(edges):
            target = edges[edge][1]
            edge += 1
            if target not in order:
                work += [(at, edge), (target, 0)]
                break
            if target in waiting:
                low[at] = min(low[at], low[target])
        else:
            if low[at] == order[at]:
                group = stack[stack.index(at) :]
                del stack[-len(group) :]
                waiting.difference_update(group)
                groups.append(group)
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[at])
    return groups


def _require_single(
    nodes: list[_Node], group: list[int], group_of: dict[int, int], number: int
) -> None:
    """Refuses a recursive group that reaches one inner value in two ways, or the same for ever."""
    if len(group) == 1 and all(target != group[0] for _, target in nodes[group[0]].edges):
        return
    for first in group:
        slots: Counter[str] = Counter()
        path: list[tuple[int, int]] = [(first, 0)]
        while path:
            at, depth = path.pop()
            if depth > len(group):
                raise InvalidSchema("the JSON schema has a part that refers to itself for ever")
            for slot, target in nodes[at].edges:
                if group_of[target] != number:
                    continue
                if slot == HERE:
                    path.append((target, depth + 1))
                else:
                    slots[slot] += 1
            inner = sum(slots.values())
            if inner > SCHEMA_NODES_MAX or len(path) > SCHEMA_NODES_MAX:
                raise _doubling()
        others = slots["*"]
        for slot, count in slots.items():
            named = slot.startswith("/") or slot == "*"
            if count + (others if named and slot != "*" else 0) > 1:
                raise _doubling()


def _doubling() -> InvalidSchema:
    return InvalidSchema(
        "the JSON schema has a recursive part that looks at the same inner value in two ways: "
        "each level of a payload would double the work"
    )
