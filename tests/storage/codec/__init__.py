"""Tests of storage/codec/."""
