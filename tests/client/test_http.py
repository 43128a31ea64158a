"""The client: errors come back as they were raised, connections are made anew, waits can end."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay.admin.errors import error_fields
from forebay.client.address import ServerInfo, read_server_info, server_file
from forebay.client.http import ServerClient, took_nothing, wire_error
from forebay.errors import (
    CorruptFrame,
    DiskError,
    ForebayError,
    LogStopped,
    LostOffsets,
    MessageTooLarge,
    OffsetOutOfRange,
    ServiceError,
    ServiceUnavailable,
    UnknownTopic,
    UsageError,
)
from forebay.limits import KIB
from forebay.settings import AdminSettings, ServerAddress, StoreSettings
from support.disks import in_thread, wait_until
from support.served import served

PATH = "/v1/topics/default/orders/messages"


class Script:
    """A server that says what it was told to, one answer for each connection."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        self.closed = 0
        """Connections that it has ended."""
        self._thread = threading.Thread(target=self._run, args=(answers,))
        self._thread.start()

    def _run(self, answers: list[bytes | None]) -> None:
        for answer in answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.requests.append(_whole_request(connection))
                if answer is None:
                    connection.recv(1)  # and no answer, until the client goes
                else:
                    connection.sendall(answer)
            self.closed += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # who waits for a connection waits no longer
        self._listener.close()
        self._thread.join(120)
        assert not self._thread.is_alive()


