"""Where remote stores get their credentials: options, files of AWS, and the machine's identity.

One server plays the store, the metadata services of the clouds and a token service. What it is
sent shows whose credentials the client used.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest

from forebay.config import describe
from forebay.errors import InvalidSetting, ObjectMissing, ServiceUnavailable
from forebay.objects.remote import RemoteBackend, secrets_of, store_location
from forebay.settings import CloudSettings, StoreSettings

AWS_KEYS: Final = {
    "AccessKeyId": "MACHINE",
    "SecretAccessKey": "s3cr3t-of-the-machine",
    "Token": "t0k3n",
    "Expiration": "2099-01-01T00:00:00Z",
}
SERVICE_ACCOUNT: Final = json.dumps({"type": "service_account", "private_key": "PR1VATE"})
ROLE: Final = "arn:aws:iam::123456789012:role/forebay"
VARIABLES: Final = ("AWS_", "GOOGLE_", "GCE_", "AZURE_", "IDENTITY_", "MSI_")


class Cloud(BaseHTTPRequestHandler):
    """Hands out credentials, and has no object."""

    def _respond(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = _answer(self.path)
        if body is None:
            used: list[str] = self.server.used  # type: ignore[attr-defined] # set by the fixture
            token = self.headers.get("x-amz-security-token")
            used.append(f"{self.headers.get('Authorization')} {token}")
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body or b"")

    do_GET = do_PUT = do_POST = do_HEAD = _respond  # noqa: N815 - the names it looks for

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def _answer(path: str) -> bytes | None:
    soon = int(time.time()) + 3600
    answers = {
        "/latest/api/token": b"of the metadata service",
        "/latest/meta-data/iam/security-credentials/": b"role",
        "/latest/meta-data/iam/security-credentials/role": json.dumps(AWS_KEYS).encode(),
        "/computeMetadata/v1/instance/service-accounts/default/token": json.dumps(
            {"access_token": "of-google", "expires_in": 3600, "token_type": "Bearer"}
        ).encode(),
        "/identity": json.dumps({"access_token": "of-azure", "expires_on": str(soon)}).encode(),
        "/tenant/oauth2/v2.0/token": json.dumps(
            {"access_token": "of-a-pod", "expires_in": 3600}
        ).encode(),
    }
    return answers.get(path.partition("?")[0])


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The server's address, and the credentials of the requests for objects so far."""
    for name in list(os.environ):
        if name.startswith(VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Cloud) as server:
        used: list[str] = []
        server.used = used  # type: ignore[attr-defined] # for the handler
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", used=used)
        server.shutdown()
        thread.join()


def settings_of(backend: str, endpoint: str, **options: str) -> CloudSettings:
    roots = {"s3": "s3://b", "gcs": "gcs://b/p", "azure": "b/p"}
    return CloudSettings(
        backend=backend,  # type: ignore[arg-type] # a parameter is any string
        root=roots[backend],
        options={"endpoint": endpoint, **options},
        retry_timeout_seconds=0.2,
        max_retries=0,
    )


def ask(cloud: SimpleNamespace, backend: str, **options: str) -> str:
    """The credentials of one request."""
    made = RemoteBackend(settings_of(backend, cloud.url, **options))
    with pytest.raises(ObjectMissing):
        made.head("a")
    made.close()
    return str(cloud.used[-1])


# ---- the machine's identity ----


