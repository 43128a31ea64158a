"""Offload and compaction of a hundred topics.

    python examples/hundred_topics.py

Three rounds of appends, each offloaded at once, leave three small objects in every topic. One
compaction replaces the three with one object. A verification then reads every object again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import forebay
from forebay.pipeline import compact, offload, spark_session, verify

TOPICS = 100
ROUNDS = 3


def main(data: Path, topics: int = TOPICS) -> dict[str, int]:
    """Returns the number of objects made, of objects left, and of messages read."""
    spark = spark_session()
    made = 0
    with forebay.open(data) as store:
        for round_ in range(ROUNDS):
            for number in range(topics):
                topic = store.topic(f"t{number}")
                topic.append_many([b"%d of %d" % (round_, number)] * 100)
                topic.flush()
            made += offload(data, spark=spark).objects
        report = compact(data, spark=spark)
        assert report.ok
        left = made - sum(row.replaced - 1 for row in report.rows)
        checked = verify(data, spark=spark)
        assert checked.ok
        read = sum(1 for number in range(topics) for _ in store.topic(f"t{number}").read(0))
    print(f"{topics} topics: {made} objects became {left}; {read} messages are all there")
    return {"made": made, "left": left, "messages": read}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory) / "data")
