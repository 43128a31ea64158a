"""`produce`, `consume` and the questions, through a running server: the same as without one."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.remote_messages import Wanted, received
from forebay.client.address import ServerInfo, server_file
from forebay.errors import ServiceUnavailable
from forebay.format.names import parse_topic
from forebay.settings import AdminSettings, ServerAddress, StoreSettings
from forebay.topic.store import Store
from support.cli_runs import lose_local_log, make_tiered, run, small_segments
from support.served import Served, served

ODD: list[tuple[bytes, dict[str, str], str | None]] = [
    (b"plain", {}, None),
    (b"", {}, None),
    (b" ", {"empty": ""}, ""),
    (b"\xff\x00\xfe", {"binary": "no"}, "key"),
    ("Gräben, 水 \U0001f30a".encode(), {"ключ": "значение"}, "ß"),
    (b'{"json": [1, 2]}', {"quotes": '"\\'}, None),
    (b"tab\tand \r return", {}, None),
    (b"\\u0041 \x01\x1f\x7f", {}, None),
    (b"x" * 200_000, {}, None),
]


@contextmanager
def noted(settings: StoreSettings | Path) -> Iterator[Served]:
    """A server that commands find by its note in the data directory."""
    with served(settings) as server:
        data = server.store.settings.data
        assert data is not None
        note = ServerInfo(server.url, server.context.instance, 1, server.context.store_id)
        server_file(data).write_bytes(note.encode())
        yield server


def append_odd(store: Store) -> None:
    topic = store.topic("odd")
    for payload, attributes, key in ODD:
        topic.append(payload, attributes, key, "synced")


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


# ---- the same both ways ----


def test_messages_come_out_the_same_with_and_without_a_server(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Store(small_segments(data)) as store:
        append_odd(store)
    for options in ([], ["--json"], ["--start", "2", "--limit", "3"], ["--end", "4", "--json"]):
        alone = run("consume", "odd", "--data", data, *options)
        with noted(small_segments(data)) as server:
            server_said = run("consume", "odd", "--data", data, *options)
            named = run("consume", "odd", "--url", server.url, *options)
        assert alone.exit_code == server_said.exit_code == named.exit_code == 0
        assert alone.stdout_bytes == server_said.stdout_bytes == named.stdout_bytes != b""


def test_lines_go_in_the_same_with_and_without_a_server(tmp_path: Path) -> None:
    sent = b"\n".join([b"one", b"", b"\xff\xfe", "ünï".encode(), b"y" * 70_000, b"\x00", b"last"])
    stored = []
    for name in ("alone", "served"):
        data = tmp_path / name
        with Store(small_segments(data)):
            pass
        command = [sys.executable, "-m", "forebay", "produce", "t", "--data", str(data)]
        if name == "alone":
            said = subprocess.run(command, input=sent, capture_output=True, check=True, timeout=120)
        else:
            with noted(small_segments(data)):
                said = subprocess.run(
                    command, input=sent, capture_output=True, check=True, timeout=120
                )
        assert said.stdout == b"7 messages in /default/t, synced; next offset 7\n"
        with Store(small_segments(data)) as store:
            stored.append([each.payload for each in store.topic("t").read(0)])
    assert stored[0] == stored[1] == sent.split(b"\n")


@pytest.mark.parametrize("durability", ["buffered", "synced", "uploaded"])
def test_a_durability_is_kept_through_a_server(durability: str, tmp_path: Path) -> None:
    with noted(small_segments(tmp_path / "data")) as server:
        command = ("produce", "t", "--url", server.url, "--durability", durability)
        stdin = "".join(f"{number}\n" for number in range(2500))
        stage = "uploaded" if durability == "uploaded" else "synced"
        said = run(*command, stdin=stdin)
        assert said.stdout == f"2500 messages in /default/t, {stage}; next offset 2500\n"
        marks = server.store.topic("t").watermarks()
        assert getattr(marks, stage) == 2500
        again = run(*command, "--json", stdin="more\n")
        assert json.loads(again.stdout) == {"topic": "/default/t", "first": 2500, "next": 2501}
        none = run(*command)
        assert none.stdout == "0 messages in /default/t, synced; next offset 2501\n"


def test_a_line_that_is_too_long_is_named_through_a_server(tmp_path: Path) -> None:
    with noted(tmp_path / "data") as server:
        refused = run("produce", "t", "--url", server.url, stdin="ok\n" + "x" * (17 << 20) + "\n")
        assert refused.exit_code == 2
        assert "lines 2 to 2 were refused" in refused.stderr
        assert "lines 1 to 1 are stored" in refused.stderr
        assert run("consume", "t", "--url", server.url).stdout == "ok\n"


def test_lost_offsets_are_told_the_same_through_a_server(tmp_path: Path) -> None:
    data = tmp_path / "data"
    make_tiered(data)
    lose_local_log(data)
    with Store(small_segments(data)) as store:
        store.topic("orders").append(b"100", durability="synced")
    alone = [run("consume", "orders", "--data", data, *more) for more in ([], ["--skip-lost"])]
    with noted(small_segments(data)):
        through = [
            run("consume", "orders", "--data", data, *more) for more in ([], ["--skip-lost"])
        ]
    for one, other in zip(alone, through, strict=True):
        assert (one.exit_code, one.stdout, one.stderr) == (
            other.exit_code,
            other.stdout,
            other.stderr,
        )
    assert "continue at offset 100, or use --skip-lost" in through[0].stderr


# ---- questions ----


def test_topics_describe_and_explain_ask_the_server_that_runs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    make_tiered(data)
    with noted(small_segments(data)) as server:
        server.store.topic("orders").append_many([b"1", b"2"], durability="synced")
        assert run("topics", "--data", data).stdout == "/default/orders\n"
        assert lines(run("topics", "--url", server.url, "--json").stdout) == [
            {"topic": "/default/orders"}
        ]
        text = run("describe", "orders", "--data", data).stdout
        assert "  appended   102\n" in text
        assert "  in memory  100 to 101\n" in text
        facts = json.loads(run("describe", "orders", "--url", server.url, "--json").stdout)
        assert (facts["appended"], facts["memory"], facts["uploaded"]) == (102, [100, 102], 60)
        told = run("explain", "orders", "101", "--data", data).stdout
        assert "in the server's memory" in told
        assert "wal" in told
        absent = run("describe", "absent", "--url", server.url)
        assert (absent.exit_code, absent.stderr.count("\n")) == (2, 1)
    after = run("describe", "orders", "--data", data).stdout
    assert "in memory" not in after, "the note is old: the files are asked"
    assert "  synced     102\n" in after


# ---- tokens and addresses ----


def test_a_token_is_taken_from_the_configuration_or_the_environment(tmp_path: Path) -> None:
    settings = replace(small_segments(tmp_path / "data"), admin=AdminSettings(token="secret"))
    config = tmp_path / "forebay.yml"
    config.write_text("admin: {token: secret}\n")
    with served(settings) as server:
        for command in (("produce", "t"), ("consume", "t"), ("topics",), ("describe", "t")):
            bare = run(*command, "--url", server.url, stdin="x\n")
            assert bare.exit_code == 2
            assert "requires a token: set admin.token in the configuration" in bare.stderr
            # The server is in this process, and tells of refusals on the same stream.
            told = [each for each in bare.stderr.splitlines() if "valid token" not in each]
            assert len(told) == 1
            wrong = run(*command, "--url", server.url, env={"FOREBAY_TOKEN": "no"})
            assert "does not accept the token" in wrong.stderr or command == ("produce", "t")
        said = run("produce", "t", "--url", server.url, "--config", config, stdin="x\n")
        assert said.exit_code == 0, said.stderr
        read = run("consume", "t", "--url", server.url, env={"FOREBAY_TOKEN": "secret"})
        assert read.stdout == "x\n"


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, and which nobody else can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", [("produce", "t"), ("consume", "t"), ("topics",)])
@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://", "http://h:port", None])
def test_a_server_that_is_none_is_one_line(
    command: tuple[str, ...], url: str | None, nobody: str
) -> None:
    said = run(*command, "--url", url or nobody, stdin="x\n")
    assert said.exit_code == 2
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("forebay: ")


# ---- when the server goes away ----


def test_a_follower_goes_on_by_offset_when_the_server_restarts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = small_segments(data)
    command = [sys.executable, "-m", "forebay", "consume", "t", "--follow", "--limit", "6"]
    with noted(settings) as server:
        server.store.topic("t").append_many([b"0", b"1"], durability="synced")
        reader = subprocess.Popen(
            [*command, "--data", str(data)], stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None
        assert [reader.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
    with noted(settings) as server, reader:
        topic = server.store.topic("t")
        topic.append_many([b"2", b"3"], durability="synced")
        assert reader.stdout is not None
        assert [reader.stdout.readline() for _ in range(2)] == ["2\n", "3\n"]
        topic.append_many([b"4", b"5", b"6"], durability="synced")
        assert reader.stdout.read() == "4\n5\n"
        assert reader.wait(120) == 0


def test_a_server_that_stays_away_is_given_up(nobody: str) -> None:
    address = ServerAddress(nobody)
    wanted = Wanted("5", end=None, follow=True, limit=None, skip_lost=False)
    with pytest.raises(ServiceUnavailable, match="--start 5"):
        list(received(address, parse_topic("t"), wanted, lambda: None, reconnect_seconds=0.5))


def test_following_through_a_server_ends_with_ctrl_c(tmp_path: Path) -> None:
    with noted(small_segments(tmp_path / "data")) as server:
        server.store.topic("t").append(b"first", durability="synced")
        command = [sys.executable, "-m", "forebay", "consume", "t", "--follow", "--json"]
        with subprocess.Popen(
            [*command, "--url", server.url], stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout is not None
            assert json.loads(reader.stdout.readline())["payload"] == "first"
            reader.send_signal(signal.SIGINT)
            assert reader.wait(120) == 130


def test_lines_appear_at_once_through_a_server(tmp_path: Path) -> None:
    with noted(small_segments(tmp_path / "data")) as server:
        command = [sys.executable, "-m", "forebay", "produce", "t", "--url", server.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as producer:
            assert producer.stdin is not None
            producer.stdin.write(b"first\n")
            producer.stdin.flush()
            deadline = time.monotonic() + 120
            while (topic := server.store.opened("t")) is None or not topic.watermarks().synced:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            out, _ = producer.communicate(timeout=120)
            assert out == b"1 message in /default/t, synced; next offset 1\n"
            assert producer.returncode == 0
