"""The fault proxy: transparent without faults, and each fault happens and is counted."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from forebay.errors import InvalidSetting
from support.paths import TESTS
from support.proxy import FaultProxy, Faults, ProxyProcess
from support.proxy_http import (
    HEAD_BYTES_MAX,
    LINE_BYTES_MAX,
    Framer,
    MalformedHttp,
    request_body,
    request_head,
    response_body,
    response_head,
)
from support.s3_server import refusing_port

SECONDS_MAX = 60.0
KINDS: list[type[FaultProxy] | type[ProxyProcess]] = [FaultProxy, ProxyProcess]
EITHER_KIND = pytest.mark.parametrize("kind", KINDS, ids=["thread", "process"])


# ---- the servers behind the proxy ----


class _Quiet:
    """Clients that vanish are part of these tests, not an error."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _EchoHandler(socketserver.BaseRequestHandler):
    server: EchoServer

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.server.received += data
            self.request.sendall(data)
        self.request.sendall(b"end")


class EchoServer(_Quiet, socketserver.ThreadingTCPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EchoHandler)
        self.received = bytearray()


class _ObjectHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ObjectServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of the base class
        pass

    def do_PUT(self) -> None:
        body = self._body()
        self.server.requests.append(("PUT", self.path))
        self.server.objects[self.path] = body
        self._answer(hashlib.sha256(body).hexdigest().encode())

    def do_POST(self) -> None:
        self.do_PUT()

    def do_HEAD(self) -> None:
        self.server.requests.append((self.command, self.path))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.objects[self.path])))
        self.end_headers()

    def do_DELETE(self) -> None:
        self.server.requests.append(("DELETE", self.path))
        self.send_response(204)
        self.end_headers()

    def do_GET(self) -> None:
        path, _, how = self.path.partition("?")
        self.server.requests.append(("GET", path))
        body = self.server.objects[path]
        if how == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(body), 7001):
                part = body[start : start + 7001]
                self.wfile.write(b"%x;note=1\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\nX-Trailer: 1\r\n\r\n")
        elif how == "until-close":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True
        else:
            self._answer(body)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


class ObjectServer(_Quiet, ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ObjectHandler)
        self.requests: list[tuple[str, str]] = []
        self.objects: dict[str, bytes] = {}


@contextlib.contextmanager
def serving(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(SECONDS_MAX)
        server.server_close()


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    with serving(EchoServer()) as server:
        yield server


@pytest.fixture
def objects() -> Iterator[ObjectServer]:
    with serving(ObjectServer()) as server:
        yield server


def address_of(server: socketserver.TCPServer) -> str:
    return f"127.0.0.1:{server.server_address[1]}"


# ---- clients ----


@contextlib.contextmanager
def connected(proxy: FaultProxy | ProxyProcess) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), timeout=SECONDS_MAX) as client:
        yield client


@contextlib.contextmanager
def http_client(proxy: FaultProxy | ProxyProcess) -> Iterator[http.client.HTTPConnection]:
    with contextlib.closing(
        http.client.HTTPConnection(proxy.host, proxy.port, timeout=SECONDS_MAX)
    ) as client:
        yield client


def ask(
    client: http.client.HTTPConnection, method: str, path: str, body: Any = None
) -> tuple[int, bytes]:
    client.request(method, path, body=body, encode_chunked=isinstance(body, Iterator))
    answer = client.getresponse()
    return answer.status, answer.read()


