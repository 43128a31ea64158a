"""Log lines: their two forms, and that no secret is in any of them."""

from __future__ import annotations

import base64
import errno
import io
import json
import logging
import re
import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from forebay import metrics
from forebay.config import describe
from forebay.errors import ForebayError, LogStopped, ServiceError, ServiceUnavailable
from forebay.files.local import LocalDisk
from forebay.format.names import parse_topic
from forebay.logs import ERRORS, JsonFormatter, ServerFormatter, event
from forebay.settings import (
    CloudSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing import Fault, FaultDisk
from forebay.topic.store import Store

LOG: Final = logging.getLogger("forebay.test")


@dataclass
class Lines:
    """What was logged, in both forms."""

    text: io.StringIO = field(default_factory=io.StringIO)
    json: io.StringIO = field(default_factory=io.StringIO)

    def last(self) -> str:
        return self.text.getvalue().splitlines()[-1]

    def fields(self) -> dict[str, Any]:
        """The fields of the last line, without its time."""
        found: dict[str, Any] = json.loads(self.json.getvalue().split("\n")[-2])
        assert found.pop("at").endswith("Z")
        return found

    @property
    def all(self) -> str:
        return self.text.getvalue() + self.json.getvalue()


@contextmanager
def listening(logger: logging.Logger) -> Iterator[Lines]:
    lines = Lines()
    text, in_json = logging.StreamHandler(lines.text), logging.StreamHandler(lines.json)
    in_json.setFormatter(JsonFormatter())
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(text)
    logger.addHandler(in_json)
    yield lines
    logger.removeHandler(text)
    logger.removeHandler(in_json)
    logger.setLevel(level)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What the tests' logger logs."""
    with listening(LOG) as lines:
        yield lines


@pytest.fixture
def all_lines() -> Iterator[Lines]:
    """What any logger logs."""
    with listening(logging.getLogger()) as lines:
        yield lines


@pytest.fixture
def log_lines() -> Iterator[Lines]:
    """What the write-ahead log logs, whatever level a command has set for the others."""
    with listening(logging.getLogger("forebay.wal")) as lines:
        yield lines


def test_a_line_is_what_happened_and_its_fields(lines: Lines) -> None:
    event(LOG, logging.INFO, "object committed", topic="/default/orders", bytes=9, seconds=0.12345)
    assert lines.last() == "object committed topic=/default/orders bytes=9 seconds=0.123"
    assert lines.fields() == {
        "level": "info",
        "logger": "forebay.test",
        "event": "object committed",
        "topic": "/default/orders",
        "bytes": 9,
        "seconds": 0.12345,
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("two words", '"two words"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "x"', '"say \\"x\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("Grüße", "Grüße"),
        ("one\ntwo", '"one\\ntwo"'),
        ("one\u2028two", '"one\\u2028two"'),
        ("\x1b[31m", '"\\u001b[31m"'),
        (None, "None"),
        (Path("/data/wal.log"), "/data/wal.log"),
        (ServiceUnavailable("no answer"), '"no answer"'),
    ],
)
def test_a_value_stays_one_word_of_one_line(lines: Lines, value: object, shown: str) -> None:
    event(LOG, logging.ERROR, "it happened", value=value, after=1)
    assert lines.text.getvalue() == f"it happened value={shown} after=1\n"
    plain = value if value is None else str(value)
    assert lines.fields()["value"] == plain


def test_a_topic_has_one_name_in_text_and_in_json(lines: Lines) -> None:
    event(LOG, logging.INFO, "object committed", topic=parse_topic("orders"), chunks=None, late=inf)
    assert lines.last() == "object committed topic=/default/orders chunks=None late=inf"
    found = lines.fields()
    assert (found["topic"], found["chunks"], found["late"]) == ("/default/orders", None, "inf")


def test_a_rotation_is_logged_with_its_topic_and_what_caused_it(
    tmp_path: Path, log_lines: Lines
) -> None:
    settings = StoreSettings(tmp_path, wal=WalSettings(rotate_max_bytes=1000))
    with Store(settings) as store:
        topic = store.topic("orders")
        for _ in range(2):
            topic.append(b"x" * 1000, durability="synced")
        topic.rotate()
    found = [json.loads(line) for line in log_lines.json.getvalue().splitlines()]
    rotated = [each for each in found if each["event"] == "segment rotated"]
    assert [(each["file"], each["start"], each["end"]) for each in rotated] == [
        ("wal.log", 0, 0),
        ("wal.1.log", 1, 1),
    ]
    assert {each["topic"] for each in rotated} == {"/default/orders"}
    assert [each["closed_by"] for each in rotated] == ["bytes", "bytes"]
    assert "segment rotated topic=/default/orders file=wal.log start=0" in log_lines.all


def test_a_line_in_json_is_one_line(lines: Lines) -> None:
    event(LOG, logging.WARNING, "it\nhappened", error=ValueError("one\ntwo"))
    assert lines.json.getvalue().count("\n") == 1
    assert lines.fields()["event"] == "it\nhappened"


def test_lines_of_others_have_the_same_form(lines: Lines) -> None:
    LOG.warning("%d things\nhappened", 3)
    assert lines.fields() == {
        "level": "warning",
        "logger": "forebay.test",
        "event": "3 things\nhappened",
    }


def test_a_traceback_is_below_the_line_and_in_one_field(lines: Lines) -> None:
    with pytest.raises(RuntimeError) as caught:
        fail()
    event(LOG, logging.ERROR, "it failed", trace=caught.value, error=repr(caught.value))
    first, second, *_ = lines.text.getvalue().splitlines()
    assert first == "it failed error=\"RuntimeError('a bug')\""
    assert second == "Traceback (most recent call last):"
    found = lines.fields()
    assert found["error"] == "RuntimeError('a bug')"
    assert found["trace"].endswith("RuntimeError: a bug")
    assert "in fail" in found["trace"]


def fail() -> None:
    raise RuntimeError("a bug")


def test_what_nobody_listens_to_is_not_formatted(lines: Lines) -> None:
    class Fragile:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    LOG.setLevel(logging.ERROR)
    event(LOG, logging.INFO, "it happened", value=Fragile())
    assert lines.all == ""


def test_a_line_names_the_place_that_logged_it(caplog: pytest.LogCaptureFixture) -> None:
    event(LOG, logging.WARNING, "it happened")
    assert caplog.records[0].funcName == "test_a_line_names_the_place_that_logged_it"


# ---- what a server's lines look like ----------------------------------------------------------


def test_a_servers_line_begins_with_the_time_and_the_level() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(ServerFormatter())
    LOG.addHandler(handler)
    event(LOG, logging.WARNING, "upload failed", topic="/default/orders")
    LOG.removeHandler(handler)
    moment, rest = stream.getvalue().split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", moment)
    assert rest == "warning upload failed topic=/default/orders\n"


def test_an_error_without_words_is_told_by_its_name(lines: Lines) -> None:
    event(LOG, logging.ERROR, "it ended", error=KeyboardInterrupt())
    assert lines.last() == "it ended error=KeyboardInterrupt()"
    assert lines.fields()["error"] == "KeyboardInterrupt()"


# ---- errors by kind ---------------------------------------------------------------------------


def counted(level: int, text: str, **fields: Any) -> dict[str, float]:
    """What one line adds to the counts."""
    before = ERRORS.values()
    event(LOG, level, text, **fields)
    return {
        kind: number - before.get((kind,), 0.0)
        for (kind,), number in ERRORS.values().items()
        if number != before.get((kind,), 0.0)
    }


def test_a_warning_is_counted_by_the_class_of_its_error() -> None:
    assert counted(logging.WARNING, "it failed", error=ServiceUnavailable("x")) == {
        "ServiceUnavailable": 1
    }
    assert counted(logging.ERROR, "a bug", error="in words", trace=KeyError("x")) == {"KeyError": 1}


def test_a_warning_without_an_error_is_counted_by_its_words() -> None:
    assert counted(logging.WARNING, "a log was set aside", log_id="7") == {"a log was set aside": 1}
    assert counted(logging.WARNING, "it failed", error="in words") == {"it failed": 1}


def test_what_is_no_warning_is_not_counted() -> None:
    assert counted(logging.INFO, "object committed", error=ServiceUnavailable("x")) == {}


def test_a_warning_that_nobody_listens_to_is_counted() -> None:
    LOG.setLevel(logging.CRITICAL)
    try:
        assert counted(logging.ERROR, "it happened") == {"it happened": 1}
    finally:
        LOG.setLevel(logging.NOTSET)


def test_a_disk_that_fails_is_counted(tmp_path: Path) -> None:
    disk = FaultDisk(LocalDisk())
    before = ERRORS.value("OSError")
    with Store(StoreSettings(tmp_path), disk=disk) as store:
        topic = store.topic("orders")
        topic.append(b"x", durability="synced")
        disk.inject(Fault("sync", errno.EIO, path="wal.log"))
        with pytest.raises(LogStopped):
            topic.append(b"y", durability="synced")
        assert ERRORS.value("OSError") == before + 1
        store.topic("orders")


# ---- secrets ----------------------------------------------------------------------------------

SECRET: Final = "hunter2/hunter2+hunter2hunter2hunter2=="
TOKEN: Final = "a-token/of+a+session=="
KEY: Final = base64.b64encode(b"the key of an account in the cloud").decode()
SIGNATURE: Final = "c2lnbmF0dXJl+b2Y/YW4=YWNjb3VudA=="
PASSWORD: Final = "correct-horse-battery"


class Parrot(BaseHTTPRequestHandler):
    """Refuses every request, and repeats all of it in the response."""

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("x-amz-security-token", "")
        signature = parse_qs(urlsplit(self.path).query).get("sig", [""])[0]
        body = (
            "<Error><Code>AccessDenied</Code>"
            f"<Message>not you: {token}{signature} at {quote(self.path)}</Message>"
            f"<StringToSign>{self.path} {dict(self.headers)} {SECRET} {KEY}</StringToSign></Error>"
        ).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse  # noqa: N815 - the names it looks for

    def log_message(self, *_: object) -> None:
        """Logs nothing: the test looks for secrets in what the client logs."""


@pytest.fixture
def parrot() -> Iterator[str]:
    """The address of a server that repeats what it is sent."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Parrot) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


S3: Final = {"access_key": "a-name", "secret_key": SECRET, "session_token": TOKEN, "region": "r"}
CLOUDS: Final[dict[str, tuple[str, str, dict[str, str]]]] = {
    "s3": ("s3", "s3://bucket/prefix", S3),
    "azure key": ("azure", "azure://box", {"account_name": "me", "account_key": KEY}),
    "azure token": (
        "azure",
        "azure://box",
        {"account_name": "me", "sas_token": f"sv=2024-01-01&sig={quote(SIGNATURE, safe='')}"},
    ),
}


@pytest.fixture
def dead() -> Iterator[str]:
    """The address of a port that is taken, so that nobody else listens there either."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def cloud(store: str, endpoint: str) -> CloudSettings:
    backend, root, options = CLOUDS[store]
    return CloudSettings(
        backend=backend,  # type: ignore[arg-type] # one of its literals
        root=root,
        options={**options, "endpoint": endpoint},
        request_timeout_seconds=60,
        retry_timeout_seconds=0.2,
        max_retries=1,
    )


def fail_to_upload(settings: StoreSettings) -> ForebayError:
    """The error of an upload to a store that worked when the topic was created."""
    before = replace(settings, cloud=CloudSettings(backend="memory", root=str(settings.data)))
    with Store(before) as store:
        store.topic("orders").append(b"x")
    with Store(settings) as store, pytest.raises(ServiceError) as caught:
        store.topic("orders").upload()
    return caught.value


def require_no_secret(text: str, *secrets: str) -> None:
    for secret in secrets:
        for form in (secret, quote(secret), quote(secret, safe="")):
            assert form not in text


@pytest.mark.parametrize("server", ["dead", "parrot"])
@pytest.mark.parametrize("store", CLOUDS)
def test_an_upload_that_fails_tells_no_secret(
    tmp_path: Path, all_lines: Lines, store: str, server: str, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(server)
    settings = StoreSettings(
        data=tmp_path,
        cloud=cloud(store, f"http://{address}"),
        uploader=UploaderSettings(enabled=False),
    )
    error = fail_to_upload(settings)
    assert "upload failed topic=/default/orders" in all_lines.text.getvalue()
    said = [
        all_lines.all,
        repr(error),
        *traceback.format_exception(error),
        repr(settings),
        json.dumps(describe(settings)),
        metrics.render(),
    ]
    require_no_secret("\n".join(said), SECRET, TOKEN, KEY, SIGNATURE)


def test_a_secret_of_the_environment_is_told_no_more_than_one_of_the_file(
    tmp_path: Path, all_lines: Lines, parrot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    place = CloudSettings(
        backend="s3",
        root="s3://bucket",
        options={"endpoint": f"http://{parrot}", "region": "r"},
        retry_timeout_seconds=0.2,
        max_retries=1,
    )
    settings = StoreSettings(tmp_path, cloud=place, uploader=UploaderSettings(enabled=False))
    error = fail_to_upload(settings)
    assert "not you: ***" in str(error), "the server's words are shown, without the secrets"
    everything = "".join(traceback.format_exception(error)) + all_lines.all + repr(settings)
    require_no_secret(everything, SECRET, TOKEN)


def test_the_catalogs_password_is_told_by_nobody(
    tmp_path: Path, all_lines: Lines, dead: str
) -> None:
    metadata = MetadataSettings(
        backend="etcd",
        endpoints=[dead],
        username="me",
        password=PASSWORD,
        timeout_seconds=1,
    )
    settings = StoreSettings(tmp_path, metadata=metadata)
    with Store(settings) as store, pytest.raises(ServiceError) as caught:
        store.topic("orders")
    error = caught.value
    everything = "".join(traceback.format_exception(error)) + repr(error) + all_lines.all
    require_no_secret(everything + repr(settings) + json.dumps(describe(settings)), PASSWORD)
