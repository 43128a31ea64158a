"""Raises an exception at one bytecode of a call: what Ctrl-C does, at the worst moment.

`f_trace_opcodes` reports every bytecode before it runs. That is stricter than a signal, for which
the interpreter looks only after calls and at the ends of loops.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import forebay
from support.disks import in_thread

FOREBAY = Path(forebay.__file__).parent
HANG_SECONDS = 30.0
"""What has not happened after this time never will."""


class Attempt(Protocol):
    """One run of a call that is interrupted."""

    def act(self) -> None:
        """The call. It may raise KeyboardInterrupt."""

    def check(self) -> None:
        """Raises unless everything works that must. Runs on another thread."""


def watched(frame: FrameType) -> bool:
    """Whether the code is ours or of the modules for threads; a double of the disk is neither."""
    name = frame.f_code.co_filename
    if name.startswith(str(FOREBAY)):
        return not name.startswith(str(FOREBAY / "testing"))
    return name == threading.__file__


class OpcodeInterrupter:
    """Raises KeyboardInterrupt at the `at`-th bytecode of the calling thread."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.seen = 0
        self.place = ""

    def run(self, act: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            act()
        except KeyboardInterrupt:
            assert self.place, "somebody really pressed Ctrl-C"
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.place or not watched(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._traced

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and not self.place:
            self.seen += 1
            if self.seen == self.at:
                code = frame.f_code
                self.place = f"{code.co_filename}:{frame.f_lineno} {code.co_name} {frame.f_lasti}"
                raise KeyboardInterrupt(self.place)
        return self._traced


def interrupt_everywhere(make: Callable[[], Attempt], name: str, samples: int | None) -> int:
    """Interrupts the call at every bytecode, or at about `samples` of them; returns their number.

    Raises AssertionError with the place of the interrupt if a check fails or hangs.
    """
    total = _attempt(make, None).seen
    step = 1 if samples is None else max(total // samples, 1)
    chosen: Iterable[int] = range(1 + zlib.crc32(name.encode()) % step, total + 1, step)
    for at in chosen:
        _attempt(make, at)
    return total


def _attempt(make: Callable[[], Attempt], at: int | None) -> OpcodeInterrupter:
    attempt = make()
    interrupter = OpcodeInterrupter(at)
    interrupter.run(attempt.act)
    try:
        in_thread(attempt.check).result(HANG_SECONDS)
    except BaseException as error:
        raise AssertionError(f"after an interrupt at {interrupter.place}: {error!r}") from error
    return interrupter