def receive(client: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (part := client.recv(min(1 << 16, count - len(data)))):
        data += part
    return bytes(data)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        threading.Event().wait(0.005)


def there_and_back(client: socket.socket, data: bytes) -> bytes:
    """What an echo server sends back, received while the rest is sent."""
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    answer = receive(client, len(data))
    sender.join(SECONDS_MAX)
    return answer


# ---- without faults ----


@EITHER_KIND
def test_without_faults_every_byte_of_64_connections_passes(
    kind: type[FaultProxy | ProxyProcess], echo: EchoServer
) -> None:
    data = [random.Random(number).randbytes(100_000 + number) for number in range(64)]

    def exchange(number: int) -> bool:
        with connected(proxy) as client:
            same = there_and_back(client, data[number]) == data[number]
            client.shutdown(socket.SHUT_WR)
            return same and receive(client, 4) == b"end"

    with kind(address_of(echo)) as proxy, ThreadPoolExecutor(64) as pool:
        assert all(pool.map(exchange, range(64)))
        eventually(lambda: proxy.stats().connections_open == 0)
        stats = proxy.stats()
    total = sum(map(len, data))
    assert (stats.connections, stats.bytes_up, stats.bytes_down) == (64, total, total + 64 * 3)
    assert stats.faults == stats.failures == {}


def test_a_transfer_larger_than_all_buffers_passes_a_delay(echo: EchoServer) -> None:
    data = random.Random(1).randbytes(24 << 20)
    faults = Faults(latency_ms=2)
    with FaultProxy(address_of(echo), faults=faults) as proxy, connected(proxy) as client:
        assert there_and_back(client, data) == data


@EITHER_KIND
def test_requests_are_counted_exactly_and_bodies_pass_unchanged(
    kind: type[FaultProxy | ProxyProcess], objects: ObjectServer
) -> None:
    body = random.Random(2).randbytes(3_000_000)
    digest = hashlib.sha256(body).hexdigest().encode()
    with kind(address_of(objects), http=True) as proxy, http_client(proxy) as client:
        for _ in range(20):
            assert ask(client, "PUT", "/small", b"x")[0] == 200
        assert ask(client, "PUT", "/empty", b"") == (200, hashlib.sha256().hexdigest().encode())
        assert ask(client, "PUT", "/a", body) == (200, digest)
        parts = iter([body[:1], body[1:70_000], body[70_000:]])
        assert ask(client, "POST", "/b", parts) == (200, digest)
        assert ask(client, "HEAD", "/a") == (200, b"")
        assert ask(client, "DELETE", "/small") == (204, b"")
        assert ask(client, "GET", "/a") == (200, body)
        assert ask(client, "GET", "/b?chunked") == (200, body)
        assert ask(client, "GET", "/b?until-close") == (200, body)
        stats = proxy.stats()
    assert stats.requests == {"PUT": 22, "POST": 1, "HEAD": 1, "DELETE": 1, "GET": 3}
    assert len(objects.requests) == 28
    assert stats.connections == 1
    assert stats.faults == stats.failures == {}


def test_parallel_requests_are_counted_exactly(objects: ObjectServer) -> None:
    def put(number: int) -> None:
        with http_client(proxy) as client:
            for _ in range(10):
                assert ask(client, "PUT", f"/{number}", bytes(number * 1000))[0] == 200

    with FaultProxy(address_of(objects), http=True) as proxy, ThreadPoolExecutor(16) as pool:
        list(pool.map(put, range(16)))
        assert proxy.requests_by_method() == {"PUT": 160}


EXPECTING = b"PUT /e HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"


def test_a_client_that_waits_for_100_continue_gets_it(objects: ObjectServer) -> None:
    with FaultProxy(address_of(objects), http=True) as proxy, connected(proxy) as client:
        for _ in range(2):
            client.sendall(EXPECTING)
            interim = b"HTTP/1.1 100 Continue\r\n\r\n"
            assert receive(client, len(interim)) == interim
            client.sendall(b"hello")
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert (answer.status, len(answer.read())) == (200, 64)
        assert objects.objects == {"/e": b"hello"}
        assert proxy.requests_by_method() == {"PUT": 2}


def test_an_upstream_that_is_not_there_resets_the_client() -> None:
    with refusing_port() as port, FaultProxy(f"127.0.0.1:{port}") as proxy:
        with pytest.raises(ConnectionResetError), connected(proxy) as client:
            client.recv(1)
        assert proxy.stats().failures == {"upstream": 1}


# ---- delays ----


@EITHER_KIND
def test_latency_delays_each_turn_by_at_least_itself(
    kind: type[FaultProxy | ProxyProcess], echo: EchoServer
) -> None:
    with kind(address_of(echo), faults=Faults(latency_ms=60)) as proxy, connected(proxy) as client:
        start = time.monotonic()
        for turn in (b"one", b"two"):
            client.sendall(turn)
            assert receive(client, 3) == turn
        assert time.monotonic() - start >= 0.12


def test_bytes_keep_flowing_into_a_latency(echo: EchoServer) -> None:
    with FaultProxy(address_of(echo), faults=Faults(latency_ms=60_000)) as proxy:
        with connected(proxy) as one, connected(proxy) as two:
            for client in (one, two):
                client.sendall(bytes(12 << 20))
            eventually(lambda: proxy.stats().bytes_up == 24 << 20)
        assert not echo.received


def test_latency_delays_an_injected_answer_too(objects: ObjectServer) -> None:
    faults = Faults(latency_ms=60, http_error_rate=1)
    proxy = FaultProxy(address_of(objects), http=True, faults=faults)
    with proxy, http_client(proxy) as client:
        start = time.monotonic()
        assert ask(client, "GET", "/")[0] == 503
        assert time.monotonic() - start >= 0.06


def test_jitter_never_changes_the_order_of_bytes(echo: EchoServer) -> None:
    data = random.Random(3).randbytes(2_000_000)
    faults = Faults(latency_ms=1, jitter_ms=20)
    with FaultProxy(address_of(echo), faults=faults) as proxy, connected(proxy) as client:
        assert there_and_back(client, data) == data


def test_a_rate_limit_is_kept_by_all_connections_together(echo: EchoServer) -> None:
    with (
        FaultProxy(address_of(echo), faults=Faults(bytes_per_second=400_000)) as proxy,
        connected(proxy) as one,
        connected(proxy) as two,
        ThreadPoolExecutor(2) as pool,
    ):
        start = time.monotonic()
        data = bytes(80_000)
        assert list(pool.map(lambda client: there_and_back(client, data), (one, two))) == [data] * 2
        assert time.monotonic() - start >= 160_000 / 400_000


# ---- connections that fail ----


@EITHER_KIND
def test_refused_connections_end_at_once_until_the_fault_is_over(
    kind: type[FaultProxy | ProxyProcess], echo: EchoServer
) -> None:
    with kind(address_of(echo)) as proxy:
        with proxy.faults(Faults(refuse=True)):
            with pytest.raises(ConnectionError), connected(proxy) as client:
                assert client.recv(1) == b"never"
            eventually(lambda: proxy.stats().faults == {"refused": 1})
        with connected(proxy) as client:
            assert there_and_back(client, b"back") == b"back"


def echoed_until_reset(upstream: str, seed: int) -> int:
    faults = Faults(reset_rate=1, reset_after_bytes_max=200)
    with FaultProxy(upstream, faults=faults, seed=seed) as proxy, connected(proxy) as client:
        count = 0
        with contextlib.suppress(ConnectionError):
            while True:
                client.sendall(b"x")
                count += len(client.recv(1))
        assert proxy.stats().faults == {"reset": 1}
        return count


def test_a_reset_comes_at_a_byte_that_the_seed_decides(echo: EchoServer) -> None:
    counts = [echoed_until_reset(address_of(echo), seed) for seed in (1, 1, 2, 3)]
    assert counts[0] == counts[1]
    assert len(set(counts)) > 1
    assert max(counts) <= 100


def test_the_share_of_connections_that_are_reset_is_repeatable(echo: EchoServer) -> None:
    def resets() -> int:
        faults = Faults(reset_rate=0.4, reset_after_bytes_max=100)
        with FaultProxy(address_of(echo), faults=faults, seed=5) as proxy:
            for _ in range(30):
                with contextlib.suppress(ConnectionError), connected(proxy) as client:
                    for _ in range(48):
                        client.sendall(b"x")
                        client.recv(1)
                    client.shutdown(socket.SHUT_WR)
                    receive(client, 4)
            return proxy.stats().faults["reset"]

    first = resets()
    assert 0 < first < 30
    assert first == resets()


@EITHER_KIND
def test_a_black_hole_answers_nobody_and_resets_its_victims_when_it_ends(
    kind: type[FaultProxy | ProxyProcess], echo: EchoServer
) -> None:
    with kind(address_of(echo)) as proxy, connected(proxy) as old, connected(proxy) as idle:
        for client in (old, idle):
            assert there_and_back(client, b"before") == b"before"
        with proxy.faults(Faults(black_hole=True)), connected(proxy) as new:
            for client in (old, new):
                client.sendall(b"lost")
                client.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(SECONDS_MAX)
            eventually(lambda: proxy.stats().faults == {"black_hole": 2})
            proxy.set(Faults())
            for client in (old, new):
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
        assert there_and_back(idle, b"after") == b"after"
        assert bytes(echo.received) == b"before" * 2 + b"after"


def test_a_black_hole_takes_what_was_still_on_its_way(echo: EchoServer) -> None:
    with FaultProxy(address_of(echo), faults=Faults(latency_ms=60_000)) as proxy:
        with connected(proxy) as client:
            client.sendall(b"slow")
            eventually(lambda: proxy.stats().bytes_up == 4)
            proxy.set(Faults(black_hole=True))
            proxy.set(Faults())
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        assert not echo.received


# ---- requests that fail ----


def test_a_request_answered_with_an_error_never_reaches_the_upstream(
    objects: ObjectServer,
) -> None:
    with FaultProxy(address_of(objects), http=True) as proxy, http_client(proxy) as client:
        with proxy.faults(Faults(http_error_rate=1)):
            status, body = ask(client, "PUT", "/a", bytes(3_000_000))
            assert (status, b"<Code>SlowDown</Code>" in body) == (503, True)
            assert ask(client, "POST", "/b", iter([b"chunk"] * 3))[0] == 503
            assert ask(client, "HEAD", "/c") == (503, b"")
        with proxy.faults(Faults(http_error_rate=1, http_error_status=500)):
            assert ask(client, "DELETE", "/d")[0] == 500
        assert ask(client, "PUT", "/e", b"kept")[0] == 200
        stats = proxy.stats()
    assert objects.requests == [("PUT", "/e")]
    assert stats.faults == {"http_error": 4}
    assert stats.connections == 1
    assert stats.requests == {"PUT": 2, "POST": 1, "HEAD": 1, "DELETE": 1}


def test_the_share_of_errors_is_repeatable_with_many_connections(objects: ObjectServer) -> None:
    def put(proxy: FaultProxy) -> int:
        with http_client(proxy) as client:
            return sum(ask(client, "PUT", "/a", b"x")[0] == 503 for _ in range(10))

    counts = []
    for _ in range(2):
        faults = Faults(http_error_rate=0.3)
        with FaultProxy(address_of(objects), http=True, faults=faults, seed=9) as proxy:
            with ThreadPoolExecutor(8) as pool:
                counts.append(sum(pool.map(put, [proxy] * 8)))
            assert proxy.stats().faults == {"http_error": counts[-1]}
    assert counts[0] == counts[1]
    assert 0 < counts[0] < 80


def test_pipelined_requests_are_answered_in_their_order(objects: ObjectServer) -> None:
    objects.objects["/a"] = b"object"
    faults = Faults(http_error_rate=0.5)
    with FaultProxy(address_of(objects), http=True, faults=faults, seed=3) as proxy:
        with connected(proxy) as client:
            client.sendall(b"".join(b"GET /a?%d HTTP/1.1\r\n\r\n" % at for at in range(12)))
            client.shutdown(socket.SHUT_WR)
            answers = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert proxy.requests_by_method() == {"GET": 12}
        errors = proxy.stats().faults["http_error"]
    draws = random.Random("request 3")
    expected = [b"503" if draws.random() < 0.5 else b"200" for _ in range(12)]
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == expected
    assert errors == expected.count(b"503")


def test_a_client_that_waits_for_100_continue_gets_the_error_at_once(
    objects: ObjectServer,
) -> None:
    faults = Faults(http_error_rate=1)
    with FaultProxy(address_of(objects), http=True, faults=faults) as proxy:
        with connected(proxy) as client:
            client.sendall(EXPECTING)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        eventually(lambda: proxy.stats().connections_open == 0)
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    assert objects.requests == []


@pytest.mark.parametrize("how", ["", "?chunked", "?until-close"])
def test_a_timeout_after_success_hides_the_whole_answer(objects: ObjectServer, how: str) -> None:
    objects.objects["/a"] = bytes(500_000)
    with FaultProxy(address_of(objects), http=True) as proxy, http_client(proxy) as client:
        assert ask(client, "PUT", "/before", b"x")[0] == 200
        proxy.set(Faults(timeout_after_success_rate=1, hang_seconds=0))
        with pytest.raises(http.client.RemoteDisconnected):
            ask(client, "GET", f"/a{how}")
        stats = proxy.stats()
    assert stats.faults == {"timeout_after_success": 1}
    assert stats.bytes_down > 500_000
    assert objects.requests == [("PUT", "/before"), ("GET", "/a")]


def test_a_timeout_after_success_can_hang_and_closing_does_not_wait_for_it(
    objects: ObjectServer,
) -> None:
    faults = Faults(timeout_after_success_rate=1, hang_seconds=3600)
    proxy = FaultProxy(address_of(objects), http=True, faults=faults)
    with proxy, connected(proxy) as client:
        client.sendall(EXPECTING)
        interim = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert receive(client, len(interim)) == interim
        client.sendall(b"hello")
        eventually(lambda: proxy.stats().faults == {"timeout_after_success": 1})
        assert objects.objects == {"/e": b"hello"}
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        proxy.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_a_raw_timeout_after_success_delivers_the_request_and_resets(echo: EchoServer) -> None:
    with FaultProxy(address_of(echo)) as proxy, connected(proxy) as client:
        assert there_and_back(client, b"ping") == b"ping"
        with proxy.faults(Faults(timeout_after_success_rate=1, hang_seconds=0.05)):
            client.sendall(b"commit")
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            assert proxy.stats().faults == {"timeout_after_success": 1}
    assert bytes(echo.received) == b"pingcommit"


# ---- ending ----


@EITHER_KIND
def test_closing_in_the_middle_of_a_transfer_ends_both_sides(
    kind: type[FaultProxy | ProxyProcess], echo: EchoServer
) -> None:
    proxy = kind(address_of(echo), faults=Faults(bytes_per_second=1_000_000))
    with connected(proxy) as client:
        client.sendall(bytes(100_000))
        assert client.recv(1)
        proxy.close()
        with pytest.raises(ConnectionResetError):
            receive(client, 100_000)
    proxy.close()
    assert proxy.stats().connections == 1
    assert "fault-proxy" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConnectionRefusedError), connected(proxy):
        pass


