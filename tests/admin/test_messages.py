"""Messages are POSTed: all of a request or nothing, within limits, as durable as was asked for."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.admin.context import ServerContext
from forebay.admin.messages import parse_lines
from forebay.admin.request import PENDING
from forebay.errors import MessageTooLarge, UsageError
from forebay.files.local import LocalDisk
from forebay.limits import KIB, MESSAGE_BYTES_MAX, MIB
from forebay.settings import AdminSettings, StoreSettings
from forebay.testing import FaultDisk
from forebay.topic.store import Store
from support.disks import in_thread, wait_until
from support.raw_http import NDJSON, Said, ask, plain_socket
from support.served import Served, served, serving

PATH = "/v1/topics/default/orders/messages"


def post(server: Served, body: Any, query: str = "", path: str = PATH) -> Said:
    return ask(server, "POST", path + query, body, NDJSON)


def messages(server: Served, topic: str = "/default/orders") -> list[Any]:
    found = server.store.topic(topic)
    return [
        (each.payload, each.attributes, each.routing_key)
        for each in found.read(end=found.watermarks().appended)
    ]


# ---- what is taken ----


def test_lines_of_json_become_messages_with_consecutive_offsets(server: Served) -> None:
    lines = [
        {"payload": "plain"},
        {"payload": "grüße 🌊", "attributes": {"a": "1", "b": ""}, "routing_key": "k"},
        {"payload_base64": base64.b64encode(b"\0\xff").decode(), "routing_key": None},
        {"payload": ""},
    ]
    body = "\n".join(json.dumps(line) for line in lines).encode()
    said = post(server, body)
    assert said.status == 200
    assert said.json() == {
        "topic": "/default/orders",
        "first_offset": 0,
        "next_offset": 4,
        "count": 4,
        "durability": "synced",
    }
    assert messages(server) == [
        (b"plain", {}, None),
        ("grüße 🌊".encode(), {"a": "1", "b": ""}, "k"),
        (b"\0\xff", {}, None),
        (b"", {}, None),
    ]
    assert post(server, b'{"payload":"x"}\n').json()["first_offset"] == 4


def test_a_body_of_another_type_is_one_payload(server: Served) -> None:
    said = ask(server, "POST", PATH + "?routing_key=k&attribute=a=1&attribute=b=x=y", b"\0line\n")
    assert said.json()["count"] == 1
    assert messages(server) == [(b"\0line\n", {"a": "1", "b": "x=y"}, "k")]


@pytest.mark.parametrize("durability", ["buffered", "synced", "uploaded"])
def test_a_message_is_as_durable_as_was_asked_for(server: Served, durability: str) -> None:
    said = post(server, b'{"payload":"x"}', f"?durability={durability}")
    assert said.json()["durability"] == durability
    marks = server.store.topic("/default/orders").watermarks()
    reached = {"buffered": marks.appended, "synced": marks.synced, "uploaded": marks.uploaded}
    assert reached[durability] == 1


def test_a_body_in_chunks_is_taken(server: Served) -> None:
    chunks = (b'{"payload":"%d"}\n' % number for number in range(3))
    assert post(server, chunks).json()["count"] == 3


def test_producers_at_a_time_share_the_log_and_lose_nothing(server: Served) -> None:
    body = b"".join(b'{"payload":"%d"}\n' % number for number in range(50))
    answers = [in_thread(lambda: post(server, body).json()) for _ in range(8)]
    firsts = sorted(answer.result(120)["first_offset"] for answer in answers)
    assert firsts == list(range(0, 400, 50))
    assert [payload for payload, _, _ in messages(server)] == [
        b"%d" % number for _ in range(8) for number in range(50)
    ]


def test_a_batch_larger_than_the_queue_is_taken_as_room_is_made(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path)
    settings = replace(settings, wal=replace(settings.wal, queue_max_bytes=64 * KIB))
    with served(settings) as server:
        body = b"".join(b'{"payload":"%d%s"}\n' % (n, b"x" * 1024) for n in range(400))
        assert post(server, body).json()["next_offset"] == 400
        assert len(messages(server)) == 400


# ---- what is refused ----

BAD_LINES = {
    "not JSON": (b'{"payload":"a"}\n{"payload":', "line 2, column"),
    "a bare number": (
        b'{"payload":"a"}\n\n7',
        "line 3: the message is a number; it must be an object",
    ),
    "a list": (b'[{"payload":"a"}]', "line 1: the message is a list"),
    "two on a line": (b'{"payload":"a"},{"payload":"b"}', "line 1, column"),
    "one on two lines": (b'{"payload":\n"a"}\n{"payload":"b"},{"payload":"c"}', "line 1, column"),
    "a string over two lines": (b'{"payload":"a}\n{b"}', "line 1, column"),
    "no payload": (b"{}", "line 1: a message has either payload or payload_base64; this has nei"),
    "both payloads": (b'{"payload":"a","payload_base64":"YQ=="}', "this has both"),
    "an unknown key": (b'{"payload":"a","key":"b"}', "line 1: unknown key 'key'; known ones: "),
    "an offset": (b'{"payload":"a","offset":1}', "line 1: offset is given by the log"),
    "a payload that is a number": (b'{"payload":1}', "line 1: payload is a number; it must be"),
    "a payload that is null": (b'{"payload":null}', "line 1: payload is null"),
    "bad base64": (b'{"payload_base64":"a"}', "line 1: payload_base64: invalid base64"),
    "base64 that is not ASCII": (
        '{"payload_base64":"ü"}'.encode(),
        "payload_base64: invalid base64",
    ),
    "attributes that are a list": (b'{"payload":"a","attributes":[]}', "attributes is a list"),
    "an attribute that is a number": (
        b'{"payload":"a","attributes":{"n":1}}',
        "line 1: attribute 'n' is a number; it must be text",
    ),
    "an attribute that is nested deeply": (
        b'{"payload":"a","attributes":{"n":' + b"[" * 100_000,
        "attributes[...] is a list; it must be text",
    ),
    "an attribute that is a number, before a name that is not UTF-8": (
        b'{"payload":"a","attributes":{"n":1,"\xff":"b"}}',
        "attributes[...] is a number; it must be text",
    ),
    "a key that is a boolean": (b'{"payload":"a","routing_key":true}', "routing_key is a boolean"),
    "a control character": (b'{"payload":"a\tb"}', "line 1, column"),
    "bytes that are not UTF-8": (b'{"payload":"\xff"}', "line 1, column"),
    "a lone surrogate": (b'{"payload":"\\ud800"}', "line 1, column"),
    "nothing": (b"\n \n", "the body has no message"),
    "too many attributes": (
        json.dumps({"payload": "", "attributes": {str(n): "" for n in range(1025)}}).encode(),
        "line 1: attributes must be an object of at most 1024 entries",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_refuses_the_whole_request_and_names_itself(
    untouched: Served, case: str
) -> None:
    body, words = BAD_LINES[case]
    status, kind, message = post(untouched, body).error
    assert (status, kind) == (400, "UsageError")
    assert words in message
    assert untouched.store.topics() == []  # not even the topic was made


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?durability=fast", "durability is 'fast'; it must be one of buffered, synced, uploaded"),
        ("?durability=synced&durability=synced", "durability is given twice"),
        ("?durabilty=synced", "unknown parameter 'durabilty'"),
        ("?routing_key=a&routing_key=b", "routing_key is given twice"),
        ("?attribute=novalue", "attribute is 'novalue'; it must be name=text"),
        ("?attribute=a=1&attribute=a=2", "attribute 'a' is given twice"),
        ("?routing_key=%ff", "the query cannot be read"),
        ("?" + "&".join(f"attribute={n}=" for n in range(1025)), "1025 attributes"),
    ],
)
def test_a_bad_query_is_refused(untouched: Served, query: str, words: str) -> None:
    status, kind, message = ask(untouched, "POST", PATH + query, b"x").error
    assert (status, kind) == (400, "UsageError")
    assert words in message
    assert untouched.store.topics() == []


def test_what_belongs_to_one_payload_is_refused_beside_lines(untouched: Served) -> None:
    status, _, message = post(untouched, b'{"payload":"a"}', "?routing_key=k").error
    assert status == 400
    assert "in NDJSON it is in each line" in message


@pytest.mark.parametrize("topic", ["a.b", "%00", "%20", "%ff", "a" * 256])
def test_a_name_that_is_none_is_refused(untouched: Served, topic: str) -> None:
    status, kind, _ = post(
        untouched, b'{"payload":"a"}', path=f"/v1/topics/default/{topic}/messages"
    ).error
    assert (status, kind) == (400, "InvalidTopicName")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_told_which_there_are(untouched: Served, method: str) -> None:
    said = ask(untouched, method, PATH)
    assert said.error[:2] == (405, "UsageError")
    assert said.headers["Allow"] == "GET, POST"
    assert ask(untouched, "HEAD", PATH).status == 405


# ---- limits ----


def small(tmp_path: Path, **limits: int) -> StoreSettings:
    return StoreSettings(data=tmp_path, admin=AdminSettings(**limits))  # type: ignore[arg-type]


def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    with served(small(tmp_path, request_bytes_max=64 * KIB)) as server:
        whole = b"x" * (64 * KIB)
        assert ask(server, "POST", PATH, whole).status == 200
        assert ask(server, "POST", PATH, whole + b"x").error[:2] == (413, "MessageTooLarge")
        chunks = (b"x" * KIB for _ in range(65))
        assert ask(server, "POST", PATH, chunks).error[:2] == (413, "MessageTooLarge")
        assert len(messages(server)) == 1


def test_a_request_has_so_many_messages_at_most(tmp_path: Path) -> None:
    with served(small(tmp_path, request_messages_max=3)) as server:
        assert post(server, b'{"payload":"a"}\n' * 3).status == 200
        status, kind, message = post(server, b'{"payload":"a"}\n' * 4).error
        assert (status, kind) == (413, "MessageTooLarge")
        assert "line 4" in message
        assert post(server, b'{"payload":"a","routing_key":"k"}\n' * 4).status == 413
        assert len(messages(server)) == 3


def test_a_message_over_the_limit_is_refused_before_anything_is_appended() -> None:
    large = b'{"payload":"small"}\n{"payload":"' + b"x" * MESSAGE_BYTES_MAX + b'"}'
    with pytest.raises(MessageTooLarge, match="message 2 has"):
        parse_lines(large, 10)
    fits = b'{"payload":"' + b"x" * (MESSAGE_BYTES_MAX - 4 * KIB) + b'"}'
    assert len(parse_lines(fits, 10).payloads) == 1


def test_lines_are_read_alike_at_once_and_one_by_one() -> None:
    plain = [b'{"payload":"%d"}' % number for number in range(5)]
    assert parse_lines(b"\n".join(plain), 5).payloads == [b"%d" % number for number in range(5)]
    assert parse_lines(b"\r\n".join([*plain, b""]), 5) == parse_lines(b"\n\n".join(plain), 5)
    for text in (b'{"payload":"a"},0,{"payload":"b"}', b'{"payload":[{"a":1}\n{"a":2}]}'):
        with pytest.raises(UsageError, match="line 1"):
            parse_lines(text, 5)


def test_requests_over_the_room_wait_and_are_then_told_to_come_back(tmp_path: Path) -> None:
    limits = {"request_bytes_max": 64 * KIB, "pending_bytes_max": 64 * KIB}
    with served(small(tmp_path, **limits)) as server:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {64 * KIB}\r\n\r\n"
        before = PENDING.value()
        with plain_socket(server) as holder:
            holder.sendall(head.encode() + b"x" * (64 * KIB - 1))  # and the last byte does not come
            wait_until(lambda: PENDING.value() >= before + 64 * KIB)
            waiting = in_thread(lambda: post(server, b'{"payload":"a"}\n'))
            said = waiting.result(120)
            assert said.error[:2] == (503, "ServiceUnavailable")
            assert said.headers["Retry-After"] == "1"
            assert "nothing was taken" in said.error[2]
            waiting = in_thread(lambda: post(server, b'{"payload":"b"}\n'))
            holder.sendall(b"x")
            assert waiting.result(120).status == 200
        assert {payload for payload, _, _ in messages(server)} == {b"b", b"x" * 64 * KIB}


def test_a_client_that_goes_before_its_body_came_leaves_nothing(tmp_path: Path) -> None:
    limits = {"request_bytes_max": 64 * KIB, "pending_bytes_max": 64 * KIB}
    with served(small(tmp_path, **limits)) as server:
        with plain_socket(server) as gone:
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {64 * KIB}\r\n\r\n"
            gone.sendall(head.encode() + b"x" * KIB)
        assert ask(server, "POST", PATH, b"y" * (64 * KIB)).status == 200  # its room is free again
        assert messages(server) == [(b"y" * (64 * KIB), {}, None)]


# ---- a disk that fills, a server that stops ----


def test_a_full_disk_refuses_with_the_reason_and_goes_on_when_there_is_space(
    tmp_path: Path,
) -> None:
    disk = FaultDisk(LocalDisk())
    settings = StoreSettings(data=tmp_path, admin=AdminSettings(listen="127.0.0.1:0"))
    with Store(settings, disk=disk) as store, serving(context := ServerContext(store)) as client:
        server = Served(context, client)
        assert post(server, b'{"payload":"before"}').status == 200
        disk.space = 0
        for _ in range(3):
            said = post(server, b'{"payload":"refused"}')
            assert said.status == 507, said.body
            assert "No space left" in said.error[2]
            assert "free some space" in said.error[2]
            assert said.headers["Retry-After"] == "1"
        disk.space = None
        answer = post(server, b'{"payload":"after"}')
        assert answer.status == 200
        found = [payload for payload, _, _ in messages(server)]
        assert found[0] == b"before"
        assert found[answer.json()["first_offset"]] == b"after"
        assert set(found) <= {b"before", b"refused", b"after"}


def test_a_stop_lets_producers_end(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    ended = threading.Event()
    with served(tmp_path) as server:
        client = server.new_client()

        def produce() -> None:
            try:
                while True:
                    body = b'{"payload":"%d"}\n' % len(acknowledged)
                    said = client.request("POST", PATH, body=body, headers=NDJSON).read()
                    acknowledged.append(json.loads(said)["first_offset"])
            except Exception:  # noqa: BLE001  # the server ended, as it should
                ended.set()

        in_thread(produce)
        wait_until(lambda: len(acknowledged) > 5)
    assert ended.wait(120)
    with Store(StoreSettings(data=tmp_path)) as store:
        assert store.topic("/default/orders").watermarks().synced >= len(acknowledged)


def test_large_bodies_are_taken_too(server: Served) -> None:
    body = b"".join(b'{"payload":"%s"}\n' % (b"x" * 100 * KIB) for _ in range(40))
    assert len(body) > 3 * MIB
    assert post(server, body).json()["count"] == 40
