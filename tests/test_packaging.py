"""What is installed, shipped and released: the lock files, the version, the sdist and the wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import forebay
from forebay.cli import main

ROOT: Final = Path(__file__).parents[1]
LOCKS: Final = ("requirements.lock", "requirements-build.lock", "requirements-java.lock")
LOCKED_LINE: Final = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[^\s;]+)(?: ; [^\\\n]+?)?(?: --hash=sha256:[0-9a-f]{64})+"
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- the lock files ----


def locked_lines(name: str) -> list[str]:
    """One line for each package, without comments."""
    joined = re.sub(r"\s*\\\n\s*", " ", text_of(name))
    return [line for line in joined.splitlines() if not line.lstrip().startswith("#")]


def locked(name: str) -> dict[str, Version]:
    found = {}
    for line in locked_lines(name):
        match = LOCKED_LINE.fullmatch(line)
        assert match, f"{name}: no exact version with hashes: {line}"
        found[match["name"]] = Version(match["version"])
    return found


def required() -> dict[str, list[Requirement]]:
    """What pyproject.toml requires, by the lock file that has it."""
    project = tomllib.loads(text_of("pyproject.toml"))
    groups, extras = project["dependency-groups"], project["project"]["optional-dependencies"]
    java = [*extras.pop("java"), *groups.pop("java")]
    build = [*project["build-system"]["requires"], *groups["build"]]
    everything = [
        *project["project"]["dependencies"],
        *(each for names in (*extras.values(), *groups.values()) for each in names),
    ]
    names = dict(zip(LOCKS, (everything, build, java), strict=True))
    return {
        lock: [Requirement(each) for each in given if isinstance(each, str)]
        for lock, given in names.items()
    }


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_satisfies_pyproject(name: str) -> None:
    """After a change of dependencies, run `make lock`."""
    versions = locked(name)
    requirements = required()[name]
    assert requirements
    for each in requirements:
        version = versions.get(canonicalize_name(each.name))
        assert version is not None, f"{name} has no {each.name}: run make lock"
        assert version in each.specifier, f"{name} has {each.name} {version}: run make lock"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_names_no_place(name: str) -> None:
    """Neither an index nor a host nor a file: it is the same wherever it was made."""
    lines = text_of(name).splitlines()
    assert [line for line in lines if re.search(r"://|/|\.(?:org|com|net|io)\b", line)] == []
    options = {word for line in locked_lines(name) for word in re.findall(r"--[a-z-]+", line)}
    assert options == {"--hash"}


def test_the_lock_files_agree() -> None:
    whole, build, java = map(locked, LOCKS)
    assert build.items() <= whole.items()
    assert not java.keys() & whole.keys()


@pytest.mark.parametrize(
    "line",
    ["click", "click==8.1", "click>=8.1 --hash=sha256:" + "0" * 64, "click==8.1 --hash=sha256:0"],
)
def test_a_line_without_an_exact_version_or_a_hash_is_found(line: str) -> None:
    assert LOCKED_LINE.fullmatch("click==8.1 --hash=sha256:" + "0" * 64)
    assert not LOCKED_LINE.fullmatch(line)


# ---- the version ----


def test_the_command_line_prints_the_version() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert done.stdout == f"forebay, version {forebay.__version__}\n"


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.*)$", text_of("CHANGELOG.md"), re.MULTILINE)
    version, _, date = headings[0].partition(" - ")
    assert version == forebay.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d|not released yet", date)


# ---- the sdist and the wheel ----


def build(hook: str, source: Path, target: Path, *settings: str) -> Path:
    """Calls a hook of the build backend in `source`, as pip does; it needs no network."""
    program = (
        "import sys; from scikit_build_core import build\n"
        "hook, target, *settings = sys.argv[1:]\n"
        "settings = dict(each.split('=', 1) for each in settings)\n"
        "print(getattr(build, hook)(target, config_settings=settings))"
    )
    command = [sys.executable, "-c", program, hook, str(target), *settings]
    done = subprocess.run(
        command, cwd=source, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("build_sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"forebay-{forebay.__version__}"


def relative_links(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)", prose)
    return [link for link in links if not re.match(r"\w+:", link)]


def test_the_links_of_every_document_work_in_an_sdist(unpacked: Path) -> None:
    documents = list(unpacked.rglob("*.md"))
    links = [(each, link) for each in documents for link in relative_links(each.read_text("utf-8"))]
    assert unpacked / "README.md" in {document for document, _ in links}
    broken = [(each.name, link) for each, link in links if not (each.parent / link).exists()]
    assert broken == []


def test_a_wheel_of_the_sdist_has_the_version_and_the_packages_alone(
    unpacked: Path, tmp_path: Path
) -> None:
    pure = ("wheel.cmake=false", "wheel.py-api=py3")
    wheel = zipfile.ZipFile(build("build_wheel", unpacked, tmp_path, *pure))
    names = wheel.namelist()
    metadata = f"forebay-{forebay.__version__}.dist-info"
    packages = {"forebay", "pyspark_forebay", "pyspark_forebay_pulsar"}
    assert {name.split("/")[0] for name in names} == {*packages, metadata}
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    fields = Parser().parsestr(wheel.read(f"{metadata}/METADATA").decode())
    assert fields["Version"] == forebay.__version__


# ---- the checks before a commit ----


def test_pre_commit_runs_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", text_of("Makefile"), re.MULTILINE)
    assert recipe
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    config: dict[str, Any] = yaml.safe_load(text_of(".pre-commit-config.yaml"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert [hook["entry"] for hook in hooks] == commands
    assert not any(hook["pass_filenames"] for hook in hooks)
