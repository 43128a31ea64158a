"""Settings for people to read: the page docs/guide/configuration.md, and `forebay config show`.

The page is made from the settings classes themselves: names, kinds and defaults come from the
classes, meanings from the texts below their fields. A test compares the page with `render()` and
loads every file that it shows. `describe` puts settings back into the shape of the file; no secret
is in what it returns.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from forebay.config.aliases import (
    ALIASES,
    BACKENDS,
    CLOUD_OPTIONS,
    ETCD_ENDPOINT,
    IN_MEMORY,
    RANGED_READS,
    REFUSED,
    TOP_LEVEL,
)
from forebay.config.document import DEPTH_MAX, FILE_BYTES_MAX, NODES_MAX
from forebay.config.load import LOOSE, SECTIONS, STORE_KEYS, Key, keys_of
from forebay.config.quantities import format_duration, format_size
from forebay.settings import StoreSettings, is_secret

_INTRODUCTION = """\
# Configuration

<!-- Made by `forebay config reference`; the texts are those of src/forebay/settings.py. -->

One YAML file configures a store. Every key has a default, so an empty file is valid: everything is
then under `data` beside the file. A store on S3, with its credentials in the environment:

```yaml
data: /var/lib/forebay
storage:
  wal: {fsync_interval_ms: 1s, rotate_max_bytes: 64MiB}
  uploader: {interval_seconds: 5m, max_object_bytes: 1GiB}
  cloud:
    backend: s3
    root: s3://${BUCKET:-forebay}/prod
    options:
      region: eu-central-1
      access_key: ${AWS_ACCESS_KEY_ID}
      secret_key: ${AWS_SECRET_ACCESS_KEY}
  deleter: {retention_time_minutes: 1d, retention_size_mb: 10GiB}
metadata:
  backend: etcd
  endpoints: ["127.0.0.1:2379"]
  prefix: /forebay
```

## Which file counts

1. `--config FILE` or `--data DIR` of a command, one of them; in Python, what `forebay.open` is
   given.
2. The environment variable `FOREBAY_CONFIG`, a file.
3. The environment variable `FOREBAY_DATA`, a directory.
4. Else the directory `data` below the working directory, with the defaults.

Only the first of these is used: an option overrides both variables, and `FOREBAY_CONFIG` overrides
`FOREBAY_DATA`.

A file, or a path that ends with `.yml` or `.yaml`, is a configuration. A directory, or a path that
does not exist, is a data directory. A key that is missing from the file has its default. The
environment changes a key only if the file says `${NAME}`.

## Values

| kind | written as |
|---|---|
| size | `8MiB`, `64 MB`, `512k`, or a plain number in the unit that the key's name ends with; \
`_bytes` and `_chunk_size` are bytes, `_mb` is 1024 * 1024 bytes. All units are powers of 1024: \
`MB` is `MiB` |
| duration | `250ms`, `90s`, `5m`, `4h`, `7d`, `1h30m`, or a plain number in the unit that the \
key's name ends with: `_ms`, `_seconds`, `_minutes` |
| flag | `true` or `false`; `yes`, `no`, `on`, `off` |
| path | relative to the directory of the file, not to that of the process |
| null | `null`, `~` or nothing: switches off what can be switched off. A section that is null has \
its defaults, and an option that is null is ignored |
| text | as it is written: `password: 0123` is the four characters |

`${NAME}` in a value is replaced by the environment variable; if it is not set, the file is \
refused. `${NAME:-default}` is the default if the variable is unset or empty; the default cannot \
contain braces. `$${` means `${`. The value of a variable is not replaced again, and neither \
are names of keys. Inside YAML's braces it needs quotes: `{dir: "${WAL}"}`.

## Where things are

`data` is the directory of everything without a separate key: `wal/`, `objects/`, `catalog.db`.
If it is missing, it is the directory above `storage.wal.dir`; if that is missing too, it is `data`
next to the file. `data: null` keeps everything in memory.
A topic's files are in `<storage.wal.dir>/<namespace>/<topic>/`.
"""

_CREDENTIALS = """\
## Credentials of the store

Credentials are looked for in this order:

1. In `storage.cloud.options`: keys, tokens, `credentials_path` or `credentials_json`, or for s3 the
   name of a `profile`.
