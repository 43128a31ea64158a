"""`forebay.Streams`: batches of messages in both directions, for high rates."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from forebay.broker.calls import Calls
from forebay.broker.context import BrokerContext


def services(_context: BrokerContext, _calls: Calls) -> Sequence[grpc.GenericRpcHandler]:
    return []
