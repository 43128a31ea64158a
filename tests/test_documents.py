"""What the documents name is there: files, sections, tests, commands and their options."""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import click
import pytest

from forebay.cli import main
from support.paths import ROOT, TESTS

PICTURES: Final = sorted((ROOT / "docs" / "images").glob("*.svg"))
DOCUMENTS: Final = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN: Final = re.compile(r"`([^`\n]+)`")
SHELLS: Final = {"", "console", "sh", "bash", "shell"}

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(text: str) -> str:
    return FENCE.sub("", text)


# ---- links ----


def anchors(text: str) -> set[str]:
    """Those of the headings, as they are made on the web; a second one of a name gets a number."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(text: str) -> list[str]:
    """Where the links and pictures of a document lead, but for those to other sites."""
    plain = SPAN.sub("", prose(text))
    inline = re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", plain)
    tags = re.findall(r"<(?:img|source|a)\b[^>]*?\b(?:src|srcset|href)=\"([^\"]+)\"", plain)
    named = re.findall(r"^\[[^]]+\]: (\S+)", plain, re.MULTILINE)
    return [each for each in (*inline, *tags, *named) if not re.match(r"https?:|mailto:", each)]


def broken_links(document: Path, text: str) -> list[str]:
    broken = []
    for link in links(text):
        name, _, section = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists():
            broken.append(f"{link}: there is no such file")
        elif section and target.suffix == ".md":
            there = anchors(text if target == document else text_of(target))
            if section not in there:
                broken.append(f"{link}: there is no such section")
    return broken


@each_document
def test_every_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document, text_of(document)) == []


def test_a_broken_link_would_be_found() -> None:
    here = ROOT / "README.md"
    text = "# Some `code`\n[a](#some-code) [b](#none) ![c](docs/no.svg) [d](LICENSE) `[e](f)`"
    assert [each.split(":")[0] for each in broken_links(here, text)] == ["#none", "docs/no.svg"]


# ---- tests ----


def names_in(path: Path) -> list[str]:
    return re.findall(r"^(?:async )?def (test_\w+)", text_of(path), re.MULTILINE)


def missing_tests(text: str) -> list[str]:
    """Tests that are named in code spans, and are not there.

    A name may be shortened: `*` and `…` stand for anything, `::name` is in the file that was named
    before it, and a file may be named without its folder.
    """
    missing = []
    files: list[Path] = []
    for span in SPAN.findall(prose(text)):
        file, colons, test = span.partition("::")
        if re.fullmatch(r"tests/[\w*/.-]*|test_[\w*]+\.py", file):
            within = file.startswith("tests/")
            files = sorted(ROOT.glob(file) if within else TESTS.rglob(file))
            if not files:
                missing.append(span)
                continue
        elif not (colons and not file) and not span.startswith("…_"):
            continue
        wanted = (test if colons else span if span.startswith("…_") else "").replace("…", "*")
        if wanted and not any(
            fnmatchcase(name, wanted) for path in files for name in names_in(path)
        ):
            missing.append(span)
    return missing


@each_document
def test_every_test_that_is_named_exists(document: Path) -> None:
    assert missing_tests(text_of(document)) == []


def test_a_test_that_is_missing_would_be_found() -> None:
    here = "`tests/test_documents.py::test_a_test_that_is_missing_would_be_found`"
    assert missing_tests(f"{here}, `::test_every_link_leads_somewhere`, `…_would_be_found`") == []
    wrong = ["tests/none/test_*.py", "test_documents.py::test_none", "…_is_none", "::test_no"]
    text = f"`{wrong[0]}` {here}, " + ", ".join(f"`{each}`" for each in wrong[1:])
    assert missing_tests(text) == wrong


def rows_without_a_test(text: str) -> list[str]:
    """Of tables whose last column, or the one before, says what shows a claim."""
    found = []
    column: int | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            column = None
        elif "shown by" in cells:
            column = cells.index("shown by")
        elif column is None or set(line) <= set("|- :"):
            continue
        elif not re.search(r"`tests/|the same|`test_|`::test_|`forebay bench", cells[column]):
            found.append(line)
    return found


@each_document
def test_every_claim_in_a_table_names_what_shows_it(document: Path) -> None:
    assert rows_without_a_test(text_of(document)) == []


CLAIMS: Final = re.compile(
    r"^\| claim \| shown by \| limits \|\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE
)


def guarantees(document: Path) -> list[str]:
    """The rows of its tables of claims, tests and limits."""
    return [row for rows in CLAIMS.findall(text_of(document)) for row in rows.splitlines()]


def test_the_readme_repeats_five_of_the_guarantees() -> None:
    all_of_them = guarantees(ROOT / "docs" / "guarantees.md")
    assert len(all_of_them) >= 25
    chosen = guarantees(ROOT / "README.md")
    assert len(chosen) == 5
    assert [row for row in chosen if row not in all_of_them] == []


def test_the_promises_of_the_guides_are_listed_with_their_tests() -> None:
    text = text_of(ROOT / "docs" / "guarantees.md")
    assert len(re.findall(r"`tests/", text)) > 125
    table = (
        "| claim | shown by |\n|---|---|\n| a | `tests/wal/test_log_kill.py` |\n| b | trust me |\n"
    )
    assert rows_without_a_test(table) == ["| b | trust me |"]


# ---- Danube's documents, line by line ----

SEEDS: Final = ROOT / "docs" / "seeds.md"
SEED_HEADER: Final = "| line | what | code | test | what differs, and why |"


def seed_rows(text: str) -> dict[str, list[list[str]]]:
    """The cells of the table of each document, by its number."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert SEED_HEADER in section
        rows = section.partition(SEED_HEADER)[2].splitlines()[2:]
        found[section[:3]] = [
            [cell.strip() for cell in row.strip("|").split("|")]
            for row in rows
            if row.startswith("|")
        ]
    return found


