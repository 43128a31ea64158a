"""`RemoteBackend`: objects in S3, Google Cloud Storage and Azure, through obstore's sync calls.

The client retries requests within `max_retries` and `retry_timeout_seconds`; an error after that is
final. Payloads are signed over plain HTTP, and not over TLS.

Options, besides what the environment and the machine's identity provide:

    s3      endpoint region access_key secret_key session_token profile role_arn virtual_host_style
            anonymous
    gcs     endpoint credentials_path (a service account's file) credentials_json (its contents)
            project (ignored: the name of a bucket is unique) anonymous (for reading only)
    azure   endpoint account_name account_key sas_token anonymous

Without credentials the client looks for them itself: in the environment, in a web identity token
file, and at the metadata service of the machine or container. `profile` and `role_arn` are ours
(`aws_credentials`).

The client raises the same exception for most failures, with the server's whole response in its
text. The HTTP status and the server's code, such as `NoSuchBucket`, decide which error is raised
instead. Its message has only the code and the message of the response, because the rest may contain
signed requests with tokens. Known secrets and the queries of URLs are removed.

`list` returns keys in the server's order. S3, GCS and Azure sort by the bytes of the key. SeaweedFS
sorts directory by directory, which is the same within one directory.

Beware:

- A multipart upload cannot be conditional, and replaces an object in silence. With `create` the key
  is looked up before the first part is sent and again before the completion, so another writer has
  to publish between that and the completion to be overwritten.
- In Azure the parts of two uploads of the same key at the same time replace each other. Reading the
  object back shows it, unless both had the same bytes anyway.
- The client's threads do not survive a fork, and calls would hang in the child. The first call
  starts them; a child of a process that has started them gets ServiceRefused.
- A process that is killed leaves the parts of unfinished uploads in the bucket. They are invisible
  and cost money: give the bucket a lifecycle rule that aborts incomplete uploads.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from forebay.clock import SYSTEM_CLOCK
from forebay.errors import (
    InvalidSetting,
    ObjectExists,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.layout import Buffer
from forebay.limits import OBJECT_KEY_BYTES_MAX, PART_BYTES_MIN
from forebay.objects.aws_credentials import client_identity, credential_provider
from forebay.objects.backend import (
    CopyUnsupported,
    ObjectMeta,
    WriterScope,
    check_key,
    check_metadata,
    check_range,
    ends_early,
    require_etag,
    taken,
)
from forebay.settings import CloudSettings

if TYPE_CHECKING:
    from obstore import GetOptions, WritableFile
    from obstore.store import ClientConfig, RetryConfig, S3Credential

T = TypeVar("T")
Kind = Literal["s3", "gcs", "azure"]
_CLIENT_ERRORS: Final = (BaseError, OSError, ValueError, NotImplementedError)
_PAGE: Final = 1000
_CONNECT_SECONDS_MAX: Final = 5.0
_BACKOFF_SECONDS_MAX: Final = 15.0
_CREATE_PAUSES: Final = (0.1, 0.5)
"""Seconds before each repetition of a creation that got no response."""
_STORES: Final[Mapping[str, Any]] = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}
_started_by: int | None = None
"""The process that started the client's threads, which all clients share."""

