"""A process that uses a store as its standard input says, and prints what happened.

The first line is JSON: `data`, `cloud`, `metadata`, `uploader`, `deleter`, `wal` (fields of the
settings) and `name`, which is in every payload. Then commands, one to a line:

    append COUNT DURABILITY    so many messages
    run                        appends without end
    run again                  the same; some appends are "uploaded", and no error ends it
    upload, open, close        what they say; `open` gets the topic (again)

It prints, each line with one system call: `ack OFFSET STARTED DURABILITY PAYLOAD` once a message
was acknowledged, where STARTED is the monotonic time at which it was appended; `error KIND TEXT`;
`done COMMAND`. An error ends the command. `run again` opens the topic again after an error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any, Final

import forebay
from forebay.errors import ForebayError
from forebay.settings import (
    CloudSettings,
    DeleterSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.topic.store import AnyDurability, Store, Topic

TOPIC: Final = "/default/orders"
PACE_SECONDS: Final = 0.003
"""Between two appends of `run`, so that a round has hundreds of messages and not thousands."""


def tell(text: str) -> None:
    os.write(sys.stdout.fileno(), text.replace("\n", " ").encode() + b"\n")


def settings(given: dict[str, Any]) -> StoreSettings:
    return StoreSettings(
        data=given["data"],
        wal=WalSettings(**given.get("wal", {})),
        uploader=UploaderSettings(**given.get("uploader", {})),
        cloud=CloudSettings(**given["cloud"]),
        deleter=DeleterSettings(**given.get("deleter", {})),
        metadata=MetadataSettings(**given["metadata"]),
    )


class Worker:
    def __init__(self, given: dict[str, Any]) -> None:
        self.name: str = given["name"]
        self.store: Store = forebay.open(settings(given))
        self.random = random.Random(self.name)
        self.count = 0
        self.opened: Topic | None = None

    @property
    def topic(self) -> Topic:
        if self.opened is None:
            self.opened = self.store.topic(TOPIC)
        return self.opened

    def obey(self, command: str) -> None:
        match command.split():
            case ["append", count, durability]:
                for _ in range(int(count)):
                    self.append([self.payload()], durability)  # type: ignore[arg-type] # as given
            case ["run", *again]:
                self.run(again=bool(again))
            case ["upload"]:
                self.topic.upload()
            case ["open"]:
                self.opened = self.store.topic(TOPIC)
            case ["close"]:
                self.store.close()
        tell(f"done {command}")

    def payload(self) -> bytes:
        self.count += 1
        return f"{self.name}:{self.count}:".encode().ljust(self.random.randint(40, 1200), b".")

    def append(self, payloads: list[bytes], durability: AnyDurability) -> None:
        started = time.monotonic()
        if len(payloads) == 1:
            first = self.topic.append(payloads[0], durability=durability)
        else:
            first = self.topic.append_many(payloads, durability=durability).start
        for offset, payload in enumerate(payloads, first):
            tell(f"ack {offset} {started} {durability} {payload.decode()}")

    def run(self, *, again: bool) -> None:
        while True:
            drawn = self.random.random()
            durability: AnyDurability = "uploaded" if again and drawn < 0.02 else "synced"
            payloads = [self.payload() for _ in range(3 if drawn > 0.8 else 1)]
            try:
                self.append(payloads, durability)
            except ForebayError as error:
                if not again:
                    raise
                tell(f"error {type(error).__name__} {error}")
                self.opened = None
            time.sleep(PACE_SECONDS)


def main() -> None:
    worker = Worker(json.loads(sys.stdin.readline()))
    tell("ready")
    for line in sys.stdin:
        try:
            worker.obey(line.strip())
        except ForebayError as error:
            tell(f"error {type(error).__name__} {error}")


if __name__ == "__main__":
    main()
