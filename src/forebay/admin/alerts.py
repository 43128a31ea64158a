"""What somebody should know now, in plain words, and what becomes of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from forebay.admin.reach import Reached
from forebay.admin.site import Site
from forebay.admin.topic_page import TopicPage
from forebay.limits import MIB

_ALERTS_MAX: Final = 20
_DISK_BYTES_MIN: Final = 256 * MIB
_DISK_SHARE_MIN: Final = 0.05
"""Of a small disk."""
_LATE: Final = 3
"""Uploads that are so many intervals late are told."""


@dataclass(frozen=True, slots=True)
class Alert:
    kind: str
    level: Literal["info", "warning", "error"]
    text: str
    topic: str | None = None


def alerts(site: Site, reached: Reached, pages: Sequence[TopicPage]) -> list[Alert]:
    """The gravest first, at most 20."""
    found: list[Alert] = []
    if site.unready is not None:
        found.append(Alert("unready", "info", f"The server is not ready yet: {site.unready}."))
    if reached.state == "away":
        found.append(
            Alert(
                "store",
                "error",
                f"The object store does not answer: {(reached.why or '').rstrip('.')}. Appends go "
                "on; what is waiting is uploaded when it answers again.",
            )
        )
    trouble = site.watch.states.catalog_trouble
    if trouble is not None:
        found.append(
            Alert(
                "catalog",
                "error",
                f"The catalog does not answer: {trouble.rstrip('.')}. What is shown of objects is "
                "what it said last; nothing is uploaded until it answers again.",
            )
        )
    found += _disk(site)
    found += _spark(site)
    for page in pages:
        found += _topic(site, page)
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda each: order[each.level])[:_ALERTS_MAX]


def _disk(site: Site) -> list[Alert]:
    data = site.settings.data
    if data is None:
        return []
    try:
        disk = shutil.disk_usage(Path(data))
    except FileNotFoundError:
        return []  # nothing was stored yet
    except OSError as error:
        return [Alert("disk", "error", f"The data directory cannot be looked at: {error}.")]
    if disk.free >= min(_DISK_BYTES_MIN, disk.total * _DISK_SHARE_MIN):
        return []
    return [
        Alert(
            "disk",
            "error",
            f"The disk of the data directory is nearly full: {disk.free // MIB} MiB are free. "
            "When it is full, appends are refused and nothing is lost: free some space.",
        )
    ]


def _spark(site: Site) -> list[Alert]:
    driver = None if site.jobs is None else site.jobs.driver()
    if driver is None or driver.error is None:
        return []
    return [
        Alert(
            "spark",
            "warning",
            f"The Spark driver ended ({driver.error.rstrip('.')}) and is started again. Nothing is "
            "lost: uploads go on when it is ready.",
        )
    ]


def _topic(site: Site, page: TopicPage) -> list[Alert]:
    found: list[Alert] = []
    if page.missing:
        start, end = page.missing[0]
        more = f", and {len(page.missing) - 1} more ranges" if len(page.missing) > 1 else ""
        found.append(
            Alert(
                "missing",
                "error",
                f"The offsets {start} to {end - 1} of {page.name}{more} are in no tier, and not "
                f"recorded as lost. Run `forebay verify {page.name}`.",
                page.name,
            )
        )
    if page.trouble is not None:
        found.append(
            Alert("trouble", "warning", f"{page.name}: {page.trouble.rstrip('.')}.", page.name)
        )
    uploader = site.settings.uploader
    allowed = uploader.max_open_seconds + _LATE * uploader.interval_seconds
    waited = float(page.facts["lag"]["seconds"])
    if uploader.enabled and page.facts["open"] and waited > allowed:
        found.append(
            Alert(
                "late",
                "warning",
                f"Messages of {page.name} wait for their upload for {waited:.0f} s; it should be "
                f"{allowed:.0f} s at most.",
                page.name,
            )
        )
    return found