def test_a_client_that_vanishes_leaves_no_connection_behind(echo: EchoServer) -> None:
    with FaultProxy(address_of(echo)) as proxy:
        for _ in range(20):
            with connected(proxy) as client:
                client.sendall(bytes(1_000_000))
        eventually(lambda: proxy.stats().connections == 20)
        eventually(lambda: proxy.stats().connections_open == 0)


def test_a_process_that_died_is_an_error_and_not_a_hang(echo: EchoServer) -> None:
    proxy = ProxyProcess(address_of(echo))
    os.kill(proxy.pid, signal.SIGKILL)
    with pytest.raises(ConnectionError):
        proxy.set(Faults(refuse=True))
    with pytest.raises(ConnectionError):
        proxy.close()
    proxy.close()


def test_the_program_takes_faults_as_options_and_prints_its_port_first(echo: EchoServer) -> None:
    command = [sys.executable, "-W", "error", "-m", "support.proxy"]
    options = ["--listen", "127.0.0.1:0", "--upstream", address_of(echo), "--latency-ms", "40"]
    with subprocess.Popen(
        [*command, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        start = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX) as client:
            assert there_and_back(client, b"ping") == b"ping"
        assert time.monotonic() - start >= 0.04
        answers = []
        for line in ('{"set": {"refuse": true}}', '{"set": {"no": 1}}', "nonsense", "{}"):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            answers.append(json.loads(process.stdout.readline()))
        assert [list(answer) for answer in answers] == [["ok"], ["error"], ["error"], ["error"]]
        process.stdin.close()
        assert process.wait(SECONDS_MAX) == 0


# ---- settings ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency_ms": -1},
        {"reset_rate": 1.5},
        {"http_error_rate": 0.6, "timeout_after_success_rate": 0.6},
        {"reset_after_bytes_max": 0},
        {"http_error_status": 200},
    ],
    ids=str,
)
def test_faults_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        Faults(**wrong)


