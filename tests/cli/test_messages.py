"""The command line: each command's happy path and its bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay.limits import MESSAGE_BYTES_MAX
from support.cli_runs import refused, run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_produced_is_consumed(data: Path) -> None:
    produced = run("produce", "numbers", "--data", data, stdin="one\ntwo\nthree\n")
    assert produced.exit_code == 0
    assert produced.stdout == "3 messages in /default/numbers, synced; next offset 3\n"
    assert run("consume", "numbers", "--data", data).stdout == "one\ntwo\nthree\n"
    assert (
        run("consume", "numbers", "--data", data, "--start", "1", "--limit", "1").stdout == "two\n"
    )
    assert run("consume", "numbers", "--data", data, "--start", "latest").stdout == ""


def test_producing_again_goes_on_at_the_next_offset(data: Path) -> None:
    run("produce", "numbers", "--data", data, stdin="one\n")
    again = run("produce", "numbers", "--data", data, "--json", stdin="two\nthree\n")
    assert json.loads(again.stdout) == {"topic": "/default/numbers", "first": 1, "next": 3}
    lines = run("consume", "numbers", "--data", data, "--json").stdout.splitlines()
    assert [json.loads(line)["offset"] for line in lines] == [0, 1, 2]


def test_lines_are_stored_as_they_arrive(data: Path) -> None:
    command = [sys.executable, "-m", "forebay", "produce", "slow", "--data", str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as producer:
        assert producer.stdin is not None
        producer.stdin.write(b"first\n")
        producer.stdin.flush()
        follow = ["consume", "slow", "--data", str(data), "--follow", "--limit", "1"]
        directory = data / "wal" / "default" / "slow"
        wait_for((directory / "wal.synced").exists)
        shown = subprocess.run(
            [sys.executable, "-m", "forebay", *follow],
            check=True,
            capture_output=True,
            timeout=120,
        )
        assert shown.stdout == b"first\n"
        producer.send_signal(signal.SIGINT)
        out, _ = producer.communicate(timeout=120)
        assert out == b"1 message in /default/slow, synced; next offset 1\n"
        assert producer.returncode == 130


def test_a_line_that_is_too_long_is_named_and_the_ones_before_it_are_stored(data: Path) -> None:
    result = run(
        "produce", "t", "--data", data, stdin="ok\n" + "x" * (MESSAGE_BYTES_MAX + 1) + "\n"
    )
    assert result.exit_code == 2
    assert "line 2 has" in result.stderr
    assert "The 1 lines before it are stored" in result.stderr
    assert run("consume", "t", "--data", data).stdout == "ok\n"


def test_a_payload_that_is_not_text_is_base64_in_json(data: Path) -> None:
    with forebay.open(data) as store:
        store.topic("t").append_many([b"a\xff", rb"a\xff"])
    first, second = run("consume", "t", "--data", data, "--json").stdout.splitlines()
    assert json.loads(first)["payload_base64"] == "Yf8="
    assert json.loads(second)["payload"] == r"a\xff"


def test_a_closed_input_is_refused(data: Path) -> None:
    command = f"{sys.executable} -m forebay produce t --data {data} <&-"
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert "standard input is closed" in shown.stderr


def test_nothing_to_produce_is_no_error(data: Path) -> None:
    assert "0 messages" in run("produce", "numbers", "--data", data).stdout


def test_topics_are_listed(data: Path) -> None:
    run("produce", "b", "--data", data, stdin="x\n")
    run("produce", "/other/a", "--data", data, stdin="x\n")
    assert run("topics", "--data", data).stdout == "/default/b\n/other/a\n"
    listed = run("topics", "--data", data, "--json").stdout.splitlines()
    assert [json.loads(line)["topic"] for line in listed] == ["/default/b", "/other/a"]


def test_consuming_needs_no_lock(data: Path) -> None:
    with forebay.open(data) as store:
        store.topic("shared").append(b"seen", durability="synced")
        assert run("consume", "shared", "--data", data).stdout == "seen\n"


def test_following_prints_what_comes_later(data: Path) -> None:
    with forebay.open(data) as store:
        topic = store.topic("live")
        topic.append(b"before", durability="synced")
        command = [sys.executable, "-m", "forebay", "consume", "live", "--follow", "--limit", "3"]
        with subprocess.Popen(
            [*command, "--data", str(data)], stdout=subprocess.PIPE, text=True
        ) as consumer:
            assert consumer.stdout is not None
            assert consumer.stdout.readline() == "before\n"
            topic.append(b"after", durability="synced")
            assert consumer.stdout.readline() == "after\n"
            topic.append(b"last", durability="synced")
            assert consumer.stdout.readline() == "last\n"
            assert consumer.wait(timeout=120) == 0


def test_bad_input_is_one_line_and_exit_code_2(data: Path, tmp_path: Path) -> None:
    run("produce", "numbers", "--data", data, stdin="one\n")
    assert "a topic is /namespace/topic" in refused("produce", "a/b", "--data", data)
    assert "there is no topic /default/absent" in refused("consume", "absent", "--data", data)
    for bad in ("x", "-1", "9" * 5000):
        assert "must be an offset" in refused(
            "consume", "numbers", "--data", data, f"--start={bad}"
        )
    assert "the next one is 1" in refused("consume", "numbers", "--data", data, "--start", "7")
    assert "is not a data directory" in refused("topics", "--data", tmp_path / "absent")
    file = tmp_path / "file"
    file.write_text("")
    assert run("produce", "numbers", "--data", file).exit_code == 2


def test_a_locked_topic_says_who_holds_it(data: Path) -> None:
    with forebay.open(data) as store:
        store.topic("owned").append(b"x", durability="synced")
        assert "in use by process" in refused("produce", "owned", "--data", data)


def test_inspect_shows_each_kind_of_file(data: Path) -> None:
    run("produce", "seen", "--data", data, stdin="one\ntwo\n")
    with forebay.open(data) as store:
        topic = store.topic("seen")
        topic.rotate()
        topic.append(b"three", durability="synced")
    place = data / "wal" / "default" / "seen"

    def look(name: str, *options: str) -> list[dict[str, object]]:
        shown = run("inspect", place / name, "--json", *options)
        assert shown.exit_code == 0, shown.output
        return [json.loads(line) for line in shown.stdout.splitlines()]

    *frames, summary = look("wal.log")
    assert [(frame["offset"], frame["payload"]) for frame in frames] == [(0, "one"), (1, "two")]
    assert (summary["frames"], summary["end"], summary["next_offset"]) == (2, "complete", 2)
    assert len(look("wal.log", "--limit", "1")) == 2
    assert look("wal.ckpt")[0]["next_offset"] == 3
    assert look("wal.synced")[0]["seq"] == 1
    assert look("wal.idx")[0]["entries"] == [[0, 0]]
    assert "Frame: offset=0" in run("inspect", place / "wal.log").stdout


def test_inspect_reads_checkpoints_of_danube(tmp_path: Path) -> None:
    checkpoint = tmp_path / "wal.ckpt"
    checkpoint.write_bytes(bytes(43))
    shown = run("inspect", checkpoint, "--json")
    assert json.loads(shown.stdout)["type"] == "DanubeWalCheckpoint"
    uploader = tmp_path / "uploader.ckpt"
    uploader.write_bytes(bytes(33))
    assert json.loads(run("inspect", uploader, "--json").stdout)["last_object_id"] is None


def test_inspect_says_where_a_segment_is_torn(data: Path) -> None:
    run("produce", "torn", "--data", data, stdin="one\ntwo\n")
    segment = data / "wal" / "default" / "torn" / "wal.log"
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1])
    summary = json.loads(run("inspect", segment, "--json").stdout.splitlines()[-1])
    assert summary["end"] == "torn frame"
    assert summary["valid_bytes"] == len(whole) // 2


def test_inspect_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    assert "no such file" in refused("inspect", tmp_path / "absent")
    assert "is a directory" in refused("inspect", tmp_path)
    for name in ("wal.ckpt", "wal.synced", "wal.idx"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        refused("inspect", tmp_path / name)


def test_a_reader_of_the_output_that_leaves_is_no_error(data: Path) -> None:
    run("produce", "many", "--data", data, stdin="line\n" * 100_000)
    command = [sys.executable, "-m", "forebay", "consume", "many", "--data", str(data)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as consumer:
        assert consumer.stdout is not None
        assert consumer.stderr is not None
        assert consumer.stdout.readline() == "line\n"
        consumer.stdout.close()
        assert consumer.stderr.read() == ""
        assert consumer.wait(timeout=120) == 0
