"""Bases, models and helpers for tests of FSDP."""
