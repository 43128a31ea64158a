"""`forebay produce` and `forebay consume`: lines into a topic, and messages out of it as lines.

Both use a server if --url names one or if one runs on the data directory (`remote_messages`).
Otherwise they open the directory themselves. Input and output are the same either way. `produce`
appends lines as they arrive. It stops at a line that is too long; the lines before it are stored.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import click

from forebay.cli.message_format import Facts, MessageFormat, payload_of
from forebay.cli.options import (
    chosen_server,
    connected,
    json_option,
    open_view,
    refused_token,
    store_options,
    url_option,
    viewed_topic,
)
from forebay.cli.subscriptions import type_option
from forebay.errors import LostOffsets, ServiceRefused, UsageError
from forebay.limits import ATTRIBUTES_MAX, KIB, MESSAGE_BYTES_MAX, MIB
from forebay.settings import ServerAddress, StoreSettings

if TYPE_CHECKING:
    from forebay.cli.remote_messages import Durability, Wanted
    from forebay.format.message import StreamMessage
    from forebay.topic.store import Topic
    from forebay.topic.view import TopicView
    from forebay.wal.reader import LogReader


_READ_BYTES: Final = MIB
_LINE_BYTES_MAX: Final = MESSAGE_BYTES_MAX - KIB
"""The longest line: less than a message may have, as a message has a header too."""
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class MessageParts:
    """What `produce` gives every message besides its payload."""

    key: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)


def attributes_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """The attributes of `--attribute NAME=TEXT`; UsageError for anything else."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--attribute is {pair[:40]!r}; it must be NAME=TEXT")
        if name in found:
            raise UsageError(f"--attribute names {name[:40]!r} twice")
        found[name] = text
    if len(found) > ATTRIBUTES_MAX:
        raise UsageError(f"{len(found)} attributes; a message has {ATTRIBUTES_MAX} at most")
    return found


