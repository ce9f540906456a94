"""Tests for pytest that run in ranks: the mark `world_size`, the fixture `dist_env`, and what reports say of them.

The plugin imports it when a test needs it. It starts ranks by `launch` and judges them by `_testing.bases`. Private
names of pytest are in `pytest_internals` alone.
"""
