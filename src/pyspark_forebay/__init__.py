"""Lets Spark find the format `forebay` by its name, with nothing imported."""

from forebay.pipeline.source.batch import ForebayDataSource as DefaultSource

__all__ = ["DefaultSource"]
