"""Pulsar's names of topics, and of the managed ledgers that hold their messages.

    persistent://public/default/orders-partition-3     a topic, or a partition of one
    public/default/persistent/orders-partition-3       its managed ledger, in the index of a ledger

The last part of a managed ledger's name is percent-encoded. Old topics have a cluster in their
name, after the tenant: `persistent://tenant/cluster/namespace/orders`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import unquote_plus

_PARTITION: Final = re.compile(r"(?P<base>.+)-partition-(?P<number>0|[1-9][0-9]{0,8})")
_SCHEME: Final = "persistent"
_PUBLIC: Final = "public/default"
UNKNOWN_TOPIC: Final = "unknown"


class PulsarTopic(NamedTuple):
    """A topic, or a partition of one, which is a topic too."""

    namespace: str
    """The tenant and the namespace, such as `public/default`."""
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}://{self.namespace}/{self.name}"

    @property
    def partition(self) -> int:
        """The number of the partition; -1 if it is none."""
        found = _PARTITION.fullmatch(self.name)
        return -1 if found is None else int(found["number"])

    @property
    def base(self) -> PulsarTopic:
        """The topic of which this is a partition, or the topic itself."""
        found = _PARTITION.fullmatch(self.name)
        return self if found is None else self._replace(name=found["base"])

    @property
    def spellings(self) -> set[str]:
        """The names that users write, with and without the number of the partition."""
        found = set()
        for topic in (self, self.base):
            found |= {str(topic), f"{topic.namespace}/{topic.name}"}
            if topic.namespace == _PUBLIC:
                found.add(topic.name)
        return found


def topic_of_managed_ledger(name: str | None) -> PulsarTopic:
    """The topic of a managed ledger; of another name, or of none, the namespace is empty."""
    if name is None:
        return PulsarTopic("", UNKNOWN_TOPIC)
    parts = name.split("/")
    if len(parts) not in (4, 5) or parts[-2] != _SCHEME:
        return PulsarTopic("", name)
    return PulsarTopic("/".join(parts[:-2]), unquote_plus(parts[-1]))
