"""Assertions, context managers and small helpers."""
