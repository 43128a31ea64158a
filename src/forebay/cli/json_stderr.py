"""Standard error as lines of JSON, for `--log-format json`: everything, to the last line.

Log lines are JSON because of their formatter. Other things are written to standard error too: the
error that ends a command, warnings and tracebacks of Python, and the output of libraries and of
child processes, such as Spark's JVM. `write_json_lines` puts a pipe in the place of the file
descriptor. A thread reads it, passes lines of JSON on as they are, and wraps the others:

    {"at": "...", "level": "warning", "logger": "stderr", "event": "the line"}

Beware: what is written right before `os._exit` or a kill may be lost, because the thread does not
run any more.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Final

from forebay.logs import JsonFormatter

_STDERR: Final = 2
_READ_BYTES: Final = 64 * 1024
_LINE_BYTES_MAX: Final = 1024 * 1024
"""A longer line is cut, and each part is wrapped."""
_END_SECONDS: Final = 2.0
_formatter: Final = JsonFormatter()
_installed: list[threading.Thread] = []


def json_line(
    level: int, text: str, logger: str = "forebay", error: BaseException | None = None
) -> str:
    """The line of JSON for something that was not logged; `error` adds a traceback."""
    trace = None if error is None else (type(error), error, error.__traceback__)
    return _formatter.format(logging.LogRecord(logger, level, "", 0, text, None, trace))


def write_json_lines() -> None:
    """Makes JSON of all that this process and its children write to standard error from now on.

    Does nothing if `sys.stderr` is not standard error, as in tests, or if it was done before.
    """
    if _installed or not _is_real():
        return
    target = os.dup(_STDERR)
    source, sink = os.pipe()
    os.dup2(sink, _STDERR)
    os.close(sink)
    thread = threading.Thread(target=_pass_on, args=(source, target), name="stderr", daemon=True)
    thread.start()
    _installed.append(thread)
    atexit.register(_finish, thread, target)
    sys.excepthook = _on_exception
    threading.excepthook = _on_thread_exception


def _is_real() -> bool:
    try:
        return sys.stderr.fileno() == _STDERR
    except (OSError, AttributeError, ValueError):
        return False


def _pass_on(source: int, target: int) -> None:
    rest = b""
    while data := os.read(source, _READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LINE_BYTES_MAX:
            lines, rest = [*lines, rest], b""
        _write(target, b"".join(as_json_line(line) for line in lines if line.strip()))
    if rest.strip():
        _write(target, as_json_line(rest))


def as_json_line(line: bytes) -> bytes:
    """The line with its end, as it is if it is a JSON object, else wrapped in one."""
    try:
        if isinstance(json.loads(line), dict):
            return line + b"\n"
    except (ValueError, RecursionError):
        pass
    text = line.decode("utf-8", "replace").rstrip()
    return json_line(logging.WARNING, text, "stderr").encode("utf-8", "replace") + b"\n"


def _write(target: int, data: bytes) -> None:
    with suppress(OSError):  # nobody reads our errors any more
        while data:
            data = data[os.write(target, data) :]


def _finish(thread: threading.Thread, target: int) -> None:
    """Passes on what is left, before the process ends."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os.dup2(target, _STDERR)
    thread.join(_END_SECONDS)  # a child process may keep the pipe open


def _on_exception(
    _kind: type[BaseException], error: BaseException, _trace: TracebackType | None
) -> None:
    _say(json_line(logging.ERROR, "the process failed", error=error))


def _on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
        _say(json_line(logging.ERROR, "a thread failed", error=arguments.exc_value))


def _say(line: str) -> None:
    """Writes the line after what somebody may have left without an end; blank lines are dropped."""
    sys.stderr.write(f"\n{line}\n")