2. In the environment, under the names of the cloud's own tools: `AWS_ACCESS_KEY_ID`,
   `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY` and so on.
3. In the identity of the machine: the role of an instance, a container or a pod (AWS), the service
   account of a machine or a pod (Google), a managed or a workload identity (Azure).

`profile` is a section of `~/.aws/credentials` and `~/.aws/config`, or of the files that
`AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE` name. Its keys are read again every 15 minutes;
its region counts if no other is set. A profile that asks a service or runs a program (single
sign-on, a role of another profile, `credential_process`) needs boto3, which is not installed with
Forebay: `pip install boto3`.

`role_arn` is assumed with the token in `AWS_WEB_IDENTITY_TOKEN_FILE` if that is set, otherwise with
the other credentials through boto3. `project` is accepted and not needed: names of buckets are
unique. `anonymous` sends no credentials.
"""

_REFUSED = """\
## What is refused

Errors name the file, the line and the key, and say what is allowed. An unknown key is refused with
the nearest known name, a key that is given twice is refused, and so are tags (`!name`), several
documents in a file, files of more than {bytes}, more than {nodes} values (one that is used by an
alias counts each time) and more than {depth} levels. No error contains values of keys
such as `secret_key`, `password` or `token`, or of variables with such names.
"""


def render() -> str:
    """The whole page."""
    parts = [
        _INTRODUCTION,
        "## Keys\n",
        *_tables(),
        "## A file with every key\n\nThe values are the defaults.\n",
        f"```yaml\n{sample()}```\n",
        _CREDENTIALS,
        _aliases(),
        _REFUSED.format(bytes=format_size(FILE_BYTES_MAX), nodes=NODES_MAX, depth=DEPTH_MAX),
    ]
    return "\n".join(parts)


def sample() -> str:
    """A file with every key, each with its default."""
    lines = ["data: data"]
    for path in sorted(LOOSE.keys() | SECTIONS.keys(), key=_order):
        indent = "  " * (len(path) - 1)
        if len(path) > 1 and f"{path[0]}:" not in lines:
            lines.append(f"{path[0]}:")
        if path in SECTIONS:
            lines.append(f"{indent}{path[-1]}:")
            lines += [f"{indent}  {key.name}: {_default(key)}" for key in _keys(path)]
        elif path != ("data",):
            lines.append(f"{indent}{path[-1]}: {_default(STORE_KEYS[LOOSE[path]])}")
    return "".join(f"{line}\n" for line in lines)


def _order(path: tuple[str, ...]) -> tuple[int, int]:
    """Keys of `storage` first, in the order of the sections."""
    sections = list(SECTIONS)
    return (path[0] != "storage", sections.index(path) if path in SECTIONS else -1)


def _keys(path: tuple[str, ...]) -> list[Key]:
    return list(keys_of(SECTIONS[path]).values())


def _tables() -> Iterator[str]:
    loose = [(".".join(path), STORE_KEYS[name]) for path, name in LOOSE.items()]
    yield _table(
        "At the top", "", [(shown, key, _meaning("StoreSettings", key)) for shown, key in loose]
    )
    for path, kind in SECTIONS.items():
        about = _in_file(inspect.getdoc(kind) or "")
        rows = [(key.name, key, _meaning(kind.__name__, key)) for key in _keys(path)]
        yield _table(f"`{'.'.join(path)}`", about, rows)


def _table(title: str, about: str, rows: list[tuple[str, Key, str]]) -> str:
    lines = [f"### {title}", "", *([about, ""] if about else [])]
    lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    for shown, key, meaning in rows:
        default = "`data`" if shown == "data" else f"`{_default(key)}`"
        lines.append(f"| `{shown}` | {_kind(key)} | {default} | {meaning} |")
    return "\n".join([*lines, ""])


def _kind(key: Key) -> str:
    kind = {"flag": "flag", "path": "path", "text": "text", "list": "list of strings"}.get(key.kind)
    if key.unit is not None:
        kind = f"{key.unit.measures}, or number of {key.unit.name}"
    elif key.kind == "choice":
        kind = ", ".join(f"`{choice}`" for choice in key.choices)
    elif key.kind == "options":
        kind = "mapping of names to strings"
    elif key.kind == "number":
        kind = "whole number" if key.whole else "number"
    return f"{kind}, or null" if key.optional else str(kind)


def _default(key: Key) -> str:
    return format_value(key, key.default)


def format_value(key: Key, value: Any) -> str:
    """The value as a configuration file has it, such as `64MiB`."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if key.unit is not None:
        amount = Fraction(value) * key.unit.scale
        return format_size(int(amount)) if key.unit.measures == "size" else format_duration(amount)
    if key.kind == "list":
        return json.dumps(list(value))
    if key.kind in {"text", "options"}:
        return json.dumps(value)
    return str(value)


