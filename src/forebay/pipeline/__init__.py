"""Everything that moves data in bulk, on Apache Spark."""