def test_the_role_of_an_instance_is_used(
    cloud: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", cloud.url)
    assert "Credential=MACHINE/" in (said := ask(cloud, "s3", region="r"))
    assert said.endswith(" t0k3n")


def test_the_service_account_of_a_machine_is_used(
    cloud: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", cloud.url.removeprefix("http://"))
    assert ask(cloud, "gcs", project="any") == "Bearer of-google None"


def test_the_managed_identity_of_a_machine_is_used(
    cloud: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"{cloud.url}/identity")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{cloud.url}/identity")
    monkeypatch.setenv("IDENTITY_HEADER", "x")
    assert ask(cloud, "azure", account_name="me") == "Bearer of-azure None"


def test_the_workload_identity_of_a_pod_is_used(
    cloud: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("jwt")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", cloud.url)
    assert ask(cloud, "azure", account_name="me") == "Bearer of-a-pod None"


def test_a_role_with_a_web_identity_is_assumed_by_the_client(
    cloud: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The token service is only asked over TLS, so here the request fails, and nothing is sent."""
    (tmp_path / "token").write_text("jwt")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_STS_ENDPOINT", cloud.url)
    settings = settings_of("s3", cloud.url, region="r", role_arn=ROLE)
    assert store_location(settings).config["role_arn"] == ROLE
    with pytest.raises(ServiceUnavailable, match="POST"):
        RemoteBackend(settings).head("a")
    assert cloud.used == []


# ---- profiles ----


def write_profiles(folder: Path, credentials: str, config: str = "") -> None:
    (folder / "credentials").write_text(credentials)
    (folder / "config").write_text(config)


def test_a_profile_is_read_from_the_files_of_aws(
    cloud: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_profiles(
        tmp_path,
        "[work]\naws_access_key_id = WORK\naws_secret_access_key = a%b\n",
        "[profile work]\nregion = eu-north-1\n",
    )
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of somebody else")
    said = ask(cloud, "s3", profile="work")
    assert "Credential=WORK/" in said
    assert "/eu-north-1/s3/" in said
    assert said.endswith(" None"), "a token of the environment belongs to other keys"


def test_the_region_of_the_options_is_stronger_than_that_of_a_profile(
    cloud: SimpleNamespace, tmp_path: Path
) -> None:
    keys = "aws_access_key_id = D\naws_secret_access_key = s\naws_session_token = t\n"
    write_profiles(tmp_path, "", f"[default]\nregion = eu-north-1\n{keys}")
    said = ask(cloud, "s3", profile="default", region="r")
    assert "Credential=D/" in said
    assert "/r/s3/" in said
    assert said.endswith(" t")


def test_a_profile_with_a_web_identity_needs_no_boto3(
    cloud: SimpleNamespace, tmp_path: Path
) -> None:
    config = f"[profile pod]\nrole_arn = {ROLE}\nweb_identity_token_file = /token\n"
    write_profiles(tmp_path, "", config)
    found = store_location(settings_of("s3", cloud.url, profile="pod")).config
    assert (found["role_arn"], found["web_identity_token_file"]) == (ROLE, "/token")
    RemoteBackend(settings_of("s3", cloud.url, profile="pod"))


@pytest.mark.parametrize(
    ("credentials", "message"),
    [
        ("[other]\naws_access_key_id = K\n", "the profile 'work' is neither in "),
        ("aws_secret_access_key = s3cr3t\n", "cannot be read: MissingSectionHeaderError"),
    ],
)
def test_a_profile_that_is_not_there_is_refused_without_a_secret(
    cloud: SimpleNamespace, tmp_path: Path, credentials: str, message: str
) -> None:
    write_profiles(tmp_path, credentials)
    with pytest.raises(InvalidSetting) as caught:
        RemoteBackend(settings_of("s3", cloud.url, profile="work"))
    assert message in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


# ---- boto3 ----


@pytest.mark.parametrize(
    ("options", "config"),
    [({"role_arn": ROLE}, ""), ({"profile": "sso"}, "[profile sso]\nsso_session = corp\n")],
)
def test_what_needs_boto3_says_how_to_install_it(
    cloud: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    config: str,
) -> None:
    write_profiles(tmp_path, "", config)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidSetting, match="pip install boto3"):
        RemoteBackend(settings_of("s3", cloud.url, **options))


def test_a_role_is_assumed_through_boto3(
    cloud: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double, as boto3 is optional. Its times are not in the one zone that the client takes."""
    asked: list[Any] = []

    class Sts:
        def __init__(self, session: Any, **request: str) -> None:
            asked.append((session, request))

        def __call__(self) -> dict[str, Any]:
            zone = timezone(timedelta(hours=0), "of botocore")
            until = datetime.now(zone) + timedelta(hours=1)
            return {
                "access_key_id": "ASSUMED",
                "secret_access_key": "s3cr3t-of-a-role",
                "token": "r0l3",
                "expires_at": until,
            }

    boto3, providers = ModuleType("boto3"), ModuleType("obstore.auth.boto3")
    boto3.Session = SimpleNamespace  # type: ignore[attr-defined] # a double
    providers.StsCredentialProvider = Sts  # type: ignore[attr-defined] # a double
    monkeypatch.setitem(sys.modules, "boto3", boto3)
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", providers)
    said = ask(
        cloud, "s3", region="r", role_arn=ROLE, access_key="BASE", secret_key="s3cr3t-of-base"
    )
    assert "Credential=ASSUMED/" in said
    assert said.endswith(" r0l3")
    [(session, request)] = asked
    assert request == {"RoleArn": ROLE, "RoleSessionName": "forebay"}
    assert (session.aws_access_key_id, session.profile_name) == ("BASE", None)


# ---- options of gcs ----


def test_credentials_of_gcs_may_be_inline(cloud: SimpleNamespace) -> None:
    settings = settings_of("gcs", cloud.url, credentials_json=SERVICE_ACCOUNT, project="p")
    place = store_location(settings)
    assert place.config["service_account_key"] == SERVICE_ACCOUNT
    assert "p" not in place.config.values(), "no request needs a project"
    assert {"PR1VATE", SERVICE_ACCOUNT} <= set(secrets_of(settings))
    shown = repr(settings) + json.dumps(describe(StoreSettings(None, cloud=settings)))
    assert "PR1VATE" not in shown


def test_inline_credentials_that_are_a_path_are_refused(cloud: SimpleNamespace) -> None:
    with pytest.raises(InvalidSetting, match="credentials_path"):
        store_location(settings_of("gcs", cloud.url, credentials_json="/etc/gcs.json"))


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("s3", {"profile": "work", "access_key": "K"}),
        ("gcs", {"credentials_path": "/a", "credentials_json": SERVICE_ACCOUNT}),
    ],
)
def test_two_sources_of_credentials_are_refused(
    cloud: SimpleNamespace, backend: str, options: dict[str, str]
) -> None:
    with pytest.raises(InvalidSetting, match="exclude each other"):
        store_location(settings_of(backend, cloud.url, **options))
