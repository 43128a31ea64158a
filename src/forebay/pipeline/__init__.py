"""Everything that moves data in bulk, on Apache Spark.

    from forebay.pipeline import offload, spark_session
    offload("data/", spark=spark_session())

Importing this package imports no Spark. `register(spark)` makes the format `forebay` known to a
session that does not find it by its name.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "compact": "jobs.compact",
    "export": "jobs.export",
    "offload": "jobs.offload",
    "register": "source",
    "replay": "jobs.replay",
    "restore": "jobs.restore",
    "spark_session": "session",
    "undo_compaction": "jobs.compact",
    "verify": "jobs.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'forebay.pipeline' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"forebay.pipeline.{_PLACES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
