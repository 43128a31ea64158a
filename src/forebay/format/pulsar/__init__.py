"""Pulsar's tiered storage: data and index objects of ledgers, and the entries in them. No I/O."""
