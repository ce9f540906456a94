"""Bases, models and helpers for tests of DTensor."""
