"""Readers that do not read: they cost the server little, and lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from forebay.broker import streams_pb2 as pb
from forebay.broker.fetch_stream import encode_response
from forebay.format.frame import scan
from forebay.limits import MIB
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from support.server_processes import ServerProcess

READERS = 12
TOPIC_BYTES = 64 * MIB


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(each for each in status.splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def opening() -> bytes:
    opened = pb.OpenFetch(topic="/default/orders", offset=0, end_offset=TOPIC_BYTES // 1024)
    return pb.FetchRequest(open=opened).SerializeToString()


@pytest.mark.parametrize("uploaded", [False, True], ids=["in segments", "in objects"])
async def test_readers_that_do_not_read_cost_little(tmp_path: Path, uploaded: bool) -> None:
    settings = StoreSettings(tmp_path / "data", uploader=UploaderSettings(enabled=False))
    with Store(settings) as store:
        topic = store.topic("orders")
        topic.append_many([bytes(900)] * (TOPIC_BYTES // 1024))
        if uploaded:
            topic.upload()
    with ServerProcess("serve", tmp_path / "data", tmp_path / "log") as server:
        server.wait_ready()
        calls: list[Any] = []
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            grpc.aio.insecure_channel(server.where["broker"], options) for _ in range(READERS)
        ]
        before = resident_bytes(server.pid)
        for channel in channels:
            calls.append(channel.stream_stream("/forebay.Streams/FetchStream")())
            await calls[-1].write(opening())
            await calls[-1].read()
        first = pb.FetchResponse.FromString(await calls[0].read())
        assert len(scan(first.frames)) > 0
        assert resident_bytes(server.pid) - before < READERS * 10 * MIB
        count = len(scan(first.frames))
        while isinstance(raw := await calls[0].read(), bytes):  # it goes on where it was
            response = pb.FetchResponse.FromString(raw)
            count += len(scan(response.frames, expected=count, consecutive=True))
        assert count == TOPIC_BYTES // 1024
        for channel in channels:
            await channel.close()


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**63 - 1, 2**64 - 1])
def test_a_response_is_the_message_that_the_protocol_describes(number: int) -> None:
    frames = bytes(number % 1000)
    found = pb.FetchResponse.FromString(encode_response(memoryview(frames), number))
    assert (found.frames, found.next_offset) == (frames, number)