def _meaning(owner: str, key: Key) -> str:
    if (owner, key.name) == ("WalSettings", "dir"):
        owner, name = "StoreSettings", "wal_root"
    else:
        name = key.name
    return _in_file(_meanings()[owner][name])


def _in_file(text: str) -> str:
    """As the file spells it, and fit for a table."""
    return re.sub(r"\bNone\b", "null", text).replace("|", "\\|")


@cache
def _meanings() -> dict[str, dict[str, str]]:
    """The text below each field, by class and field."""
    kinds: list[type] = [StoreSettings, *SECTIONS.values()]
    files = {inspect.getfile(kind) for kind in kinds}
    return {
        each.name: dict(_attribute_texts(each))
        for file in sorted(files)
        for each in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef)
    }


def _attribute_texts(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(owner.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                yield name, " ".join(text.split())


def _aliases() -> str:
    rows = [(TOP_LEVEL.old, f"`{TOP_LEVEL.new}`")]
    for alias in ALIASES:
        unit = f"; a plain number is in {alias.unit.name}" if alias.unit else ""
        rows.append((alias.old, f"`{alias.new}`{unit}"))
    rows += [(f"storage.cloud.backend: {old}", f"`{new}`") for old, new in BACKENDS.items()]
    rows.append((ETCD_ENDPOINT.old, f"`{ETCD_ENDPOINT.new}`, with `metadata.backend: etcd`"))
    lines = [
        "## Names of Danube's configuration",
        "",
        "These names, and earlier ones of ours, are accepted too. A key that is given under both",
        "names is an error.",
        "",
        "| written | stands for |",
        "|---|---|",
        *(f"| `{old}` | {new} |" for old, new in rows),
        "",
        "Options of the store may be beside `backend` and `root` instead of in `options`: "
        + ", ".join(f"`{name}`" for name in CLOUD_OPTIONS)
        + ".",
        "A root may be `gcs://bucket/prefix`, and for azure `container/prefix`.",
        f"`{RANGED_READS}` may be `true`: objects are always read by ranges.",
        f"`{IN_MEMORY}` may be `false`: a catalog in memory would be lost.",
        "",
        "These keys of Danube's file are refused, like every unknown key. Remove them:",
        "",
        "| refused | instead |",
        "|---|---|",
        *(f"| `{old.replace(', ', '`, `')}` | {new} |" for old, new in REFUSED.items()),
        "",
    ]
    return "\n".join(lines)


_HIDDEN: Final = "***"
_USER: Final = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_QUERY: Final = re.compile(r"(://[^?\s]*\?)\S+")


def describe(settings: StoreSettings) -> dict[str, Any]:
    """The settings as plain dicts, lists, texts and numbers, all keys given.

    Secrets, and passwords and queries of URLs, are `***`. Without any, a file of what it returns
    loads as the same settings.
    """
    found: dict[str, Any] = {}
    for path, name in LOOSE.items():
        _section(found, path[:-1])[path[-1]] = _plain(path[-1], getattr(settings, name))
    for path, kind in SECTIONS.items():
        owner = getattr(settings, path[-1])
        section = _section(found, path)
        for name in keys_of(kind):
            section[name] = _plain(name, getattr(owner, name))
    found["storage"]["wal"]["dir"] = _plain("dir", settings.wal_root)
    return found


def _section(found: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        found = found.setdefault(name, {})
    return found


def _plain(name: str, value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(key, each) for key, each in value.items()}
    if value is not None and is_secret(name):
        return _HIDDEN
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return _QUERY.sub(rf"\1{_HIDDEN}", _USER.sub(_HIDDEN, value))
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    return value
