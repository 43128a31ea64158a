"""What a server and its Spark driver say to each other; `forebay.pipeline.driver` has the words.

Apart from the driver itself, so that a server that starts none imports none of it.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass, field
from typing import Any, Final

from forebay.settings import StoreSettings

WORK_FOLDER: Final = "spark-work"
"""In the data directory: what Spark writes while it works."""
LENGTH_BYTES: Final = 8
LINE_BYTES_MAX: Final = 1024 * 1024
"""Of an event."""
DETAILS_MAX: Final = 20
TEXT_MAX: Final = 2000
BEAT_SECONDS: Final = 2.0
"""From one sign of life to the next."""
REFUSED, GONE = 2, 3
"""Exit codes: Spark did not start; Spark is gone."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a driver is told first."""

    settings: StoreSettings
    log_level: int = logging.WARNING

    def encode(self) -> bytes:
        body = pickle.dumps(self)
        return len(body).to_bytes(LENGTH_BYTES, "little") + body


@dataclass(frozen=True, slots=True)
class Order:
    """One job to be done."""

    id: str
    kind: str
    topics: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an order: `done`, `failed` or `cancelled`."""

    state: str
    summary: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    details: tuple[str, ...] = ()
