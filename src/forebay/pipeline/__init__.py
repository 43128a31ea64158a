"""Everything that runs on Apache Spark: the jobs, the source and the sink.

    from forebay.pipeline import offload, spark_session
    offload("data/", spark=spark_session())

    jobs/       offload, compact, verify, restore, import_danube, import_pulsar, export,
                replay
    source/     spark.read and spark.readStream
    pulsar/     the same for ledgers that Pulsar offloaded
    sink/       df.write and df.writeStream
    session     SparkSession with our options
    execute     runs a function over many items, on Spark or on threads
    location    the settings of a store, from Spark's options
    driver      the process in which a server runs Spark

Importing this package does not import Spark. Spark finds the formats `forebay` and `pulsar-offload`
by their names. If a session does not, `register(spark)` adds them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.pipeline.jobs.compact import compact as compact
    from forebay.pipeline.jobs.compact import undo_compaction as undo_compaction
    from forebay.pipeline.jobs.export.job import export as export
    from forebay.pipeline.jobs.import_danube import DanubeOrigin as DanubeOrigin
    from forebay.pipeline.jobs.import_danube import import_danube as import_danube
    from forebay.pipeline.jobs.import_pulsar import import_pulsar as import_pulsar
    from forebay.pipeline.jobs.offload import offload as offload
    from forebay.pipeline.jobs.replay import replay as replay
    from forebay.pipeline.jobs.restore import restore as restore
    from forebay.pipeline.jobs.verify import verify as verify
    from forebay.pipeline.session import spark_session as spark_session
    from forebay.pipeline.source.data_source import register as register
    from forebay.pipeline.source.stream_offsets import stream_lag as stream_lag

_PLACES = {
    "DanubeOrigin": "jobs.import_danube",
    "compact": "jobs.compact",
    "export": "jobs.export.job",
    "import_danube": "jobs.import_danube",
    "import_pulsar": "jobs.import_pulsar",
    "offload": "jobs.offload",
    "register": "source.data_source",
    "replay": "jobs.replay",
    "restore": "jobs.restore",
    "spark_session": "session",
    "stream_lag": "source.stream_offsets",
    "undo_compaction": "jobs.compact",
    "verify": "jobs.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'forebay.pipeline' has no attribute {name!r}")
    if name == "register":  # its module imports Spark at the top: check that it is installed
        from forebay.pipeline.session import require_packages

        require_packages()
    found = globals()[name] = getattr(import_module(f"forebay.pipeline.{_PLACES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
