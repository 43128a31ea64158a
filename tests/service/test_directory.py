"""A data directory is one server's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.client.address import ServerInfo, is_id, read_server_info, server_file
from forebay.errors import DiskError, FormatError, LogLocked
from forebay.format.names import STORE_ID_FILE
from forebay.service.directory import DataDirectory

NOTE = ServerInfo("http://127.0.0.1:8650", "0" * 32, os.getpid())


def test_one_server_at_a_time(tmp_path: Path) -> None:
    first = DataDirectory(tmp_path / "new" / "data")
    with pytest.raises(LogLocked, match=f"process {os.getpid()}"):
        DataDirectory(tmp_path / "new" / "data")
    first.announce(NOTE)
    with pytest.raises(LogLocked, match=f"{os.getpid()} at {NOTE.url}"):
        DataDirectory(tmp_path / "new" / "data")
    first.close()
    DataDirectory(tmp_path / "new" / "data").close()


def test_the_note_is_its_owners_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    server_file(tmp_path).write_text("of a server that was killed")
    directory.announce(NOTE)
    assert read_server_info(tmp_path) == NOTE
    assert server_file(tmp_path).stat().st_mode & 0o777 == 0o600
    directory.close()
    directory.close()
    assert not server_file(tmp_path).exists()


def test_a_note_of_somebody_else_stays(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.announce(NOTE)
    other = ServerInfo("http://127.0.0.1:1", "1" * 32, 1)
    server_file(tmp_path).write_bytes(other.encode())
    directory.close()
    assert read_server_info(tmp_path) == other


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=str(tmp_path / "file")):
        DataDirectory(tmp_path / "file")


def test_a_store_has_one_id_from_its_first_server_on(tmp_path: Path) -> None:
    first = DataDirectory(tmp_path / "a")
    file = tmp_path / "a" / STORE_ID_FILE
    assert is_id(first.store_id)
    assert file.read_text() == first.store_id + "\n"
    assert file.stat().st_mode & 0o777 == 0o600
    first.close()
    again = DataDirectory(tmp_path / "a")
    other = DataDirectory(tmp_path / "b")
    assert again.store_id == first.store_id != other.store_id
    again.close()
    other.close()
    assert file.exists(), "it stays when the server goes"


def test_a_draft_of_an_id_that_was_never_used_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / (STORE_ID_FILE + ".tmp")).write_text("0123")
    directory = DataDirectory(tmp_path)
    assert is_id(directory.store_id)
    directory.close()
    assert not (tmp_path / (STORE_ID_FILE + ".tmp")).exists()


@pytest.mark.parametrize("text", [b"", b"0" * 31, b"0" * 33, b"G" * 32, b"\xff" * 32, b"0" * 1000])
def test_an_id_that_is_none_is_told_and_left(text: bytes, tmp_path: Path) -> None:
    (tmp_path / STORE_ID_FILE).write_bytes(text)
    for _ in range(2):  # and the directory is free again
        with pytest.raises(FormatError, match=STORE_ID_FILE):
            DataDirectory(tmp_path)
    assert (tmp_path / STORE_ID_FILE).read_bytes() == text
