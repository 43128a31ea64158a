"""A driver without Spark: says what a real one says, and does what the topic's name tells it to.

Arguments: how it starts (`ready`, `refused`), and a file whose lines say what each cycle does
(`moved`, `idle`, `failed`); cycles after the last line are idle.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def say(**facts: Any) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")  # whole, from any thread


def beat() -> None:
    while True:
        say(event="beat")
        time.sleep(0.05)


def ended(job: str, state: str, objects: int = 0, error: str | None = None) -> None:
    details = [] if error is None else [error]
    summary = {"topics": 1, "objects": objects}
    say(event="ended", id=job, state=state, summary=summary, error=error, details=details)


def cycle(job: str, file: Path) -> None:
    lines = file.read_text().splitlines() if file.exists() else []
    what = lines.pop(0) if lines else "idle"
    file.write_text("\n".join(lines))
    if what == "moved":
        say(event="progress", id=job, done=1, total=2, step=1)
        ended(job, "done", objects=3)
    elif what == "failed":
        ended(job, "failed", error="the store is away")
    else:
        ended(job, "done")


def main() -> None:
    start, file = sys.argv[1], Path(sys.argv[2])
    commands = sys.stdin.buffer
    commands.read(int.from_bytes(commands.read(8), "little"))
    if start == "refused":
        say(event="refused", error="no such master")
        sys.exit(2)
    threading.Thread(target=beat, daemon=True).start()
    say(event="ready", master="fake")
    print("this is no event", flush=True)
    for line in commands:
        told = json.loads(line)
        job = told["id"]
        if told["do"] == "cancel":
            ended(job, "cancelled")
            continue
        topic = told["topics"][0] if told["topics"] else ""
        if told["options"].get("due"):
            cycle(job, file)
        elif topic == "/jobs/die":
            say(event="progress", id=job, done=1, total=4, step=1)
            os.kill(os.getpid(), signal.SIGKILL)
        elif topic == "/jobs/stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif topic == "/jobs/hang":
            say(event="progress", id=job, done=1, total=4, step=1)
        elif topic == "/jobs/fail":
            ended(job, "failed", error="it cannot be done")
        else:
            say(event="log", logger="forebay.pipeline", level=20, text="hello", fields={"a": "b"})
            ended(job, "done", objects=2)


main()
