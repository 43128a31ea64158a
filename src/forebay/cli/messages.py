"""`forebay produce` and `forebay consume`: lines into a topic, and out of it."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Generator, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click

from forebay.cli.options import json_option, open_view, store_options
from forebay.errors import LostOffsets, UsageError
from forebay.limits import KIB, MESSAGE_BYTES_MAX, MIB
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.format.message import StreamMessage
    from forebay.topic.store import Topic
    from forebay.topic.view import TopicView

_POLL_SECONDS: Final = 0.1
_READ_BYTES: Final = MIB


@click.command()
@click.argument("topic")
@click.option(
    "--durability",
    type=click.Choice(["buffered", "synced", "uploaded"]),
    default="synced",
    show_default=True,
    help="buffered: synced at the end alone. synced: as lines arrive. "
    "uploaded: also in a committed object at the end.",
)
@store_options
@json_option
def produce(topic: str, durability: str, settings: StoreSettings, as_json: bool) -> None:
    """Appends every line of standard input to TOPIC.

    Returns when all of them are synced to disk, or uploaded.

    \b
    Examples:
      echo hello | forebay produce greetings
      seq 1000 | forebay produce /default/numbers --data /tmp/demo --durability uploaded
    """
    import forebay

    with forebay.open(settings) as store:
        log = store.topic(topic)
        first = log.watermarks().appended
        interrupted = False
        try:
            _append_lines(log, synced=durability != "buffered")
        except KeyboardInterrupt:
            interrupted = True
        log.flush()
        end = log.watermarks().synced
        stage = "synced"
        if durability == "uploaded" and end > first and not interrupted:
            log.wait(end - 1, durability="uploaded")
            stage = "uploaded"
    if as_json:
        click.echo(json.dumps({"topic": log.name, "first": first, "next": end}))
    else:
        count = "1 message" if end - first == 1 else f"{end - first} messages"
        click.echo(f"{count} in {log.name}, {stage}; next offset {end}")
    if interrupted:
        sys.exit(130)


def _append_lines(log: Topic, *, synced: bool) -> None:
    """Appends and syncs lines as they arrive, so that a slow source is not held back."""
    done = 0
    for lines in _arriving_lines():
        for number, line in enumerate(lines, done + 1):
            if len(line) > MESSAGE_BYTES_MAX - KIB:
                log.append_many(lines[: number - done - 1], durability="synced")
                raise UsageError(
                    f"line {number} has {len(line)} bytes and a message at most "
                    f"{MESSAGE_BYTES_MAX}; the {number - 1} lines before it are stored"
                )
        log.append_many(lines, durability="synced" if synced else "buffered")
        done += len(lines)


def _arriving_lines() -> Iterator[list[bytes]]:
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("standard input is closed: pipe lines into this command")
    rest = b""
    while chunk := sys.stdin.buffer.read1(_READ_BYTES):  # type: ignore[union-attr]
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MESSAGE_BYTES_MAX:
            lines.append(rest)
        if lines:
            yield lines
    if rest:
        yield [rest]


@click.command()
@click.argument("topic")
@click.option("--start", default="earliest", show_default=True, metavar="OFFSET|earliest|latest")
@click.option("--end", type=click.IntRange(0), metavar="OFFSET", help="Stop before this offset.")
@click.option("--follow", "-f", is_flag=True, help="Wait for more at the end of the log.")
@click.option("--limit", type=click.IntRange(0), help="Stop after this many messages.")
@click.option("--skip-lost", is_flag=True, help="Go on after offsets that are recorded as lost.")
@store_options
@json_option
def consume(
    topic: str,
    start: str,
    end: int | None,
    follow: bool,
    limit: int | None,
    skip_lost: bool,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Prints the synced messages of TOPIC, one per line.

    From objects and local files, without a lock: the topic's owner may be appending meanwhile.
    With --json a payload that is not UTF-8 comes as payload_base64.

    \b
    Examples:
      forebay consume greetings
      forebay consume numbers --start 990 --limit 5 --json
      forebay consume numbers --start latest --follow
      forebay consume numbers --config forebay.yml --end 100000 --skip-lost
    """
    with open_view(settings) as store:
        view = store.topic(topic)
        offset = _start_offset(view.start_offset, view.end_offset, start)
        if end is not None and end < offset:
            raise UsageError(f"--end {end} is before the start, offset {offset}")
        messages = _messages(view, offset, end, follow=follow, skip_lost=skip_lost)
        try:
            for message in islice(messages, limit):
                sys.stdout.buffer.write(_line(message, as_json=as_json))
                if follow:
                    sys.stdout.buffer.flush()
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            messages.close()
            sys.stdout.buffer.flush()


def _line(message: StreamMessage, *, as_json: bool) -> bytes:
    if not as_json:
        return message.payload + b"\n"
    facts: dict[str, Any] = {
        "offset": message.offset,
        "publish_time": message.publish_time,
        **_payload(message.payload),
        "attributes": message.attributes,
        "routing_key": message.routing_key,
    }
    return json.dumps(facts).encode() + b"\n"


def _payload(payload: bytes) -> dict[str, str]:
    """The payload as text where it is text, else in base64 under another name."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def _messages(
    view: TopicView, offset: int, end: int | None, *, follow: bool, skip_lost: bool
) -> Generator[StreamMessage, None, None]:
    while True:
        try:
            if offset < view.end_offset:
                with view.reader(offset, end) as reader:
                    for message in reader:
                        offset = message.offset + 1
                        yield message
        except LostOffsets as lost:
            if not skip_lost:
                raise LostOffsets(
                    f"{lost} (--start {lost.end}), or use --skip-lost",
                    start=lost.start,
                    end=lost.end,
                ) from lost
            click.echo(f"forebay: skipped offsets {offset} to {lost.end - 1}: lost", err=True)
            offset = lost.end
            if end is None or offset < end:
                continue
        if not follow or (end is not None and offset >= end):
            return
        time.sleep(_POLL_SECONDS)
        view.refresh()


def _start_offset(first: int, end: int, start: str) -> int:
    if start in {"earliest", "latest"}:
        return first if start == "earliest" else end
    if not start.isdecimal() or len(start) > 19:
        raise UsageError(f"--start is {start[:40]!r}; it must be an offset, earliest or latest")
    if not first <= int(start) <= end:
        raise UsageError(
            f"--start {start} is not in the log: its oldest offset is {first}, its next {end}"
        )
    return int(start)
