"""Registers the format `pulsar-offload`: Spark imports modules named `pyspark_*`.

A module has one DefaultSource, so this format has a module of its own beside `pyspark_forebay`.
"""

from forebay.pipeline.pulsar.data_source import PulsarDataSource as DefaultSource

__all__ = ["DefaultSource"]
