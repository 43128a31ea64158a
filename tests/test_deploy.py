"""The examples in `deploy/` name metrics and labels that exist, and have the shape they should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from support.paths import ROOT
from test_metrics import modules

DEPLOY: Final = ROOT / "deploy"
DASHBOARD: Final[dict[str, Any]] = json.loads(
    (DEPLOY / "grafana" / "forebay.json").read_text(encoding="utf-8")
)
LISTED: Final = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from forebay.metrics import catalogue
print(json.dumps({each.name: [each.kind, *each.labels] for each in catalogue()}))
"""
OF_PROMETHEUS: Final = {"instance", "job", "le"}
"""Labels that Prometheus adds, or that a histogram has."""


@pytest.fixture(scope="module")
def known() -> dict[str, list[str]]:
    """Kind and labels of every series there is, by its name."""
    done = subprocess.run(
        [sys.executable, "-c", LISTED, *modules()], capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    for name, facts in list(found.items()):
        if facts[0] == "histogram":
            del found[name]
            found |= {name + end: facts for end in ("_bucket", "_sum", "_count")}
    return found


def panels() -> list[dict[str, Any]]:
    return [each for each in DASHBOARD["panels"] if each["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]
    for group in yaml.safe_load((DEPLOY / "forebay-alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def test_every_metric_that_is_asked_for_exists(known: dict[str, list[str]]) -> None:
    named = {name for each in expressions() for name in re.findall(r"\bforebay_\w+", each)}
    assert len(named) > 30
    assert sorted(named - known.keys()) == []


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_label_that_is_asked_for_is_the_metrics(
    expression: str, known: dict[str, list[str]]
) -> None:
    names = re.findall(r"\bforebay_\w+", expression)
    labels = OF_PROMETHEUS.union(*(known[name][1:] for name in names))
    grouped = re.findall(r"\bby \(([\w, ]+)\)", expression)
    chosen = re.findall(r"[{,]\s*(\w+)\s*[=!]", expression)
    used = {each.strip() for group in grouped for each in group.split(",")} | set(chosen)
    assert sorted(used - labels) == []


def test_rates_are_of_what_only_grows(known: dict[str, list[str]]) -> None:
    for expression in expressions():
        for name in re.findall(r"(?:rate|increase)\((forebay_\w+)", expression):
            grows = known[name][0] in {"counter", "histogram"}
            assert grows or 'stage="uploaded"' in expression, expression


def test_the_dashboard_can_be_imported() -> None:
    assert DASHBOARD["uid"] == "forebay"
    assert DASHBOARD["title"] == "Forebay"
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [each["id"] for each in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["expr"]
            assert target["datasource"]["uid"] == "${datasource}"


def test_no_panel_lies_over_another() -> None:
    taken: set[tuple[int, int]] = set()
    for each in DASHBOARD["panels"]:
        place = each["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, each["title"]
        taken |= cells


@pytest.mark.parametrize(
    "what",
    [
        "forebay_wal_append_total",
        "forebay_topic_upload_lag_messages",
        "forebay_topic_upload_lag_seconds",
        "forebay_topic_offset",
        "forebay_store_requests_total",
        "forebay_errors_total",
        "forebay_wal_fsync_latency_seconds_bucket",
        "forebay_http_requests_total",
        "forebay_http_messages_read_total",
    ],
)
def test_the_dashboard_shows_what_matters(what: str) -> None:
    assert any(what in expression for expression in expressions())


@pytest.mark.parametrize(
    "what",
    [
        "forebay_subscription_lag_seconds",
        "forebay_subscription_failing",
        "forebay_subscription_dead_letters_total",
        "forebay_subscription_gone_total",
        "forebay_subscription_unread_removed_total",
    ],
)
def test_an_alert_tells_what_is_wrong_with_a_subscription(what: str) -> None:
    (group,) = yaml.safe_load((DEPLOY / "forebay-alerts.yml").read_text())["groups"]
    (rule,) = [each for each in group["rules"] if what in each["expr"]]
    assert rule["annotations"]["summary"].endswith(".")


def test_prometheus_is_told_where_the_server_is() -> None:
    found = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = found["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8650"]}]
    assert [(DEPLOY / each).exists() for each in found["rule_files"]] == [True]
