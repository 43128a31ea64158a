"""The ways through the code in ARCHITECTURE.md: the files exist, are few, and are passed."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

import forebay
from forebay.settings import StoreSettings, UploaderSettings
from support.paths import ROOT
from support.served import served

SRC: Final = ROOT / "src" / "forebay"
FILES_MAX: Final = {
    "An append": 12,
    "A cold read": 11,
    "An offload on Spark": 14,
    "A sink batch through a server": 13,
    "An HTTP POST": 10,
}
ELSEWHERE: Final = {
    "An append": {"format/codec.py"},  # chooses the encoder when it is imported
    "A cold read": {"objects/remote.py"},  # or objects/local.py, as here
    "An HTTP POST": set[str](),
}
"""Files of a way that a trace on local disk does not pass."""


def drawn() -> dict[str, set[str]]:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = re.split(r"\n## ", text.split("\n## Five ways through the code\n")[1])[0]
    parts = re.split(r"\n### (.+)\n", section)[1:]
    return {
        name: set(re.findall(r"[a-z_/]+\.py", body))
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_five_ways_are_drawn() -> None:
    assert drawn().keys() == FILES_MAX.keys()


@pytest.mark.parametrize("way", FILES_MAX)
def test_a_way_names_files_that_exist_and_passes_few(way: str) -> None:
    files = drawn()[way]
    assert [name for name in sorted(files) if not (SRC / name).is_file()] == []
    # Either backend is one file of the way.
    passed = files - {"objects/remote.py"} if "objects/local.py" in files else files
    assert 5 <= len(passed) <= FILES_MAX[way]


@contextmanager
def traced() -> Iterator[set[str]]:
    """The files of the package in which a function is called, here or on a thread begun inside."""
    passed: set[str] = set()
    root = f"{SRC}/"

    def called(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            passed.add(frame.f_code.co_filename.removeprefix(root))

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield passed
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def not_passed(way: str, passed: set[str]) -> set[str]:
    return drawn()[way] - passed - ELSEWHERE[way]


def test_an_append_passes_the_files_that_are_drawn(tmp_path: Path) -> None:
    with traced() as passed, forebay.open(tmp_path) as store:
        store.topic("orders").append(b"hello", durability="synced")
    assert not_passed("An append", passed) == set()


def test_a_cold_read_passes_the_files_that_are_drawn(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path, uploader=UploaderSettings(enabled=False))
    with forebay.open(settings) as store:
        store.topic("orders").append_many([b"hello"] * 100)
        store.topic("orders").upload()
    for file in sorted((tmp_path / "wal").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    with traced() as passed, forebay.open(settings) as store:
        assert sum(1 for _ in store.topic("orders").read(0, end=100)) == 100
    assert not_passed("A cold read", passed) == set()


def test_an_http_post_passes_the_files_that_are_drawn(tmp_path: Path) -> None:
    with traced() as passed, served(tmp_path) as server:
        path = "/v1/topics/default/orders/messages"
        server.client.request("POST", path, body=b'{"payload": "hello"}\n').read()
    assert not_passed("An HTTP POST", passed) == set()