@EITHER_KIND
def test_http_errors_are_refused_by_a_proxy_without_http(
    kind: type[FaultProxy | ProxyProcess], echo: EchoServer
) -> None:
    with kind(address_of(echo)) as proxy:
        with pytest.raises(InvalidSetting, match="http=True"):
            proxy.set(Faults(http_error_rate=1))
        with connected(proxy) as client:
            assert there_and_back(client, b"well") == b"well"


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="host:port"):
        FaultProxy("localhost")


# ---- framing ----

REQUESTS = (
    b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    b"PUT /b HTTP/1.1\r\ncontent-LENGTH: 4\r\n\r\n\r\n\r\n"
    b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"a;x=y\r\n0123456789\r\n1\r\n\n\r\n0\r\nTrailer: 1\r\n\r\n"
    b"PUT /d HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
    b"DELETE /e HTTP/1.0\r\n\r\n"
)


def test_requests_are_found_whatever_the_cuts() -> None:
    for size in range(1, len(REQUESTS) + 1):
        framer = Framer(request_head, request_body)
        methods, passed, ends = [], b"", 0
        for start in range(0, len(REQUESTS), size):
            for piece in framer.feed(memoryview(REQUESTS[start : start + size])):
                passed += piece.data
                ends += piece.last
                if piece.head is not None:
                    methods.append(piece.head.method)
        assert methods == ["GET", "PUT", "POST", "PUT", "DELETE"]
        assert passed == REQUESTS
        assert ends == 5


