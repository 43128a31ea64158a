"""LogEvents: the last warnings and errors, each once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.admin.page.watch import FIELDS_MAX, TEXT_MAX, LogEvents
from forebay.logs import event

LOG = logging.getLogger("forebay.test_notices")


@pytest.fixture
def log_events() -> Iterator[LogEvents]:
    handler = LogEvents(most=5)
    LOG.addHandler(handler)
    yield handler
    LOG.removeHandler(handler)


def test_warnings_and_errors_are_kept_with_their_fields(log_events: LogEvents) -> None:
    event(LOG, logging.WARNING, "upload failed", topic="/default/a", error=OSError("no answer"))
    event(LOG, logging.ERROR, "a segment is kept", file="wal.log")
    event(LOG, logging.INFO, "object committed")
    newest, oldest = log_events.recent()
    assert (newest.level, newest.text, newest.fields) == (
        "error",
        "a segment is kept",
        {"file": "wal.log"},
    )
    assert (oldest.level, oldest.logger) == ("warning", LOG.name)
    assert oldest.fields == {"topic": "/default/a", "error": "no answer"}


def test_what_is_said_again_is_counted(log_events: LogEvents) -> None:
    for number in range(3):
        event(LOG, logging.WARNING, "upload failed", topic="/default/a", error=f"try {number}")
        event(LOG, logging.WARNING, "upload failed", topic="/default/b", error="other")
    found = log_events.recent()
    assert [(each.fields["topic"], each.count) for each in found] == [
        ("/default/b", 3),
        ("/default/a", 3),
    ]
    assert found[1].fields["error"] == "try 2"
    assert found[1].first < found[1].last


def test_the_oldest_go_when_there_are_too_many(log_events: LogEvents) -> None:
    for number in range(8):
        event(LOG, logging.WARNING, f"trouble {number}")
    assert [each.text for each in log_events.recent()] == [f"trouble {n}" for n in (7, 6, 5, 4, 3)]
    assert len(log_events.recent(2)) == 2


def test_an_event_is_never_large(log_events: LogEvents) -> None:
    many: dict[str, Any] = {f"field{number}": "y" * 100_000 for number in range(100)}
    event(LOG, logging.WARNING, "x" * 100_000, **many)
    (found,) = log_events.recent()
    assert len(found.text) < TEXT_MAX + 10
    assert len(found.fields) == FIELDS_MAX
    assert all(len(value) < TEXT_MAX + 10 for value in found.fields.values())


def test_a_plain_line_is_an_event_without_fields(log_events: LogEvents) -> None:
    LOG.warning("something from %s", "elsewhere")
    (found,) = log_events.recent()
    assert (found.text, found.fields) == ("something from elsewhere", {})
