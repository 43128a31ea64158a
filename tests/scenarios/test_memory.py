"""Memory is bounded by settings, not by the size of objects or the number of topics.

Each measurement is the peak of a process of its own, above what it needs while it does nothing.
How much of what may be in flight is there at once is chance. So a bound leaves room for all of it,
and the data is several times larger than the bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.limits import MIB, PART_BYTES_MIN, READ_CHUNK_BYTES
from forebay.settings import CloudReaderSettings, UploaderSettings
from support.paths import TESTS

pytestmark = pytest.mark.timeout(1200)

SMALL: Final = 64
LARGE: Final = 192
"""In MiB, of an object."""

ABOVE_IDLE_MAX: Final = 64.0
"""MiB, for one object with the default settings. A process that held the large object whole would
take three times as much."""
GROWTH_MAX: Final = (
    (1 + CloudReaderSettings().read_ahead_chunks) * CloudReaderSettings().fetch_chunk_size / MIB
)
"""MiB (28) that a large object may take more than a small one: what one reader has in flight. Runs
of the same object differ by up to 12 MiB. A process that held objects whole would take 128 MiB
more, four and a half times the bound. One that kept a quarter of their bytes would exceed it."""
CLIENT_BYTES: Final = 32 * MIB
"""Allowed beside the chunks. A measured number, not a derived one: 23 MiB were seen on S3 with a
hundred topics of 44 MiB."""

NARROW_UPLOADER: Final = UploaderSettings(
    stream_chunk_size=PART_BYTES_MIN, concurrent_parts=1, concurrent_topics=2
)
NARROW_READER: Final = CloudReaderSettings(fetch_chunk_size=MIB, read_ahead_chunks=1)
"""With these the bound is 54 MiB. A process that held all of a hundred topics of 2 MiB at once
would take almost four times as much."""


def upload_bytes_max(
    uploader: UploaderSettings, reader: CloudReaderSettings, open_topics: int = 0
) -> int:
    """What uploading takes at most above an idle process, for any number of topics.

    Each topic that is uploaded at the time holds a segment's chunk, and its parts, or what it
    reads back; a client may hold a chunk twice while it arrives. A rolling writer holds a part for
    each of the open topics besides.
    """
    parts = (uploader.concurrent_parts + 1) * uploader.stream_chunk_size
    read_back = 2 * (reader.read_ahead_chunks + 1) * reader.fetch_chunk_size
    each = max(parts, read_back) + READ_CHUNK_BYTES
    waiting = open_topics * uploader.stream_chunk_size if uploader.rolling else 0
    return uploader.concurrent_topics * each + waiting + CLIENT_BYTES


UPLOADER_FIELDS: Final = ("stream_chunk_size", "concurrent_parts", "concurrent_topics")


@dataclass
class Measured:
    idle: float
    peak: float

    @property
    def above(self) -> float:
        return self.peak - self.idle


@dataclass
class Lab:
    """A store whose processes are measured; sizes are in MiB."""

    data: Path
    cloud: dict[str, Any]
    topics: int = 1
    uploader: UploaderSettings = field(default_factory=UploaderSettings)
    reader: CloudReaderSettings = field(default_factory=CloudReaderSettings)

    def run(self, action: str, **more: int) -> Measured:
        given = {
            "data": str(self.data),
            "cloud": self.cloud,
            "action": action,
            "topics": self.topics,
            "uploader": {name: getattr(self.uploader, name) for name in UPLOADER_FIELDS},
            "reader": asdict(self.reader),
            **more,
        }
        done = subprocess.run(
            [sys.executable, "-m", "support.memory_process", json.dumps(given)],
            cwd=TESTS,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        found = Measured(told.get("idle", 0) / 1024, told.get("peak", 0) / 1024)
        print(f"{self.cloud['backend']} {action} {more}: {found} above {found.above:.1f}")
        return found


MakeLab = Callable[..., Lab]


both = pytest.mark.parametrize("lab", ["fs", "s3"], indirect=True)


@pytest.fixture
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> MakeLab:
    def make(name: str, **more: Any) -> Lab:
        cloud: dict[str, Any] = {"backend": "fs"}
        if request.param == "s3":
            settings = request.getfixturevalue("s3").settings()
            cloud = {"backend": "s3", "root": settings.root, "options": dict(settings.options)}
        return Lab(tmp_path / name, cloud, **more)

    return make


def require_same_memory(make: MakeLab, mib: int) -> None:
    """A large object takes within 64 MiB, and no more than a small one."""
    large, small = make("large"), make("small")
    large.run("build", mib=mib)
    small.run("build", mib=SMALL)
    for action in ("upload", "read"):
        of_large, of_small = large.run(action).above, small.run(action).above
        assert of_large <= ABOVE_IDLE_MAX
        assert of_large <= of_small + GROWTH_MAX


@both
def test_a_large_object_takes_no_more_memory_than_a_small_one(lab: MakeLab) -> None:
    require_same_memory(lab, LARGE)


@pytest.mark.soak
@both
def test_an_object_of_a_gib_takes_no_more_memory_than_a_small_one(lab: MakeLab) -> None:
    require_same_memory(lab, 1024)


def require_bounded_uploads(many: Lab, mib: int, action: str = "background") -> None:
    many.run("build", mib=mib)
    idle = many.run("idle").idle
    uploading = many.run(action)
    uploader = replace(many.uploader, rolling=action == "rolling")
    bound = upload_bytes_max(uploader, many.reader, open_topics=many.topics) / MIB
    print(f"{uploading.peak - idle:.1f} above another that is idle, of {bound:.1f}")
    assert uploading.peak - idle <= bound


@pytest.mark.parametrize("lab", ["s3"], indirect=True)
def test_a_hundred_topics_upload_within_the_bound(lab: MakeLab) -> None:
    many = lab("many", topics=100, uploader=NARROW_UPLOADER, reader=NARROW_READER)
    require_bounded_uploads(many, 2)


@pytest.mark.soak
@both
def test_a_hundred_large_topics_upload_within_the_bound(lab: MakeLab) -> None:
    """4,400 MiB, thirty times the bound of the default settings."""
    require_bounded_uploads(lab("many", topics=100), 44)


@pytest.mark.soak
@both
def test_a_hundred_open_objects_stay_within_the_bound(lab: MakeLab) -> None:
    """2,300 MiB. The bound is 554 MiB, of which 500 are an unsent part of each open object."""
    many = lab("many", topics=100, uploader=NARROW_UPLOADER, reader=NARROW_READER)
    require_bounded_uploads(many, 23, "rolling")
