"""The page at `/` and what it is made of, below `/assets/`: files of this package, as they are.

Nothing comes from anywhere else, and the page may load nothing from anywhere else: the policy that
`guard` sends with them says so to the browser. Files are few and small, and read once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from forebay.admin.problems import problem

PAGE: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_CACHED: Final = {"Cache-Control": "no-cache"}
"""Browsers keep a file, and ask whether it is still the same."""


@dataclass(frozen=True, slots=True)
class Asset:
    data: bytes
    kind: str
    etag: str


def load() -> dict[str, Asset]:
    """All files of the page, by name."""
    found: dict[str, Asset] = {}
    for file in (resources.files("forebay.admin") / "page").iterdir():
        ending = file.name[file.name.rfind(".") :]
        if ending in _TYPES:
            data = file.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            found[file.name] = Asset(data, _TYPES[ending], etag)
    return found


def routes() -> list[BaseRoute]:
    assets = load()

    def answer(request: Request, name: str) -> Response:
        asset = assets.get(name)
        if asset is None:
            return problem(404, "UsageError", f"there is no file {name[:80]!r}")
        headers = {**_CACHED, "ETag": asset.etag}
        known = [each.strip().removeprefix("W/") for each in _if_none_match(request)]
        if asset.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(asset.data, media_type=asset.kind, headers=headers)

    async def page(request: Request) -> Response:
        return answer(request, PAGE)

    async def asset(request: Request) -> Response:
        return answer(request, request.path_params["name"])

    return [Route("/", page), Route("/assets/{name}", asset)]


def _if_none_match(request: Request) -> list[str]:
    return request.headers.get("if-none-match", "").split(",")
