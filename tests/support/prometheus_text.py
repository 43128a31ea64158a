"""A reader of Prometheus' text format that is strict about its rules.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE: Final = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')
ESCAPED: Final = re.compile(r"\\(.)")
KINDS: Final = ("counter", "gauge", "histogram")
SUFFIXES: Final = {"histogram": ("_bucket", "_sum", "_count")}

Labels = tuple[tuple[str, str], ...]


@dataclass
class Family:
    name: str
    text: str
    kind: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)
    """By the suffix of the name and the labels."""

    @property
    def total(self) -> float:
        """How much was counted, all labels together."""
        suffix = "_count" if self.kind == "histogram" else ""
        return sum(number for (end, _), number in self.samples.items() if end == suffix)


def parse(page: str) -> dict[str, Family]:
    """The families of a page; AssertionError for one that breaks a rule."""
    assert not page or page.endswith("\n")
    families: dict[str, Family] = {}
    family: Family | None = None
    lines = iter(page.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            family = _header(line, next(lines))
            assert family.name not in families, f"{family.name} is there twice"
            families[family.name] = family
        else:
            assert family is not None, f"a sample before its family: {line}"
            _sample(line, family)
    for each in families.values():
        _check(each)
    return families


def _header(help_line: str, type_line: str) -> Family:
    name, text = help_line.removeprefix("# HELP ").split(" ", 1)
    assert NAME.fullmatch(name), name
    assert not re.search(r"(?<!\\)(?:\\\\)*\\(?![\\n])", text), "escapes: only \\\\ and \\n"
    mark, typed, kind = type_line.rsplit(" ", 2)
    assert (mark, typed) == ("# TYPE", name), type_line
    assert kind in KINDS, kind
    return Family(name, _unescaped(text), kind)


def _sample(line: str, family: Family) -> None:
    found = SAMPLE.fullmatch(line)
    assert found, line
    suffix = found[1].removeprefix(family.name)
    assert found[1].startswith(family.name), f"{line} stands below {family.name}"
    assert suffix in SUFFIXES.get(family.kind, ("",)), line
    key = (suffix, _labels(found[2] or ""))
    assert key not in family.samples, f"twice: {line}"
    family.samples[key] = float(found[3])


def _labels(text: str) -> Labels:
    found, position = [], 0
    while position < len(text):
        label = LABEL.match(text, position)
        assert label, f"no label: {text[position:]}"
        found.append((label[1], _unescaped(label[2])))
        position = label.end()
    names = [name for name, _ in found]
    assert len(set(names)) == len(names), f"a label twice: {text}"
    return tuple(found)


def _unescaped(text: str) -> str:
    return ESCAPED.sub(lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def _check(family: Family) -> None:
    if family.kind == "histogram":
        for labels in {labels for suffix, labels in family.samples if suffix == "_count"}:
            _check_histogram(family, labels)
        return
    assert not any(name == "le" for _, labels in family.samples for name, _ in labels)
    if family.kind == "counter":
        assert all(number >= 0 for number in family.samples.values()), family.name


def _check_histogram(family: Family, labels: Labels) -> None:
    """Bounds rise, counts never fall, and the last bucket holds everything."""
    buckets = [
        (float(own[-1][1]), number)
        for (suffix, own), number in family.samples.items()
        if suffix == "_bucket" and own[-1][0] == "le" and own[:-1] == labels
    ]
    assert all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(buckets)), buckets
    assert buckets[-1] == (float("inf"), family.samples["_count", labels])
    assert ("_sum", labels) in family.samples