def wrong_seed_rows(rows: list[list[str]]) -> list[str]:
    """What is wrong with rows: their cells, and names of code or tests that are not there."""
    wrong = []
    for row in rows:
        where = " | ".join(row[:2])
        if len(row) != 5 or not row[0].isdigit() or not row[1]:
            wrong.append(f"{where}: five cells, and the first is a line")
            continue
        code, test = row[2], row[3]
        files = SPAN.findall(code)
        absent = [each for each in files if not (ROOT / "src" / "forebay" / each).is_file()]
        if not files or absent:
            wrong.append(f"{where}: no code at {absent or code}")
        named = [each for each in SPAN.findall(test) if each.startswith("tests/")]
        absent = missing_tests(test)
        if not named or absent:
            wrong.append(f"{where}: no test at {absent or test}")
    return wrong


def test_every_line_of_danubes_documents_names_code_and_test() -> None:
    tables = seed_rows(text_of(SEEDS))
    assert list(tables) == ["000", "001", "002", "003", "004"]
    rows = [row for table in tables.values() for row in table]
    assert len(rows) > 220
    assert wrong_seed_rows(rows) == []


def test_a_wrong_row_of_danubes_documents_would_be_found() -> None:
    here = "`tests/test_documents.py::test_every_link_leads_somewhere`"
    assert wrong_seed_rows([["1", "a", "`logs.py`", here, ""]]) == []
    for row, said in (
        (["a", "b", "`logs.py`", here, ""], "five cells"),
        (["1", "a", "`logs.py`", here], "five cells"),
        (["1", "a", "`none.py`", here, ""], "no code"),
        (["1", "a", "somewhere", here, ""], "no code"),
        (["1", "a", "`logs.py`", "`tests/test_documents.py::test_none`", ""], "no test"),
        (["1", "a", "`logs.py`", "trust me", ""], "no test"),
    ):
        [wrong] = wrong_seed_rows([row])
        assert said in wrong


# ---- decisions and sources ----


def test_a_decision_has_context_decision_and_consequence_and_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    records = sorted(folder.glob("[0-9]*.md"))
    assert records
    for number, record in enumerate(records, 1):
        text = text_of(record)
        assert text.startswith(f"# {number:03}: "), record.name
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequence",
        ]
        assert 10 <= len(text.splitlines()) <= 30, record.name
    listed = re.findall(r"^\| \[(\d+)\]\((.*?)\)", text_of(folder / "README.md"), re.MULTILINE)
    assert listed == [(record.name[:3], record.name) for record in records]


