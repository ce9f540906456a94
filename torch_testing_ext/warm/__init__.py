"""Warm runs: a server that has imported torch, of which each program is a fork. docs/warm.md has the guarantees."""
