"""Warm runs: a server that has imported torch, of which each program is a fork.

docs/guides/warm.md has the guarantees.

Imports `_process` alone: a client must start faster than torch is imported. Of the rest, only the runner imports it.
"""
