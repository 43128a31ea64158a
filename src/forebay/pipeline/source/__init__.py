"""The Spark source: `spark.read.format("forebay")` and `spark.readStream.format("forebay")`."""
