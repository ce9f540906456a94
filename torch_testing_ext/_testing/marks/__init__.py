"""Decorators for a test function or class: its needs, skips, timeout and parameters."""
