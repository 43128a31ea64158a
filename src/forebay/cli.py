"""The command line. Errors that a user can act on are one line on stderr and exit code 2."""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import click

from forebay.errors import ForebayError, UsageError
from forebay.limits import KIB, MESSAGE_BYTES_MAX, MIB

if TYPE_CHECKING:
    from forebay.format.message import StreamMessage
    from forebay.topic.store import Topic

_P = ParamSpec("_P")
_R = TypeVar("_R")
_POLL_SECONDS: Final = 0.1
_STDOUT: Final = 1
_READ_BYTES: Final = MIB

_data_option = click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default="data",
    show_default=True,
    envvar="FOREBAY_DATA",
    show_envvar=True,
    help="The data directory.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def _plain_errors(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turns errors that say what to do into one line on stderr and exit code 2."""

    @wraps(command)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            # Whoever read our output has had enough; that is not an error. What is still buffered
            # goes nowhere, so that flushing it at exit is none either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
            sys.exit(0)
        except (ForebayError, OSError) as error:
            click.echo(f"forebay: {error}", err=True)
            sys.exit(2)

    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forebay", prog_name="forebay")
def main() -> None:
    """Forebay, a tiered log store."""
    logging.basicConfig(format="forebay: %(message)s")


@main.command()
@_data_option
@_json_option
@_plain_errors
def topics(data: Path, as_json: bool) -> None:
    """Lists the topics of a data directory."""
    for topic in _topic_names(data):
        click.echo(json.dumps({"topic": topic}) if as_json else topic)


def _topic_names(data: Path) -> list[str]:
    import forebay

    if not data.is_dir():
        raise UsageError(f"{data} is not a data directory; name one with --data or FOREBAY_DATA")
    with forebay.open(data) as store:
        return store.topics()


@main.command()
@click.argument("topic")
@_data_option
@_json_option
@_plain_errors
def produce(topic: str, data: Path, as_json: bool) -> None:
    """Appends every line of standard input to TOPIC.

    Returns when all of them are synced to disk.

    \b
    Examples:
      echo hello | forebay produce greetings
      seq 1000 | forebay produce /default/numbers --data /tmp/demo
    """
    import forebay

    with forebay.open(data) as store:
        log = store.topic(topic)
        first = log.watermarks().appended
        interrupted = False
        try:
            _append_lines(log)
        except KeyboardInterrupt:
            interrupted = True
        log.flush()
        end = log.watermarks().synced
    if as_json:
        click.echo(json.dumps({"topic": log.name, "first": first, "next": end}))
    else:
        count = "1 message" if end - first == 1 else f"{end - first} messages"
        click.echo(f"{count} in {log.name}, synced; next offset {end}")
    if interrupted:
        sys.exit(130)


def _append_lines(log: Topic) -> None:
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
        log.append_many(lines, durability="synced")
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


@main.command()
@click.argument("topic")
@click.option("--start", default="earliest", show_default=True, metavar="OFFSET|earliest|latest")
@click.option("--follow", "-f", is_flag=True, help="Wait for more at the end of the log.")
@click.option("--limit", type=click.IntRange(0), help="Stop after this many messages.")
@_data_option
@_json_option
@_plain_errors
def consume(
    topic: str, start: str, follow: bool, limit: int | None, data: Path, as_json: bool
) -> None:
    """Prints the synced messages of TOPIC, one per line.

    It takes no lock: the topic's owner may be appending meanwhile. With --json a payload that is
    not UTF-8 comes as payload_base64.

    \b
    Examples:
      forebay consume greetings
      forebay consume numbers --start 990 --limit 5 --json
      forebay consume numbers --start latest --follow
    """
    messages = _messages(data, topic, start, follow=follow)
    try:
        for message in islice(messages, limit):
            sys.stdout.buffer.write(_line(message, as_json=as_json))
            if follow:
                sys.stdout.buffer.flush()
        sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        sys.exit(130)


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


def _messages(data: Path, topic: str, start: str, *, follow: bool) -> Iterator[StreamMessage]:
    from forebay.format.names import parse_topic
    from forebay.wal.view import LogView

    name = parse_topic(topic)
    directory = data / "wal" / name.namespace / name.topic
    if not directory.is_dir():
        raise UsageError(f"there is no topic {name} in {data}")
    view = LogView(directory)
    offset = _start_offset(view.start_offset, view.end_offset, start)
    while True:
        for message in view.reader(offset):
            offset = message.offset + 1
            yield message
        if not follow:
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


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--limit", default=20, show_default=True, type=click.IntRange(0), help="Frames to show."
)
@_json_option
@_plain_errors
def inspect(path: Path, limit: int, as_json: bool) -> None:
    """Says what is in a file of a log.

    Segments and objects (frames), checkpoints, published positions, segment indexes. Exit code 1
    if a frame is damaged.

    \b
    Examples:
      forebay inspect data/wal/default/orders/wal.log
      forebay inspect data/wal/default/orders/wal.ckpt --json
    """
    from forebay.inspect import inspect as look

    damaged = False
    for facts in look(path, limit=limit):
        damaged = damaged or facts.get("damaged", False)
        if as_json:
            click.echo(json.dumps(facts))
        else:
            kind = facts.pop("type")
            click.echo(
                f"{kind}: " + ", ".join(f"{name}={value!r}" for name, value in facts.items())
            )
    if damaged:
        sys.exit(1)


@main.group()
def bench() -> None:
    """The benchmarks whose numbers the documents quote."""


@bench.command("wal")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; it must be on a real disk. Default: a temporary directory here.",
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--mib",
    default=64,
    show_default=True,
    type=click.IntRange(1, 65536),
    help="How much each bulk measurement moves in a round.",
)
@click.option(
    "--memory/--no-memory",
    default=False,
    show_default=True,
    help="Also measure memory at 1 and 10 million messages (about a minute).",
)
@_json_option
@_plain_errors
def bench_wal(directory: Path | None, rounds: int, mib: int, memory: bool, as_json: bool) -> None:
    """The write-ahead log, beside what this machine can do with the same bytes.

    \b
    Examples:
      forebay bench wal
      forebay bench wal --dir /mnt/disk/tmp --rounds 9 --json > wal.json
    """
    from forebay.bench import report
    from forebay.bench.wal import run

    results = run(directory, rounds=rounds, mib=mib, memory=memory, progress=not as_json)
    report.show(results, as_json=as_json)
