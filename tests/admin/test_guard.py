"""Who may ask a server, and how: tokens, names, pages of other sites, TLS."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.responses import Response
from starlette.types import Message, Scope

from forebay.admin.guard import REQUESTS, Guard
from forebay.admin.server import AdminServer
from forebay.client.http import ServerClient, took_nothing
from forebay.errors import ServiceRefused, ServiceUnavailable, UsageError
from forebay.listening import is_loopback
from forebay.logs import fields_of
from forebay.settings import AdminSettings, ServerAddress, StoreSettings
from forebay.testing import ManualClock
from support.raw_http import Said, ask, plain_socket
from support.served import Served, served

PATH = "/v1/topics/default/orders/messages"
TOKEN = "a-token-of-the-tests"
OPENSSL = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
    "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1,DNS:localhost"
)
REFUSED = "a request without a valid token was refused"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("open")) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    admin = AdminSettings(token=TOKEN)
    with served(StoreSettings(data=tmp_path_factory.mktemp("token"), admin=admin)) as found:
        yield found


def port_of(server: Served) -> str:
    return server.url.rpartition(":")[2]


# ---- stores ----


@pytest.mark.parametrize(("method", "path"), [("POST", PATH), ("GET", PATH), ("GET", "/healthz")])
def test_a_request_for_another_store_is_refused(
    server: Served, guarded: Served, method: str, path: str
) -> None:
    """Behind a kept connection, of a proxy say, another server may have come."""
    for asked, other in ((server, guarded), (guarded, server)):
        for wanted in (other.context.store_id, "", asked.context.store_id + "0"):
            headers = {"Forebay-Store": wanted}  # and no token: who it is comes first
            said = ask(asked, method, path, b"x" if method == "POST" else None, headers)
            assert said.error[:2] == (412, "ServiceUnavailable")
            assert said.json()["error"]["taken"] is False
            assert "another server has the address now" in said.error[2]
        assert asked.store.topics() == []


def test_a_request_for_the_store_is_answered_and_says_by_which_run(server: Served) -> None:
    said = ask(server, "GET", "/healthz", headers={"Forebay-Store": server.context.store_id})
    assert said.json()["store"] == server.context.store_id
    assert said.headers["Forebay-Instance"] == server.context.instance == said.json()["instance"]


def test_a_client_that_is_refused_its_store_knows_that_nothing_was_taken(server: Served) -> None:
    with ServerClient(ServerAddress(server.url)) as client:
        headers = {"Forebay-Store": "0" * 32}
        with pytest.raises(ServiceUnavailable, match="nothing was taken") as found:
            client.request("POST", PATH, body=b"x", headers=headers)
        assert took_nothing(found.value)


# ---- tokens ----


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer \xff"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", PATH), ("GET", PATH), ("GET", "/nothing")])
def test_without_the_token_nothing_is_answered(
    guarded: Served, headers: dict[str, str], method: str, path: str
) -> None:
    said = ask(guarded, method, path, b"x" if method == "POST" else None, headers)
    assert said.error[:2] == (401, "ServiceRefused")
    assert said.headers["WWW-Authenticate"] == "Bearer"
    assert said.json()["error"]["taken"] is False
    assert TOKEN not in said.body.decode()
    assert guarded.store.topics() == []


def test_with_the_token_everything_is_answered(guarded: Served) -> None:
    path = "/v1/topics/default/unknown/messages"
    assert ask(guarded, "GET", path, headers=BEARER).status == 404
    assert ask(guarded, "GET", path, headers={"Authorization": f"bearer {TOKEN}"}).status == 404
    # Who has the token may call the server what he likes, and ask from where he likes.
    named = {**BEARER, "Host": "forebay.example:1", "Origin": "https://other.example"}
    assert ask(guarded, "GET", path, headers=named).status == 404


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/"])
def test_the_page_and_the_probes_need_no_token(guarded: Served, path: str) -> None:
    assert ask(guarded, "GET", path).status == 200


@pytest.mark.parametrize("path", ["//", "/healthz/", "/assets", "/Assets/x", "/healthz/../v1"])
def test_what_is_only_like_a_public_path_needs_it(guarded: Served, path: str) -> None:
    assert ask(guarded, "GET", path).status == 401


def test_a_client_with_a_wrong_token_is_refused(guarded: Served) -> None:
    address = replace(guarded.client.address, token="another")
    with ServerClient(address) as client, pytest.raises(ServiceRefused, match="FOREBAY_TOKEN"):
        client.json("GET", "/v1/topics")
    assert "another" not in repr(address)


def refusals(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    lines = [fields_of(record) for record in caplog.records]
    return [fields for text, fields in lines if text == REFUSED]


def guard_at(clock: ManualClock) -> Guard:
    return Guard(Response(), AdminSettings(token=TOKEN), clock=clock)


async def call(guard: Guard, headers: dict[str, str], path: str = PATH) -> None:
    async def send(_message: Message) -> None: ...

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    await guard({**scope, "client": ("192.0.2.7", 4711)}, receive, send)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "missing"),
        ({"Authorization": f"Bearer {TOKEN}x"}, "wrong"),
        ({"Authorization": f"Basic {TOKEN}"}, "wrong"),
    ],
)
async def test_a_request_without_the_token_leaves_a_line_that_does_not_have_it(
    caplog: pytest.LogCaptureFixture, headers: dict[str, str], reason: str
) -> None:
    await call(guard_at(ManualClock()), headers)
    assert refusals(caplog) == [
        {"client": "192.0.2.7", "method": "POST", "path": PATH, "reason": reason, "others": 0}
    ]
    assert TOKEN not in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}


async def test_requests_without_the_token_leave_a_line_each_second_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a line is short, whatever the path is."""
    clock = ManualClock()
    guard = guard_at(clock)
    for _ in range(500):
        await call(guard, {"Authorization": "Bearer guess"}, "/" + "x" * 60_000)
    assert len(refusals(caplog)) == 1
    clock.advance(1)
    await call(guard, {}, PATH)
    await call(guard, BEARER, PATH)
    assert [fields["others"] for fields in refusals(caplog)] == [0, 499]
    assert len(caplog.text) < 2000