def missing_sources(text: str) -> list[str]:
    """Modules that are named in code spans, such as `wal/log.py`, and are not in the package."""
    named = [span for span in SPAN.findall(prose(text)) if re.fullmatch(r"[a-z_/]+(\.py|/)", span)]
    return [each for each in named if not (ROOT / "src" / "forebay" / each).exists()]


@pytest.mark.parametrize(
    "document",
    [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))],
    ids=lambda path: path.name,
)
def test_every_module_that_is_named_exists(document: Path) -> None:
    own = ("tests/", "native/", "docs/")
    assert [each for each in missing_sources(text_of(document)) if not each.startswith(own)] == []


def test_a_module_that_is_missing_would_be_found() -> None:
    assert missing_sources("`wal/log.py` `wal/none.py` `none/`") == ["wal/none.py", "none/"]


# ---- commands ----


def command_lines(text: str) -> Iterator[str]:
    """What a reader would type, of code spans, blocks of the shell, and indented lines."""
    for language, block in FENCE.findall(text):
        if language in SHELLS:
            for line in block.splitlines():
                yield line.removeprefix("$ ")
    plain = prose(text)
    yield from SPAN.findall(plain)
    yield from (line.strip() for line in plain.splitlines() if line.startswith("    "))


def calls(line: str) -> Iterator[list[str]]:
    """The words of each call of `forebay` in a line, without what the shell does with them."""
    for part in re.split(r"\s*(?:\|\|?|&&|;|(?<!\S)#|\d?>>?)\s*", line):
        found = re.match(r"(?:\w+=\S+ )*forebay ((?:[a-z]|-).*)$", part.strip())
        if found:
            yield shlex.split(found[1].replace("'", "").replace('"', ""))


def wrong_call(words: list[str]) -> str | None:
    """What a call names that there is not."""
    command: click.Command = main
    words = list(words)
    while words:
        word = words.pop(0)
        known = {
            name: option
            for option in command.params
            for name in (*option.opts, *option.secondary_opts, "--help", "-h")
        }
        if word.startswith("-") and len(word) > 1:
            name = word.partition("=")[0]
            if name not in known:
                return f"{command.name} has no option {name}"
            option = known[name]
            flag = isinstance(option, click.Option) and (option.is_flag or option.count)
            if words and not flag and "=" not in word and name not in {"--help", "-h"}:
                words.pop(0)
        elif isinstance(command, click.Group):
            if not re.fullmatch(r"[a-z]+", word):
                return None  # a placeholder, such as <command>
            if word not in command.commands:
                return f"there is no command {word!r}"
            command = command.commands[word]
    return None


def wrong_calls(text: str) -> list[str]:
    return [
        f"{' '.join(words)}: {wrong}"
        for line in command_lines(text)
        for words in calls(line)
        if (wrong := wrong_call(words)) is not None
    ]


@each_document
def test_every_command_and_option_that_is_named_exists(document: Path) -> None:
    assert wrong_calls(text_of(document)) == []


def test_a_command_that_is_missing_would_be_found() -> None:
    text = (
        "`forebay fly` and `forebay topics --wings`\n```console\n"
        "$ seq 9 | forebay produce numbers --durability synced && forebay bench moon\n"
        "forebay: an error, and no command\n```\n"
        "`forebay <command> --any`, `forebay --log-format json sweep --dry-run > out`\n"
    )
    assert [each.split(": ")[1] for each in wrong_calls(text)] == [
        "there is no command 'moon'",
        "there is no command 'fly'",
        "topics has no option --wings",
    ]


# ---- pictures ----


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_stands_alone_and_knows_dark_pages(picture: Path) -> None:
    text = text_of(picture)
    root = ET.fromstring(text)
    space = {"svg": "http://www.w3.org/2000/svg"}
    assert root.find("svg:title", space) is not None
    assert root.find("svg:desc", space) is not None
    # What `forebay bench --plot` draws is transparent, in tones for both: test_bench_plot.py.
    assert "prefers-color-scheme: dark" in text or 'id="figure_1"' in text
    assert not re.search(r"""(href|src)=["']?http|url\(["']?http|@import""", text), "to be fetched"


def test_every_picture_is_shown() -> None:
    shown = {
        (document.parent / link).resolve()
        for document in DOCUMENTS
        for link in links(text_of(document))
        if link.endswith(".svg")
    }
    assert [path.name for path in PICTURES if path not in shown] == []
