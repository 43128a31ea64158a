"""What only remote stores can get wrong: options, credentials, dead servers, forks, secrets."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from forebay.errors import (
    InvalidSetting,
    ObjectExists,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.limits import PART_BYTES_MIN
from forebay.objects.backend import CopyUnsupported
from forebay.objects.remote import RemoteBackend, store_location, translated
from forebay.settings import CloudSettings
from support.azurite import Azurite
from support.gcs_fake import GcsFake
from support.proxy import FaultProxy, Faults
from support.s3_server import S3Server, refusing_port

CHUNK = PART_BYTES_MIN


def write_large(backend: RemoteBackend) -> None:
    with backend.open_streaming_writer("large", chunk_bytes=CHUNK, concurrent_parts=2) as writer:
        for _ in range(3):
            writer.write(bytes(CHUNK))


CALLS: dict[str, Callable[[RemoteBackend], object]] = {
    "head": lambda backend: backend.head("a"),
    "get_range": lambda backend: backend.get_range("a", 0, 1),
    "put": lambda backend: backend.put_object("a", b"x"),
    "writer": write_large,
    "copy": lambda backend: backend.copy_object("a", "b"),
    "delete": lambda backend: backend.delete_object("a"),
    "list": lambda backend: list(backend.list("t/")),
}


def failure(call: str, backend: RemoteBackend) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        CALLS[call](backend)
    return caught.value


def everything_said(error: BaseException) -> str:
    """The error, and what a log would show of its traceback and its causes."""
    lines = "".join(traceback.format_exception(error))
    return f"{error!r} {error.__cause__!r} {error.__context__!r} {lines}"


# ---- options ----


@pytest.mark.parametrize(
    ("backend", "name", "nearest"),
    [("s3", "acces_key", "access_key"), ("gcs", "credential", "credentials_path")],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(
    backend: str, name: str, nearest: str
) -> None:
    scheme = {"s3": "s3", "gcs": "gs"}[backend]
    settings = CloudSettings(
        backend=backend,  # type: ignore[arg-type] # a parameter is any string
        root=f"{scheme}://bucket",
        options={name: "hunter2-secret"},
    )
    with pytest.raises(InvalidSetting, match=f"'{nearest}'") as caught:
        RemoteBackend(settings)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "root", [None, "", "bucket", "gs://bucket", "s3://", "s3://user:pw@bucket/x"]
)
def test_a_root_that_is_none_is_refused(root: str | None) -> None:
    with pytest.raises(InvalidSetting):
        RemoteBackend(CloudSettings(backend="s3", root=root))


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://host", "http://user:pw@host"])
def test_an_endpoint_that_is_no_plain_url_is_refused(endpoint: str) -> None:
    settings = CloudSettings(backend="s3", root="s3://b", options={"endpoint": endpoint})
    with pytest.raises(InvalidSetting, match="endpoint"):
        RemoteBackend(settings)


def test_buckets_are_in_the_path_where_the_endpoint_is_ones_own() -> None:
    def config(**options: str) -> dict[str, str | bool]:
        return dict(
            store_location(CloudSettings(backend="s3", root="s3://b/p", options=options)).config
        )

    assert config()["virtual_hosted_style_request"] is True
    own = config(endpoint="http://127.0.0.1:1")
    assert (own["virtual_hosted_style_request"], own["unsigned_payload"]) == (False, False)
    tls = config(endpoint="https://host", virtual_host_style="true")
    assert (tls["virtual_hosted_style_request"], tls["unsigned_payload"]) == (True, True)
    with pytest.raises(InvalidSetting, match="virtual_host_style"):
        config(virtual_host_style="maybe")


def test_http_is_allowed_only_where_the_endpoint_says_so() -> None:
    def allowed(endpoint: str) -> bool:
        options = {"endpoint": endpoint}
        return store_location(
            CloudSettings(backend="s3", root="s3://b", options=options)
        ).allow_http

    assert allowed("http://127.0.0.1:1")
    assert not allowed("https://127.0.0.1:1")


# ---- refusals ----


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_secret_is_refused_and_in_no_message(s3: S3Server, call: str) -> None:
    wrong = {"secret_key": "hunter2/hunter2+hunter2", "session_token": "token-of-a-session=="}
    error = failure(call, RemoteBackend(s3.settings(options=wrong)))
    assert isinstance(error, ServiceRefused)
    assert "s3://forebay/" in str(error)
    for secret in wrong.values():
        assert secret not in everything_said(error)
        assert quote(secret, safe="") not in everything_said(error)


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_sas_token_is_refused_and_in_no_message(azure: Azurite, call: str) -> None:
    settings = azure.settings()
    signature = "c2VjcmV0LXNpZ25hdHVyZQ=="
    token = f"sv=2021-12-02&ss=b&srt=sco&sp=rwdlac&se=2099-01-01&sig={quote(signature, safe='')}"
    options = {"endpoint": azure.endpoint, "account_name": "devstoreaccount1", "sas_token": token}
    backend = RemoteBackend(CloudSettings("azure", settings.root, options, max_retries=1))
    error = failure(call, backend)
    assert isinstance(error, ServiceRefused)
    for secret in (token, signature, quote(signature, safe="")):
        assert secret not in everything_said(error)


# The answer to HEAD has no body, so nothing in it tells a missing bucket from a missing object.
@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"head"}))
def test_a_bucket_that_is_not_there_is_refused(s3: S3Server, gcs: GcsFake, call: str) -> None:
    for settings in (s3.settings("s3://no-such-bucket/x"), gcs.settings("gs://no-such-bucket/x")):
        assert isinstance(failure(call, RemoteBackend(settings)), ServiceRefused)


@pytest.mark.parametrize("call", CALLS)
def test_credentials_that_cannot_be_read_are_refused(tmp_path: Path, call: str) -> None:
    options = {"endpoint": "http://127.0.0.1:1", "credentials_path": str(tmp_path / "none.json")}
    backend = RemoteBackend(CloudSettings("gcs", "gs://forebay/x", options))
    assert isinstance(failure(call, backend), ServiceRefused)


def test_settings_show_no_options_in_their_repr(s3: S3Server) -> None:
    assert s3.secret_key not in repr(s3.settings())
    assert s3.secret_key not in repr(RemoteBackend(s3.settings()))


# ---- servers that are not well ----


@pytest.fixture
def nobody() -> Iterator[str]:
    """Where every connection is refused."""
    with refusing_port() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("call", CALLS)
def test_a_dead_endpoint_is_unavailable(nobody: str, call: str) -> None:
    settings = CloudSettings(
        backend="s3",
        root="s3://forebay/x",
        options={
            "endpoint": nobody,
            "access_key": "k",
            "secret_key": "hunter2-hunter2",
        },
        max_retries=1,
        retry_timeout_seconds=5,
    )
    error = failure(call, RemoteBackend(settings))
    assert isinstance(error, ServiceUnavailable)
    assert "s3://forebay/x" in str(error)
    assert "hunter2" not in everything_said(error)


class Answering(BaseHTTPRequestHandler):
    """Sends the server's status to every request, and counts the requests."""

    server: AnsweringServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Nothing."""

    def _handle(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests += 1
        body = f"<Error><Code>{self.server.code}</Code><Message>planned</Message></Error>".encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = _handle  # noqa: N815 - the parent's names


class AnsweringServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, status: int, code: str) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.status = status
        self.code = code
        self.requests = 0
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    def __enter__(self) -> AnsweringServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def backend(self) -> RemoteBackend:
        options = {
            "endpoint": f"http://127.0.0.1:{self.server_address[1]}",
            "access_key": "k",
            "secret_key": "s",
        }
        return RemoteBackend(CloudSettings("s3", "s3://forebay/x", options, max_retries=2))


@pytest.mark.parametrize(
    ("status", "code", "kind", "requests"),
    [
        (503, "SlowDown", ServiceUnavailable, 3),
        (400, "RequestTimeout", ServiceUnavailable, 1),
        (400, "ExpiredToken", ServiceRefused, 1),
        (403, "AccessDenied", ServiceRefused, 1),
    ],
)
def test_an_answer_is_tried_again_or_refused(
    status: int, code: str, kind: type[ServiceError], requests: int
) -> None:
    with AnsweringServer(status, code) as server:
        error = failure("put", server.backend())
    assert type(error) is kind
    assert code in str(error)
    assert server.requests == requests


@pytest.mark.parametrize(
    ("status", "code"),
    [(501, "NotImplemented"), (400, "InvalidRequest"), (405, "MethodNotAllowed")],
)
def test_a_server_that_does_not_copy_is_told_from_one_that_refuses(status: int, code: str) -> None:
    with AnsweringServer(status, code) as server:
        assert type(failure("copy", server.backend())) is CopyUnsupported
        assert type(failure("put", server.backend())) is not CopyUnsupported


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = CloudSettings(
            backend="s3",
            root="s3://forebay/x",
            options={
                "endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "access_key": "k",
                "secret_key": "s",
            },
            request_timeout_seconds=0.2,
            retry_timeout_seconds=0.5,
            max_retries=1,
        )
        assert isinstance(failure("get_range", RemoteBackend(settings)), ServiceUnavailable)


# ---- messages ----


def test_messages_take_only_code_and_message_of_the_servers_answer() -> None:
    text = (
        "Generic S3 error: Error performing GET http://u:pw@host/b?X-Amz-Signature=abcd in 1ms - "
        "Server returned non-2xx status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch"
        "</Code><Message>check it</Message><StringToSign>x-amz-security-token:TOKEN</StringToSign>"
        "</Error>\n\nDebug source:\nGeneric { headers: SECRET }"
    )
    error = translated(
        ValueError(text), operation="put", key="a", name="s3://b", secrets=["nothing"]
    )
    said = str(error)
    assert "SignatureDoesNotMatch: check it" in said
    assert not [word for word in ("pw", "abcd", "TOKEN", "SECRET", "Debug") if word in said]


# ---- uploads ----


def test_a_failed_part_fails_the_writer_and_publishes_nothing(gcs: GcsFake) -> None:
    backend = RemoteBackend(gcs.settings())
    writer = backend.open_streaming_writer("large", chunk_bytes=CHUNK, concurrent_parts=1)
    writer.write(bytes(CHUNK + 1))
    gcs.forget_uploads()

    def go_on() -> None:
        writer.write(bytes(3 * CHUNK))
        writer.close()

    with pytest.raises(ServiceUnavailable):
        go_on()
    writer.abort()
    with pytest.raises(ObjectMissing):
        backend.head("large")


def test_an_upload_that_finds_its_key_taken_leaves_no_parts_on_the_server(gcs: GcsFake) -> None:
    backend = RemoteBackend(gcs.settings())
    gcs.forget_uploads()
    writer = backend.open_streaming_writer(
        "late", chunk_bytes=CHUNK, concurrent_parts=2, create=True
    )
    writer.write(bytes(2 * CHUNK))
    assert gcs.uploads() == 1
    backend.put_object("late", b"came first")
    with pytest.raises(ObjectExists, match="late"):
        writer.close()
    assert gcs.uploads() == 0
    assert gcs.requests("late").count("HEAD") == 2, "before the first part and before the end"


def test_a_small_object_is_created_with_one_request(gcs: GcsFake) -> None:
    backend = RemoteBackend(gcs.settings())
    with backend.open_streaming_writer(
        "created-small", chunk_bytes=CHUNK, concurrent_parts=2, create=True
    ) as writer:
        writer.write(b"x")
    assert gcs.requests("created-small") == ["PUT"]


@pytest.mark.parametrize("seed", range(3))
def test_a_creation_whose_answer_was_lost_happened_or_can_be_made(s3: S3Server, seed: int) -> None:
    """ObjectExists may be about the caller's own object; the bytes tell."""
    with FaultProxy(s3.endpoint.removeprefix("http://"), http=True, seed=seed) as proxy:
        settings = replace(s3.settings(options={"endpoint": proxy.url}), max_retries=1)
        direct = RemoteBackend(s3.settings(root=settings.root))
        backend = RemoteBackend(settings)
        outcomes = set()
        with proxy.faults(Faults(timeout_after_success_rate=0.6, hang_seconds=0.01)):
            for number in range(20):
                try:
                    backend.put_object(f"k{number}", b"%d" % number, create=True)
                except (ObjectExists, ServiceUnavailable) as error:
                    outcomes.add(type(error))
                assert bytes(direct.get_range(f"k{number}", 0, len(str(number)))) == (
                    b"%d" % number
                )
        assert outcomes, "some answers were lost"
        assert proxy.stats().faults["timeout_after_success"] > 0


