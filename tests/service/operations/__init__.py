"""Tests of service/operations/."""
