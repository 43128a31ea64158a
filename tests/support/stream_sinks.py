"""A sink that is idempotent: one file for each batch, named by its number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from support.stream_runs import Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Said = Callable[[str, int], None]


def to_files(folder: Path, said: Said = lambda _what, _batch: None) -> Callable[..., None]:
    """For `foreachBatch`; `said` is told before and after a file gets its name."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(batch: DataFrame, number: int) -> None:
        rows = batch.select("topic", "partition", "offset", "value").collect()
        found = [
            (f"{topic}-part-{partition}" if partition else topic, offset, bytes(value).decode())
            for topic, partition, offset, value in rows
        ]
        draft = folder / f"draft-{number}"
        draft.write_text(json.dumps(found))
        said("writing", number)
        draft.replace(folder / f"batch-{number}.json")
        said("written", number)

    return write


def batches_in(folder: Path) -> list[Rows]:
    """The rows of the batches, in their order."""
    paths = sorted(folder.glob("batch-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    return [
        [(topic, offset, value.encode()) for topic, offset, value in json.loads(path.read_text())]
        for path in paths
    ]


def rows_in(folder: Path) -> Rows:
    return [row for rows in batches_in(folder) for row in rows]