def test_an_aborted_upload_leaves_no_parts_on_the_server(gcs: GcsFake) -> None:
    backend = RemoteBackend(gcs.settings())
    writer = backend.open_streaming_writer("large", chunk_bytes=CHUNK, concurrent_parts=2)
    writer.write(bytes(2 * CHUNK + 1))
    assert gcs.uploads() == 1
    writer.abort()
    assert gcs.uploads() == 0


def test_what_fits_into_a_chunk_is_one_request(gcs: GcsFake) -> None:
    backend = RemoteBackend(gcs.settings())
    with backend.open_streaming_writer(
        "just/a/chunk", chunk_bytes=CHUNK, concurrent_parts=2
    ) as writer:
        writer.write(bytes(CHUNK))
    assert gcs.requests("just/a/chunk") == ["PUT"]


# ---- forks ----

FORK = """
import os, signal, sys
from forebay.errors import ServiceRefused
from forebay.objects.remote import RemoteBackend
from forebay.settings import CloudSettings

used = sys.argv[1] == "used"
options = {"endpoint": sys.argv[2], "access_key": sys.argv[3], "secret_key": sys.argv[4]}
backend = RemoteBackend(CloudSettings("s3", sys.argv[5], options))
if used:
    backend.put_object("parent", b"x")
child = os.fork()
if child == 0:
    signal.alarm(90)
    try:
        backend.put_object("child", b"x")
    except ServiceRefused as error:
        os._exit(3 if "fork" in str(error) else 4)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
backend.put_object("parent", b"x")
"""


@pytest.mark.parametrize(("state", "expected"), [("fresh", 0), ("used", 3)])
def test_a_forked_child_works_or_is_told_why_not(s3: S3Server, state: str, expected: int) -> None:
    root = s3.bucket()
    command = [sys.executable, "-c", FORK, state, s3.endpoint, s3.access_key, s3.secret_key, root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == str(expected)


def test_a_process_killed_in_mid_upload_publishes_nothing(s3: S3Server) -> None:
    program = """
import os, signal, sys
from forebay.objects.remote import RemoteBackend
from forebay.settings import CloudSettings

options = {"endpoint": sys.argv[1], "access_key": sys.argv[2], "secret_key": sys.argv[3]}
backend = RemoteBackend(CloudSettings("s3", sys.argv[4], options))
writer = backend.open_streaming_writer("large", chunk_bytes=5 << 20, concurrent_parts=2)
writer.write(bytes(12 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = s3.bucket()
    command = [sys.executable, "-c", program, s3.endpoint, s3.access_key, s3.secret_key, root]
    assert subprocess.run(command, timeout=100, check=False).returncode == -signal.SIGKILL
    assert list(RemoteBackend(s3.settings(root)).list("")) == []
