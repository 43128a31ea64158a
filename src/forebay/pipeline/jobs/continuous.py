"""`Pipeline`: the continuous offload driver, one cycle after the other.

A cycle that fails is logged, counted and tried again at the next turn: nothing is lost by it, and
what it committed stays. The pipeline ends when it is stopped, after the cycle that is under way,
or when Spark itself is gone, which takes a new process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from forebay.errors import ForebayError, ServiceUnavailable
from forebay.logs import event
from forebay.metrics import Counter
from forebay.pipeline.execute import Executor
from forebay.pipeline.jobs.offload import Offload, OffloadReport
from forebay.settings import StoreSettings

_log: Final = logging.getLogger("forebay.pipeline")
FAILURES: Final = Counter(
    "forebay_pipeline_failures_total", "Cycles of the pipeline that ended with an error.", ["kind"]
)


class Pipeline:
    """One cycle each `uploader.interval_seconds`, the first at once."""

    def __init__(self, settings: StoreSettings, executor: Executor) -> None:
        self._interval = settings.uploader.interval_seconds
        self._executor = executor
        self._offload = Offload(settings, executor)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ends `run` after the cycle that is under way. From any thread, or a signal's handler."""
        self._stopping.set()

    def run(self, on_report: Callable[[OffloadReport], None] | None = None) -> None:
        """Runs until `stop`; calls `on_report` after each cycle that did not fail."""
        try:
            while not self._stopping.is_set():
                report = self._cycle()
                if report is not None and on_report is not None:
                    on_report(report)
                self._stopping.wait(self._interval)
        finally:
            self._offload.close()

    def _cycle(self) -> OffloadReport | None:
        try:
            return self._offload.once(force=False)
        except Exception as error:  # logged, and tried again: it must not end
            expected = isinstance(error, ForebayError)
            FAILURES.add(1, type(error).__name__)
            event(
                _log,
                logging.WARNING if expected else logging.ERROR,
                "a cycle of the pipeline failed",
                trace=None if expected else error,
                error=error if expected else repr(error),
            )
            if not self._executor.alive():
                raise ServiceUnavailable("Spark has ended; start the pipeline again") from error
            return None
