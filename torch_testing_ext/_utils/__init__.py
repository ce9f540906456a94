"""Context managers and small helpers for tests."""