_SCHEMES: Final[Mapping[Kind, str]] = {"s3": "s3", "gcs": "gs", "azure": "azure"}
_ROOT_SCHEMES: Final[Mapping[Kind, tuple[str, ...]]] = {
    "s3": ("s3", "s3a"),
    "gcs": ("gs", "gcs"),
    "azure": ("azure", "az", "azblob"),
}
_NAMES: Final[Mapping[Kind, Mapping[str, str]]] = {
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "access_key": "access_key_id",
        "secret_key": "secret_access_key",
        "session_token": "session_token",
        "profile": "",
        "role_arn": "",
        "virtual_host_style": "virtual_hosted_style_request",
        "anonymous": "skip_signature",
    },
    "gcs": {
        "endpoint": "base_url",
        "project": "",
        "credentials_path": "service_account",
        "credentials_json": "service_account_key",
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
"""The client's names of the options. The empty name is of one that is not passed on as it is."""
_FLAGS: Final = {"virtual_host_style", "anonymous"}
_SECRETS: Final = {"secret_key", "session_token", "account_key", "sas_token", "credentials_json"}
_EXCLUSIVE: Final = (("profile", "access_key"), ("credentials_path", "credentials_json"))
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

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>\s*(\w{1,80})\s*</Code>")
_MESSAGE: Final = re.compile(r"<Message>\s*([^<\r\n]{1,200})")
_QUERY: Final = re.compile(r"\?[^\s\"'<>)]*")
_USER_INFO: Final = re.compile(r"(?<=://)[^/\s@]*@")
_REASON_LENGTH_MAX: Final = 300
_BUCKET_MISSING: Final = {"NoSuchBucket", "ContainerNotFound", "BucketNotFound", "AccountNotFound"}
_RETRYABLE_CODES: Final = {"RequestTimeout", "SlowDown", "ServerBusy", "OperationTimedOut"}
_RETRYABLE_STATUSES: Final = {408, 409, 423, 425, 429}
_NO_COPY_CODES: Final = {"NotImplemented", "MethodNotAllowed", "InvalidRequest", "EntityTooLarge"}
_NO_COPY_STATUSES: Final = {405, 501}
_WRONG_CONFIGURATION: Final = (
    "InvalidCertificate",
    "UnknownConfigurationKey",
    "MissingBucketName",
    "UnableToParse",
    "builder error",
)
_REFUSING: Final = {"PermissionDeniedError", "UnauthenticatedError", "UnknownConfigurationKeyError"}
_MISSING: Final = ("head", "get_range", "copy", "delete")


class RemoteBackend:
    def __init__(self, settings: CloudSettings) -> None:
        self._settings = settings
        self._location = store_location(settings)
        self._secrets = secrets_of(settings)
        self._provider = credential_provider(settings.options)
        self._store: Any = None

    @property
    def name(self) -> str:
        return self._location.name

    def head(self, key: str) -> ObjectMeta:
        options: GetOptions = {"head": True}
        found = self.call("head", key, lambda: obstore.get(self._client(), key, options=options))
        given = {
            str(name): str(value)
            for name, value in found.attributes.items()
            if str(name)[:1].islower()  # the others are HTTP headers, such as Content-Type
        }
        return _meta(key, found.meta, given)

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        check_range(start, end)
        if start == end:
            return self._empty_range(key, start)
        self._check(key)
        past: Exception | None = None
        data: memoryview | None = None
        client = self._client()
        try:
            if etag is None:
                data = memoryview(obstore.get_range(client, key, start=start, end=end))
            else:
                found = obstore.get(client, key, options={"range": (start, end)})
                require_etag(self.name, key, etag, _etag(found.meta["e_tag"]))
                data = memoryview(found.bytes())
        except _CLIENT_ERRORS as error:
            if not is_past_the_end(error):
                past = self._translated(error, "get_range", key)
        if past is not None:
            raise past
        if data is None or len(data) < end - start:
            raise ends_early(self.name, key, start, end)
        return data

    def put_object(
        self,
        key: str,
        data: Buffer,
        metadata: Mapping[str, str] | None = None,
        *,
        create: bool = False,
    ) -> ObjectMeta:
        given = check_metadata(metadata)

        def put() -> obstore.PutResult:
            return self.call(
                "put",
                key,
                lambda: obstore.put(
                    self._client(),
                    key,
                    data,
                    attributes=dict(given),
                    mode="create" if create else "overwrite",
                    use_multipart=False,
                ),
            )

        done = self._repeated(put) if create else put()
        size = memoryview(data).nbytes
        return ObjectMeta(key, size, _etag(done["e_tag"]), SYSTEM_CLOCK.now_ms(), given)

    def _repeated(self, put: Callable[[], T]) -> T:
        """Repeats a creation that got no response; the client repeats only other requests.

        If the first request was carried out, the second one raises ObjectExists.
        """
        until = time.monotonic() + self._settings.retry_timeout_seconds
        for pause in _CREATE_PAUSES[: self._settings.max_retries]:
            try:
                return put()
            except ServiceUnavailable:
                if time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
        return put()

    def open_streaming_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,
        concurrent_parts: int,
        metadata: Mapping[str, str] | None = None,
        create: bool = False,
    ) -> RemoteWriter:
        """See `Backend`. Smaller chunks are raised to 5 MiB, the smallest part that S3 takes."""
        self._check(key)
        return RemoteWriter(
            self,
            key,
            chunk_bytes=max(chunk_bytes, PART_BYTES_MIN),
            concurrent_parts=max(concurrent_parts, 1),
            metadata=check_metadata(metadata),
            create=create,
        )

    def copy_object(self, source: str, target: str, *, create: bool = False) -> None:
        self._check(target)
        if create and self._location.kind == "s3":
            self.require_absent(target)  # some servers ignore the condition of a copy
        try:
            self.call(
                "copy",
                source,
                lambda: obstore.copy(self._client(), source, target, overwrite=not create),
            )
        except ObjectExists:  # it names the source
            raise taken(self.name, target) from None

    def delete_object(self, key: str) -> None:
        try:
            self.call("delete", key, lambda: obstore.delete(self._client(), key))
        except ObjectMissing:
            return

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        # The client filters by whole path segments only; the rest of the prefix is compared here.
        folder = prefix.rpartition("/")[0]
        pages = self.call(
            "list",
            folder,
            lambda: obstore.list(self._client(), folder or None, offset=after, chunk_size=_PAGE),
        )
        while page := self.call("list", folder, next, pages, None):
            for found in page:
                key = found["path"]
                if key.startswith(prefix) and (after is None or key > after):
                    yield _meta(key, found, {})

    def close(self) -> None:
        self._store = None

    # ---- for the writer ----

    def start_parts(
        self, key: str, chunk_bytes: int, concurrent_parts: int, metadata: dict[str, str]
    ) -> WritableFile:
        return self.call(
            "create",
            key,
            lambda: obstore.open_writer(
                self._client(),
                key,
                attributes=dict(metadata),
                buffer_size=chunk_bytes,
                max_concurrency=concurrent_parts,
            ),
        )

    def require_absent(self, key: str) -> None:
        """Raises ObjectExists if there is such an object."""
        with suppress(ObjectMissing):
            self.head(key)
            raise taken(self.name, key)

    def call(self, operation: str, key: str, function: Callable[..., T], *arguments: Any) -> T:
        """Calls the function, and turns the client's errors into those that `Backend` promises.

        The error has no cause or context, because the client's error may contain secrets.
        """
        if operation != "list":
            self._check(key)
        try:
            return function(*arguments)
        except ServiceError:
            raise
        except _CLIENT_ERRORS as error:
            failure = self._translated(error, operation, key)
        raise failure

    # ---- inside ----

    def _check(self, key: str) -> None:
        check_key(key)
        if len(f"{self._location.prefix}/{key}".encode()) > OBJECT_KEY_BYTES_MAX:
            raise UsageError(
                f"the key {key[:80]!r}... is longer than the limit of {OBJECT_KEY_BYTES_MAX} bytes "
                "together with the prefix of the root"
            )

    def _translated(self, error: Exception, operation: str, key: str) -> ServiceError:
        return translated(
            error, operation=operation, key=key, name=self.name, secrets=self._secrets
        )

    def _empty_range(self, key: str, at: int) -> bytes:
        if at > self.head(key).size:
            raise ends_early(self.name, key, at, at)
        return b""

    def _client(self) -> Any:
        global _started_by  # noqa: PLW0603 - the client's threads are global too
        process = os.getpid()
        if _started_by is None:
            _started_by = process
        elif _started_by != process:
            raise ServiceRefused(
                f"{self.name}: the parent of this process used an object store before the fork, "
                "and the client library hangs after a fork; start processes with 'spawn'"
            )
        if self._store is None:
            self._store = self._connect()
        return self._store

    def _connect(self) -> Any:
        place, settings = self._location, self._settings
        client: ClientConfig = {
            "allow_http": place.allow_http,
            "timeout": timedelta(seconds=settings.request_timeout_seconds),
            "connect_timeout": timedelta(
                seconds=min(settings.request_timeout_seconds, _CONNECT_SECONDS_MAX)
            ),
        }
        retry: RetryConfig = {
            "max_retries": settings.max_retries,
            "retry_timeout": timedelta(seconds=settings.retry_timeout_seconds),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(
                    seconds=max(0.1, min(_BACKOFF_SECONDS_MAX, settings.retry_timeout_seconds))
                ),
                "base": 2,
            },
        }
        credentials = None if self._provider is None else self._credentials
        try:
            return _STORES[place.kind](
                place.bucket,
                prefix=place.prefix or None,
                config=dict(place.config),
                client_options=client,
                retry_config=retry,
                credential_provider=credentials,
            )
        except _CLIENT_ERRORS as error:  # nothing was sent yet, so the configuration is wrong
            reason = scrubbed(str(error).partition("\n")[0], self._secrets)
        raise ServiceRefused(f"{self.name}: the store's options are wrong: {reason}")

    def _credentials(self) -> S3Credential:
        """Returns the credentials of the provider. No message contains them from now on."""
        assert self._provider is not None
        found = self._provider()
        tokens = [found["secret_access_key"], found.get("token") or ""]
        self._secrets = sorted({*self._secrets, *_forms(tokens)}, key=len)[::-1]
        until = found["expires_at"]  # the client takes no other time zone, not even an equal one
        return {**found, "expires_at": None if until is None else until.astimezone(UTC)}


