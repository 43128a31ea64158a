"""`consume` by time, from the end and with a template; `produce` with a key and attributes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forebay.cli.message_format import MessageFormat
from forebay.config.quantities import parse_moment
from forebay.errors import UsageError
from forebay.format.message import StreamMessage
from forebay.format.names import parse_topic
from forebay.settings import StoreSettings
from forebay.topic.store import Store
from support.cli_runs import done, refused, small_segments
from support.served import served

BASE = 1_767_225_600_000
"""2026-01-01T00:00Z."""
HOUR = 3_600_000


def fill(data: Path) -> None:
    """Five messages, an hour apart but for the third, which is late; two of them in an object."""
    with Store(small_segments(data)) as store:
        topic = store.topic("orders")
        for number, hours in enumerate((0, 1, -1, 3, 4)):
            topic._storage.append_message(
                StreamMessage(b"m%d" % number, publish_time=BASE + hours * HOUR)
            )
            if number == 1:
                topic.upload()


def both_ways(data: Path, *options: str) -> str:
    """What `consume` prints with a server and without one, which is the same."""
    alone = done("consume", "orders", "--data", data, *options)
    with served(small_segments(data)) as server:
        through = done("consume", "orders", "--url", server.url, *options)
    assert alone == through
    return alone


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--since", "2026-01-01T00:30Z"], "1234"),
        (["--since", "2026-01-01T00:30"], "1234"),
        (["--since", "2026-01-01T02:00+01:00"], "1234"),
        (["--since", str(BASE + 2 * HOUR)], "34"),
        (["--since", "2027-01-01"], ""),
        (["--since", "2026-01-01", "--until", "2026-01-01T03:00Z"], "012"),
        (["--until", "2026-01-01T01:00Z"], "0"),
        (["--since", "2026-01-01T02:00", "--limit", "1"], "3"),
        (["--since", "2026-01-01T00:30Z", "--end", "3"], "12"),
        (["--last", "2"], "34"),
        (["--last", "99"], "01234"),
        (["--last", "0"], ""),
        (["--last", "3", "--until", "2026-01-01T04:00Z"], "23"),
        (["--follow", "--until", "2026-01-01T04:00Z"], "0123"),
    ],
)
def test_messages_are_chosen_by_time_and_from_the_end(
    tmp_path: Path, options: list[str], numbers: str
) -> None:
    fill(tmp_path / "data")
    printed = both_ways(tmp_path / "data", *options)
    assert printed == "".join(f"m{number}\n" for number in numbers)


def test_a_duration_means_that_long_before_now(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data)
    done("produce", "orders", "--data", data, stdin="new\n")
    assert both_ways(data, "--since", "10m") == "new\n"
    now = int(time.time() * 1000)
    assert parse_moment("1h30m", now) == now - 90 * 60_000
    assert parse_moment("10m") is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--since", "soon"], "--since is 'soon'; it must be a date and time such as"),
        (["--until", "2026-13-01"], "--until is '2026-13-01'"),
        (["--since", "1h", "--last", "3"], "give only one of --start, --since and --last"),
        (["--since", "2026-01-02", "--until", "2026-01-01"], "is before --since"),
        (["--format", "%o %q"], "--format has %q, which means nothing"),
        (["--format", "%o\\q"], "--format has \\q, which means nothing"),
        (["--format", "100%"], "--format has %, which means nothing"),
        (["--format", "%o", "--json"], "give --json or --format, not both"),
    ],
)
def test_a_wrong_choice_is_refused_in_one_line(
    tmp_path: Path, options: list[str], words: str
) -> None:
    assert words in refused("consume", "orders", "--data", tmp_path / "data", *options)


def test_keys_and_attributes_come_out_as_they_went_in(tmp_path: Path) -> None:
    parts = ["--key", "k é", "--attribute", "a=1=2", "--attribute", "b="]
    template = "%t/%p %o %k %K %h %s %S\\n"
    wanted = "/default/orders/0 {} k é 4 a=1=2,b= {} {}\n"
    for way in ("alone", "served"):
        data = tmp_path / way
        with Store(StoreSettings(data=data)):
            pass
        with served(data) as server:
            where = ["--url", server.url]
            if way == "alone":
                server.store.close()
                where = ["--data", str(data)]
            done("produce", "orders", *where, *parts, stdin="one\ntwo\n")
            done("produce", "orders", *where, *parts, stdin="three\n")
            shown = done("consume", "orders", *where, "--format", template)
        assert shown == "".join(
            wanted.format(offset, text, len(text))
            for offset, text in enumerate(("one", "two", "three"))
        )


def test_wrong_attributes_are_refused(tmp_path: Path) -> None:
    for pairs, words in (
        (["novalue"], "it must be NAME=TEXT"),
        (["=x"], "it must be NAME=TEXT"),
        (["a=1", "a=2"], "names 'a' twice"),
    ):
        options = [each for pair in pairs for each in ("--attribute", pair)]
        assert words in refused("produce", "t", "--data", tmp_path / "data", *options)


def test_every_escape_prints_its_part() -> None:
    facts = {
        "offset": 7,
        "publish_time": 1700,
        "payload_base64": "/wA=",
        "attributes": {"b": "2", "a": "1"},
        "routing_key": None,
    }
    form = MessageFormat("%o|%v|%s|%S|%k|%K|%t|%p|%T|%h|%%|\\n\\r\\t\\0\\\\\\x41é")
    line = form.line(facts, parse_topic("/default/orders-part-3"))
    assert line == (
        b"7|\xff\x00|\xff\x00|2||-1|/default/orders-part-3|3|1700|a=1,b=2|%|"
        b"\n\r\t\0\\A" + "é".encode()
    )
    with pytest.raises(UsageError, match="known: %o %v"):
        MessageFormat("%z")


def test_the_time_of_a_moment_is_rounded_up_and_zones_are_known() -> None:
    assert parse_moment("2026-01-01T00:00:00.0001Z") == BASE + 1
    assert parse_moment("2026-01-01T01:00+01:00") == BASE
    assert parse_moment("1969-12-31") == 0
    for text in ("", "now", "1e9", "9" * 30, "2026-1-1", "-5m"):
        assert parse_moment(text, BASE) is None


def test_a_time_is_taken_over_http_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    import json

    from support.raw_http import ask

    fill(tmp_path / "data")
    with served(small_segments(tmp_path / "data")) as server:
        path = "/v1/topics/default/orders/messages"

        def offsets(query: str) -> list[int]:
            return [each["offset"] for each in ask(server, "GET", path + query).lines()]

        assert offsets("?start_time=2026-01-01T00:30Z") == [1, 2, 3, 4]
        assert offsets(f"?start_time={BASE}&end_time={BASE + HOUR}") == [0]
        assert offsets("?last=2") == [3, 4]
        server.store.topic("orders").append(b"new", durability="synced")
        assert offsets("?start_time=5m") == [5]
        assert offsets("?start_time=5m&visibility=buffered") == [5]
        for query, words in (
            ("start_time=soon", "start_time is 'soon'"),
            ("end_time=x", "end_time is 'x'"),
            ("start_time=5m&last=3", "only one of start, start_time and last"),
        ):
            said = ask(server, "GET", f"{path}?{query}")
            assert said.status == 400
            assert words in json.dumps(said.json())