def test_a_server_logs_who_came_without_the_token(
    guarded: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.admin.guard._TOKEN_LINE_SECONDS", 0.0)
    assert ask(guarded, "GET", "/v1/topics?token=guess").status == 401
    assert ask(guarded, "GET", "/v1/topics", headers=BEARER).status == 200
    (fields,) = refusals(caplog)
    assert (fields["client"], fields["path"]) == ("127.0.0.1", "/v1/topics")
    assert "guess" not in caplog.text


# ---- encodings ----


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "identity, gzip", "x", ""])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", PATH),
        ("POST", "/v1/jobs"),
        ("POST", "/v1/sink/commit"),
        ("PUT", "/v1/objects/storage/topics/default/orders/objects/data-0-9.dnb1"),
    ],
)
def test_a_body_with_an_encoding_is_refused_before_it_is_read(
    guarded: Served, method: str, path: str, encoding: str
) -> None:
    headers = {**BEARER, "Content-Encoding": encoding, "Content-Length": "9999"}
    with plain_socket(guarded) as client:  # it never sends the body
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        client.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
        said = client.makefile("rb").readline()
    assert said.startswith(b"HTTP/1.1 415 ")
    assert guarded.store.topics() == []


def test_the_refusal_of_an_encoding_says_which_one_is_accepted(server: Served) -> None:
    said = ask(server, "POST", PATH, b"\x1f\x8b", {"Content-Encoding": "gzip"})
    assert said.error[:2] == (415, "UsageError")
    assert "'gzip', and only identity is accepted" in said.error[2]
    assert said.json()["error"]["taken"] is False
    assert said.headers["Accept-Encoding"] == "identity"
    assert server.store.topics() == []
    with ServerClient(ServerAddress(server.url)) as client:
        with pytest.raises(UsageError, match="identity") as found:
            client.request("POST", PATH, body=b"x", headers={"Content-Encoding": "br"})
        assert took_nothing(found.value)


def test_a_body_without_an_encoding_may_say_so(tmp_path: Path) -> None:
    with served(tmp_path) as found:
        said = ask(found, "POST", PATH, b"x", {"Content-Encoding": "Identity"})
        assert said.status == 200
        # A request without a body has nothing that could be encoded.
        assert ask(found, "GET", PATH, headers={"Content-Encoding": "gzip"}).status == 200


def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(UsageError, match=r"admin\.token is not set"):
        AdminServer(AdminSettings(listen="0.0.0.0:0")).bind()
    with pytest.raises(UsageError, match=r"admin\.token is not set"):
        AdminServer(AdminSettings(listen="127.0.0.1.example.org:0")).bind()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("[::1]", True),
        ("::1", True),
        ("", False),
        ("0.0.0.0", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("10.0.0.1", False),
    ],
)
def test_a_loopback_is_known_by_its_address_not_by_its_first_letters(
    host: str, expected: bool
) -> None:
    assert is_loopback(host) is expected


# ---- without a token ----


def named(server: Served, host: str, origin: str | None = None) -> Said:
    headers = {"Host": host} if origin is None else {"Host": host, "Origin": origin}
    return ask(server, "GET", "/healthz", headers=headers)


