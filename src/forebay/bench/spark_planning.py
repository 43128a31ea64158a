"""Measures the time and memory to plan a scan over very many objects.

A separate process plans it, and its peak memory is what the plan takes. The catalog is made up:
descriptors of objects that do not exist, which planning never opens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from forebay.bench.measure import peak_mib
from forebay.catalog.catalog import Catalog
from forebay.catalog.chain import Chain, pointer
from forebay.catalog.kv import Put
from forebay.catalog.records import TopicRecord, encode_record
from forebay.catalog.sqlite import SqliteKv
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import ObjectName, TopicName
from forebay.limits import MIB

GOAL_MIB: Final = 200
_TOPIC: Final = TopicName("default", "long")
_OBJECT_BYTES: Final = 8 * MIB
_MESSAGES: Final = 8000
"""Messages in each object. Its index has an entry for every 1,000 of them."""
_CHILD: Final = (
    "import sys; from forebay.bench.spark_planning import plan_child; plan_child(sys.argv[1])"
)


def measure_planning(folder: Path, objects: int) -> dict[str, Any]:
    """Measures a plan over `objects` descriptors, in a separate process."""
    data = folder / "planned"
    _write_catalog(data, objects)
    output = subprocess.run(  # noqa: S603  # this interpreter, our own script
        [sys.executable, "-c", _CHILD, str(data)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout
    said = json.loads(output)
    return {
        "descriptors": objects,
        "splits": said["splits"],
        "seconds": said["seconds"],
        "mib": said["after"] - said["before"],
        "goal_mib": GOAL_MIB,
    }


def _write_catalog(data: Path, objects: int) -> None:
    """A topic of so many objects, in SQLite."""
    data.mkdir(parents=True)
    (data / "objects").mkdir()
    kv = SqliteKv(data / "catalog.db")
    keys = Catalog(kv).keys
    end = objects * _MESSAGES
    record = TopicRecord(epoch=1, log_id="gone", tail=end, verified=end, reserved=end)
    kv.commit([], [Put(keys.record(_TOPIC), encode_record(record))])
    last = keys.current(_TOPIC)
    kv.commit([], [Put(last, pointer((objects - 1) * _MESSAGES))])
    step = _OBJECT_BYTES // 8
    for first in range(0, objects, 50):
        made = []
        for number in range(first, min(first + 50, objects)):
            start = number * _MESSAGES
            name = str(ObjectName(start, start + _MESSAGES - 1))
            index = tuple((start + 1000 * at, step * at) for at in range(8))
            descriptor = ObjectDescriptor(
                name,
                start,
                start + _MESSAGES - 1,
                _OBJECT_BYTES,
                "0123456789abcdef",
                0,
                offset_index=index,
            )
            made.append(descriptor)
        kv.commit([], Chain(kv, keys, _TOPIC).changed(made))
    kv.close()


def plan_child(data: str) -> None:
    """Prints seconds, splits, and the peak in MiB before and after planning."""
    from forebay.pipeline.source.options import scan_options
    from forebay.pipeline.source.scan import plan_scan
    from forebay.topic.view import StoreView

    options = scan_options({"path": data, "subscribe": str(_TOPIC)})
    StoreView(options.settings).close()  # imports are not part of the measurement
    before = peak_mib()
    started = time.perf_counter()
    splits = plan_scan(options)
    seconds = time.perf_counter() - started
    said = {"seconds": seconds, "splits": len(splits), "before": before, "after": peak_mib()}
    print(json.dumps(said))
