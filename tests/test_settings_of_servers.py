"""Settings of the servers and of Spark: a bad value is refused by the setting's name."""

from __future__ import annotations

import pytest

from forebay.errors import InvalidSetting
from forebay.settings import AdminSettings, SparkSettings


@pytest.mark.parametrize("token", ["", "a b", "line\nbreak", "ümlaut", "x" * 5000])
def test_a_token_that_protects_nothing_or_cannot_be_sent_is_refused(token: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^token is ") as told:
        AdminSettings(listen="0.0.0.0:8650", token=token)
    assert not token or token not in str(told.value)


@pytest.mark.parametrize("master", ["", "foo", "spark://", "local[", "http://10.0.0.1:7077"])
def test_a_master_that_spark_does_not_know_is_refused(master: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^master is "):
        SparkSettings(master=master)


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[2]",
        "local[*,4]",
        "local-cluster[2,1,1024]",
        "spark://h:7077",
        "yarn",
        "k8s://x",
    ],
)
def test_every_kind_of_master_is_taken(master: str) -> None:
    assert SparkSettings(master=master).master == master
