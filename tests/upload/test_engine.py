"""What a wave keeps alive while it runs."""

from __future__ import annotations

from forebay.catalog.catalog import Catalog, Intent
from forebay.errors import ServiceUnavailable
from forebay.format.names import TopicName, parse_topic
from forebay.upload.engine import Renewal
from support.disks import wait_until

TOPIC = parse_topic("orders")


class Rows(Catalog):
    """A catalog in which one row cannot be renewed."""

    def __init__(self) -> None:
        self.renewed: list[str] = []

    def renew(self, topic: TopicName, intent: Intent) -> bool:
        if intent.object_id == "b":
            raise ServiceUnavailable("no leader")
        self.renewed.append(intent.object_id)
        return True


def test_one_intent_that_cannot_be_renewed_keeps_no_other_from_it() -> None:
    rows = Rows()
    intents = [(TOPIC, Intent(name, 1, "t")) for name in "abc"]
    with Renewal(rows, intents, grace_minutes=0):
        wait_until(lambda: rows.renewed.count("c") >= 2)
    assert rows.renewed.count("a") >= 2
