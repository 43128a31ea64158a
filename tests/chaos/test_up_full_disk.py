"""A disk that is full: appends are refused with the reason, nothing is lost, and it goes on.

The disk is a real one: a small file system in memory, in a mount namespace of the server's own.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from forebay.client.http import topic_path
from forebay.errors import DiskError, ForebayError, LogStopped
from forebay.format.names import parse_topic
from support.server_fixtures import absent
from support.server_processes import PATIENCE, ServerProcess

TOPIC: Final = "/default/orders"
DISK_MIB: Final = 24
PAYLOAD: Final = "." * 1000
MOUNT: Final = f'mount -t tmpfs -o size={DISK_MIB}m none "$0" && exec "$@"'


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[ServerProcess]:
    place = tmp_path / "disk"
    place.mkdir()
    before = ("unshare", "-m", "sh", "-c", MOUNT, str(place))
    if shutil.which("unshare") is None:
        absent("no unshare: it comes with util-linux")
    tried = subprocess.run([*before, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        absent(f"no private mounts here: {tried.stderr.strip()}")
    with ServerProcess("serve", place, tmp_path / "log", before) as server:
        yield server


def status_of_append(server: ServerProcess) -> int:
    address = str(server.where["url"]).removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request("POST", topic_path(parse_topic(TOPIC), "messages"), body=b"x" * 1000)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.timeout(300)
def test_a_full_disk_refuses_appends_and_loses_nothing(small_disk: ServerProcess) -> None:
    server = small_disk
    inside = Path(f"/proc/{server.pid}/root") / str(server.where["data"]).lstrip("/")
    ballast = inside / "ballast"
    acknowledged: dict[int, str] = {}

    def append(number: int) -> None:
        texts = [f"{number} {each} {PAYLOAD}" for each in range(100)]
        answer = server.produce(TOPIC, texts)
        offsets = range(answer["first_offset"], answer["next_offset"])
        acknowledged.update(zip(offsets, texts, strict=True))

    append(0)
    free = os.statvfs(inside)
    with ballast.open("wb") as file:
        file.truncate(0)
        os.posix_fallocate(file.fileno(), 0, (free.f_bavail - 512) * free.f_frsize)
    number = 1
    refusal: ForebayError | None = None
    while refusal is None:
        try:
            append(number)
        except (DiskError, LogStopped) as error:
            refusal = error
        number += 1
        assert number < DISK_MIB * 100, "the disk does not get full"
    assert "No space left on device" in str(refusal)
    # Whoever asks again is refused for the same reason, and the server goes on.
    for _ in range(3):
        with pytest.raises((DiskError, LogStopped), match="No space left on device"):
            append(number)
        number += 1
    assert status_of_append(server) == 507
    assert server.client.json("GET", "/healthz")["status"] == "ok"

    ballast.unlink()

    def goes_on() -> bool:
        nonlocal number
        number += 1
        try:
            append(number)
        except (DiskError, LogStopped):
            return False
        return True

    server.wait_until(goes_on, "an append after space was freed")
    found_list = server.consume(TOPIC)
    assert [each["offset"] for each in found_list] == list(range(len(found_list)))
    found = {each["offset"]: each["payload"] for each in found_list}
    assert {offset: found[offset] for offset in acknowledged} == acknowledged
    assert server.stop() == 0
