"""Appends to a topic, uploads, deletes it and creates it again, until it is killed.

Arguments: a data directory and the number of the first message. Lines on stdout: `made N` for a
message that was acknowledged at offset N, with its number; `deleting` before a deletion, and
`deleted N` after it, with the next offset.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store

TOPIC = "/default/orders"


def settings(data: Path) -> StoreSettings:
    return StoreSettings(
        data,
        wal=WalSettings(rotate_max_bytes=700),
        uploader=UploaderSettings(enabled=False, max_object_bytes=1000),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def main() -> None:
    data, first = sys.argv[1:]
    numbers = itertools.count(int(first))
    with Store(settings(Path(data))) as store:
        while True:
            topic = store.topic(TOPIC)
            for _ in range(3):
                for _ in range(4):
                    number = next(numbers)
                    payload = b"%d " % number + bytes(100)
                    say(f"made {topic.append(payload, durability='synced')} {number}")
                topic.upload()
            say("deleting")
            say(f"deleted {store.delete(TOPIC).next_offset}")


if __name__ == "__main__":
    main()
