"""The options of a remote store: known names, secrets, and what the client calls them.

    s3      endpoint region access_key secret_key session_token virtual_host_style anonymous
    gcs     endpoint credentials_path (of a service account's file) anonymous (for reading only)
    azure   endpoint account_name account_key sas_token anonymous

What is not given is taken from the environment and the machine's identity, as the client does it.
Pure: nothing is opened here, and no client is imported.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from forebay.errors import InvalidSetting
from forebay.settings import CloudSettings

Kind = Literal["s3", "gcs", "azure"]

_SCHEMES: Final[Mapping[Kind, str]] = {"s3": "s3", "gcs": "gs", "azure": "azure"}
_NAMES: Final[Mapping[Kind, Mapping[str, str]]] = {
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "access_key": "access_key_id",
        "secret_key": "secret_access_key",
        "session_token": "session_token",
        "virtual_host_style": "virtual_hosted_style_request",
        "anonymous": "skip_signature",
    },
    "gcs": {
        "endpoint": "base_url",
        "credentials_path": "service_account",
        "anonymous": "skip_signature",
    },
    "azure": {
        "endpoint": "endpoint",
        "account_name": "account_name",
        "account_key": "account_key",
        "sas_token": "sas_key",
        "anonymous": "skip_signature",
    },
}
_FLAGS: Final = {"virtual_host_style", "anonymous"}
_SECRETS: Final = {"secret_key", "session_token", "account_key", "sas_token"}
_SECRET_VARIABLES: Final = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
)
_SECRET_LENGTH_MIN: Final = 4  # shorter ones would blank out words by chance


class Place(NamedTuple):
    """Where a remote store is, and how the client is told."""

    kind: Kind
    bucket: str
    prefix: str
    config: Mapping[str, str | bool]
    allow_http: bool

    @property
    def name(self) -> str:
        root = f"{_SCHEMES[self.kind]}://{self.bucket}"
        return f"{root}/{self.prefix}" if self.prefix else root


def place_of(settings: CloudSettings) -> Place:
    """InvalidSetting for a root or an option that cannot be right."""
    kind = settings.backend
    if kind not in ("s3", "gcs", "azure"):
        raise InvalidSetting(f"the backend {kind!r} is no remote store")
    bucket, prefix = _root(kind, settings.root)
    for name in settings.options:
        if name not in _NAMES[kind]:
            raise InvalidSetting(_unknown(kind, name))
    given = {name: str(value) for name, value in settings.options.items()}
    config: dict[str, str | bool] = {
        _NAMES[kind][name]: _flag(name, value) if name in _FLAGS else value
        for name, value in given.items()
    }
    endpoint = given.get("endpoint", "")
    if endpoint:
        _check_endpoint(endpoint)
    if kind == "s3":
        # A server of one's own rarely has a host name for each bucket; Amazon prefers them.
        config.setdefault("virtual_hosted_style_request", not endpoint)
        # Over TLS the connection checks the bytes already, and the hash is half of the work.
        config["unsigned_payload"] = not endpoint.startswith("http://")
    return Place(kind, bucket, prefix, config, endpoint.startswith("http://"))


def secrets_of(settings: CloudSettings) -> list[str]:
    """Every text that must be in no message, longest first, also as a URL would carry it."""
    plain = [str(value) for name, value in settings.options.items() if name in _SECRETS]
    plain += [os.environ[name] for name in _SECRET_VARIABLES if name in os.environ]
    plain += [value for token in plain for name, value in parse_qsl(token) if name == "sig"]
    found = {form for value in plain for form in (value, quote(value), quote(value, safe=""))}
    return sorted((text for text in found if len(text) >= _SECRET_LENGTH_MIN), key=len)[::-1]


def _root(kind: Kind, root: str | None) -> tuple[str, str]:
    scheme = _SCHEMES[kind]
    parts = urlsplit(root or "")
    if parts.scheme != scheme or not parts.netloc or "@" in parts.netloc or parts.query:
        raise InvalidSetting(
            f"the root of the backend {kind} must be like {scheme}://bucket/prefix"
        )
    return parts.netloc, parts.path.strip("/")


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidSetting("the option endpoint must be like https://host:port")
    if parts.username or parts.password or parts.query:
        raise InvalidSetting("the option endpoint must not have credentials or a query in it")


def _unknown(kind: Kind, name: str) -> str:
    nearest = difflib.get_close_matches(name, _NAMES[kind], n=1, cutoff=0)
    return (
        f"the backend {kind} has no option {name!r}; the nearest is {nearest[0]!r}, "
        f"of {', '.join(_NAMES[kind])}"
    )


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InvalidSetting(f"the option {name} must be true or false")
    return value.lower() == "true"
