"""A data directory is one server's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.errors import DiskError, LogLocked
from forebay.remote import ServerNote, read_note, server_file
from forebay.service.directory import DataDirectory

NOTE = ServerNote("http://127.0.0.1:8650", "0" * 32, os.getpid())


def test_one_server_at_a_time(tmp_path: Path) -> None:
    first = DataDirectory(tmp_path / "new" / "data")
    with pytest.raises(LogLocked, match=f"process {os.getpid()}: use that server"):
        DataDirectory(tmp_path / "new" / "data")
    first.announce(NOTE)
    with pytest.raises(LogLocked, match=f"process {os.getpid()} at http://127.0.0.1:8650"):
        DataDirectory(tmp_path / "new" / "data")
    first.close()
    DataDirectory(tmp_path / "new" / "data").close()


def test_the_note_is_its_owners_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    server_file(tmp_path).write_text("of a server that was killed")
    directory.announce(NOTE)
    assert read_note(tmp_path) == NOTE
    assert server_file(tmp_path).stat().st_mode & 0o777 == 0o600
    directory.close()
    directory.close()
    assert not server_file(tmp_path).exists()


def test_a_note_of_somebody_else_stays(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.announce(NOTE)
    other = ServerNote("http://127.0.0.1:1", "1" * 32, 1)
    server_file(tmp_path).write_bytes(other.encode())
    directory.close()
    assert read_note(tmp_path) == other


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot be used"):
        DataDirectory(tmp_path / "file")
