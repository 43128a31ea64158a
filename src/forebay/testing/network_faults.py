"""What a `FaultProxy` does to the traffic that passes it, and what it has counted.

`Faults()` is a network without faults. All of it is data: the proxy reads the newest `Faults` at
every event, so that a swap takes effect at once, on the connections that are open too. Bytes that
already wait in a delay keep the time they were given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from forebay.errors import InvalidSetting

_RATES: Final = ("reset_rate", "http_error_rate", "timeout_after_success_rate")
_AMOUNTS: Final = ("latency_ms", "jitter_ms", "bytes_per_second", "hang_seconds")


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a proxy. Rates are probabilities, drawn from the proxy's seed.

    latency_ms    a round trip's: half of it on the bytes of each direction, however many there are
    jitter_ms     up to so much more for a round trip, drawn for each burst of a direction
    bytes_per_second    of the link, in each direction, shared by all connections; 0 is no limit
    refuse        new connections are reset at once
    black_hole    everything is read and dropped, nothing is answered; connections that lost bytes
                  by it are reset when it ends. Only a client's own end reaches the upstream
    reset_rate    for each `reset_after_bytes_max` bytes (both directions) of a connection: the
                  probability that it is reset, at a random one of those bytes
    http_error_rate    of requests: answered with `http_error_status`, never forwarded
    timeout_after_success_rate    of requests: forwarded whole, the answer read and not delivered,
                  the connection closed `hang_seconds` later. Without HTTP, of turns (client bytes
                  after upstream bytes): answers are dropped from then on, and the connection is
                  reset `hang_seconds` after the first that was
    """

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bytes_per_second: int = 0
    refuse: bool = False
    black_hole: bool = False
    reset_rate: float = 0.0
    reset_after_bytes_max: int = 1 << 20
    http_error_rate: float = 0.0
    http_error_status: int = 503
    timeout_after_success_rate: float = 0.0
    hang_seconds: float = 0.2

    def __post_init__(self) -> None:
        for name in _RATES:
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidSetting(f"{name} is a probability, not {getattr(self, name)}")
        for name in _AMOUNTS:
            if getattr(self, name) < 0:
                raise InvalidSetting(f"{name} is {getattr(self, name)}, below 0")
        if self.http_error_rate + self.timeout_after_success_rate > 1:
            raise InvalidSetting("a request fails in one way: the two rates add up to at most 1")
        if self.reset_after_bytes_max < 1:
            raise InvalidSetting("reset_after_bytes_max must be at least 1")
        if not 400 <= self.http_error_status <= 599:
            raise InvalidSetting(f"http_error_status {self.http_error_status} is not 400 to 599")


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """What a proxy has counted since its start. All is counted before the client can see it.

    `requests` are the request heads read from clients, by method, those that got a fault included.
    `bytes_up` were read from clients and `bytes_down` from the upstream; an injected answer is in
    neither. `faults` are those injected, by kind: "refused", "black_hole" (connections),
    "reset", "http_error" and "timeout_after_success". `failures` are not faults but troubles:
    "upstream" (no connection to it), "malformed" (not HTTP/1.1, or over a limit), "over_limit"
    (too many connections).
    """

    connections: int = 0
    connections_open: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
