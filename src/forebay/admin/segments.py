"""`GET /v1/topics/{namespace}/{topic}/segments/{file}`: raw bytes of a segment, for executors.

They are what the topic's owner published as synced, and nothing behind it. `Range: bytes=a-b` asks
for a part; `Content-Range` tells how many bytes there are. With `log=` the answer is refused if
the topic's segments are of another log by now: their names are the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from forebay.admin.problems import problem
from forebay.admin.site import Site, topic_of
from forebay.admin.transfers import Transfers
from forebay.errors import CommitRefused, UnknownTopic, UsageError
from forebay.files.local import LocalDisk
from forebay.format.checkpoint import Published
from forebay.format.names import SegmentNames, TopicName
from forebay.wal.checkpoints import read_published
from forebay.wal.identity import read_log_id

_PUBLISHED_READS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """The synced part of a segment."""

    path: Path
    size: int


def find_segment(
    directory: Path, file_name: str, name: str, log_id: str | None = None
) -> SegmentFile | None:
    """The segment of that name in a topic's directory; None if there is none.

    CommitRefused if the log is not the one that is asked for.
    """
    disk = LocalDisk()
    seq = SegmentNames(file_name).parse(name)
    published = _published(disk, directory)
    if log_id is not None and read_log_id(disk, directory) != log_id:
        raise CommitRefused(f"{directory.name}: the segments are not of the log {log_id} any more")
    if seq is None or published is None or seq > published.seq:
        return None
    path = directory / name
    try:
        size = published.position if seq == published.seq else disk.size(path)
        return SegmentFile(path, size) if disk.exists(path) else None
    except FileNotFoundError:  # retention removed it meanwhile
        return None


def _published(disk: LocalDisk, directory: Path) -> Published | None:
    """The owner may be overwriting the record this very moment: the next read gets the new one."""
    found = (read_published(disk, directory) for _ in range(_PUBLISHED_READS_MAX))
    return next((each for each in found if each is not None), None)


def read_exactly(path: Path, start: int, end: int) -> bytes:
    """OSError if the file is gone, or ends before."""
    with path.open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), end - start, start)
        while len(data) < end - start:
            more = os.pread(file.fileno(), end - start - len(data), start + len(data))
            if not more:
                raise OSError(f"{path} ends before {end}")
            data += more
    return data


def routes(site: Site) -> list[BaseRoute]:
    transfers = Transfers()

    def find(topic: TopicName, name: str, log_id: str | None) -> SegmentFile | None:
        if site.settings.data is None:
            raise UsageError("a store in memory has no segments")
        with site.store.view() as view:
            directory = view.directory(topic)
        if not directory.is_dir():
            raise UnknownTopic(f"there is no log of {topic} here")
        return find_segment(directory, site.settings.wal.file_name, name, log_id)

    async def segment(request: Request) -> Response:
        topic, name = topic_of(request.path_params), request.path_params["file"]
        log_id = request.query_params.get("log")
        found = await transfers.run(partial(find, topic, name, log_id))
        if found is None:
            return problem(404, "ObjectMissing", f"{topic} has no segment {name!r}")
        read = partial(read_exactly, found.path)
        return transfers.answer(
            request, read, found.size, kind="segment", what=f"{topic}: {name}", headers={}
        )

    return [Route("/v1/topics/{namespace}/{topic}/segments/{file}", segment, methods=["GET"])]
