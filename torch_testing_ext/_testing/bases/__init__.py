"""Ranks that are threads: their process group and its collectives."""
