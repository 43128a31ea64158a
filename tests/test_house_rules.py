"""The rules of this repository that no other tool checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from support import hexdumps
from support.paths import ROOT, SUPPORT, TESTS

SRC: Final = ROOT / "src"
SOURCES: Final = sorted(SRC.rglob("*.py"))

FUNCTION_LINES_MAX: Final = 70
NAMELESS: Final = {"utils", "util", "helpers", "helper", "common", "base", "core", "manager"}

ENTRY_POINTS: Final = {
    "forebay",
    "forebay.cli",
    "forebay.__main__",
    "forebay.testing",
    "pyspark_forebay",
    "pyspark_forebay_pulsar",
}
OPENED_BY_NAME: Final = {
    "forebay.wal.view": "processes that only read; the error of a locked topic names it",
}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_function_is_longer_than_70_lines() -> None:
    long = [
        f"{module_name(path)}.{function.name}: {lines} lines"
        for path in SOURCES
        for function in functions(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []


def imports(path: Path) -> Iterator[str]:
    """Everything that a module imports anywhere in it, and all packages above that."""
    for node in ast.walk(ast.parse(text_of(path))):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in found:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def test_every_module_is_reached_from_an_entry_point() -> None:
    graph = {module_name(path): set(imports(path)) for path in SOURCES}
    reached: set[str] = set()
    waiting = ENTRY_POINTS | OPENED_BY_NAME.keys()
    while waiting:
        name = waiting.pop()
        if name in graph and name not in reached:
            reached.add(name)
            waiting |= graph[name]
    assert sorted(graph.keys() - reached) == []


@pytest.mark.parametrize("module", sorted(OPENED_BY_NAME))
def test_a_module_that_users_open_by_name_is_named_to_them(module: str) -> None:
    own = SRC.joinpath(*module.split(".")).with_suffix(".py")
    assert any(module in text_of(path) for path in SOURCES if path != own)


def test_one_module_knows_the_frame_header() -> None:
    header = "<Q" + "II"
    knowing = [module_name(path) for path in SOURCES if f'"{header}"' in text_of(path)]
    assert knowing == ["forebay.format.pure"]


def test_module_names_say_what_is_in_them() -> None:
    for path in SOURCES:
        assert not NAMELESS & set(module_name(path).strip("_").split("."))


# ---- where tests are ----

OF_THE_WHOLE: Final = {"chaos", "scenarios", "support"}
"""Folders of tests that are about no single package."""
OF_THE_REPOSITORY: Final = {
    "bare",
    "deploy",
    "documents",
    "examples",
    "house_rules",
    "packaging",
} | {
    "readme",
    "ways",
}


def modules_beside(test: Path) -> set[str]:
    """The source modules that a test in this folder may be about: the package itself is one."""
    folder = SRC / "forebay" / test.parent.relative_to(TESTS)
    return {path.stem for path in folder.glob("*.py")} | {folder.name}


def test_every_test_module_is_named_after_its_source_module() -> None:
    """`tests/wal/test_log_append.py` is about `wal/log.py`, and `append` is a part of it."""
    astray = []
    for path in sorted(TESTS.rglob("test_*.py")):
        folder, name = path.parent.relative_to(TESTS), path.stem.removeprefix("test_")
        if folder.parts[:1] and folder.parts[0] in OF_THE_WHOLE:
            continue
        modules = modules_beside(path)
        if not folder.parts:
            modules |= OF_THE_REPOSITORY | {"main_module"}
        if not any(name == module or name.startswith(f"{module}_") for module in modules):
            astray.append(str(path.relative_to(TESTS)))
    assert astray == []


def test_what_tests_share_is_in_one_folder() -> None:
    elsewhere = [
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if SUPPORT not in path.parents and not path.name.startswith("test_")
    ]
    assert elsewhere == ["conftest.py"]


# ---- the format documents ----


def documents() -> list[str]:
    return sorted(path.name for path in hexdumps.FORMATS.glob("*.md"))


def test_every_format_document_is_referred_to_from_the_code() -> None:
    code = "".join(text_of(path) for path in SOURCES)
    assert documents()
    assert [name for name in documents() if f"docs/formats/{name}" not in code] == []


def test_the_code_refers_to_documents_that_exist() -> None:
    named = {
        match
        for path in SOURCES
        for match in re.findall(r"docs/formats/([\w-]+\.md)", text_of(path))
    }
    assert sorted(named - set(documents())) == []


def test_every_format_document_has_a_hex_dump() -> None:
    assert [name for name in documents() if not hexdumps.blocks(name)] == []


def test_every_hex_dump_is_checked_by_the_golden_test() -> None:
    dumps = {(name, at) for name in documents() for at in range(len(hexdumps.blocks(name)))}
    checked = set()
    for node in ast.walk(ast.parse(text_of(TESTS / "format" / "test_format_golden.py"))):
        match node:
            case ast.Call(
                func=ast.Name(id="block"),
                args=[ast.Constant(value=str() as name), ast.Constant(value=int() as at)],
            ):
                checked.add((name, at))
    assert checked == dumps


# ---- what an import costs ----


def test_importing_forebay_imports_no_heavy_library() -> None:
    program = "import forebay, sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "forebay" in loaded
    assert loaded & {"click", "rich", "pyspark", "grpc", "pyarrow", "numpy", "pandas"} == set()


# ---- what is left lying around ----

MACHINE_PATH: Final = re.compile(r"(?<![\w./])/(?:home|root|work|Users)/\w")
MARKS: Final = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")


def project_texts() -> list[Path]:
    folders = [SRC, ROOT / "tests", ROOT / "docs", ROOT / "native"]
    endings = {".py", ".pyi", ".md", ".c", ".h", ".toml", ".yml", ".yaml"}
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in endings]
    return sorted({*found, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"})


@pytest.mark.parametrize("pattern", [MACHINE_PATH, MARKS], ids=["machine paths", "marks"])
def test_nothing_unfinished_and_no_ones_paths_are_in_the_project(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_texts()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
