"""The state of jobs between two runs: small values in the catalog, for each topic and job.

    <topic>/notes/<name>

A value is bytes that only its job interprets: how far a sink has committed, what `verify` has read.
It is changed by compare-and-set, so two runs of one job cannot both continue from the same state.
The code for records, descriptors, ownership and lives never reads it. A state without a record does
not make a topic exist.

Beware: state is only in the catalog. A topic that was rebuilt from its bucket has no state, so a
missing state does not prove that a job never ran; see `origin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.errors import CommitRefused, UsageError
from forebay.format.names import TopicName, after_prefix
from forebay.limits import CATALOG_PAGE, JOB_STATE_BYTES_MAX

ORIGIN_NAME: Final = "began"
"""The state of `origin`: put with a topic's first record, if the topic was empty then."""

ORIGIN_HERE: Final = "here"


def origin_after(epoch: int) -> str:
    """The origin of a topic that is created with this epoch, after one of its name was deleted.

    Another text for each, so that nobody trusts a state of the deleted topic that was written late.
    """
    return f"{ORIGIN_HERE} since epoch {epoch}"


def is_of_deleted(written: str | None, now: str | None) -> bool:
    """Whether a state with the origin `written` is one of a topic that was deleted since.

    `now` is the origin of the topic that has this name now.
    """
    return now is not None and now.startswith(origin_after(0)[:-1]) and written != now


def began_here(origin: str | None) -> bool:
    """Whether the origin says that the catalog knows the topic since it was empty."""
    return origin is not None and origin.partition(" ")[0] == ORIGIN_HERE


_NEXT_KEY: Final = "\1"


@dataclass(frozen=True, slots=True)
class JobState:
    """A state as it was read; its revision is what the next write compares."""

    name: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Anything:
    """Whatever the state is now, it is replaced."""


ANYTHING: Final = Anything()


def read_job_state(catalog: Catalog, topic: TopicName, name: str) -> bytes | None:
    """The value, or None if there is none."""
    found = find_job_state(catalog, topic, name)
    return None if found is None else found.value


def find_job_state(catalog: Catalog, topic: TopicName, name: str) -> JobState | None:
    """The state with its revision, for a `write_job_state` that must follow it and nothing else."""
    entry = catalog.kv.get(catalog.keys.job_state(topic, name))
    return None if entry is None else JobState(name, entry.value, entry.revision)


def write_job_state(
    catalog: Catalog,
    topic: TopicName,
    name: str,
    value: bytes,
    *,
    expected: JobState | bytes | Anything | None,
) -> JobState:
    """Writes the state if it still is as `expected`; returns it as it is now.

    `expected` is None for a state that must not be there yet, a value or a JobState for one that
    must not have changed, ANYTHING for last writer wins. CommitRefused if it is otherwise: read it,
    and decide again. A state that already has this value counts as written, so that a write whose
    response was lost can be repeated.
    """
    if len(value) > JOB_STATE_BYTES_MAX:
        raise UsageError(
            f"the note {name!r} of {topic} has {len(value)} bytes; "
            f"at most {JOB_STATE_BYTES_MAX} are allowed"
        )
    key = catalog.keys.job_state(topic, name)
    entry = catalog.kv.get(key)
    if entry is not None and entry.value == value:
        return JobState(name, value, entry.revision)
    if not _is_expected(entry, expected):
        raise _changed(topic, name)
    compares = (
        []
        if isinstance(expected, Anything)
        else [Compare(key, entry.revision if entry else ABSENT)]
    )
    revision = catalog.kv.commit(compares, [Put(key, value)])
    if revision is None:
        raise _changed(topic, name)
    return JobState(name, value, revision)


def remove_job_state(catalog: Catalog, topic: TopicName, name: str) -> None:
    """Removes the state. Idempotent."""
    catalog.kv.commit([], [Remove(catalog.keys.job_state(topic, name))])


def job_states(catalog: Catalog, topic: TopicName, prefix: str = "") -> Iterator[JobState]:
    """The states whose names start with `prefix`, in the order of their keys, a page at a time."""
    own = catalog.keys.job_states(topic)
    at, end = catalog.keys.job_state(topic, prefix) if prefix else own, after_prefix(own)
    while page := catalog.kv.range(at, end, limit=CATALOG_PAGE):
        for entry in page:
            name = catalog.keys.job_state_name(topic, entry.key)
            if name is None or not name.startswith(prefix):
                return
            yield JobState(name, entry.value, entry.revision)
        at = page[-1].key + _NEXT_KEY


def origin(catalog: Catalog, topic: TopicName) -> str | None:
    """Since when this catalog knows the topic; it changes with a restore.

    See `began_here`: since the topic was empty, so a state that is absent was never written.
    Another text: a restore has added to the topic, and states of before may be older than what it
    added.
    None: the local log outlived an earlier catalog.
    """
    value = read_job_state(catalog, topic, ORIGIN_NAME)
    return None if value is None else value.decode("utf-8", "replace")


def _is_expected(entry: Entry | None, expected: JobState | bytes | Anything | None) -> bool:
    match expected:
        case Anything():
            return True
        case None:
            return entry is None
        case JobState():
            return entry is not None and entry.revision == expected.revision
        case _:
            return entry is not None and entry.value == expected


def _changed(topic: TopicName, name: str) -> CommitRefused:
    return CommitRefused(
        f"{topic}: the note {name!r} was changed by another process; read it, and decide again"
    )