class RemoteWriter(WriterScope):
    """Collects a chunk, passes it to the client, and collects the next while that is sent.

    An object of one chunk is a single PUT. The client holds on to a buffer until it is sent, so it
    gets a buffer of the writer, never the caller's.
    """

    def __init__(
        self,
        backend: RemoteBackend,
        key: str,
        *,
        chunk_bytes: int,
        concurrent_parts: int,
        metadata: dict[str, str],
        create: bool,
    ) -> None:
        self._backend = backend
        self._key = key
        self._chunk_bytes = chunk_bytes
        self._concurrent_parts = concurrent_parts
        self._metadata = metadata
        self._create = create
        self._chunk: bytearray | None = bytearray()
        self._parts: WritableFile | None = None
        self._size = 0

    def write(self, data: Buffer) -> None:
        self._open_chunk()
        with memoryview(data).cast("B") as view:
            at = 0
            while at < len(view):
                chunk = self._open_chunk()
                if len(chunk) == self._chunk_bytes:
                    self._send(chunk)
                    self._chunk = chunk = bytearray()
                end = at + self._chunk_bytes - len(chunk)
                chunk += view[at:end]
                at = end
            self._size += len(view)

    def close(self) -> ObjectMeta:
        chunk = self._open_chunk()
        if self._parts is None:
            self._chunk = None
            return self._backend.put_object(self._key, chunk, self._metadata, create=self._create)
        if chunk:
            self._send(chunk)
        try:
            if self._create:
                self._backend.require_absent(self._key)
            self._backend.call("complete", self._key, self._parts.close)
        except BaseException as error:
            self.abort()
            if self._create and isinstance(error, ServiceRefused | ServiceUnavailable):
                # Azure refuses the completion if another upload of the same key was completed.
                self._backend.require_absent(self._key)
            raise
        self._parts = self._chunk = None
        meta = self._backend.head(self._key)
        if meta.size != self._size:
            raise ServiceError(
                f"{self._backend.name}: the object {self._key!r} has {meta.size} bytes, but "
                f"{self._size} were written; upload it again"
            )
        return meta

    def abort(self) -> None:
        parts, self._parts, self._chunk = self._parts, None, None
        if parts is not None:
            try:
                parts.__exit__(RuntimeError, RuntimeError("aborted"), None)
            except _CLIENT_ERRORS:
                return  # the parts stay, invisible, until the bucket's lifecycle rule applies

    def _send(self, chunk: bytearray) -> None:
        try:
            if self._parts is None:
                if self._create:
                    self._backend.require_absent(self._key)
                self._parts = self._backend.start_parts(
                    self._key, self._chunk_bytes, self._concurrent_parts, self._metadata
                )
            self._backend.call("part", self._key, self._parts.write, chunk)
        except BaseException:
            self.abort()
            raise

    def _open_chunk(self) -> bytearray:
        if self._chunk is None:
            raise UsageError(f"the writer of {self._key!r} is closed, aborted or failed")
        return self._chunk

    @property
    def ended(self) -> bool:
        return self._chunk is None


