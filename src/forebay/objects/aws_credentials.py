"""Credentials of AWS that the client of object stores does not find by itself.

`profile` names a section in the shared files of AWS's tools:

    ~/.aws/credentials   [name]           or AWS_SHARED_CREDENTIALS_FILE
    ~/.aws/config        [profile name]   or AWS_CONFIG_FILE; `default` without the word profile

Its keys, its region and its web identity are read here. A profile that needs more than reading a
file, such as single sign-on, a role of another profile or a program that prints keys, is left to
boto3, an optional dependency. So is `role_arn`, unless a web identity token file exists, with which
the client assumes the role itself.

Beware: the files hold secrets. No error quotes them.
"""

from __future__ import annotations

import configparser
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from forebay.errors import InvalidSetting

if TYPE_CHECKING:
    from obstore.store import S3Credential

_CREDENTIAL_SECONDS: Final = 900
"""How long keys from a file are used before the file is read again."""

_ELSEWHERE: Final = (
    "source_profile",
    "credential_source",
    "credential_process",
    "sso_session",
    "sso_start_url",
    "login_session",
)
"""Keys of profiles whose credentials come from a service or a program."""


@dataclass(frozen=True, slots=True, repr=False)
class AwsProfile:
    """What the files say about one profile."""

    name: str
    values: Mapping[str, str]

    @property
    def keys(self) -> tuple[str, str, str | None] | None:
        """The access key, the secret key and the session token; None if it has no keys."""
        access, secret = (
            self.values.get("aws_access_key_id"),
            self.values.get("aws_secret_access_key"),
        )
        if not access or not secret:
            return None
        return access, secret, self.values.get("aws_session_token") or None

    @property
    def needs_boto3(self) -> bool:
        """Whether reading the files is not enough to get credentials."""
        found = any(name in self.values for name in _ELSEWHERE)
        return found or (self.keys is None and "web_identity_token_file" not in self.values)


def read_profile(name: str, env: Mapping[str, str] = os.environ) -> AwsProfile:
    """Reads both files; raises InvalidSetting if neither has the profile."""
    credentials = _path(env, "AWS_SHARED_CREDENTIALS_FILE", "credentials")
    config = _path(env, "AWS_CONFIG_FILE", "config")
    section = name if name == "default" else f"profile {name}"
    found = {**_section(config, section), **_section(credentials, name)}
    if not found:
        raise InvalidSetting(
            f"options: the profile {name!r} is neither in {credentials} nor in {config}"
        )
    return AwsProfile(name, found)


def _path(env: Mapping[str, str], variable: str, file: str) -> Path:
    given = env.get(variable)
    return Path(given).expanduser() if given else Path.home() / ".aws" / file


def _section(path: Path, section: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False, default_section="\0")
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, configparser.Error) as error:
        # A parser's error quotes the line, which may be a secret.
        raise InvalidSetting(
            f"options: the file {path} of the profile cannot be read: {type(error).__name__}"
        ) from None
    return dict(parser[section]) if parser.has_section(section) else {}


# ---- what the client is given ----


def client_identity(options: Mapping[str, str]) -> dict[str, str]:
    """The part of the client's configuration that `profile` and `role_arn` stand for.

    Keys are not in it: see `credential_provider`.
    """
    found = {}
    if "profile" in options:
        profile = read_profile(options["profile"])
        if profile.values.get("region") and not _region_is_set(options):
            found["region"] = profile.values["region"]
        if not profile.needs_boto3 and profile.keys is None:
            names = ("role_arn", "web_identity_token_file", "role_session_name")
            found |= {name: profile.values[name] for name in names if name in profile.values}
    if "role_arn" in options:
        found["role_arn"] = options["role_arn"]
    return found


def _region_is_set(options: Mapping[str, str]) -> bool:
    return bool(
        options.get("region")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
    )


def credential_provider(options: Mapping[str, str]) -> Callable[[], S3Credential] | None:
    """Returns the function that gets the credentials for `profile` and `role_arn`.

    None if the client gets them by itself. Raises InvalidSetting if boto3 is needed and missing.
    """
    if not {"profile", "role_arn"} & options.keys():
        return None
    profile = read_profile(options["profile"]) if "profile" in options else None
    role = options.get("role_arn")
    if role is not None:
        token_file = {} if profile is None else profile.values
        if os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") or "web_identity_token_file" in token_file:
            return None
        return _from_boto3(options, role)
    assert profile is not None
    if profile.needs_boto3:
        return _from_boto3(options, None)
    return None if profile.keys is None else partial(_from_profile, profile.name)


def _from_profile(name: str) -> S3Credential:
    """Reads the keys again, because tools that rotate keys replace the file."""
    keys = read_profile(name).keys
    if keys is None:
        raise InvalidSetting(f"options: the profile {name!r} has no keys any more")
    until = datetime.now(UTC) + timedelta(seconds=_CREDENTIAL_SECONDS)
    return {
        "access_key_id": keys[0],
        "secret_access_key": keys[1],
        "token": keys[2],
        "expires_at": until,
    }


def _from_boto3(options: Mapping[str, str], role: str | None) -> Callable[[], S3Credential]:
    try:
        boto3 = importlib.import_module("boto3")
        providers = importlib.import_module("obstore.auth.boto3")
    except ImportError:
        why = "profile" if role is None else "role_arn"
        raise InvalidSetting(
            f"options: {why} needs the package boto3 here, to ask AWS for credentials: install it "
            "with `pip install boto3`, or use keys or a web identity token file"
        ) from None
    session = boto3.Session(
        profile_name=options.get("profile"),
        aws_access_key_id=options.get("access_key"),
        aws_secret_access_key=options.get("secret_key"),
        aws_session_token=options.get("session_token"),
        region_name=options.get("region"),
    )

    @cache
    def provider() -> Callable[[], S3Credential]:
        if role is None:
            found = providers.Boto3CredentialProvider(session)
        else:
            found = providers.StsCredentialProvider(
                session, RoleArn=role, RoleSessionName="forebay"
            )
        return cast("Callable[[], S3Credential]", found)

    def credentials() -> S3Credential:
        """Making the provider may ask a service or run a program: not before a request."""
        return provider()()

    return credentials
