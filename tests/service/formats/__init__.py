"""Tests of service/formats/."""