def _etag(text: str | None) -> str | None:
    """Removes the quotes, which Azure omits in lists."""
    return None if text is None else text.strip('"')


def _meta(key: str, found: Mapping[str, Any], metadata: dict[str, str]) -> ObjectMeta:
    modified_ms = int(found["last_modified"].timestamp() * 1000)
    return ObjectMeta(key, found["size"], _etag(found["e_tag"]), modified_ms, metadata)


class StoreLocation(NamedTuple):
    """Where a remote store is, and how the client is configured for it."""

    kind: Kind
    bucket: str
    prefix: str
    config: Mapping[str, str | bool]
    allow_http: bool

    @property
    def name(self) -> str:
        root = f"{_SCHEMES[self.kind]}://{self.bucket}"
        return f"{root}/{self.prefix}" if self.prefix else root


def store_location(settings: CloudSettings) -> StoreLocation:
    """Reads the location from the settings; raises InvalidSetting for a wrong root or option."""
    kind = settings.backend
    if kind not in ("s3", "gcs", "azure"):
        raise InvalidSetting(f"backend is {kind!r}; a remote store is s3, gcs or azure")
    bucket, prefix = _root(kind, settings.root)
    for name in settings.options:
        if name not in _NAMES[kind]:
            raise InvalidSetting(_unknown(kind, name))
    given = {name: str(value) for name, value in settings.options.items()}
    for first, second in _EXCLUSIVE:
        if first in given and second in given:
            raise InvalidSetting(f"options: {first} and {second} exclude each other: give one")
    if "credentials_json" in given:
        _check_json(given["credentials_json"])
    config: dict[str, str | bool] = {
        _NAMES[kind][name]: _flag(name, value) if name in _FLAGS else value
        for name, value in given.items()
        if _NAMES[kind][name]
    }
    config.update(client_identity(given))
    endpoint = given.get("endpoint", "")
    if endpoint:
        _check_endpoint(endpoint)
    if kind == "s3":
        # Amazon prefers a host name for each bucket; other servers rarely have one.
        config.setdefault("virtual_hosted_style_request", not endpoint)
        # TLS checks the bytes already, and hashing them would double the work.
        config["unsigned_payload"] = not endpoint.startswith("http://")
        # One request that keeps the metadata; the client's other way, "multipart", loses them.
        config["copy_if_not_exists"] = "header: If-None-Match: *"
    return StoreLocation(kind, bucket, prefix, config, endpoint.startswith("http://"))


