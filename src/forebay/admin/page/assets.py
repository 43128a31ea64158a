"""`/` and `/assets/...`: the page, which is the files in `static/`, served as they are.

The page loads nothing from other hosts, and the policy that `guard` sends with it makes the browser
enforce that. The files are few and small, and read once, at the start.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from forebay.admin.errors import error_response
from forebay.admin.operations import Endpoint, Operation, Reply

PAGE: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_CACHED: Final = {"Cache-Control": "no-cache"}
"""Browsers keep a file, and revalidate it by its ETag."""


@dataclass(frozen=True, slots=True)
class Asset:
    data: bytes
    kind: str
    etag: str


def load() -> dict[str, Asset]:
    """All files of the page, by name."""
    found: dict[str, Asset] = {}
    for file in (resources.files("forebay.admin.page") / "static").iterdir():
        ending = file.name[file.name.rfind(".") :]
        if ending in _TYPES:
            data = file.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            found[file.name] = Asset(data, _TYPES[ending], etag)
    return found


SHOW_PAGE: Final = Operation(
    "page",
    "page",
    "Returns the page.",
    {200: Reply("The page.", str, "text/html"), 304: Reply("Not modified.")},
    public=True,
)
READ_ASSET: Final = Operation(
    "asset",
    "page",
    "Returns a file of the page.",
    {200: Reply("The file.", str, "*/*"), 304: Reply("Not modified.")},
    errors=(404,),
    public=True,
)


def routes() -> list[Endpoint]:
    assets = load()

    def respond(request: Request, name: str) -> Response:
        asset = assets.get(name)
        if asset is None:
            return error_response(404, "UsageError", f"there is no file {name[:80]!r}")
        headers = {**_CACHED, "ETag": asset.etag}
        etags = request.headers.get("if-none-match", "").split(",")
        known = [each.strip().removeprefix("W/") for each in etags]
        if asset.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(asset.data, media_type=asset.kind, headers=headers)

    async def page(request: Request) -> Response:
        return respond(request, PAGE)

    async def asset(request: Request) -> Response:
        return respond(request, request.path_params["name"])

    return [Endpoint("/", page, SHOW_PAGE), Endpoint("/assets/{name}", asset, READ_ASSET)]
