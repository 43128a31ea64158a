"""The page for users: it is what the settings say, and every file on it loads."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Final, Literal

import pytest

from forebay.config import describe, parse_config
from forebay.config.aliases import ALIASES
from forebay.config.load import LOOSE, SECTIONS, keys_of
from forebay.config.reference import render, sample
from forebay.errors import InvalidSetting
from forebay.objects.remote import store_location
from forebay.settings import CloudSettings, StoreSettings
from support.paths import ROOT

PAGE: Final = ROOT / "docs" / "guide" / "configuration.md"
FILES: Final = re.findall(r"```yaml\n(.*?)```", render(), re.DOTALL)
BASE: Final = Path("/b")


def test_the_page_is_what_the_settings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "forebay config reference makes it anew"


def test_the_page_shows_two_files() -> None:
    assert len(FILES) == 2
    assert FILES[1] == sample()


@pytest.mark.parametrize("file", FILES, ids=["s3", "every key"])
def test_every_file_on_the_page_loads(file: str) -> None:
    env = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}
    assert parse_config(file, base=BASE, env=env) != StoreSettings(data=None)


def test_the_file_with_every_key_is_the_defaults() -> None:
    defaults = StoreSettings(data=BASE / "data")
    assert parse_config(sample(), base=BASE, env={}) == defaults
    for section, keys in describe(defaults)["storage"].items():
        assert f"  {section}:" in sample()
        for key in keys if isinstance(keys, dict) else ():
            assert f"    {key}: " in sample()


def test_every_field_of_a_store_is_reached_from_the_file() -> None:
    reached = {path[-1] for path in SECTIONS} | set(LOOSE.values()) | {"wal_root"}
    found = {"server"}  # where a server runs is looked up, never configured
    assert {field.name for field in fields(StoreSettings)} == reached | found


@pytest.mark.parametrize("path", SECTIONS, ids=".".join)
def test_every_field_of_a_section_is_a_key_with_a_meaning(path: tuple[str, ...]) -> None:
    names = [field.name for field in fields(SECTIONS[path])]
    assert list(keys_of(SECTIONS[path])) == names
    section = render().split(f"### `{'.'.join(path)}`")[1].split("##")[0]
    for name in names:
        assert re.search(rf"^\| `{name}` \| .+ \| `.+` \| .+\. \|$", section, re.MULTILINE)


def test_every_alias_is_on_the_page() -> None:
    for alias in ALIASES:
        assert f"| `{alias.old}` | `{alias.new}`" in render()


@pytest.mark.parametrize(
    ("backend", "root"), [("s3", "s3://b"), ("gcs", "gs://b"), ("azure", "azure://b")]
)
def test_every_option_of_a_remote_store_is_on_the_page(
    backend: Literal["s3", "gcs", "azure"], root: str
) -> None:
    with pytest.raises(InvalidSetting) as refused:
        store_location(CloudSettings(backend, root, {"no-such": "x"}))
    known = str(refused.value).rsplit("; all are ", maxsplit=1)[1]
    assert f"{backend}: {known}." in render()
