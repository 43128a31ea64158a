"""As much of Google Cloud Storage's XML API as the client uses, in memory, on the loopback."""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import tempfile
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from forebay.settings import CloudSettings

BUCKET: Final = "forebay"
_PAGE: Final = 1000
_META: Final = "x-goog-meta-"


class _Object(NamedTuple):
    data: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        """Nothing."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        self.query = {
            name: values[0]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        bucket, _, self.key = unquote(parts.path.lstrip("/")).partition("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if bucket != BUCKET:
            self._error(404, "NoSuchBucket")
            return
        with self.server.lock:
            self.server.requests.append((self.command, self.key))
            getattr(self, f"_{self.command.lower()}")()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815 - the parent's names

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    def _user_headers(self) -> dict[str, str]:
        found = {name.lower(): value for name, value in self.headers.items()}
        return {name: value for name, value in found.items() if name.startswith(_META)}

    def _put(self) -> None:
        source = self.headers.get("x-goog-copy-source")
        if "uploadId" in self.query:
            upload = self.server.uploads.get(self.query["uploadId"])
            if upload is None:
                self._error(404, "NoSuchUpload")
                return
            upload[1][int(self.query["partNumber"])] = self.body
            self._answer(200, ETag=f'"{hashlib.md5(self.body).hexdigest()}"')
        elif self.headers.get("x-goog-if-generation-match") == "0" and (
            self.key in self.server.objects
        ):
            self._error(412, "PreconditionFailed")
        elif source is not None:
            found = self.server.objects.get(unquote(source).lstrip("/").partition("/")[2])
            if found is None:
                self._error(404, "NoSuchKey")
                return
            self.server.objects[self.key] = found
            self._answer(200, b"<CopyObjectResult/>")
        else:
            made = _Object(self.body, self._user_headers())
            self.server.objects[self.key] = made
            self._answer(200, ETag=made.etag)

    def _post(self) -> None:
        if "uploads" in self.query:
            upload_id = secrets.token_hex(8)
            self.server.uploads[upload_id] = (self._user_headers(), {})
            name = "InitiateMultipartUploadResult"
            self._answer(200, f"<{name}><UploadId>{upload_id}</UploadId></{name}>".encode())
            return
        headers, pieces = self.server.uploads.pop(self.query["uploadId"], ({}, None))
        if pieces is None:
            self._error(404, "NoSuchUpload")
            return
        made = _Object(b"".join(piece for _, piece in sorted(pieces.items())), headers)
        self.server.objects[self.key] = made
        name = "CompleteMultipartUploadResult"
        self._answer(200, f"<{name}><ETag>{escape(made.etag)}</ETag></{name}>".encode())

    def _delete(self) -> None:
        if "uploadId" in self.query:
            self.server.uploads.pop(self.query["uploadId"], None)
            self._answer(204)
        elif self.server.objects.pop(self.key, None) is None:
            self._error(404, "NoSuchKey")
        else:
            self._answer(204)

    def _head(self) -> None:
        self._get()

    def _get(self) -> None:
        if not self.key:
            self._list()
            return
        found = self.server.objects.get(self.key)
        if found is None:
            self._error(404, "NoSuchKey")
            return
        headers = {**found.headers, "ETag": found.etag, "Last-Modified": formatdate(usegmt=True)}
        data, status, size = found.data, 200, len(found.data)
        if (wanted := self.headers.get("Range")) is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or size) + 1, size)
            if start >= size:
                self._error(416, "InvalidRange")
                return
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            data, status = data[start:end], 206
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _list(self) -> None:
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        prefix = self.query.get("prefix", "")
        keys = sorted(k for k in self.server.objects if k.startswith(prefix) and k > after)
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(found.data)}</Size>"
            f"<ETag>{escape(found.etag)}</ETag>"
            "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
            for key, found in ((key, self.server.objects[key]) for key in keys[:_PAGE])
        )
        if len(keys) > _PAGE:
            rows += f"<NextContinuationToken>{escape(keys[_PAGE - 1])}</NextContinuationToken>"
        page = f"<ListBucketResult>{rows}</ListBucketResult>"
        self._answer(200, page.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}
        self.requests: list[tuple[str, str]] = []
        self.uploads: dict[str, tuple[dict[str, str], dict[int, bytes]]] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that aborts an upload hangs up: no reason to print a traceback."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class GcsFake:
    """Its service account needs no token: the client must not go and ask the machine for one."""

    def start(self) -> None:
        self._server = _Server()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._dir = tempfile.TemporaryDirectory(prefix="forebay-gcs-")
        self._account = Path(self._dir.name) / "account.json"
        account = {
            "gcs_base_url": self.endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        self._account.write_text(json.dumps(account))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._dir.cleanup()

    def requests(self, key: str) -> list[str]:
        """The methods of all requests for objects whose key ends so."""
        with self._server.lock:
            return [method for method, asked in self._server.requests if asked.endswith(key)]

    def uploads(self) -> int:
        """Unfinished ones."""
        return len(self._server.uploads)

    def forget_uploads(self) -> None:
        """As a bucket's lifecycle rule does."""
        with self._server.lock:
            self._server.uploads.clear()

    def settings(self, root: str | None = None) -> CloudSettings:
        return CloudSettings(
            backend="gcs",
            root=root or f"gs://{BUCKET}/{secrets.token_hex(6)}",
            options={"endpoint": self.endpoint, "credentials_path": str(self._account)},
            request_timeout_seconds=60,
            retry_timeout_seconds=60,
            max_retries=2,
        )
