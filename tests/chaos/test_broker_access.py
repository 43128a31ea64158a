"""Without the token nothing is answered, over TLS or not, and the token is in no log."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from forebay.broker import danube_pb2 as pb
from forebay.broker.server import BrokerServer
from forebay.errors import UsageError
from forebay.settings import BrokerSettings
from support.hostile_broker import RawClient, attacked, serves

TOKEN = "a-token-that-is-in-no-log"
OPENSSL = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
    *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
)
METHODS = (
    "ProducerService/CreateProducer",
    "ProducerService/SendMessage",
    "ConsumerService/Subscribe",
    "ConsumerService/Ack",
    "Discovery/TopicLookup",
    "HealthCheck/HealthCheck",
)


async def test_calls_without_the_token_are_refused_and_the_token_is_not_logged(
    tmp_path: Path,
) -> None:
    refused = grpc.StatusCode.UNAUTHENTICATED
    with attacked(tmp_path, token=TOKEN) as server:
        address = server.where["broker"]
        wrong = (
            (),
            (("authorization", ""),),
            (("authorization", TOKEN),),
            (("authorization", f"Basic {TOKEN}"),),
            (("authorization", f"Bearer {TOKEN} "),),
            (("authorization", f"bearer {TOKEN}x"),),
            (("authorization", f"Bearer {TOKEN[:-1]}"),),
            (("x-authorization", f"Bearer {TOKEN}"),),
        )
        for metadata in wrong:
            async with RawClient(address, metadata) as client:
                for method in METHODS:
                    assert await client.status(method, b"") is refused, (metadata, method)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.receive(1).read()
                assert caught.value.code() is refused
        await serves(address, [("authorization", f"Bearer {TOKEN}")])
        assert TOKEN not in server.said
        assert TOKEN not in str(server.where)
        assert "a call without the token was refused" in server.said


@pytest.mark.parametrize("address", ["0.0.0.0:6650", "[::]:6650"])
def test_an_address_that_others_reach_needs_a_token(address: str) -> None:
    with pytest.raises(UsageError, match="token"):
        BrokerServer(BrokerSettings(listen=address)).bind()
    assert TOKEN not in repr(BrokerSettings(listen=address, token=TOKEN))


async def test_the_token_is_checked_over_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [*OPENSSL, "-keyout", str(key), "-out", str(cert)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    with attacked(tmp_path, token=TOKEN, cert_file=str(cert), key_file=str(key)) as server:
        address = server.where["broker"]
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        request = pb.TopicLookupRequest(topic="/default/none").SerializeToString()
        async with grpc.aio.secure_channel(address, credentials) as channel:
            stub: Any = channel.unary_unary("/danube.Discovery/TopicLookup")
            for metadata, status in (
                ((), grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", f"Bearer {TOKEN}"),), grpc.StatusCode.NOT_FOUND),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub(request, metadata=metadata, timeout=60)
                assert caught.value.code() is status
        async with RawClient(address) as plain, asyncio.timeout(60):
            got = await plain.status("Discovery/TopicLookup", request, seconds=5)
            assert got in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert TOKEN not in server.said
