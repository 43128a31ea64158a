"""`FanoutTopic`: a non-reliable topic, whose messages are stored nowhere.

Every subscription passes a message to one of its consumers. A message is dropped, and counted, if
the subscription has no consumer, or if that consumer does not read as fast as messages come.
"""

from __future__ import annotations

from forebay.dispatch import metrics
from forebay.dispatch.key_router import KeyRouter, kept_key
from forebay.dispatch.policy import SubscriptionType
from forebay.dispatch.subscription import Consumer
from forebay.errors import SubscriptionBusy
from forebay.limits import SUBSCRIPTION_CONSUMERS_MAX


class FanoutTopic:
    """Call every method in the event loop of the server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.published = 0
        self.subscriptions: dict[str, FanoutSubscription] = {}

    def subscription(self, name: str, kind: SubscriptionType) -> FanoutSubscription:
        """Returns the subscription, new or as it is; SubscriptionBusy if its type differs."""
        found = self.subscriptions.get(name)
        if found is None:
            found = self.subscriptions[name] = FanoutSubscription(kind)
        if not found.consumers:
            found.kind = kind
        if found.kind is not kind:
            raise SubscriptionBusy(
                f"{self.name}: the subscription {name!r} is {found.kind.name.lower()} and in use: "
                "subscribe with the same type"
            )
        return found

    def publish(self, data: bytes, key: str | None) -> int:
        """Passes a message to all subscriptions; returns how many got it."""
        self.published += 1
        reached = sum(each.publish(data, key) for each in self.subscriptions.values())
        missed = len(self.subscriptions) - reached
        if missed or not self.subscriptions:
            metrics.DROPPED.add(max(missed, 1), self.name)
        return reached

    def close(self) -> None:
        for subscription in self.subscriptions.values():
            for consumer in subscription.consumers.values():
                consumer.end()


class FanoutSubscription:
    """The consumers of one subscription, and whose turn it is."""

    def __init__(self, kind: SubscriptionType) -> None:
        self.kind = kind
        self.consumers: dict[int, Consumer] = {}
        """In the order of joining; the first is the active one, unless all take turns."""
        self._router = KeyRouter()
        self._turn = 0
        self._noted: dict[int, None] = {}
        """The numbers of consumers that have subscribed, those of longest ago first."""

    def noted(self, number: int) -> list[int]:
        """A consumer has subscribed. Returns others that are gone, if there are very many."""
        self._noted.pop(number, None)
        self._noted[number] = None
        if len(self._noted) <= 2 * SUBSCRIPTION_CONSUMERS_MAX:
            return []
        gone = [each for each in self._noted if each not in self.consumers]
        gone = gone[:SUBSCRIPTION_CONSUMERS_MAX]
        for each in gone:
            del self._noted[each]
        return gone

    def join(self, consumer: Consumer) -> None:
        """A consumer with the same number is replaced."""
        self.leave_number(consumer.number)
        self.consumers[consumer.number] = consumer
        self._router.add(consumer.number, consumer.name, consumer.filters)

    def leave(self, consumer: Consumer) -> None:
        consumer.leave()
        if self.consumers.get(consumer.number) is consumer:
            self.leave_number(consumer.number)

    def leave_number(self, number: int) -> None:
        if self.consumers.pop(number, None) is not None:
            self._router.remove(number)

    def publish(self, data: bytes, key: str | None) -> bool:
        """Whether a consumer got it."""
        consumer = self._chosen(key)
        if consumer is None or consumer.full or consumer.crowded:
            return False
        consumer.put(data)
        return True

    def _chosen(self, key: str | None) -> Consumer | None:
        if not self.consumers:
            return None
        if self.kind is SubscriptionType.KEY_SHARED and key is not None:
            number = self._router.choose(kept_key(key))
            return None if number is None else self.consumers[number]
        consumers = list(self.consumers.values())
        if self.kind in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER):
            return consumers[0]
        self._turn += 1
        for ahead in range(len(consumers)):  # a full one is passed over, if another one has room
            consumer = consumers[(self._turn + ahead) % len(consumers)]
            if not consumer.full:
                return consumer
        return None
