"""`forebay restore` of one topic, as a function: what the command does, without Spark."""

from __future__ import annotations

from typing import Any

from forebay.pipeline.jobs.restore import open_restore
from forebay.settings import StoreSettings
from forebay.topic.resources import close_executor_resources
from forebay.upload.restore import RestoreChoices, RestoreReport


def restore(settings: StoreSettings, topic: str, **choices: Any) -> RestoreReport:
    """Restores the topic with these choices. Raises what the command would print as its error."""
    try:
        with open_restore(
            settings, [topic], RestoreChoices(**choices), everything=False, runner="threads"
        ) as run:
            (done,) = run.topics()
    finally:
        close_executor_resources()  # tests replace the files of the catalog afterwards
    if done.error is not None:
        raise done.error
    assert done.report is not None
    return done.report
