"""Tests of a broker's connections, in virtual time."""
