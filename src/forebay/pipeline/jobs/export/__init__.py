"""Exports: a topic to a table of Parquet, Delta or Iceberg, each message exactly once."""
