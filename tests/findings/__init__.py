"""Findings of reviews as tests: what should be, so that each one fails until its defect is gone."""