def _whole_request(connection: socket.socket) -> bytes:
    """To its last byte: who closes with something unread resets the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(64 * KIB)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    while len(body) < length:
        body += connection.recv(64 * KIB)
    return head


@contextmanager
def scripted(*answers: bytes | None, seconds: float = 120) -> Iterator[tuple[Script, ServerClient]]:
    script = Script(list(answers))
    try:
        with ServerClient(ServerAddress(script.url), timeout_seconds=seconds) as client:
            yield script, client
    finally:
        script.close()


def answer(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in chunks) + end


# ---- errors ----


@pytest.mark.parametrize(
    "error",
    [
        UsageError("a"),
        UnknownTopic("no topic"),
        OffsetOutOfRange("out", start=3, end=9),
        LostOffsets("lost", start=3, end=9),
        LogStopped("stopped", synced=7),
        CorruptFrame("bad", file="f", position=1, offset=None),
        DiskError(errno.ENOSPC, "no space"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_the_way_over_the_wire(error: ForebayError) -> None:
    again = wire_error(json.loads(json.dumps(error_fields(error))))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_an_error_of_another_version_is_an_error_still() -> None:
    for told in ({"kind": "Unheard", "message": "words"}, {"kind": "annotations"}, {}):
        assert type(wire_error(told)) is ServiceError
    assert all(
        isinstance(wire_error({"kind": name, "message": "m"}), ForebayError)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, ForebayError)
    )


def test_a_server_raises_here_what_it_raised_there(tmp_path: Path) -> None:
    admin = AdminSettings(request_bytes_max=64 * KIB)
    with served(StoreSettings(data=tmp_path, admin=admin)) as server:
        client = server.client
        with pytest.raises(UnknownTopic, match="/default/orders"):
            client.request("GET", PATH)
        with pytest.raises(UsageError, match="/v2"):
            client.json("GET", "/v2")
        with pytest.raises(MessageTooLarge, match="request_bytes_max"):
            client.request("POST", PATH, body=b"x" * (8 * 1024 * KIB))
        assert client.json("POST", PATH, value={"any": "payload"})["count"] == 1
        with pytest.raises(OffsetOutOfRange) as found:
            next(client.lines(PATH, {"start": 5}))
        assert (found.value.start, found.value.end) == (0, 1)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (answer(b"<html>", "502 Bad Gateway"), "status 502, but is not a Forebay server"),
        (answer(b'{"error": 1}', "500 Oops"), "status 500"),
        (answer(b"[1]", "500 Oops"), "status 500"),
        (answer(b"not json"), "not JSON"),
        (b"SSH-2.0-OpenSSH\r\n", "does not respond"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{", "not JSON|does not respond"),
        (b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n5", "does not respond"),
        (b"", "does not respond"),
    ],
)
def test_an_answer_that_is_none_is_an_error_in_words(said: bytes, words: str) -> None:
    with scripted(said) as (_, client), pytest.raises(ServiceError, match=words):
        client.json("GET", "/healthz")


def test_nobody_there_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        client = ServerClient(ServerAddress(f"http://127.0.0.1:{port}"))
        with client, pytest.raises(ServiceUnavailable, match=f"127.0.0.1:{port}"):
            client.json("GET", "/healthz")


def test_silence_is_unavailable_in_time() -> None:
    silent = scripted(None, seconds=0.05)
    with silent as (_, client), pytest.raises(ServiceUnavailable, match="timed out"):
        client.json("GET", "/healthz")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8650", "ftp://host", "http://", "http://host:port", "http://[::1"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        ServerClient(ServerAddress(url))


def test_a_missing_file_of_certificates_is_refused(tmp_path: Path) -> None:
    address = ServerAddress("https://127.0.0.1:1", ca_file=tmp_path / "missing.pem")
    with pytest.raises(UsageError, match=r"ca_file .*missing\.pem cannot be read"):
        ServerClient(address)


# ---- connections ----


def test_a_connection_that_was_closed_while_idle_is_made_anew() -> None:
    with scripted(answer(b"1"), answer(b"2"), answer(b"3")) as (script, client):
        assert client.json("GET", "/a") == 1
        wait_until(lambda: script.closed == 1)
        assert client.json("POST", "/b", value=0) == 2  # a POST too: nothing was sent twice
        assert client.json("GET", "/c") == 3  # closed or not yet: a GET can be sent again
        assert [each.split(b" ")[1] for each in script.requests] == [b"/a", b"/b", b"/c"]


def test_a_post_whose_answer_is_missing_is_not_sent_again() -> None:
    with scripted(b"", answer(b"1")) as (script, client):
        with pytest.raises(ServiceUnavailable):
            client.json("POST", "/b", value=0)
        assert len(script.requests) == 1


def test_an_answer_that_nobody_read_does_not_disturb_the_next(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.store.topic("/default/orders").append_many([b"x" * 1000] * 100, durability="synced")
        unread = server.client.request("GET", PATH)
        assert unread.status == 200
        assert server.client.json("GET", "/readyz")["status"] == "ready"
        with pytest.raises(ServiceError, match="larger than 10 bytes"):
            server.client.request("GET", PATH).read(10)
        assert server.client.json("GET", "/readyz")["status"] == "ready"


# ---- lines ----


def test_lines_come_whole_however_they_were_cut() -> None:
    text = "".join(f'{{"n":{number}}}\n' for number in range(50)).encode() + b"\r\n\n{}\r\n"
    expected = [line for line in text.splitlines() if line]
    for size in (1, 3, 7, 64, 10_000):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        with scripted(chunked(*parts)) as (_, client):
            assert list(client.lines("/lines")) == expected
    with scripted(answer(b"a\nb")) as (_, client):
        assert list(client.lines("/lines")) == [b"a", b"b"]


@pytest.mark.parametrize("end", [b"", b"5", b"5\r\n", b"5\r\nab", b"5\r\nabcde", b"zz\r\n"])
def test_a_stream_that_breaks_off_does_not_look_like_its_end(end: bytes) -> None:
    with scripted(chunked(b"whole\n", b"par", end=end)) as (_, client):
        lines = client.lines("/lines")
        assert next(lines) == b"whole"
        with pytest.raises(ServiceUnavailable):
            list(lines)


def test_an_interrupt_ends_a_wait(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.store.topic("/default/orders").append(b"a", durability="synced")
        client = server.new_client()
        seen: list[Any] = []

        def follow() -> None:
            seen.extend(client.lines(PATH, {"follow": "true", "limit": 1}))
            for line in client.lines(PATH, {"follow": "true"}):
                seen.append(line)

        following = in_thread(follow)
        wait_until(lambda: len(seen) == 2)
        client.interrupt()
        with pytest.raises(ServiceUnavailable, match="interrupted"):
            following.result(120)
        with pytest.raises(ServiceUnavailable, match="interrupted"):
            client.json("GET", "/healthz")
        client.interrupt()


def test_an_interrupt_ends_a_request_that_has_no_answer_yet() -> None:
    with scripted(None) as (script, client):
        asking = in_thread(lambda: client.json("GET", "/healthz"))
        wait_until(lambda: len(script.requests) == 1)
        client.interrupt()
        with pytest.raises(ServiceUnavailable, match="interrupted"):
            asking.result(120)


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    """Half of it may even look whole."""
    whole = b'HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{"a": 1}'
    with scripted(whole, whole) as (_, client):
        with pytest.raises(ServiceUnavailable, match="does not respond"):
            client.json("GET", "/v1/config")
        with pytest.raises(http.client.IncompleteRead):
            client.request("POST", PATH, body=b"x").read()


# ---- one store ----


def who(store: str | None = "a" * 32) -> bytes:
    return answer(json.dumps({"instance": "1" * 32, "store": store}).encode())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (who("b" * 32), "serves another store"),
        (who(None), "serves another store"),
        (answer(b"hello"), "is not a Forebay server"),
        (answer(b"[" * 5000), "is not a Forebay server"),
        (answer(b"{}" + b" " * 70 * KIB), "is not a Forebay server"),
        (answer(b"{}", "404 No"), "is not a Forebay server"),
        (answer(b"", headers="Connection: close\r\n"), "is not a Forebay server"),
        (b"SSH-2.0-OpenSSH\r\n", "does not respond"),
        (b"", "does not respond"),
    ],
)
def test_a_client_of_one_store_asks_another_server_nothing(said: bytes, words: str) -> None:
    with scripted(said, said) as (script, plain):
        address = ServerAddress(plain.address.url, None, "secret", None, "a" * 32)
        for method in ("POST", "GET"):
            with ServerClient(address) as client:
                with pytest.raises(ServiceUnavailable, match=words) as found:
                    client.request(method, "/v1/topics", body=b"x")
                assert took_nothing(found.value)
        assert [request.split(b"\r\n")[0] for request in script.requests] == [
            b"GET /healthz HTTP/1.1"
        ] * 2
        assert not any(b"secret" in request for request in script.requests)


def test_a_server_that_closes_after_each_answer_is_not_trusted_with_the_next() -> None:
    """The next connection may be another server's."""
    whole = who()[len(b"HTTP/1.1 200 OK\r\n") :]
    said = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + whole
    with scripted(said) as (script, plain):
        address = ServerAddress(plain.address.url, store="a" * 32)
        with ServerClient(address) as client, pytest.raises(ServiceUnavailable, match="closes"):
            client.json("GET", "/v1/topics")
        assert len(script.requests) == 1


