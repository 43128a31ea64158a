"""Which log a directory holds, where the files that say so are damaged.

The id is never taken from the catalog: that a log fits to the objects shows that it was the topic's
once, not that it still is. With another machine's id, an old log would hand out offsets again that
were acknowledged there. Its copy beside it is another matter: it was written with the id.
"""

from __future__ import annotations

from forebay.catalog.records import TopicRecord
from forebay.format.names import LOG_ID_COPY_FILE, LOG_ID_FILE
from forebay.topic.repairs_plan import Finding, Kind
from forebay.topic.repairs_survey import Survey


def judge_id(
    topic: str, survey: Survey, record: TopicRecord | None
) -> tuple[str | None, Finding | None]:
    """The id of the log as far as it can be known, and what is wrong with the files.

    A finding that is fixable is put right by writing the id.
    """
    own, copy = survey.ids.own, survey.ids.copy
    known = record.log_id if record is not None else None
    if own is not None and own in (copy, known):
        return own, None if copy == own else _of_copy(topic, survey)
    if copy is not None:
        what = _what(survey) if own is None else "it does not say what its copy says"
        remedy = f"it is written again from its copy, {LOG_ID_COPY_FILE}"
        return copy, _finding(topic, survey, what, remedy)
    if record is None or known is None:
        return own, _without_catalog(topic, survey)
    if not survey.begun:
        return own, None
    what = f"{_what(survey)}: opening it sets the log aside{_at_stake(survey, record)}"
    remedy = (
        f"none: if the topic was never open on another machine, this is its log, with the id "
        f"{known} by the catalog: write that into {LOG_ID_FILE}. Otherwise put the file back from "
        "a copy; where the topic went on elsewhere, there is nothing to do"
    )
    return None, _finding(topic, survey, what, remedy, fixable=False)


def _what(survey: Survey) -> str:
    if not survey.ids.whole:
        return "it is damaged"
    if survey.ids.own is None:
        return "it is missing"
    return "it is not the id of the log that the topic goes on in"


def _at_stake(survey: Survey, record: TopicRecord) -> str:
    """What would not be readable any more."""
    first = max(record.tail, survey.start)
    goes_on = max(record.tail, record.reserved, survey.end)
    if survey.end <= first:
        return f", and goes on at offset {goes_on}; the objects have all of its messages"
    return (
        f", and goes on at offset {goes_on}; {survey.end - first} messages of it, {first} to "
        f"{survey.end - 1}, are in no object"
    )


def _of_copy(topic: str, survey: Survey) -> Finding | None:
    """One that is missing is made by the next open."""
    if survey.ids.copy is None and survey.ids.copy_whole:
        return None
    where = str(survey.directory / LOG_ID_COPY_FILE)
    what = "it is damaged" if survey.ids.copy is None else f"it is no copy of {LOG_ID_FILE}"
    return Finding(topic, Kind.LOG_ID, where, what, f"it is written again from {LOG_ID_FILE}")


def _without_catalog(topic: str, survey: Survey) -> Finding | None:
    """Where the catalog knows no id, opening takes the log whatever its id is."""
    if survey.ids.whole:
        return None
    remedy = "none: remove it; the catalog knows of no log yet, so this one gets a new id"
    return _finding(topic, survey, "it is damaged", remedy, fixable=False)


def _finding(
    topic: str, survey: Survey, what: str, remedy: str, *, fixable: bool = True
) -> Finding:
    where = str(survey.directory / LOG_ID_FILE)
    return Finding(topic, Kind.LOG_ID, where, what, remedy, fixable)
