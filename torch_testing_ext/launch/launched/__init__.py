"""Ranks that a launcher has started: their processes are the ranks of every test."""
