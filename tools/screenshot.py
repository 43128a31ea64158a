"""Takes a picture of the page of a running server, with the chromium of the system.

    .venv/bin/python tools/screenshot.py http://127.0.0.1:8650 docs/images/dashboard.png

It waits until the page shows topics and a chart, and then for `--settle` seconds more.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def take(url: str, target: Path, options: argparse.Namespace) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        sys.exit("no chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            device_scale_factor=options.scale,
            color_scheme="dark" if options.dark else "light",
            reduced_motion="reduce",
        )
        if options.token:
            page.add_init_script(f"sessionStorage.setItem('forebay.token', {options.token!r})")
        page.goto(url)
        page.wait_for_selector(".topic", timeout=30_000)
        page.wait_for_selector(".plot canvas", timeout=30_000)
        page.wait_for_timeout(options.settle * 1000)
        target.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=target, full_page=options.full)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes a picture of the page of a running server.")
    parser.add_argument("url", help="such as http://127.0.0.1:8650")
    parser.add_argument("target", type=Path, nargs="?", default=Path("docs/images/dashboard.png"))
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--scale", type=float, default=1, help="pixels for each CSS pixel")
    parser.add_argument("--settle", type=float, default=3, help="seconds to wait for numbers")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--full", action="store_true", help="the whole page, however long")
    parser.add_argument("--token", help="of the server, if it asks for one")
    options = parser.parse_args()
    take(options.url, options.target, options)
    sys.stdout.write(f"{options.target}\n")


if __name__ == "__main__":
    main()
