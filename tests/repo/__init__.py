"""Tests of the tree itself: rules, documents, deployment files."""
