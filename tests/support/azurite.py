"""Azurite, the emulator of Azure Blob Storage, where npm has installed it; see `program`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from typing import Final

from forebay.settings import CloudSettings
from support.paths import ROOT
from support.s3_server import free_ports

ACCOUNT: Final = "devstoreaccount1"
CONTAINER: Final = "forebay"
START_SECONDS_MAX: Final = 60.0
STARTS_MAX: Final = 3
_API_VERSION: Final = "2021-12-02"
_TOOLS: Final = ROOT / ".tools" / "node_modules" / ".bin" / "azurite-blob"


def program() -> str | None:
    """`npm install --prefix .tools azurite` puts it where this looks first."""
    return str(_TOOLS) if _TOOLS.exists() else shutil.which("azurite-blob")


class Azurite:
    """`start` returns when the container is made; everything is in the server's memory."""

    def __init__(self) -> None:
        self.account_key = base64.b64encode(secrets.token_bytes(48)).decode()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        found = program()
        assert found is not None
        for attempt in range(STARTS_MAX):
            try:
                self._start(found)
            except RuntimeError:  # the port may have been taken in between
                if attempt == STARTS_MAX - 1:
                    raise
            else:
                return

    def _start(self, found: str) -> None:
        port = free_ports(1)[0]
        self.endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        self._process = subprocess.Popen(
            [
                found,
                *("--blobHost", "127.0.0.1", "--blobPort", str(port)),
                *("--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence"),
                "--silent",
            ],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", **self._accounts()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + START_SECONDS_MAX
        while not self._make_container():
            if time.monotonic() > end or self._process.poll() is not None:
                self.stop()
                raise RuntimeError("azurite is not ready")
            time.sleep(0.05)

    def _accounts(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{self.account_key}"}

    def _make_container(self) -> bool:
        date = formatdate(usegmt=True)
        named = f"x-ms-date:{date}\nx-ms-version:{_API_VERSION}\n"
        resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        signed = "PUT\n" + "\n" * 11 + named + resource
        key = base64.b64decode(self.account_key)
        signature = base64.b64encode(hmac.digest(key, signed.encode(), hashlib.sha256)).decode()
        request = urllib.request.Request(
            f"{self.endpoint}/{CONTAINER}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": _API_VERSION,
                "Authorization": f"SharedKey {ACCOUNT}:{signature}",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 201)
        except urllib.error.HTTPError as error:
            return error.code == 409  # an earlier request made it
        except OSError:
            return False

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def settings(self, root: str | None = None) -> CloudSettings:
        return CloudSettings(
            backend="azure",
            root=root or f"azure://{CONTAINER}/{secrets.token_hex(6)}",
            options={
                "endpoint": self.endpoint,
                "account_name": ACCOUNT,
                "account_key": self.account_key,
            },
            request_timeout_seconds=60,
            retry_timeout_seconds=60,
            max_retries=2,
        )
