"""A real browser for tests of the page: the chromium of the system, without a window.

Every page is watched: what it writes to the console as an error, what it throws, and which hosts
it asks. A test that ends with any of it, unannounced, has failed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

PATIENCE_MS: Final = 60_000
_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS: Final = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def chromium() -> str | None:
    return next((found for name in _PROGRAMS if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module alone: while it is open, no event loop can run in this thread."""
    from playwright.sync_api import sync_playwright

    from support.server_fixtures import absent

    program = chromium()
    if program is None:
        absent("no chromium: apt-get install chromium")
    with (
        tempfile.TemporaryDirectory(prefix="forebay-browser-") as home,
        sync_playwright() as playwright,
    ):
        opened = playwright.chromium.launch(
            executable_path=program,
            args=_ARGUMENTS,
            env={"HOME": home, "PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": home},
        )
        yield opened
        opened.close()


@dataclass
class Visitor:
    """A browser's window on one server."""

    page: Page
    url: str
    hosts: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    """Parts of complaints that the test provokes."""

    def watch(self) -> None:
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(f"thrown: {error}"))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text}")

    def require_quiet(self) -> None:
        known = self.expected
        loud = [each for each in self.complaints if not any(part in each for part in known)]
        assert loud == []
        assert self.hosts == {urlsplit(self.url).netloc}


class Visits:
    """Opens pages, and checks all of them in the end.

    A test that ends its server itself ends the visits first, with `visit` as a context: a page asks
    its server again every second, and complains when nobody is there.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._visitors: list[Visitor] = []

    def __call__(self, url: str, **options: Any) -> Visitor:
        context = self._browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        )
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        visitor = Visitor(page, url)
        visitor.watch()
        self._visitors.append(visitor)
        page.goto(url)
        return visitor

    def __enter__(self) -> Visits:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end(self) -> None:
        visitors, self._visitors = self._visitors, []
        for visitor in visitors:
            visitor.page.context.close()
        for visitor in visitors:
            visitor.require_quiet()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visits]:
    """`visit(url)` opens the page in a fresh context."""
    visits = Visits(browser)
    yield visits
    visits.end()