def secrets_of(settings: CloudSettings) -> list[str]:
    """Every text that no message may contain, plain and URL-encoded, longest first."""
    plain = [str(value) for name, value in settings.options.items() if name in _SECRETS]
    if "credentials_json" in settings.options:
        plain += _check_json(settings.options["credentials_json"])
    plain += [os.environ[name] for name in _SECRET_VARIABLES if name in os.environ]
    plain += [value for token in plain for name, value in parse_qsl(token) if name == "sig"]
    return sorted(_forms(plain), key=len)[::-1]


def _forms(secrets: Sequence[str]) -> set[str]:
    """The secrets, plain and URL-encoded, without those that are too short to be looked for."""
    found = {form for value in secrets for form in (value, quote(value), quote(value, safe=""))}
    return {text for text in found if len(text) >= _SECRET_LENGTH_MIN}


def _check_json(text: str) -> list[str]:
    """Raises InvalidSetting unless the text is a JSON object; returns the private key in it."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidSetting(
            "options: credentials_json must be the contents of a service account's file; the path "
            "of such a file is credentials_path"
        )
    key = found.get("private_key")
    return [key] if isinstance(key, str) else []


def _root(kind: Kind, root: str | None) -> tuple[str, str]:
    text = root or ""
    if kind == "azure" and text and "://" not in text:
        text = f"azure://{text}"  # Danube's form: container/prefix
    parts = urlsplit(text)
    known = parts.scheme in _ROOT_SCHEMES[kind]
    if not known or not parts.netloc or "@" in parts.netloc or parts.query:
        raise InvalidSetting(
            f"root is wrong: for the backend {kind} it must be like "
            f"{_SCHEMES[kind]}://bucket/prefix"
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
        f"the backend {kind} has no option {name!r}; the nearest is {nearest[0]!r}; all are "
        f"{', '.join(_NAMES[kind])}"
    )


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InvalidSetting(f"the option {name} must be true or false")
    return value.lower() == "true"


def translated(
    error: Exception, *, operation: str, key: str, name: str, secrets: Sequence[str]
) -> ServiceError:
    """The error to raise instead of the client's.

    Raise it outside the `except` block, so that it does not carry the client's error with it.
    """
    text = str(error)
    reason = f"{name}: {operation} of {key!r}: {scrubbed(_summary(text), secrets)}"
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else ""
    if code in _BUCKET_MISSING:
        return ServiceRefused(reason)
    if isinstance(error, FileNotFoundError) and operation in _MISSING:
        return ObjectMissing(f"{name}: there is no object {key!r}")
    if type(error).__name__ == "AlreadyExistsError":
        return taken(name, key)
    if operation == "copy" and _no_copy(error, status, code):
        return CopyUnsupported(reason)
    if type(error).__name__ in _REFUSING or isinstance(error, ValueError):
        return ServiceRefused(reason)
    if any(mark in text for mark in _WRONG_CONFIGURATION):
        return ServiceRefused(reason)
    # A 404 for a write means that the server no longer knows the upload: completed or aborted.
    passing = status is None or status >= 500 or status in _RETRYABLE_STATUSES
    if passing or code in _RETRYABLE_CODES or isinstance(error, FileNotFoundError):
        return ServiceUnavailable(reason)
    return ServiceRefused(reason)


def is_past_the_end(error: Exception) -> bool:
    """Whether a ranged read failed because the object is too short."""
    text = str(error)
    found = _STATUS.search(text)
    return (found is not None and found[1] == "416") or "Wanted range starting at" in text


def scrubbed(text: str, secrets: Sequence[str]) -> str:
    """The text without the secrets, and without queries and user names of URLs."""
    text = _USER_INFO.sub("", _QUERY.sub("", text))
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _no_copy(error: Exception, status: int | None, code: str) -> bool:
    unsupported = type(error).__name__ == "NotSupportedError"
    unsupported = unsupported or isinstance(error, NotImplementedError)
    return unsupported or status in _NO_COPY_STATUSES or code in _NO_COPY_CODES


def _summary(text: str) -> str:
    """The first sentence of the client's error, and the code and message of the response."""
    sentence = text.split("\n\nDebug source", 1)[0].split("<", 1)[0]
    sentence = " ".join(sentence.split())[:_REASON_LENGTH_MAX]
    code, message = _CODE.search(text), _MESSAGE.search(text)
    parts = [sentence.rstrip(": ")]
    parts += [found[1].strip() for found in (code, message) if found is not None]
    return ": ".join(parts)
