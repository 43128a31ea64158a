"""What `produce` says when a server breaks off, refuses or ends: what is sure and what is not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import remote_messages
from forebay.cli.remote_messages import Durability, Sender, Sent
from forebay.client.http import ServerClient, took_nothing
from forebay.errors import ForebayError, ServiceUnavailable
from forebay.format.names import parse_topic
from forebay.settings import ServerAddress, StoreSettings, UploaderSettings
from support.cli_runs import run
from support.scripted_server import RUN, STORE, Lines, answering, appended, interrupt, said
from support.served import Served, served

TOPIC = parse_topic("t")
UNKNOWN = "are stored: look at the end of the topic"
HTML = b"<html>504 Gateway Time-out</html>"


def failure(kind: str, message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message, **fields}}


class Script:
    """Answers one after the other; after the last one the connection breaks off."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = iter(answers)
        self.requests: list[bytes] = []

    def __call__(self, request: bytes) -> bytes | None:
        self.requests.append(request)
        return next(self._answers, None)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a server that is busy."""
    monkeypatch.setattr(remote_messages, "_BUSY_SECONDS", 0.0)


def sent_through(url: str, monkeypatch: pytest.MonkeyPatch, lines: Lines, how: Durability) -> Sent:
    monkeypatch.setattr(sys, "stdin", lines)
    with ServerClient(ServerAddress(url, store=STORE)) as client:
        return Sender(client, TOPIC, how).run()


# ---- a server that breaks off, or is none ----


def test_a_server_of_another_kind_is_told() -> None:
    with answering(lambda _request: said(b"hi", "404 Nope")) as url:
        assert "is not a Forebay server" in run("topics", "--url", url).stderr
    # One that does not even say who it is gets no request at all.
    script = Script()
    with answering(script, who={"instance": None}) as url:
        told = run("produce", "t", "--url", url, stdin="x\n")
    assert told.exit_code == 2
    assert "is not a Forebay server" in told.stderr
    assert script.requests == []


def test_a_server_that_breaks_off_leaves_no_doubt_about_what_is_confirmed() -> None:
    script = Script(said(appended(0, 1000)))
    with answering(script) as url:
        told = run("produce", "t", "--url", url, stdin="line\n" * 1500)
    assert told.exit_code == 2
    assert told.stdout == ""
    assert "lines 1 to 1000 are stored" in told.stderr
    assert f"whether lines 1001 to 1500 {UNKNOWN}" in told.stderr
    assert len(script.requests) == 2, "what may be stored is not sent again"


@pytest.mark.parametrize(
    "answer",
    [
        said(HTML, "504 Gateway Time-out"),
        said(HTML, "502 Bad Gateway"),
        said(failure("ServiceRefused", "the object store refuses"), "502 Bad Gateway"),
        said(failure("ServiceUnavailable", "/default/good-for-nothing: no answer"), "503 Away"),
        said(failure("InternalError", "nothing was taken"), "500 Oops"),
        said(failure("UsageError", "gone"), "410 Gone"),
        said(b"<html>hello</html>"),
        said({"count": 3}),
        said(appended(0, 2)),
    ],
)
def test_what_is_no_refusal_leaves_doubt_and_is_not_sent_again(answer: bytes) -> None:
    """A proxy's answer, or a server's after the append, says nothing about the lines."""
    script = Script(answer, said(appended(0, 3)))
    with answering(script) as url:
        told = run("produce", "t", "--url", url, stdin="a\nb\nc\n")
    assert told.exit_code == 2
    assert f"no line is confirmed; it is unknown whether lines 1 to 3 {UNKNOWN}" in told.stderr
    assert "refused:" not in told.stderr
    assert len(script.requests) == 1


@pytest.mark.parametrize("status", ["400 Bad", "404 No", "409 Conflict", "413 Large", "504 Late"])
def test_what_the_server_refused_is_told_as_refused(status: str) -> None:
    sure = {} if status[:3] in {"400", "404", "413"} else {"taken": False}
    script = Script(said(appended(5, 1000)), said(failure("UsageError", "no", **sure), status))
    with answering(script) as url:
        told = run("produce", "t", "--url", url, stdin="x\n" * 1001)
    assert told.exit_code == 2
    assert "lines 1001 to 1001 were refused: no; lines 1 to 1000 are stored" in told.stderr
    assert "unknown" not in told.stderr


@pytest.mark.usefixtures("hurried")
def test_a_server_that_took_nothing_is_asked_again() -> None:
    busy = said(failure("ServiceUnavailable", "no room", taken=False), "503 Busy")
    script = Script(busy, busy, said(appended(7, 1)))
    with answering(script) as url:
        told = run("produce", "t", "--url", url, stdin="line\n")
    assert told.stdout == "1 message in /default/t, synced; next offset 8\n"
    assert len(script.requests) == 3
    with answering(lambda _request: busy) as url:
        told = run("produce", "t", "--url", url, stdin="line\n")
    assert "lines 1 to 1 were not sent: the server was busy 30 times" in told.stderr
    assert "unknown" not in told.stderr


def test_what_never_got_to_a_server_is_not_in_doubt() -> None:
    with answering(Script()) as url:
        pass
    with ServerClient(ServerAddress(url)) as client, pytest.raises(ServiceUnavailable) as found:
        client.request("POST", "/v1/topics/default/t/messages", body=b"x")
    assert took_nothing(found.value)


# ---- lines that are only buffered ----


@pytest.mark.parametrize(
    "second",
    [said(appended(2, 1), run="2" * 32), said(appended(1, 1)), said(appended(9, 1), run="2" * 32)],
    ids=["another run", "offsets again", "another run, further on"],
)
def test_a_restart_leaves_doubt_about_lines_that_were_buffered(
    second: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines(b"a\nb\n", b"c\n")
    with (
        answering(Script(said(appended(0, 2)), second)) as url,
        pytest.raises(ServiceUnavailable, match=f"restarted .* whether lines 1 to 3 {UNKNOWN}"),
    ):
        sent_through(url, monkeypatch, lines, "buffered")
    # What is synced is nobody's to lose.
    if b'"first_offset": 1' not in second:
        with answering(Script(said(appended(0, 2)), second)) as url:
            found = sent_through(url, monkeypatch, Lines(b"a\nb\n", b"c\n"), "synced")
        assert found.count == 3


def test_a_restart_before_the_last_word_leaves_doubt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"offset": 1, "payload": "of somebody else"}
    for last, why in (
        (said(message, run="2" * 32), "restarted"),
        (said(failure("OffsetOutOfRange", "not there", start=0, end=1), "416 No"), "not there"),
        (said(failure("LogStopped", "the disk", synced=0)), "the disk"),
        (said(b""), "stopped before it confirmed"),
        (said(b"<html>"), "Expecting value"),
    ):
        with (
            answering(Script(said(appended(0, 2)), last)) as url,
            pytest.raises(ServiceUnavailable, match=f"{why}.* whether lines 1 to 2 {UNKNOWN}"),
        ):
            sent_through(url, monkeypatch, Lines(b"a\nb\n"), "buffered")
    with answering(Script(said(appended(0, 2)), said(message))) as url:
        assert sent_through(url, monkeypatch, Lines(b"a\nb\n"), "buffered").stage == "synced"


def test_a_server_that_goes_takes_what_was_buffered_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        answering(Script(said(appended(0, 2)))) as url,
        pytest.raises(ServiceUnavailable, match=f"no line is confirmed.* lines 1 to 3 {UNKNOWN}"),
    ):
        sent_through(url, monkeypatch, Lines(b"a\nb\n", b"c\n"), "buffered")


# ---- an upload that does not come about ----


def test_lines_that_are_synced_and_not_uploaded_are_stored(tmp_path: Path) -> None:
    """Whatever the object store says: it is no refusal, and the answer tells how far it went."""
    settings = StoreSettings(data=tmp_path, uploader=UploaderSettings(enabled=False))
    with served(settings) as server:
        topic = server.store.topic("t")
        topic.append(b"0", durability="synced")
        shutil.rmtree(tmp_path / "objects", ignore_errors=True)
        (tmp_path / "objects").write_text("a file, where a directory is wanted")
        told = run(
            "produce", "t", "--url", server.url, "--durability", "uploaded", stdin="a\nb\nc\n"
        )
        assert told.exit_code == 2
        assert "offset 1 to 3 are synced, and are not uploaded" in told.stderr
        assert "lines 1 to 3 are stored" in told.stderr
        assert "refused:" not in told.stderr
        assert topic.watermarks().synced == 4
        error = failed_upload(server)
        facts = vars(error)
        assert (facts["status"], facts["first_offset"], facts["synced"]) == (504, 4, 5)
        assert not took_nothing(error)


def failed_upload(server: Served) -> ForebayError:
    with pytest.raises(ForebayError) as found:
        server.client.request(
            "POST",
            "/v1/topics/default/t/messages",
            query={"durability": "uploaded"},
            body=b"payload",
        )
    return found.value


def test_errors_before_the_append_say_that_nothing_was_taken(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        (tmp_path / "wal" / "default").mkdir(parents=True)
        (tmp_path / "wal" / "default" / "t").write_text("a file, where a log is wanted")
        with pytest.raises(ForebayError) as found:
            server.client.request("POST", "/v1/topics/default/t/messages", body=b"x")
        assert vars(found.value)["status"] >= 500
        assert took_nothing(found.value)


# ---- interrupts ----


@pytest.mark.parametrize(
    ("durability", "before"), [("synced", 0), ("uploaded", 0), ("buffered", 1)]
)
def test_an_interrupted_request_is_not_passed_over_in_silence(durability: str, before: int) -> None:
    """Nor one that waits for an upload at the end, nor one for the sync of what was buffered."""
    asked = threading.Event()
    over = threading.Event()
    seen: list[bytes] = []

    def answer(request: bytes) -> bytes | None:
        seen.append(request)
        if len(seen) <= before:
            return said(appended(0, 1))
        asked.set()
        over.wait(120)
        return None

    with answering(answer) as url:
        command = [sys.executable, "-m", "forebay", "produce", "t", "--url", url]
        with subprocess.Popen(
            [*command, "--durability", durability],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as producer:
            assert producer.stdin is not None
            producer.stdin.write(b"first\n")
            producer.stdin.close()
            producer.stdin = None
            assert asked.wait(120)
            producer.send_signal(signal.SIGINT)
            out, err = producer.communicate(timeout=120)
        over.set()
    assert producer.returncode == 130
    assert out == b""
    assert (
        f"interrupted; no line is confirmed; it is unknown whether lines 1 to 1 {UNKNOWN}"
        in err.decode()
    )
    assert err.count(b"\n") == 1


def test_an_interrupt_between_requests_ends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(Script(said(appended(3, 2)))) as url:
        found = sent_through(url, monkeypatch, Lines(b"a\nb\n", interrupt, b"c\n"), "synced")
    assert (found.interrupted, found.doubt, found.next, found.count) == (True, None, 5, 2)
    script = Script(said(appended(3, 2)))
    with answering(script) as url:
        found = sent_through(url, monkeypatch, Lines(b"a\nb\n", interrupt), "uploaded")
    assert (found.stage, found.count) == ("synced", 2)
    assert b"durability=synced" in script.requests[0]


def test_answers_name_the_run_that_gave_them(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.client.json("GET", "/v1/topics")
        assert server.client.instance == server.context.instance != RUN
        assert json.loads(server.client.request("GET", "/healthz").read())["store"] == (
            server.context.store_id
        )
