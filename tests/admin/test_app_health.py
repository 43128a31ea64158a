"""The server says that it lives, and whether it is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import ServiceUnavailable
from support.served import served


def test_a_server_tells_which_run_it_is(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        answer = server.client.json("GET", "/healthz")
        assert answer["instance"] == server.context.instance


def test_a_server_that_is_not_ready_says_why(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert server.client.json("GET", "/readyz")["status"] == "ready"
        server.context.unready = "topics are being opened"
        with pytest.raises(ServiceUnavailable, match="topics are being opened"):
            server.client.json("GET", "/readyz")
