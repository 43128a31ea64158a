"""The files of the page: served as they are, kept by browsers, and in the package."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path

import pytest

from forebay.admin.page import assets
from forebay.errors import UsageError
from support.paths import ROOT
from support.served import Served, served

PAGE = Path(str(resources.files("forebay.admin.page") / "static"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


def test_the_page_is_served_with_a_policy_that_allows_nothing_from_elsewhere(
    server: Served,
) -> None:
    answer = server.client.request("GET", "/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.read() == (PAGE / "index.html").read_bytes()


KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


def test_every_file_has_its_type_and_is_sent_again_only_when_it_changed(server: Served) -> None:
    for file in PAGE.iterdir():
        answer = server.client.request("GET", f"/assets/{file.name}")
        assert answer.read() == file.read_bytes()
        assert answer.headers["content-type"].startswith(KINDS[file.suffix])
        known = {"If-None-Match": answer.headers["etag"]}
        again = server.client.request("GET", f"/assets/{file.name}", headers=known)
        assert (again.status, again.read()) == (304, b"")


def test_a_file_that_is_not_there_is_not_found(server: Served) -> None:
    for name in ("nothing.js", "..%2Fassets.py", "index.html%00"):
        with pytest.raises(UsageError):
            server.client.request("GET", f"/assets/{name}")


def test_the_page_names_only_files_that_are_here() -> None:
    texts = [path.read_text() for path in PAGE.iterdir() if not path.name.startswith("uplot")]
    named = {name for text in texts for name in re.findall(r'"/assets/([\w.]+)"', text)}
    named |= {name for text in texts for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert named
    assert named <= assets.load().keys()
    here = {path.name for path in PAGE.iterdir()}
    assert here - named == {"index.html", "uplot.LICENSE.txt"}


def test_nothing_in_the_page_points_to_another_host() -> None:
    for path in PAGE.iterdir():
        if not path.name.startswith("uplot"):
            hosts = set(re.findall(r"https?://[^\s\"'`]+", path.read_text()))
            assert hosts <= {"http://www.w3.org/2000/svg"}, path.name


def test_scripts_and_styles_are_files_of_their_own() -> None:
    text = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", text) == []
    assert "<style" not in text
    assert re.findall(r"\son\w+=", text) == []
    assert re.findall(r"\sstyle=", text) == []


def test_no_rule_keeps_a_file_of_the_page_out_of_the_package() -> None:
    """The build takes what is in a package's folder and is not ignored."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert "src/forebay" in project["wheel"]["packages"]
    rules = [line.strip() for line in (ROOT / ".gitignore").read_text().splitlines() if line]
    for path in PAGE.iterdir():
        kept_out = [rule for rule in rules if fnmatch(path.name, rule.rstrip("/"))]
        assert kept_out == [], path.name
