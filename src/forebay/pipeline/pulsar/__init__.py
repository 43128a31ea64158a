"""`spark.read.format("pulsar-offload")`: ledgers that Pulsar offloaded, straight from a bucket."""
