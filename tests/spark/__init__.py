"""The log read without a broker: snapshots, and Spark's batch, stream and native reads."""
