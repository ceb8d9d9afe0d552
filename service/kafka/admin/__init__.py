"""APIs of Kafka's admin clients."""
