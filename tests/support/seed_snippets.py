"""The YAML snippets and the settings of the four documents about Danube, as they are in them.

Without the spaces at the ends of lines. The documents are not part of this repository; `FOLDER` has
them where the project is developed, and `tests/config/test_load_seeds.py` compares.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from support.paths import ROOT

FOLDER: Final = ROOT.parent / "shared" / "seeds"


class Snippet(NamedTuple):
    seed: str
    """The number of the document, which its file name begins with."""
    line: int
    """The number of its first line in the document."""
    text: str


SNIPPETS: Final = (
    Snippet(
        "000",
        556,
        """\
storage:
  uploader:
    stream_chunk_size: 8388608  # 8 MiB (chunk size for streaming uploads)
    concurrent_parts: 4         # concurrent multipart upload parts

  cloud_reader:
    fetch_chunk_size: 4194304   # 4 MiB (chunk size for streaming downloads)
    enable_ranged_reads: true   # use byte-range requests when possible
""",
    ),
    Snippet(
        "002",
        61,
        """\
wal_cloud:
  uploader:
    enabled: true
    interval_seconds: 300
    root_prefix: "/danube-data"
    max_object_bytes: 1073741824  # 1 GiB
    # max_object_messages: 1000000  # optional
""",
    ),
    Snippet(
        "004",
        394,
        """\
storage:
  wal:
    dir: /var/lib/danube/wal
    cache_capacity: 2048
    fsync_interval_ms: 5000
    fsync_max_batch_bytes: 10485760  # 10 MiB
    rotate_max_bytes: 52428800        # 50 MiB
    rotate_max_seconds: 3600          # 1 hour

  uploader:
    interval_seconds: 300  # 5 minutes

  cloud:
    backend: s3
    root: s3://my-bucket/danube
    options:
      region: us-east-1
      endpoint: https://s3.amazonaws.com
      access_key: ${AWS_ACCESS_KEY_ID}
      secret_key: ${AWS_SECRET_ACCESS_KEY}
""",
    ),
)

KNOBS: Final = {
    "storage.uploader.interval_seconds": "300",
    "storage.uploader.max_batch_bytes": "64MiB",
    "storage.uploader.max_object_bytes": "null",
    "storage.uploader.max_object_messages": "1000000",
    "storage.uploader.max_open_seconds": "null",
    "storage.uploader.max_idle_seconds": "60",
    "storage.wal.file_name": "wal.log",
    "storage.deleter.check_interval_minutes": "5",
    "storage.deleter.retention_time_minutes": "1440",
    "storage.deleter.retention_size_mb": "10240",
    "metadata.namespace": "/danube",
    "metadata.endpoints": '["127.0.0.1:2379"]',
    "metadata.lease_seconds": "15",
}
"""Settings that the documents name without a snippet (002, 003, 004), with a value for each."""