def test_a_name_that_is_not_this_machines_is_refused(server: Served) -> None:
    port = port_of(server)
    for host in ("127.0.0.1", f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert named(server, host).status == 200
    for host in (
        "rebound.example",
        f"rebound.example:{port}",
        "127.0.0.1.example",
        "",
        "[",
        "::1:",
    ):
        status, kind, message = named(server, host).error
        assert (status, kind) == (403, "ServiceRefused")
        assert "admin.url" in message


def test_a_page_of_another_site_is_refused(server: Served) -> None:
    port = port_of(server)
    own = f"127.0.0.1:{port}"
    assert named(server, own, f"http://{own}").status == 200
    for origin in (
        "https://other.example",
        "null",
        "",
        "http://127.0.0.1:1",
        "http://[",
        f"http://localhost:{port}",
    ):
        assert named(server, own, origin).error[:2] == (403, "ServiceRefused")


async def test_the_name_that_is_configured_is_taken() -> None:
    settings = AdminSettings(url="https://forebay.example:8650")
    own, other = "forebay.example:8650", "https://other.example"
    assert await guarded_status(settings, own) == 204
    assert await guarded_status(settings, "forebay.example") == 204  # a proxy's port is its own
    assert await guarded_status(settings, own, f"https://{own}") == 204
    assert await guarded_status(settings, own, other) == 403
    assert await guarded_status(settings, "other.example") == 403
    assert await guarded_status(settings, "127.0.0.1:8650", f"https://{own}") == 204


async def guarded_status(settings: AdminSettings, host: str, origin: str | None = None) -> int:
    """What a guard with these settings answers before an application that answers 204."""
    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        return {"type": "http.request"}

    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    scope: Scope = {"type": "http", "method": "GET", "path": "/v1/topics", "headers": headers}
    await Guard(Response(status_code=204), settings)(scope, receive, send)
    return statuses[0]


def test_a_host_that_comes_twice_or_never_is_refused(server: Served) -> None:
    for hosts in ("", "Host: localhost\r\nHost: rebound.example\r\n"):
        with plain_socket(server) as client:
            client.sendall(f"GET /healthz HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n".encode())
            assert client.recv(1000).startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))


# ---- what answers carry ----


def test_every_answer_forbids_guessing_its_type(server: Served, guarded: Served) -> None:
    for said in (
        ask(server, "GET", "/healthz"),
        ask(server, "GET", "/nothing"),
        ask(guarded, "GET", PATH),
    ):
        assert said.headers["X-Content-Type-Options"] == "nosniff"
        assert said.headers["Content-Security-Policy"] is None


def test_the_page_may_load_and_ask_nothing_from_elsewhere(server: Served) -> None:
    said = ask(server, "GET", "/")
    policy = dict(
        part.strip().split(" ", 1) for part in said.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    sources = {word for text in policy.values() for word in text.split()}
    assert sources <= {"'none'", "'self'", "data:"}
    assert said.headers["Referrer-Policy"] == "no-referrer"


def test_requests_are_counted_by_route_not_by_path(server: Served) -> None:
    route = "/v1/topics/{namespace}/{topic}/messages"
    before = REQUESTS.value("GET", route, "404"), REQUESTS.value("GET", "none", "404")
    for number in range(5):
        ask(server, "GET", f"/v1/topics/default/unknown{number}/messages")
        ask(server, "GET", f"/nothing/{number}")
    after = REQUESTS.value("GET", route, "404"), REQUESTS.value("GET", "none", "404")
    assert (after[0] - before[0], after[1] - before[1]) == (5, 5)
    odd = REQUESTS.value("other", route, "405")
    ask(server, "PROPFIND", PATH)
    assert REQUESTS.value("other", route, "405") == odd + 1


# ---- TLS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    home = tmp_path_factory.mktemp("tls")
    cert, key = home / "cert.pem", home / "key.pem"
    subprocess.run(
        [*OPENSSL.split(), "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return cert, key


def test_a_server_with_a_certificate_talks_to_clients_that_know_it(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    admin = AdminSettings(token=TOKEN, cert_file=cert, key_file=key, ca_file=cert)
    with served(StoreSettings(data=tmp_path, admin=admin)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        server.client.request("POST", PATH, body=b"over TLS").read()
        [line] = server.new_client().lines(PATH)
        assert b"over TLS" in line
        stranger = ServerClient(ServerAddress(server.url, token=TOKEN))
        with stranger, pytest.raises(ServiceRefused, match="check ca_file"):
            stranger.json("GET", "/healthz")
        plain = ServerAddress(server.url.replace("https", "http"), token=TOKEN)
        with ServerClient(plain) as client, pytest.raises(ServiceUnavailable):
            client.json("GET", "/healthz")