@pytest.mark.parametrize(
    ("answer", "method", "ends"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", "GET", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", "HEAD", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "DELETE", True),
        (b"HTTP/1.1 304\r\nContent-Length: 3\r\n\r\n", "GET", True),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", "GET", False),
    ],
)
def test_the_end_of_an_answer_depends_on_its_request(
    answer: bytes, method: str, ends: bool
) -> None:
    framer = Framer(response_head, lambda head: response_body(head, method))
    pieces = list(framer.feed(memoryview(answer)))
    assert b"".join(piece.data for piece in pieces) == answer
    assert pieces[-1].last == ends
    assert framer.until_close != ends


@pytest.mark.parametrize(
    "wrong",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"PUT / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n",
        b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + bytes(LINE_BYTES_MAX),
        b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 1000,
        b"GET / HTTP/1.1\r\nHost: " + b"x" * HEAD_BYTES_MAX,
    ],
    ids=lambda wrong: repr(wrong[:60]),
)
def test_what_is_no_http_is_refused_and_resets_the_connection(
    wrong: bytes, objects: ObjectServer
) -> None:
    with pytest.raises(MalformedHttp):
        list(Framer(request_head, request_body).feed(memoryview(wrong)))
    with FaultProxy(address_of(objects), http=True) as proxy, connected(proxy) as client:
        client.sendall(wrong)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert proxy.stats().failures == {"malformed": 1}
