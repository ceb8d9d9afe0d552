"""Tests of service/kafka/."""
