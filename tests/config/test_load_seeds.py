"""What the documents about Danube show as configuration loads, and opens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import forebay
from forebay.config import load_config, parse_config
from support.seed_snippets import FOLDER, KNOBS, SNIPPETS, Snippet


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda each: each.seed)
def test_a_snippet_of_the_documents_loads_and_opens(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    path = tmp_path / "danube.yml"
    path.write_text(snippet.text.replace("/var/lib/danube", str(tmp_path / "danube")))
    settings = load_config(path)
    with forebay.open(path) as store:
        assert store.settings.uploader == settings.uploader
        assert store.topics() == []
        if settings.cloud.backend == "fs":
            topic = store.topic("orders")
            topic.append(b"x")
            assert len(topic.upload()) == 1


@pytest.mark.parametrize("key", KNOBS)
def test_a_setting_that_the_documents_name_is_a_key(key: str) -> None:
    *sections, name = key.split(".")
    text = "".join(f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections))
    parse_config(f"{text}{'  ' * len(sections)}{name}: {KNOBS[key]}\n", base=Path("/b"), env={})


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the documents are not part of the repository")
def test_the_snippets_are_those_of_the_documents() -> None:
    found = [
        Snippet(path.name[:3], text[: block.start(1)].count("\n") + 1, _stripped(block[1]))
        for path in sorted(FOLDER.glob("*.txt"))
        for text in [path.read_text(encoding="utf-8", errors="replace")]
        for block in re.finditer(r"^```ya?ml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if isinstance(yaml.safe_load(block[1]), dict)
    ]
    assert tuple(found) == SNIPPETS


def _stripped(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