def test_a_client_is_held_to_the_store_that_it_met(tmp_path: Path) -> None:
    with served(tmp_path / "a") as a, served(tmp_path / "b") as b:
        with ServerClient(ServerAddress(a.url)) as client:
            client.pin()
            assert client.address.store == a.context.store_id != b.context.store_id
            assert client.json("GET", "/v1/topics")["total"] == 0
            assert client.instance == a.context.instance
        wrong = ServerAddress(b.url, store=a.context.store_id)
        with (
            ServerClient(wrong) as client,
            pytest.raises(ServiceUnavailable, match="another store"),
        ):
            client.json("GET", "/v1/topics")


def test_notes_of_older_servers_are_read(tmp_path: Path) -> None:
    note = {"url": "http://127.0.0.1:1", "instance": "1" * 32, "pid": 7}
    server_file(tmp_path).write_text(json.dumps(note))
    assert read_server_info(tmp_path) == ServerInfo("http://127.0.0.1:1", "1" * 32, 7)
    for store, expected in (("a" * 32, "a" * 32), (None, None)):
        server_file(tmp_path).write_text(json.dumps({**note, "store": store}))
        assert read_server_info(tmp_path) == ServerInfo("http://127.0.0.1:1", "1" * 32, 7, expected)
    for wrong in ("", "A" * 32, 7, ["a" * 32]):
        server_file(tmp_path).write_text(json.dumps({**note, "store": wrong}))
        assert read_server_info(tmp_path) is None
    server_file(tmp_path).write_text("[]")
    assert read_server_info(tmp_path) is None
