"""Lets Spark find the format `forebay` by its name, with nothing imported."""

from forebay.pipeline.source.data_source import ForebayDataSource as DefaultSource

__all__ = ["DefaultSource"]