@click.command()
@click.argument("topic")
@click.option(
    "--durability",
    type=click.Choice(["buffered", "synced", "uploaded"]),
    default="synced",
    show_default=True,
    help="buffered: sync once, at the end. synced: sync lines as they arrive. "
    "uploaded: like synced, and wait at the end until a committed object holds all lines.",
)
@click.option("--key", help="The routing key of every message.")
@click.option(
    "--attribute",
    "pairs",
    multiple=True,
    metavar="NAME=TEXT",
    help="An attribute of every message. May be given several times.",
)
@url_option
@store_options
@json_option
def produce(
    topic: str,
    durability: Durability,
    key: str | None,
    pairs: tuple[str, ...],
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Appends every line of standard input to TOPIC.

    Returns when all lines are synced to disk, or uploaded. Uses the server that --url names, or the
    one that runs on the data directory; if there is none, opens the directory itself. If the
    connection to the server breaks, the command prints which lines are confirmed, with exit code 2.

    \b
    Examples:
      echo hello | forebay produce greetings
      seq 1000 | forebay produce /default/numbers --data /tmp/demo --durability uploaded
      echo hello | forebay produce greetings --url http://127.0.0.1:8650
      echo 42 | forebay produce orders --key customer-7 --attribute source=shop
    """
    parts = MessageParts(key, attributes_of(pairs))
    server = chosen_server(settings, url)
    if server is not None:
        _produce_through(server, topic, durability, parts, as_json=as_json)
    else:
        _produce_here(settings, topic, durability, parts, as_json=as_json)


def _produce_through(
    server: ServerAddress, topic: str, durability: Durability, parts: MessageParts, *, as_json: bool
) -> None:
    from forebay.cli.remote_messages import Sender
    from forebay.format.names import parse_topic

    with connected(server) as client:
        sent = Sender(client, parse_topic(topic), durability, parts).run()
    if sent.doubt is not None:
        click.echo(f"forebay: {sent.doubt}", err=True)
        sys.exit(130)
    first, end = sent.first or 0, sent.next or 0
    _print_produced(sent.topic, first, end, sent.count, sent.stage, as_json=as_json)
    if sent.interrupted:
        sys.exit(130)


def _produce_here(
    settings: StoreSettings,
    topic: str,
    durability: Durability,
    parts: MessageParts,
    *,
    as_json: bool,
) -> None:
    import forebay

    with forebay.open(settings) as store:
        log = store.topic(topic)
        first = log.watermarks().appended
        interrupted = False
        try:
            _append_lines(log, parts, synced=durability != "buffered")
        except KeyboardInterrupt:
            interrupted = True
        log.flush()
        end = log.watermarks().synced
        stage = "synced" if settings.data is not None else "in memory only, lost with this command"
        if durability == "uploaded" and end > first and not interrupted:
            log.wait(end - 1, durability="uploaded")
            stage = "uploaded"
    _print_produced(log.name, first, end, end - first, stage, as_json=as_json)
    if interrupted:
        sys.exit(130)


def _print_produced(
    topic: str, first: int, end: int, count: int, stage: str, *, as_json: bool
) -> None:
    if as_json:
        click.echo(json.dumps({"topic": topic, "first": first, "next": end}))
        return
    messages = "1 message" if count == 1 else f"{count} messages"
    click.echo(f"{messages} in {topic}, {stage}; next offset {end}")


def _append_lines(log: Topic, parts: MessageParts, *, synced: bool) -> None:
    done = 0
    for lines in arriving_lines():
        sound, problem = sound_lines(lines, done)
        log.append_many(
            sound,
            len(sound) * [parts.attributes] if parts.attributes else None,
            len(sound) * [parts.key] if parts.key is not None else None,
            durability="synced" if synced or problem else "buffered",
        )
        if problem is not None:
            raise problem
        done += len(lines)


@click.command()
@click.argument("topic")
@click.option(
    "--start",
    metavar="OFFSET|earliest|latest",
    help="Start at this offset.  [default: earliest]",
)
@click.option(
    "--since",
    metavar="TIME",
    help="Start at the first message that was published then or later, or at the end.",
)
@click.option("--last", type=click.IntRange(0), help="Start this many messages before the end.")
@click.option("--end", type=click.IntRange(0), metavar="OFFSET", help="Stop before this offset.")
@click.option(
    "--until",
    metavar="TIME",
    help="Stop before the first message that was published then or later.",
)
@click.option("--follow", "-f", is_flag=True, help="At the end of the log, wait for new messages.")
@click.option("--limit", type=click.IntRange(0), help="Stop after this many messages.")
@click.option(
    "--skip-lost", is_flag=True, help="Skip offsets that are recorded as lost or unknown."
)
@click.option(
    "--format",
    "template",
    metavar="TEMPLATE",
    help="Print this for each message: %o offset, %v payload, %k key, %h attributes, %T time in "
    "ms, %t topic, %p partition, %S and %K bytes of payload and key, %% and \\n.",
)
@click.option(
    "--subscription",
    metavar="NAME",
    help="Continue where this subscription is, acknowledge each message after it was printed, and "
    "wait for more. It is created if it does not exist.",
)
@type_option
@click.option("--consumer", metavar="NAME", help="The consumer's name in the subscription.")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="GLOB",
    help="Of a key-shared subscription, only keys that match. May be given several times.",
)
@url_option
@store_options
@json_option
def consume(
    topic: str,
    start: str | None,
    since: str | None,
    last: int | None,
    end: int | None,
    until: str | None,
    follow: bool,
    limit: int | None,
    skip_lost: bool,
    template: str | None,
    subscription: str | None,
    kind: str | None,
    consumer: str | None,
    filters: tuple[str, ...],
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Prints the synced messages of TOPIC, one per line.

    Uses the server that --url names, or the one that runs on the data directory, and reconnects
    when the server restarts. If there is none, reads objects and local files directly, without a
    lock. With --json, a payload that is not UTF-8 is printed as payload_base64.

    A TIME is ISO 8601, in UTC unless it has a time zone, or a duration before now, or milliseconds
    since 1970. Publish times need not ascend: --since begins at the lowest offset of that time or
    later, and --until ends before the first message it reads of that time or later.

    With --subscription, a server's broker delivers the messages, or this command if there is no
    server. What was printed and not yet acknowledged when it ends is delivered again.

    \b
    Examples:
      forebay consume greetings
      forebay consume numbers --start 990 --limit 5 --json
      forebay consume numbers --start latest --follow
      forebay consume numbers --config forebay.yml --end 100000 --skip-lost
      forebay consume numbers --since 10m --follow
      forebay consume numbers --since 2026-01-01T00:00Z --until 2026-01-02T00:00Z
      forebay consume orders --last 5 --format '%o %k %v\\n'
      forebay consume orders --subscription billing --type shared
    """
    line = _line_of(topic, template, as_json=as_json)
    if subscription is not None:
        places = (start, since, last, end, until)
        if skip_lost or any(each is not None for each in places):
            raise UsageError(
                "a subscription continues where it is: --start, --since, --last, --end, --until "
                "and --skip-lost do not go with --subscription; `forebay subscriptions seek` "
                "moves it"
            )
        _consume_as(topic, subscription, kind, (consumer, filters, limit), settings, url, line)
        return
    if kind is not None or consumer is not None or filters:
        raise UsageError("--type, --consumer and --filter need --subscription")
    wanted = _wanted(start, since, last, end, until, (follow, limit, skip_lost))
    server = chosen_server(settings, url)
    if server is not None:
        _print_all(_through(server, topic, wanted, settings, url), wanted, line)
        return
    with open_view(settings) as store:
        view = viewed_topic(store, topic)
        _print_all(_here(view, wanted), wanted, line)


def _consume_as(
    topic: str,
    subscription: str,
    kind: str | None,
    rest: tuple[str | None, tuple[str, ...], int | None],
    settings: StoreSettings,
    url: str | None,
    line: Callable[[Facts], bytes],
) -> None:
    from forebay.cli.consume_subscription import Subscriber, consume_subscription
    from forebay.format.names import parse_topic

    wanted = Subscriber(parse_topic(topic), subscription, kind, *rest)
    consume_subscription(chosen_server(settings, url), settings, wanted, line)


def _wanted(
    start: str | None,
    since: str | None,
    last: int | None,
    end: int | None,
    until: str | None,
    rest: tuple[bool, int | None, bool],
) -> Wanted:
    """Checks what the options say together. `rest` are those that always fit."""
    from forebay.cli.remote_messages import Wanted

    if sum(each is not None for each in (start, since, last)) > 1:
        raise UsageError("give only one of --start, --since and --last")
    begin = "earliest" if start is None else start
    if begin not in {"earliest", "latest"} and (not begin.isdecimal() or len(begin) > 19):
        raise UsageError(f"--start is {begin[:40]!r}; it must be an offset, earliest or latest")
    if end is not None and begin.isdecimal() and end < int(begin):
        raise UsageError(f"--end {end} is before the start, offset {begin}")
    start_time, end_time = moment_of("--since", since), moment_of("--until", until)
    if start_time is not None and end_time is not None and end_time < start_time:
        raise UsageError(f"--until {until} is before --since {since}")
    return Wanted(begin, end, *rest, start_time, end_time, last)


def moment_of(option: str, text: str | None) -> int | None:
    """The milliseconds since 1970 of an option such as `--since 10m`; UsageError if it has none."""
    from forebay.config.quantities import MOMENT_FORMS, parse_moment

    found = None if text is None else parse_moment(text, int(time.time() * 1000))
    if text is not None and found is None:
        raise UsageError(f"{option} is {text[:40]!r}; it must be {MOMENT_FORMS}")
    return found


def _line_of(topic: str, template: str | None, *, as_json: bool) -> Callable[[Facts], bytes]:
    """Returns what makes the output of a message."""
    from forebay.format.names import parse_topic

    if template is None:
        if as_json:
            return lambda facts: json.dumps(facts).encode() + b"\n"
        return lambda facts: payload_of(facts) + b"\n"
    if as_json:
        raise UsageError("give --json or --format, not both")
    form, name = MessageFormat(template), parse_topic(topic)
    return lambda facts: form.line(facts, name)


def _print_all(
    messages: Generator[Facts, None, None], wanted: Wanted, line: Callable[[Facts], bytes]
) -> None:
    out = sys.stdout.buffer
    try:
        for facts in islice(messages, wanted.limit):
            out.write(line(facts))
            if wanted.follow:
                out.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        messages.close()
        out.flush()


def _through(
    server: ServerAddress,
    topic: str,
    wanted: Wanted,
    settings: StoreSettings,
    url: str | None,
) -> Generator[Facts, None, None]:
    from dataclasses import replace

    from forebay.cli.remote_messages import received
    from forebay.client.http import topic_path
    from forebay.format.names import parse_topic

    name = parse_topic(topic)
    if wanted.follow and wanted.start == "latest":
        # Ask for the number first: "latest" after a server restart would skip messages.
        with connected(server) as client:
            server = client.address
            try:
                facts = client.json("GET", topic_path(name), query={"limit": 0})
            except ServiceRefused as error:
                raise refused_token(error, server) from error
        marks = [facts.get(stage) or 0 for stage in ("appended", "synced", "uploaded")]
        wanted = replace(wanted, start=str(max(marks)))
    # After a restart the server may have another address, which its file in the data directory
    # has. A URL that the user gave stays as it is.
    yield from received(
        server, name, wanted, lambda: chosen_server(settings, None) if url is None else None
    )


def _here(view: TopicView, wanted: Wanted) -> Generator[Facts, None, None]:
    from forebay.cli.remote_messages import print_skipped, with_advice

    end = wanted.end
    found: LogReader | None = None
    if wanted.start_time is not None:
        found = view.reader_at_time(wanted.start_time, end)
        offset = found.position
    elif wanted.last is not None:
        offset = view.offset_of_last(wanted.last)
    else:
        offset = _start_offset(view.start_offset, view.end_offset, wanted.start)
    if end is not None and end < offset:
        raise UsageError(f"--end {end} is before the start, offset {offset}")
    while True:
        try:
            if offset < view.end_offset:
                with found or view.reader(offset, end) as reader:
                    found = None
                    for message in reader:
                        if wanted.is_over(message.publish_time):
                            return
                        offset = message.offset + 1
                        yield message_facts(message)
                    offset = reader.position  # after a jump over an accepted range, it is later
        except LostOffsets as lost:
            if not wanted.skip_lost:
                raise with_advice(lost) from lost
            print_skipped(offset, lost.end)
            offset = lost.end
            if end is None or offset < end:
                continue
        if not wanted.follow or (end is not None and offset >= end):
            return
        time.sleep(_POLL_SECONDS)
        view.refresh()


def _start_offset(first: int, end: int, start: str) -> int:
    if start in {"earliest", "latest"}:
        return first if start == "earliest" else end
    if not first <= int(start) <= end:
        raise UsageError(
            f"--start {start} is not in the log: its oldest offset is {first}, the next one "
            f"is {end}"
        )
    return int(start)


# ---- lines of standard input as messages, messages as lines of standard output ----


def arriving_lines() -> Iterator[list[bytes]]:
    """Yields the lines of standard input without their line ends, as many as have arrived."""
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


def sound_lines(lines: list[bytes], done: int) -> tuple[list[bytes], UsageError | None]:
    """The lines before the first one that is too long, and the error for that line.

    `done` is the number of lines before `lines`. The error is None if all lines are short enough.
    """
    for at, line in enumerate(lines):
        if len(line) > _LINE_BYTES_MAX:
            number = done + at + 1
            return lines[:at], UsageError(
                f"line {number} has {len(line)} bytes; a message has at most {MESSAGE_BYTES_MAX}. "
                f"The {number - 1} lines before it are stored"
            )
    return lines, None


def payload_facts(payload: bytes) -> dict[str, str]:
    """`{"payload": text}` if the payload is UTF-8, else `{"payload_base64": ...}`."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def message_facts(message: StreamMessage) -> Facts:
    """A message as --json prints it."""
    return {
        "offset": message.offset,
        "publish_time": message.publish_time,
        **payload_facts(message.payload),
        "attributes": message.attributes,
        "routing_key": message.routing_key,
    }
