"""Tests of storage/kafka/."""
