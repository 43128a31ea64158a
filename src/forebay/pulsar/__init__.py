"""Pulsar's tiered storage: offloaded ledgers, the policies behind them, and what triggers them."""
