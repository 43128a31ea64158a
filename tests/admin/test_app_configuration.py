"""The server tells its settings, and no secret among them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from forebay.config import describe
from forebay.settings import CloudSettings, StoreSettings
from support.served import served

TOKEN = "a-token-that-nobody-may-see"
SECRET = "hunter2hunter2"


def test_the_settings_are_told_in_the_shape_of_the_file(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        told = server.client.json("GET", "/v1/config")
        assert told == json.loads(json.dumps(describe(server.store.settings)))
        assert told["data"] == str(tmp_path)
        assert told["storage"]["wal"]["rotate_max_bytes"] == 64 * 1024 * 1024


def test_secrets_are_not_told(tmp_path: Path) -> None:
    settings = StoreSettings(
        data=tmp_path,
        cloud=CloudSettings(backend="fs", root=str(tmp_path / "objects")),
    )
    settings = replace(settings, admin=replace(settings.admin, token=TOKEN))
    settings = replace(
        settings,
        metadata=replace(settings.metadata, password=SECRET),
    )
    with served(settings) as server:
        text = server.client.request("GET", "/v1/config").read().decode()
    assert TOKEN not in text
    assert SECRET not in text
    assert json.loads(text)["admin"]["token"] == "***"
    assert json.loads(text)["metadata"]["password"] == "***"
