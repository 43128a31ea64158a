"""`Pipeline`: runs offloads in cycles until it is stopped.

A cycle that fails is logged and counted, and the next one retries. No data is lost, and what the
cycle committed stays committed. The pipeline ends after `stop`, when the current cycle is over. It
raises if Spark itself has ended, because only a new process can start it again.
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
    """Waits `uploader.interval_seconds` after each cycle; the first one starts at once."""

    def __init__(self, settings: StoreSettings, executor: Executor) -> None:
        self._interval = settings.uploader.interval_seconds
        self._executor = executor
        self._offload = Offload(settings, executor)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Makes `run` return after the current cycle. Call it in any thread or signal handler."""
        self._stopping.set()

    def run(self, on_report: Callable[[OffloadReport], None] | None = None) -> None:
        """Runs until `stop`; calls `on_report` after each cycle that did not fail.

        ServiceUnavailable if Spark has ended. Closes the pipeline, so run it only once.
        """
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
        except Exception as error:  # a failed cycle must not end the pipeline
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
