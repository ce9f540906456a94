"""Assertions, context managers and small helpers for tests. They know nothing of ranks, bases or marks."""
