"""A server ends and another one has its address: commands notice, and give it nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.cli.options import connected
from forebay.cli.remote_messages import Sender, Wanted, received
from forebay.client.address import ServerInfo, find_server, server_file
from forebay.errors import ServiceUnavailable
from forebay.format.names import parse_topic
from forebay.settings import ServerAddress, StoreSettings
from forebay.testing import ManualClock
from support.cli_runs import small_segments
from support.scripted_server import Address, Lines, answering
from support.served import Served, served

TOPIC = parse_topic("t")
ALL = Wanted("earliest", end=None, follow=True, limit=None, skip_lost=False)
TOKEN = "secret"


@contextmanager
def two(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    """Servers of two stores, with the same topic in both."""
    with (
        served(small_segments(tmp_path / "a")) as a,
        served(small_segments(tmp_path / "b")) as b,
    ):
        a.store.topic("t").append_many([b"a0", b"a1"], durability="synced")
        b.store.topic("t").append_many([b"b%d" % n for n in range(9)], durability="synced")
        yield a, b


def by_url(address: Address, _a: Served) -> ServerAddress:
    return ServerAddress(address.url, token=TOKEN)


def by_note(address: Address, a: Served) -> ServerAddress:
    data = a.store.settings.data
    assert data is not None
    note = ServerInfo(address.url, a.context.instance, 1, a.context.store_id)
    server_file(data).write_bytes(note.encode())
    found = find_server(StoreSettings(data=data, admin=a.store.settings.admin))
    assert found is not None
    assert found.store == a.context.store_id
    return found


@pytest.mark.parametrize("found_by", [by_url, by_note])
@pytest.mark.parametrize("durability", ["buffered", "synced", "uploaded"])
def test_lines_never_go_into_another_store(
    found_by: object, durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two(tmp_path) as (a, b), Address(a.url) as address:
        assert callable(found_by)
        lines = Lines(b"a2\n", b"a3\n", lambda: address.give_to(b.url), b"for a\n")
        monkeypatch.setattr(sys, "stdin", lines)
        with (
            connected(found_by(address, a)) as client,
            pytest.raises(ServiceUnavailable, match="serves another store") as found,
        ):
            Sender(client, TOPIC, durability).run()  # type: ignore[arg-type]
        assert "were not sent" in str(found.value)
        assert ("lines 1 to 2 are stored" in str(found.value)) == (durability == "synced")
        assert b.store.topic("t").watermarks().appended == 9
        expected = 3 if durability == "uploaded" else 4  # the last lines wait for the next ones
        assert a.store.topic("t").watermarks().appended == expected


@pytest.mark.parametrize("found_by", [by_url, by_note])
def test_a_follower_never_prints_messages_of_another_store(
    found_by: object, tmp_path: Path
) -> None:
    with two(tmp_path) as (a, b), Address(a.url) as address:
        assert callable(found_by)
        start = found_by(address, a)
        messages = received(start, TOPIC, ALL, lambda: None, reconnect_seconds=1)
        assert [next(messages)["payload"] for _ in range(2)] == ["a0", "a1"]
        address.give_to(b.url)
        with pytest.raises(ServiceUnavailable, match=r"another store.*use --start 2"):
            list(messages)


@pytest.mark.parametrize("silence", [0.0, 31.0])
def test_a_follower_goes_on_when_its_own_server_is_back(tmp_path: Path, silence: float) -> None:
    """Also after a silence that is longer than a server may be away."""
    with two(tmp_path) as (a, b), Address(a.url) as address:
        seen = 0
        clock = ManualClock()

        def again() -> None:
            nonlocal seen
            seen += 1
            if seen == 2:
                address.give_to(a.url)

        start = ServerAddress(address.url)
        messages = received(start, TOPIC, ALL, again, 30, monotonic=clock.monotonic)
        assert [next(messages)["payload"] for _ in range(2)] == ["a0", "a1"]
        clock.advance(silence)
        address.give_to(b.url)
        a.store.topic("t").append(b"a2", durability="synced")
        assert next(messages)["payload"] == "a2"
        messages.close()


def test_a_note_that_names_another_store_does_not_lead_there(tmp_path: Path) -> None:
    """The directory was replaced while somebody followed."""
    with two(tmp_path) as (a, b), Address(a.url) as address:
        other = ServerAddress(b.url, b.context.instance, store=b.context.store_id)
        messages = received(
            ServerAddress(address.url), TOPIC, ALL, lambda: other, reconnect_seconds=1
        )
        assert [next(messages)["payload"] for _ in range(2)] == ["a0", "a1"]
        address.give_to(b.url)
        with pytest.raises(ServiceUnavailable, match="another store"):
            list(messages)


def test_another_program_is_told_no_token_and_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bytes] = []
    with (
        two(tmp_path) as (a, _),
        answering(lambda _request: None, heard=heard) as program,
        Address(a.url) as address,
    ):
        start = ServerAddress(address.url, token=TOKEN, store=a.context.store_id)
        lines = Lines(b"a2\n", lambda: address.give_to(program), b"secret line\n")
        monkeypatch.setattr(sys, "stdin", lines)
        with connected(start) as client, pytest.raises(ServiceUnavailable, match="not sent"):
            Sender(client, TOPIC, "synced").run()
        with pytest.raises(ServiceUnavailable, match="another store"):
            list(received(start, TOPIC, ALL, lambda: None, reconnect_seconds=0.5))
    assert len(heard) > 1
    assert all(request.startswith(b"GET /healthz ") for request in heard)
    assert not any(word in request for request in heard for word in (b"uthorization", b"secret"))
