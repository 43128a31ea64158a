"""`<data>/jobs.ndjson`: the last jobs of a server, one line of JSON each, the oldest first.

It is for people who want to know what ran: nothing is decided by it. The file is replaced as a
whole, so that a crash leaves the old or the new one; a line that cannot be read is left out, and
told.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Final

from forebay.admin.jobs import LOST, JobRecord
from forebay.files.local import LocalDisk
from forebay.logs import event

_log: Final = logging.getLogger("forebay.service")
JOBS_KEPT: Final = 200
_MODE: Final = 0o600
"""Errors of jobs may name anything."""
_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
_NAMES: Final = {field.name for field in fields(JobRecord)}


def read_jobs(path: Path) -> list[JobRecord]:
    """What the file holds; what was not over when its server ended is lost."""
    try:
        with path.open("rb") as file:
            lines = file.read(_FILE_BYTES_MAX).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        event(_log, logging.WARNING, "past jobs cannot be read", file=path, error=error)
        return []
    found = [_record(line) for line in lines]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        event(
            _log,
            logging.WARNING,
            "past jobs are left out: their lines are damaged",
            file=path,
            lines=len(found) - len(known),
        )
    return known[-JOBS_KEPT:]


def _record(line: bytes) -> JobRecord | None:
    try:
        told = json.loads(line)
        known = {name: told[name] for name in _NAMES if name in told}
        record = JobRecord(**known)
        record = replace(record, topics=tuple(record.topics), details=tuple(record.details))
        right = isinstance(known["id"], str) and isinstance(known["created"], int | float)
    except (ValueError, TypeError, KeyError):
        return None
    if not right:
        return None
    if record.over:
        return record
    return replace(record, state=LOST, error="the server ended while the job was not over")


def write_jobs(path: Path, jobs: Iterable[JobRecord]) -> None:
    """OSError if the disk does not take it; the file is as before then."""
    lines = [json.dumps(asdict(job)).encode() + b"\n" for job in jobs]
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    with open(  # with an opener, so that it is nobody else's from the start
        draft, "xb", opener=lambda name, flags: os.open(name, flags, _MODE)
    ) as file:
        file.write(b"".join(lines[-JOBS_KEPT:]))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    LocalDisk().sync_dir(path.parent)
