"""Registers the format `forebay`: Spark imports modules named `pyspark_*` for their DefaultSource.

So `spark.read.format("forebay")` works without registering the data source first.
"""

from forebay.pipeline.source.data_source import ForebayDataSource as DefaultSource

__all__ = ["DefaultSource"]
